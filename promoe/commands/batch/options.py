"""What `promoe batch` can be asked for."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from promoe.commands.model_options import ModelOptions
from promoe.errors import check_at_least


@dataclass(frozen=True)
class Options(ModelOptions):
    """Answer a file of prompts, many at once, so that each expert is loaded once for all of them.

    INPUT has a JSON object per line: an OpenAI batch request (custom_id, method, url, body), or a "prompt" or "messages" with
    the fields of such a body. Answers are written to --out as they are completed, in OpenAI's format; a line that cannot be
    answered gets an error there. The same command again answers what is missing.

    Example: `promoe batch MODEL questions.jsonl --out answers.jsonl --cache 25%`

    Raises:
        ConfigError: a value is out of range.
    """

    input: str
    """file of prompts (JSON lines)"""
    _: KW_ONLY
    out: str
    """file that answers are added to (JSON lines)"""
    max_tokens: int = 256
    """longest answer, in tokens, for lines that do not say it"""
    seed: int = 0
    """seed of sampling; each line has a seed of its own that follows from it, unless the line says one"""
    at_once: int = 64
    """the most sequences that are computed together"""
    step_tokens: int = 512
    """the most tokens of a step"""
    kv_tokens: int = 16384
    """tokens of the KV cache, which all sequences share: a prompt and its answer must fit"""

    def __post_init__(self) -> None:
        check_at_least(
            1, max_tokens=self.max_tokens, at_once=self.at_once, step_tokens=self.step_tokens, kv_tokens=self.kv_tokens
        )
