"""How many tokens a model was made for, and whether a prompt and its answer fit: one rule for all that answer prompts."""

from __future__ import annotations

from typing import Any

from promoe.errors import ConfigError

# Kinds of rotary embeddings that read positions beyond `max_position_embeddings`, by their factor.
_EXTENDED = ("linear", "dynamic")


def context_tokens(config: Any) -> int | None:
    """Return the tokens of prompt and answer together that a model has positions for; None: its configuration does not say.

    Args:
        config: a model's configuration.
    """
    text = config.get_text_config(decoder=True)
    found = getattr(text, "max_position_embeddings", None)
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        return None
    return max([found, *(_extended(rope, found) for rope in _rotary(text))])


def _rotary(text: Any) -> list[dict[str, Any]]:
    """Return the parameters of rotary embeddings: one set, or one for each kind of layer."""
    found = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    if not isinstance(found, dict):
        return []
    return [one for one in (found, *found.values()) if isinstance(one, dict)]


def _extended(rope: dict[str, Any], positions: int) -> int:
    """Return the positions that scaled rotary embeddings reach. Others' are in `max_position_embeddings` already."""
    kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor")
    if not isinstance(factor, (int, float)) or not 1 < factor < 2**20:
        return positions
    original = rope.get("original_max_position_embeddings")
    if kind == "yarn":
        return int(factor * original) if isinstance(original, (int, float)) else positions
    return int(factor * positions) if kind in _EXTENDED else positions


def longest_answer(
    context: int | None, prompt_tokens: int, asked: int | None, default: int, *, apart: bool = False
) -> int:
    """Return the longest answer to a prompt, in tokens.

    Args:
        context: tokens of the model's context; None: unknown.
        prompt_tokens: length of the prompt.
        asked: length that was asked for; None: it was not said.
        default: length where it was not said. It is less where the context leaves less.
        apart: whether prompt and answer have positions of their own, as in encoder-decoders.

    Raises:
        ConfigError: the prompt, or the prompt with the answer that was asked for, is longer than the model's context.
    """
    if context is None:
        return default if asked is None else asked
    taken = (prompt_tokens if prompt_tokens > context else 0) if apart else prompt_tokens
    left = context - taken
    if left < (asked or 1):
        answer = "" if asked is None else f", and an answer of {asked} was asked for"
        raise ConfigError(
            f"The model's context is {context} tokens. The prompt has {prompt_tokens}{answer}. Shorten "
            f"{'it' if asked is None else 'either'}."
        )
    return min(asked or default, left)
