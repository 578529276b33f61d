"""The settings of a patched model."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Literal, get_args

from promoe.errors import ConfigError, shown
from promoe.scheduler.config import EvictionName
from promoe.stores.layout import DEFAULT_CHUNK_BYTES

# A predictor is asked about passes of up to this many tokens.
MAX_PREDICTED_TOKENS = 8
# Longer ones use most experts: from this share of a layer's on, the next layer's absent experts are fetched in order.
STREAMED_SHARE = 0.7
DEVICE_CHUNK_BYTES = 32 * 2**20  # from RAM to a device
# Far more than any link gains from: each worker is a thread, with memory for a chunk of its own.
MAX_WORKERS, MAX_CHUNK_BYTES = 256, 2**30
ReadMode = Literal["auto", "page_cache", "direct"]
Verify = Literal["first", "always"]


@dataclass(frozen=True, slots=True)
class Ablation:
    """Parts of promoe that can be switched off, to measure what each one gains. Nobody else needs to.

    Args:
        early_preemption: start fetching when the gate has chosen, before the experts' forward asks.
        reorder: run resident experts first, then those in flight, then the rest.
        begin_early: compute an expert's first product while the tensors of its last one are still on their way, if the layer
            would wait for them. This is for few tokens in `grouped_mm` on the processor, and for first tensors that take at
            least `PromoeConfig.min_group_bytes`.
        stream: while a layer computes a long prompt, fetch the next layer's absent experts, nearly all of which it will use.
        governor: measure whether prefetch pays, and switch it off while it does not.
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
    """How a patched model fetches and keeps experts. Every value has a sensible default.

    Args:
        eviction: which resident expert makes room: "next_use" (expected steps until next use), "lru", "lfru" or
            "static" (by popularity).
        lookahead: how many MoE layers ahead a predictor looks (the paper's prefetch distance k, here 1..k).
        min_probability: a prediction below this calibrated probability is not fetched.
        waste_share: how much of all that is moved may be predictions that do not come true. The nearer it comes to that, the
            surer a prediction has to be; 1 sets no limit.
        bypass: when the cache holds every expert, simply load them and run the stock forward.
        chunk_bytes: the most that one transfer moves, and so what a demand fetch waits for; a multiple of 4096. None: 4 MiB;
            32 MiB from RAM to a GPU, which a copy engine moves in the time that it takes to order three such copies.
        min_group_bytes: experts of a layer that take less memory together than this run in one call when the last has
            come; larger ones run as they come. To run a group by itself costs about as much as to read this many bytes. On a
            GPU, which waits for copies by itself, all that slots have room for run in one call.
        workers: transfer threads.
        pinned_bytes: for experts on disk and slots on a GPU: pinned RAM in which what was read stays; None: as much as is
            free, less 2 GiB, and no more than all experts take; 0: the least, two experts per worker. Unpatching needs RAM for
            all experts beside it.
        read_mode: for experts on disk: "page_cache", "direct" (O_DIRECT), or "auto" (page cache if all fit into free RAM with
            2 GiB to spare).
        spool_folder: for `patch(store="disk")`: where experts are written that no checkpoint has; None: where the system has
            temporary files. What is written there has no name any more once the model is patched, and goes with the process;
            only a process that is killed while it writes leaves a folder promoe-spool-*.
        stall_timeout_s: a forward that waits while nothing arrives for this long raises EngineStalledError.
        verify: compare experts as they come with what is stored: None (not at all), "first" (when an expert comes for the
            first time, it is read twice), or "always" (each time, with a checksum of then); see docs/reliability.md.
        strict: check invariants that production only counts, and fill a slot in RAM with NaN as its expert goes.
        ablation: parts to switch off, for measurements; see `Ablation`.
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
        """`chunk_bytes`, or what stands for None: between files and RAM, or from RAM `onto_device`."""
        if self.chunk_bytes is not None:
            return self.chunk_bytes
        return DEVICE_CHUNK_BYTES if onto_device else DEFAULT_CHUNK_BYTES

    def _require(self, holds: bool, name: str, allowed: str) -> None:
        if not holds:
            raise ConfigError(
                f"The {name!r} field of PromoeConfig must be {allowed}. Got {shown(getattr(self, name))} instead."
            )


def checked_config(config: PromoeConfig | None) -> PromoeConfig:
    """The settings, or the default ones.

    Raises:
        ConfigError: they are something else.
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
