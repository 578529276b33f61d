"""The settings of a patched model."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Literal, get_args

from promoe.errors import ConfigError, shown
from promoe.scheduler.config import EvictionName
from promoe.stores.layout import DEFAULT_CHUNK_BYTES

DEVICE_CHUNK_BYTES = 32 * 2**20  # from RAM to a device
# Far more than any link gains from. Each worker is a thread with memory for one chunk.
MAX_WORKERS, MAX_CHUNK_BYTES = 256, 2**30
ReadMode = Literal["auto", "page_cache", "direct"]
Verify = Literal["first", "always"]
Kernels = Literal["exact", "fast"]


@dataclass(frozen=True, slots=True)
class Ablation:
    """Switches for parts of promoe, to measure what each part gains. All are on by default.

    Args:
        early_preemption: start fetching as soon as the gate has chosen, before the experts' forward is called.
        reorder: run resident experts first, then those in flight, then the rest.
        begin_early: compute an expert's first product while the tensors of its second product are still in flight,
            where the layer would otherwise wait for them. Applies to few tokens in `grouped_mm` on a CPU, if the
            tensors of the first product take at least `PromoeConfig.min_group_bytes`.
        stream: while a layer computes a long prompt, fetch the absent experts of the next layer. A long prompt uses
            nearly all of them.
        governor: measure whether prefetching pays, and switch it off while it does not.
    """

    early_preemption: bool = True
    reorder: bool = True
    begin_early: bool = True
    stream: bool = True
    governor: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, bool):
                raise ConfigError(
                    f"The {field.name!r} field of Ablation must be True or False. Got {shown(value)} instead."
                )


@dataclass(frozen=True, slots=True)
class PromoeConfig:
    """How a patched model fetches and keeps experts. Every field has a sensible default.

    Args:
        eviction: which resident expert leaves its slot to make room: "next_use" (the one whose next use is expected
            last), "lru", "lfru" or "static" (the least popular one).
        lookahead: how many MoE layers ahead a predictor looks (the paper's prefetch distance k; here, all of 1..k).
        min_probability: a prediction with a lower calibrated probability than this is not fetched.
        waste_share: the largest share of all moved bytes that may belong to predictions that do not come true. The
            closer the measured share is to this limit, the more certain a prediction has to be. 1 sets no limit.
        bypass: if the cache has room for every expert, load all of them and run the stock forward.
        chunk_bytes: the largest transfer, in bytes; a multiple of 4096. A demand fetch may have to wait for one
            transfer that has begun. None: 4 MiB; 32 MiB from RAM to a GPU, because its copy engine needs no more time
            for that than the host needs to start three such copies.
        min_group_bytes: if the experts that a layer needs take less memory than this, they run in one call when the
            last one has arrived; otherwise they run as they arrive. Running a group in a call of its own costs about as
            much as reading this many bytes. A GPU waits for copies by itself, so there all experts that fit into slots
            run in one call.
        workers: number of transfer threads.
        pinned_bytes: for experts on disk with slots on a GPU: how much pinned RAM keeps the experts that were read.
            None: all free RAM except 2 GiB, and at most the size of all experts. 0: the least possible, two experts per
            worker. Unpatching needs RAM for all experts in addition.
        read_mode: for experts on disk: "page_cache", "direct" (O_DIRECT), or "auto" (the page cache if all experts fit
            into free RAM and leave 2 GiB; otherwise direct).
        spool_folder: for `patch(store="disk")`: the folder to write experts to that are in no checkpoint. None: the
            system's folder for temporary files. The files are unlinked as soon as the model is patched, so their space
            is freed when the process ends. Only a process that is killed while it writes leaves a folder promoe-spool-*
            behind.
        stall_timeout_s: seconds. A forward that waits this long while nothing arrives raises EngineStalledError.
        verify: compare arriving experts with what is stored: None (never), "first" (an expert that arrives for the
            first time is read twice), or "always" (later arrivals are also compared with a checksum of the first one).
            See docs/reliability.md.
        kernels: "exact" (the output is identical to the unmodified model's) or "fast": where a processor multiplies sooner
            in fp32 than in the model's 16 bits, experts with many tokens are widened first, which changes the last bits.
            `report()` says how far products are from the exact ones. For models opened from files, on a CPU.
        strict: raise where an invariant is broken that production only counts, and fill a slot in RAM with NaN when its
            expert is evicted.
        ablation: parts to switch off for measurements, see `Ablation`.
    """

    eviction: EvictionName = "next_use"
    lookahead: int = 1
    min_probability: float = 0.5
    waste_share: float = 0.025
    bypass: bool = True
    chunk_bytes: int | None = None
    min_group_bytes: int = 4 * 1024 * 1024
    workers: int = 2
    pinned_bytes: int | None = None
    read_mode: ReadMode = "auto"
    spool_folder: str | os.PathLike[str] | None = None
    stall_timeout_s: float = 60.0
    verify: Verify | None = None
    kernels: Kernels = "exact"
    strict: bool = False
    ablation: Ablation = Ablation()

    def __post_init__(self) -> None:
        for name in ("bypass", "strict"):
            self._require(isinstance(getattr(self, name), bool), name, "True or False")
        for name in ("lookahead", "min_group_bytes", "workers"):
            self._require(_is_int(getattr(self, name)), name, "a whole number")
        for name in ("min_probability", "waste_share", "stall_timeout_s"):
            self._require(isinstance(getattr(self, name), float) or _is_int(getattr(self, name)), name, "a number")
        self._require(isinstance(self.ablation, Ablation), "ablation", "a promoe.Ablation")
        self._require(self.eviction in get_args(EvictionName), "eviction", f"one of {get_args(EvictionName)}")
        self._require(self.read_mode in get_args(ReadMode), "read_mode", f"one of {get_args(ReadMode)}")
        self._require(
            self.verify is None or self.verify in get_args(Verify), "verify", f"None or one of {get_args(Verify)}"
        )
        self._require(self.kernels in get_args(Kernels), "kernels", f"one of {get_args(Kernels)}")
        self._require(self.lookahead >= 1, "lookahead", "at least 1 layer")
        self._require(0.0 < self.min_probability <= 1.0, "min_probability", "in (0, 1]")
        self._require(0.0 <= self.waste_share <= 1.0, "waste_share", "from 0 to 1")
        pinned_bytes = self.pinned_bytes
        self._require(
            pinned_bytes is None or (_is_int(pinned_bytes) and pinned_bytes >= 0), "pinned_bytes", "None or bytes"
        )
        self._require(
            self.spool_folder is None
            or (isinstance(self.spool_folder, (str, os.PathLike)) and self.spool_folder != ""),
            "spool_folder",
            "None or a folder",
        )
        self._require(self.min_group_bytes >= 0, "min_group_bytes", "at least 0 bytes")
        self._require(1 <= self.workers <= MAX_WORKERS, "workers", f"1 to {MAX_WORKERS} threads")
        self._require(self.stall_timeout_s > 0, "stall_timeout_s", "more than 0 seconds")
        chunk_bytes = self.chunk_bytes
        self._require(
            chunk_bytes is None
            or (_is_int(chunk_bytes) and 4096 <= chunk_bytes <= MAX_CHUNK_BYTES and chunk_bytes % 4096 == 0),
            "chunk_bytes",
            "None or a positive multiple of 4096 bytes, at most 1 GiB",
        )

    def longest_chunk(self, onto_device: bool = False) -> int:
        """Return `chunk_bytes`, or the default that None stands for: for files and RAM, or for copies `onto_device`."""
        if self.chunk_bytes is not None:
            return self.chunk_bytes
        return DEVICE_CHUNK_BYTES if onto_device else DEFAULT_CHUNK_BYTES

    def _require(self, holds: bool, name: str, allowed: str) -> None:
        if not holds:
            raise ConfigError(
                f"The {name!r} field of PromoeConfig must be {allowed}. Got {shown(getattr(self, name))} instead."
            )


def checked_config(config: PromoeConfig | None) -> PromoeConfig:
    """Return `config`, or the default settings for None.

    Raises:
        ConfigError: `config` is not a PromoeConfig.
    """
    if config is None:
        return PromoeConfig()
    if not isinstance(config, PromoeConfig):
        raise ConfigError(
            f"The 'config' argument must be a promoe.PromoeConfig or None. Got {shown(repr(config))} instead. A model's own "
            "configuration is read from its config.json; settings are passed as promoe.PromoeConfig(lookahead=2), for example."
        )
    return config


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
