"""What `promoe demo` was asked for."""

from __future__ import annotations

from dataclasses import dataclass

from promoe.errors import ConfigError


@dataclass(frozen=True)
class Options:
    """See the help of `promoe demo`.

    Raises:
        ConfigError: a number is out of range.
    """

    model: str | None = None
    cache: str = "20%"
    prompts: int = 3
    max_new_tokens: int = 32
    repeat: int = 128
    out: str = "promoe-out"
    skip_widened: bool = False

    def __post_init__(self) -> None:
        for name, least in (("prompts", 1), ("max_new_tokens", 2), ("repeat", 1)):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}. Got {value} instead.")
