"""What `promoe simulate` can be asked for."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal

from promoe.errors import ConfigError, check_at_least

PolicyName = Literal["default", "next_use", "lru", "lfu", "lfru", "static", "belady"]


@dataclass(frozen=True)
class Options:
    """Say what a cache, a policy and a predictor would do on a machine, from recorded routing alone.

    The real scheduler runs under a virtual clock; the same input gives the same output to the byte. The cache is empty at
    first. Tokens that the trace does not know to be a prompt's are generated.

    Example: `promoe simulate --trace trace --cache 25% --hardware rtx-4090`

    Raises:
        ConfigError: a value is out of range.
    """

    _: KW_ONLY
    trace: str
    """recorded routing: an .npz of expert ids, or a folder of `promoe-train collect`"""
    cache: str = "50%"
    """slots as a share of the routed experts, rounded down per layer, such as 25%"""
    policy: PolicyName = "default"
    """which expert makes room. default shares all slots between the layers, as does next_use, which does not stream prompts;
    lru, lfu, lfru, static (most popular) and belady (knows the future, the least possible) give each layer its own"""
    max_tokens: int | None = None
    """simulate only this many tokens of the trace, those of prompts included"""
    predictor: str | None = None
    """what is prefetched: token, previous, popularity, correlation, or oracle; none by default"""
    lookahead: int = 1
    """how many layers ahead are predicted"""
    batch: int = 1
    """sequences that are generated together; one that ends makes room for the trace's next"""
    hardware: str = "rtx-4090"
    """the machine: rtx-4090, rtx-3090, h100-pcie5 or laptop-ssd"""
    model: str = "auto"
    """sizes of the model: a preset such as deepseek-v2-lite or gpt-oss-20b, the folder of a checkpoint or of a config.json, or
    a hub id; auto: the folder that a recorded trace names, if it is there, else the preset that has the trace's layers and
    experts"""
    bits: float | None = None
    """bits per weight of an expert, scales included, such as 4.25; by default as many as the model has"""
    fit: str | None = None
    """another trace of the model, to fit the predictor, the static popularity or the default's reuse prior on"""
    json: str | None = None
    """file to write the figures to"""

    def __post_init__(self) -> None:
        check_at_least(1, max_tokens=self.max_tokens)
        if self.bits is not None and not 0 < self.bits <= 64:
            raise ConfigError(f"--bits must be more than 0 and at most 64 per weight. Got {self.bits:g}.")
