"""What `promoe demo` was asked for."""

from __future__ import annotations

from dataclasses import dataclass

from promoe.errors import check_at_least


@dataclass(frozen=True)
class Options:
    """See the help of `promoe demo`.

    Raises:
        ConfigError: a number is out of range.
    """

    model: str | None = None
    cache: str = "20%"
    prompts: int = 3
    max_new_tokens: int = 16
    repeat: int = 128
    out: str = "promoe-out"
    skip_widened: bool = False
    steps: bool = False

    def __post_init__(self) -> None:
        check_at_least(1, prompts=self.prompts, repeat=self.repeat)
        check_at_least(2, max_new_tokens=self.max_new_tokens)
