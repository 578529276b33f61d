"""What `promoe bench` can be asked for."""

from __future__ import annotations

import math
import re
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Literal

from promoe.errors import ConfigError, check_at_least

DISK = "disk"
DEFAULT_SYSTEMS = {
    "latency": ["resident", "on-demand", "lru", "next-use", "gate", "page-cache", "disk-offload"],
    "throughput": ["gate", "fast", "page-cache", "disk-offload", "eliseev-naive"],
}


@dataclass(frozen=True)
class Emulated:
    """The speed of an emulated link: in bytes, or as the ratio of moving all of a token's experts to computing the token."""

    bytes_per_s: float | None = None
    ratio: float | None = None

    def link(self, token_bytes: int, compute_s: float) -> Any:
        """Return the link for a model.

        Args:
            token_bytes: bytes of all routed experts that one token of the model needs.
            compute_s: seconds per token of the model with everything in memory.
        """
        from promoe.transfer.links import EmulatedLink

        if self.bytes_per_s is not None:
            return EmulatedLink(self.bytes_per_s)
        assert self.ratio is not None
        return EmulatedLink(token_bytes / (self.ratio * compute_s))


@dataclass(frozen=True)
class Options:
    """Measure this library beside the unmodified model and what people use today, at equal memory, on this machine.

    Each system runs in a process of its own, whose memory, page cache included, a control group limits where the system
    lets us (root, or a group of one's own). They take turns at the same prompts, and all tokens are compared with the
    unmodified model's (with quantised experts: with those of the same model with all experts in slots). Writes a table
    (Markdown), plots and JSON.

    Example: `promoe bench --cache 25% --systems resident lru gate gate:int4 disk-offload --pairs 3`

    Raises:
        ConfigError: a value is out of range.
    """

    model: str | None = None
    """folder of a checkpoint, or a GGUF file, that fits into RAM once (decoded); by default the demo model with experts of real
    size (4 GB, written once, beside the folder that --out names)"""
    _: KW_ONLY
    cache: list[str] = field(default_factory=lambda: ["12.5%", "25%", "50%"])
    """slots, as shares of the routed experts (in 16 bits: quantised systems get as many bytes), sizes, or "2 per layer" for
    slots that belong to one layer each"""
    task: Literal["latency", "throughput"] = "latency"
    """latency: one answer after the other; throughput: many prompts, one by one, in padded batches and together"""
    systems: list[str] = field(default_factory=list)
    """by default resident, on-demand, lru, next-use, gate, page-cache and disk-offload; for throughput gate, fast,
    page-cache, disk-offload and eliseev-naive. There are resident, on-demand, lru, lfru, static, next-use, gate (the default
    configuration), fast (with kernels="fast"), paper-prefetch, paper-preempt, paper (ProMoE as published, step by step),
    eliseev, eliseev-no-preload, eliseev-no-lru, eliseev-naive (Eliseev and Mazur 2023, with :int2 or :int3 as published),
    random, oracle, page-cache, disk-offload, airllm, llama-cpp and llama-cpp-no-repack (llama.cpp, also with :q8_0 or
    :q4_0), folders of trained predictors, or NAME@FOLDER. NAME:FORM and NAME:FORM@FOLDER have their experts in int8, int4,
    int3 or int2, as in gate:int4, or read them from a GGUF file in q8_0 or q4_0 (q8_0-int8: and round them to int8). What is
    not there in a form is written. resident:FORM has all experts in slots, and is added"""
    pairs: int = 5
    """prompts that every system answers, after one to warm up"""
    max_new_tokens: int = 20
    """tokens generated for each prompt"""
    prompt_tokens: list[int] = field(default_factory=list)
    """also measure reading prompts of these lengths, in tokens"""
    at_once: list[int] = field(default_factory=lambda: [8, 32, 64])
    """for throughput: sequences at once"""
    step_tokens: int = 512
    """for throughput: most tokens of a step"""
    lengths: str = "mtbench"
    """for throughput: length of prompts: mtbench (77 tokens on average, 418 at most), summaries (1693, 1984), or MEAN:MOST"""
    prompts: str | None = None
    """JSON list of texts; by default held-out ShareGPT prompts of the repository"""
    link: str = DISK
    """disk, emulated:R for one over which all of a token's experts take R times as long as computing the token, or
    emulated:1.5GB/s"""
    workspace: str = "128MiB"
    """memory that each system gets beside the slots and the model's other weights"""
    seconds_per_answer: float = 30.0
    """cut an answer short after this many seconds"""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """type of the weights"""
    out: str = "promoe-out/bench"
    """folder for tables, plots and the other systems' files"""
    json: str | None = None
    """file to write the figures to; by default bench.json in that folder"""

    def __post_init__(self) -> None:
        from promoe.runtime.sizes import check_cache

        check_at_least(1, pairs=self.pairs, max_new_tokens=self.max_new_tokens, step_tokens=self.step_tokens)
        if any(length < 1 for length in self.prompt_tokens):
            raise ConfigError(f"--prompt-tokens must be at least 1 token each. Got {list(self.prompt_tokens)} instead.")
        if not self.seconds_per_answer > 0:
            raise ConfigError(f"--seconds-per-answer must be more than 0. Got {self.seconds_per_answer} instead.")
        if not self.at_once or min(self.at_once) < 1:
            raise ConfigError(f"--at-once must be at least 1 each. Got {list(self.at_once)} instead.")
        for cache in self.cache:
            check_cache(cache)
        if not self.cache:
            raise ConfigError("--cache needs at least one size, such as 25%.")
        _ = self.workspace_bytes, self.emulated()

    @property
    def named_systems(self) -> list[str]:
        """The names of --systems, or those of the task."""
        return self.systems or DEFAULT_SYSTEMS[self.task]

    @property
    def folder(self) -> Path:
        """The folder of --out."""
        return Path(self.out)

    @property
    def json_file(self) -> Path:
        """The file for the figures."""
        return self.folder / "bench.json" if self.json is None else Path(self.json)

    @property
    def workspace_bytes(self) -> int:
        """Bytes that each system gets beside the slots and the model's other weights.

        Raises:
            ConfigError: --workspace is not a size.
        """
        from promoe.runtime.sizes import fixed_bytes

        try:
            return fixed_bytes(self.workspace)
        except ConfigError as error:
            raise ConfigError(f"--workspace: {error}") from None

    def emulated(self) -> Emulated | None:
        """Return the speed of the link to emulate; None: the disk.

        Raises:
            ConfigError: --link is neither.
        """
        from promoe.runtime.sizes import fixed_bytes

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
