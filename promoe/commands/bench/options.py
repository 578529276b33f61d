"""What `promoe bench` was asked for."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from promoe.errors import ConfigError, check_at_least
from promoe.runtime.sizes import check_cache, fixed_bytes

DISK = "disk"


@dataclass(frozen=True)
class Emulated:
    """A link to emulate: its bandwidth, or the time to move all of a token's experts / the time to compute the token."""

    bytes_per_s: float | None = None
    ratio: float | None = None


@dataclass(frozen=True)
class Options:
    """See the help of `promoe bench`.

    Raises:
        ConfigError: a value is out of range.
    """

    cache: Sequence[str]
    systems: Sequence[str]
    model: str | None = None
    pairs: int = 5
    max_new_tokens: int = 20
    prompt_tokens: Sequence[int] = ()
    prompts: str | None = None
    link: str = DISK
    workspace: str = "128MiB"
    seconds_per_answer: float = 30.0
    dtype: str = "bfloat16"
    out: Path = Path("promoe-out/bench")
    json: Path | None = None

    def __post_init__(self) -> None:
        check_at_least(1, pairs=self.pairs, max_new_tokens=self.max_new_tokens)
        if any(length < 1 for length in self.prompt_tokens):
            raise ConfigError(f"--prompt-tokens must be at least 1 token each. Got {list(self.prompt_tokens)} instead.")
        if not self.seconds_per_answer > 0:
            raise ConfigError(f"--seconds-per-answer must be more than 0. Got {self.seconds_per_answer} instead.")
        for cache in self.cache:
            check_cache(cache)
        try:
            fixed_bytes(self.workspace)
        except ConfigError as error:
            raise ConfigError(f"--workspace: {error}") from None
        if not self.cache:
            raise ConfigError("--cache needs at least one size, such as 25%.")
        self.emulated()

    def emulated(self) -> Emulated | None:
        """The link to emulate; None: the disk.

        Raises:
            ConfigError: --link is neither.
        """
        if self.link == DISK:
            return None
        kind, _, value = self.link.partition(":")
        speed = re.fullmatch(r"(.+[KMGT]i?B)/s", value)
        try:
            if kind == "emulated":
                found = Emulated(bytes_per_s=fixed_bytes(speed[1])) if speed else Emulated(ratio=float(value))
                if 0 < (found.bytes_per_s or found.ratio or 0) < math.inf:
                    return found
        except ValueError:
            pass
        raise ConfigError(
            f"--link must be {DISK!r}, 'emulated:R' for a link over which all of a token's experts take R times as long as "
            f"computing the token, or 'emulated:1.5GB/s'. Got {self.link!r} instead."
        )
