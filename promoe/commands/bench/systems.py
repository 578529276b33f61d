"""The systems that `promoe bench` and `promoe demo` compare, by name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from promoe.config import Ablation, PromoeConfig
from promoe.errors import ConfigError
from promoe.experts.kernels.formats import FORMATS

Kind = Literal["resident", "promoe", "page-cache", "disk-offload", "airllm", "llama-cpp", "llama-cpp-no-repack"]
Slots = Literal["shared", "per layer", "one token", "one layer"]
RESIDENT = "resident"
# The form of experts whose output is the unmodified model's.
EXACT = "auto"
QUANTISED = tuple(name for name, slot_format in FORMATS.items() if not slot_format.exact)
# The types of a GGUF file's matrices in which llama.cpp serves a model, and the forms of this library with as many bits.
BESIDE_GGUF = {"q8_0": ("q8_0", "q8_0-int8", "int8"), "q4_0": ("q4_0", "int4")}
# Bits per weight, scales included.
BITS_OF_GGUF = {"q8_0": 8.5, "q4_0": 4.5}
# Forms of experts that this library reads from a GGUF file: the type there, and `experts=` with which it is opened.
FROM_GGUF = {"q8_0": ("q8_0", "auto"), "q8_0-int8": ("q8_0", "int8"), "q4_0": ("q4_0", "auto")}
ORACLE = "oracle"
# How many layers ahead the oracle looks: enough for the link never to wait for it.
ORACLE_LOOKAHEAD = 4
# Without `bypass` slots are measured even where they hold everything.
_BASE = PromoeConfig(bypass=False)
_MORE_THAN_A_LAYER = 2**60  # bytes


@dataclass(frozen=True)
class System:
    """One way to serve a model.

    Attributes:
        name: in tables, and for `--systems`.
        kind: who serves it: "promoe" for this library, "resident" for a model with everything in memory (the unmodified one,
            or this library's with all experts in slots if they are quantised), else a peer.
        meaning: one line about it.
        config: settings of this library.
        predictor: the predictor of this library's prefetch; "oracle" knows the future.
        experts: form of the experts: "auto", one of `QUANTISED` (see `promoe.from_pretrained`) or of `FROM_GGUF`; of
            llama.cpp's weights: "auto", or one of `BESIDE_GGUF`.
        slots: what becomes of the memory for slots: "shared" by all layers; split evenly, slots "per layer"; or used only in
            part, so that nothing is kept: slots for the experts of "one token" in one layer, or for all experts of "one
            layer", which each visit then reads.
    """

    name: str
    kind: Kind
    meaning: str
    config: PromoeConfig = _BASE
    predictor: str | None = None
    experts: str = EXACT
    slots: Slots = "shared"

    @property
    def is_ours(self) -> bool:
        """Whether this library serves it."""
        return self.kind == "promoe"

    @property
    def is_peer(self) -> bool:
        """Whether other software serves it."""
        return self.kind not in ("promoe", "resident")

    @property
    def is_llama_cpp(self) -> bool:
        """Whether llama.cpp serves it. Its products round otherwise, so its tokens are counted, and not verified."""
        return self.kind in ("llama-cpp", "llama-cpp-no-repack")

    @property
    def gguf_type(self) -> str | None:
        """The type of the matrices in the GGUF file that it reads, or "auto" for that of the model; None: it reads none."""
        if self.is_llama_cpp:
            return self.experts
        return FROM_GGUF[self.experts][0] if self.experts in FROM_GGUF else None

    @property
    def is_quantised(self) -> bool:
        """Whether its output is that of quantised experts."""
        return self.experts != EXACT

    @property
    def in_16_bits(self) -> str:
        """The name of the same system with the experts as the checkpoint has them."""
        return self.name.removesuffix(f":{self.experts}")

    @property
    def reference(self) -> str:
        """The name of the system whose tokens this one has to generate."""
        return f"{RESIDENT}:{self.experts}" if self.is_quantised else RESIDENT


def _ours(name: str, meaning: str, predictor: str | None = None, **settings: Any) -> System:
    return System(name, "promoe", meaning, replace(_BASE, **settings), predictor)


_IN_TURN = Ablation(early_preemption=False, reorder=False, begin_early=False, stream=False)
_UNSTREAMED = Ablation(stream=False)
_PAPER = replace(_IN_TURN, stream=True, governor=False)


def _paper(name: str, meaning: str, ablation: Ablation) -> System:
    return _ours(name, meaning, "gate", eviction="lru", waste_share=1.0, ablation=ablation)


# They do not read through the page cache, which would keep what they are not to keep.
_PUBLISHED: dict[str, Any] = {"eviction": "lru", "waste_share": 1.0, "read_mode": "direct"}
_AT_THE_LAYER = Ablation(early_preemption=False, begin_early=False, stream=False, governor=False)


def _eliseev(name: str, meaning: str, slots: Slots, predictor: str | None = None, **settings: Any) -> System:
    """Return a row of Eliseev and Mazur (2023), table 2; with 2 and 3 bits as NAME:int2 and NAME:int3."""
    return replace(_ours(name, meaning, predictor, **_PUBLISHED, ablation=_AT_THE_LAYER, **settings), slots=slots)


_ALL = (
    System(RESIDENT, "resident", "the unmodified model with everything in RAM, memory not limited"),
    _ours(
        "on-demand",
        "LRU; missing experts one after the other by id, fetched in turn",
        eviction="lru",
        ablation=_IN_TURN,
    ),
    _ours(
        "lru",
        "LRU; all missing experts requested at the gate, those at hand run first",
        eviction="lru",
        ablation=_UNSTREAMED,
    ),
    _ours("lfru", "as lru, evicting by frequency over age", eviction="lfru", ablation=_UNSTREAMED),
    _ours("static", "as lru, with the most popular experts kept", eviction="static", ablation=_UNSTREAMED),
    _ours("next-use", "evicting by expected next use, prompts streamed layer by layer; no predictor"),
    _ours("gate", "the default: next-use, and later layers' gates asked early say what to prefetch", "gate"),
    _ours("fast", 'the default with kernels="fast", whose last bits differ', "gate", kernels="fast"),
    _paper("paper-prefetch", "on-demand, and the gates' predictions prefetched, LRU, never switched off", _PAPER),
    _paper(
        "paper-preempt",
        "as paper-prefetch, and missing experts requested at the gate, before what is speculative",
        replace(_PAPER, early_preemption=True),
    ),
    _paper(
        "paper",
        "as paper-preempt, and experts at hand run first: ProMoE as published",
        replace(_PAPER, early_preemption=True, reorder=True),
    ),
    _eliseev(
        "eliseev",
        "Eliseev and Mazur (2023): LRU in slots per layer; the next layer's gate, asked one layer early, says what to prefetch",
        "per layer",
        "gate",
    ),
    _eliseev("eliseev-no-preload", "as eliseev, without prefetch", "per layer"),
    _eliseev(
        "eliseev-no-lru",
        "as eliseev-no-preload, with slots for one layer's experts of one token only: no expert is kept for the next token",
        "one token",
    ),
    _eliseev(
        "eliseev-naive",
        "each layer reads all its experts before it computes, and none is kept (as accelerate offloads)",
        "one layer",
        min_group_bytes=_MORE_THAN_A_LAYER,
    ),
    _ours("random", "the default with useless predictions", "random"),
    _ours(
        ORACLE,
        "the default with perfect predictions of decode, four layers ahead",
        ORACLE,
        lookahead=ORACLE_LOOKAHEAD,
    ),
    System("page-cache", "page-cache", "the unmodified model, its experts mapped from a file: the kernel caches"),
    System("disk-offload", "disk-offload", "accelerate's disk_offload of the experts, all else in RAM"),
    System("airllm", "airllm", "AirLLM: a layer at a time from disk (pip install 'promoe[bench]')"),
    System(
        "llama-cpp",
        "llama-cpp",
        "llama.cpp with its defaults: a mapped GGUF file, and copies of matrices that it multiplies faster in another layout",
    ),
    System(
        "llama-cpp-no-repack",
        "llama-cpp-no-repack",
        "as llama-cpp, without copies (--no-repack): the kernel can drop all weights, and read them again",
    ),
)
KNOWN = {system.name: system for system in _ALL}
_OURS = [system.name for system in _ALL if system.is_ours]


def find_systems(names: Sequence[str]) -> list[System]:
    """Return the systems of these names, in their order, each quantised form's reference before the first one of the form.

    Args:
        names: each one of `KNOWN`; or NAME@FOLDER for one of this library's with a trained predictor; or FOLDER, which means
            gate@FOLDER. Each may have a form of experts behind its name: NAME:FORM, NAME:FORM@FOLDER.

    Raises:
        ConfigError: a name is unknown or given twice, or needs a package that is not installed; or none of the systems is
            this library's.
    """
    found = [_find(name) for name in names]
    again = sorted({system.name for system in found if sum(other.name == system.name for other in found) > 1})
    if again:
        raise ConfigError(f"--systems names {', '.join(again)} twice. Name each system once.")
    if not any(system.is_ours for system in found):
        raise ConfigError(f"--systems needs at least one of this library's: {', '.join(_OURS)}.")
    return _with_references(found)


def _with_references(systems: Sequence[System]) -> list[System]:
    """Add the references of quantised systems that are not among them."""
    found: list[System] = []
    there = {system.name for system in systems}
    for system in systems:
        if system.is_quantised and not system.is_peer and system.reference not in there:
            there.add(system.reference)
            found.append(_in_form(KNOWN[RESIDENT], system.experts))
        found.append(system)
    return found


def _find(name: str) -> System:
    head, at, folder = name.partition("@")
    base, _, form = head.rpartition(":")
    if base and form in (*QUANTISED, *FROM_GGUF):
        return _in_form(_find_plain(f"{base}{at}{folder}"), form)
    return _find_plain(name)


def _in_form(system: System, form: str) -> System:
    if system.is_llama_cpp:
        return _in_gguf_form(system, form)
    if system.is_peer:
        raise ConfigError(f"The system {system.name!r} serves experts as the checkpoint has them. Leave :{form} out.")
    meaning = f"`{system.name}` with experts in {form}"
    if system.kind == "resident":
        meaning = f"this library with all experts in slots, in {form}; memory not limited"
    if form in FROM_GGUF:
        meaning += ", from a GGUF file"
    return replace(system, name=f"{system.name}:{form}", meaning=meaning, experts=form)


def _in_gguf_form(system: System, form: str) -> System:
    if form not in BESIDE_GGUF:
        raise ConfigError(
            f"The system {system.name!r} serves GGUF files: in 16 bits, or in {', '.join(BESIDE_GGUF)}. Got {form!r} instead."
        )
    return replace(
        system, name=f"{system.name}:{form}", meaning=f"`{system.name}` with its matrices in {form}", experts=form
    )


def require_gguf(system: System) -> None:
    """Raise ConfigError unless what a system needs to read GGUF files is installed.

    llama.cpp is compiled when it is installed, which takes minutes: where it is not there, its rows say so, and the others
    go on.
    """
    needed = {"gguf": "gguf"} | ({"llama_cpp": "llama-cpp-python"} if system.is_llama_cpp else {})
    missing = [package for module, package in needed.items() if find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"The system {system.name!r} needs {' and '.join(needed.values())}, and {' and '.join(missing)} "
            "cannot be found: pip install 'promoe[bench-llama]'."
        )


def _find_plain(name: str) -> System:
    if name in KNOWN:
        system = KNOWN[name]
        package = {"disk-offload": "accelerate", "airllm": "airllm"}.get(system.kind)
        if package is not None and find_spec(package) is None:
            raise ConfigError(f"The system {name!r} needs the package {package}: pip install 'promoe[bench]'.")
        return system
    base, at, folder = name.partition("@") if "@" in name else ("gate", "", name)
    if base in _OURS and os.path.isfile(Path(folder) / "config.json"):
        label = Path(folder).resolve().name
        label = "learned" if label == "predictor" else label
        meaning = f"`{base}` with the predictor {folder}"
        return replace(KNOWN[base], name=f"{base}, {label}" if at else label, meaning=meaning, predictor=folder)
    raise ConfigError(
        f"There is no system {name!r}. Name {', '.join(KNOWN)}, the folder of a trained predictor, or paper@FOLDER. A form of "
        f"experts stands behind the name, as in gate:int4 or gate:int4@FOLDER: {', '.join((*QUANTISED, *FROM_GGUF))}."
    )
