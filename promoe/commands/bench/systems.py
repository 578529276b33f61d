"""The systems that `promoe bench` compares, by name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from promoe.config import PromoeConfig
from promoe.errors import ConfigError

Kind = Literal["resident", "promoe", "page-cache", "disk-offload", "airllm"]
RESIDENT = "resident"
ORACLE = "oracle"
# Without `bypass` slots are measured even where they hold everything.
_BASE = PromoeConfig(bypass=False)
# How far the oracle looks: enough layers for the link never to wait for its word.
ORACLE_LOOKAHEAD = 4


@dataclass(frozen=True)
class System:
    """One way to serve a model.

    Attributes:
        name: in tables, and for `--systems`.
        kind: who serves it: "promoe" for this library.
        meaning: in words.
        config: this library's settings.
        predictor: this library's predictor; "oracle" knows the future.
    """

    name: str
    kind: Kind
    meaning: str
    config: PromoeConfig = _BASE
    predictor: str | None = None


_ON_DEMAND = replace(_BASE, eviction="lru", early_preemption=False, reorder=False, begin_early=False, stream=False)
_PAPER = replace(_ON_DEMAND, stream=True, governor=False, waste_share=1.0)
KNOWN = {
    system.name: system
    for system in (
        System(RESIDENT, "resident", "the unmodified model with everything in RAM, memory not limited"),
        System("on-demand", "promoe", "LRU; missing experts one after the other by id, fetched in turn", _ON_DEMAND),
        System(
            "lru",
            "promoe",
            "LRU; all missing experts requested at the gate, those at hand run first",
            replace(_BASE, eviction="lru", stream=False),
        ),
        System(
            "lfru", "promoe", "as lru, evicting by frequency over age", replace(_BASE, eviction="lfru", stream=False)
        ),
        System(
            "static",
            "promoe",
            "as lru, with the most popular experts kept",
            replace(_BASE, eviction="static", stream=False),
        ),
        System(
            "next-use", "promoe", "evicting by expected next use, prompts streamed layer by layer; no predictor", _BASE
        ),
        System(
            "gate",
            "promoe",
            "the default: next-use, and later layers' gates asked early say what to prefetch",
            _BASE,
            "gate",
        ),
        System(
            "paper-prefetch",
            "promoe",
            "on-demand, and the gates' predictions prefetched, LRU, never switched off",
            _PAPER,
            "gate",
        ),
        System(
            "paper-preempt",
            "promoe",
            "as paper-prefetch, and missing experts requested at the gate, before what is speculative",
            replace(_PAPER, early_preemption=True),
            "gate",
        ),
        System(
            "paper",
            "promoe",
            "as paper-preempt, and experts at hand run first: ProMoE as published",
            replace(_PAPER, early_preemption=True, reorder=True),
            "gate",
        ),
        System("random", "promoe", "the default with useless predictions", _BASE, "random"),
        System(
            ORACLE,
            "promoe",
            "the default with perfect predictions of decode, four layers ahead",
            replace(_BASE, lookahead=ORACLE_LOOKAHEAD),
            ORACLE,
        ),
        System("page-cache", "page-cache", "the unmodified model, its experts mapped from a file: the kernel caches"),
        System("disk-offload", "disk-offload", "accelerate's disk_offload of the experts, all else in RAM"),
        System("airllm", "airllm", "AirLLM: a layer at a time from disk (pip install 'promoe[bench]')"),
    )
}


def find_systems(names: Sequence[str]) -> list[System]:
    """The systems of these names, in their order.

    Args:
        names: of `KNOWN`; or NAME@FOLDER for one of this library's with a trained predictor; or FOLDER, for gate@FOLDER.

    Raises:
        ConfigError: a name is unknown or given twice, or needs a package that is not installed.
    """
    found = [_find(name) for name in names]
    again = sorted({system.name for system in found if sum(other.name == system.name for other in found) > 1})
    if again:
        raise ConfigError(f"--systems names {', '.join(again)} twice. Name each system once.")
    if not any(system.kind == "promoe" for system in found):
        raise ConfigError(f"--systems needs at least one of this library's: {', '.join(_ours())}.")
    return found


def _ours() -> list[str]:
    return [name for name, system in KNOWN.items() if system.kind == "promoe"]


def _find(name: str) -> System:
    if name in KNOWN:
        system = KNOWN[name]
        package = {"disk-offload": "accelerate", "airllm": "airllm"}.get(system.kind)
        if package is not None and find_spec(package) is None:
            raise ConfigError(f"The system {name!r} needs the package {package}: pip install 'promoe[bench]'.")
        return system
    base, at, folder = name.partition("@") if "@" in name else ("gate", "", name)
    if base in _ours() and os.path.isfile(Path(folder) / "config.json"):
        known, label = KNOWN[base], Path(folder).resolve().name
        label = "learned" if label == "predictor" else label
        meaning = f"`{base}` with the predictor {folder}"
        return System(f"{base}, {label}" if at else label, "promoe", meaning, known.config, folder)
    raise ConfigError(
        f"There is no system {name!r}. Name {', '.join(KNOWN)}, the folder of a trained predictor, or paper@FOLDER."
    )
