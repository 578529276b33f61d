"""Checks the prompts of a batch before they are answered: one rule for paged and padded models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from promoe.errors import ConfigError
from promoe.model.context import context_tokens, longest_answer
from promoe.runtime.sampling import Sampling
from promoe.runtime.token_choice import EndsAt, TokenChoice, TokenChoices

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Longest answer, in tokens, of prompts that do not say it.
NEW_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Admitted:
    """A prompt that is answered: its number, its tokens, the longest answer, and what chooses its tokens."""

    number: int
    ids: Sequence[int]
    max_new_tokens: int
    choice: TokenChoice


class Admission:
    """Checks prompts.

    Args:
        model: the model.
        kv_tokens: tokens of the KV cache; None: it grows.

    Raises:
        ConfigError: the model's `generation_config` cannot be used.
    """

    def __init__(self, model: PreTrainedModel, kv_tokens: int | None) -> None:
        self._kv_tokens = kv_tokens
        self._num_ids = model.get_input_embeddings().num_embeddings
        self._context = context_tokens(model.config)
        self._apart = model.config.is_encoder_decoder
        self._choices = TokenChoices(model)

    def admit(
        self, number: int, ids: Sequence[int], max_new_tokens: int | None, sampling: Sampling, ends_at: EndsAt | None
    ) -> Admitted:
        """Return a prompt that can be answered.

        Raises:
            ValueError: it cannot be; ConfigError, or Transformers' own about settings of sampling.
        """
        longest = self._longest(ids, max_new_tokens)
        return Admitted(number, ids, longest, self._choices.of(ids, longest, sampling, ends_at))

    def _longest(self, ids: Sequence[int], asked: int | None) -> int:
        if not ids or (asked is not None and asked < 1):
            raise ConfigError("The prompt has no tokens." if not ids else "The answer may have no tokens.")
        if wrong := [token for token in ids if not 0 <= token < self._num_ids]:
            raise ConfigError(
                f"The prompt has the token id {wrong[0]}; the model has ids from 0 to {self._num_ids - 1}."
            )
        longest = longest_answer(self._context, len(ids), asked, NEW_TOKENS, apart=self._apart)
        if self._kv_tokens is not None and len(ids) + longest > self._kv_tokens:
            raise ConfigError(
                f"The prompt has {len(ids)} tokens and its answer up to {longest}, but the KV cache has room for "
                f"{self._kv_tokens} tokens. Ask for a shorter answer, or for a larger KV cache."
            )
        return longest
