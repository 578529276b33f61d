"""The systems that the demo compares: systems of `promoe bench` under names that tell a story."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from promoe.commands.bench.systems import KNOWN, System
from promoe.config import Ablation


def _told(known: str, name: str, meaning: str) -> System:
    return replace(KNOWN[known], name=name, meaning=meaning)


RESIDENT = replace(KNOWN["resident"], name="all resident")
_NEXT_USE = _told("next-use", "+ next-use eviction", "evicts the expert whose next use is expected last")
# Each adds one idea to the one before it. Streaming prompts comes with prefetch.
SYSTEMS = (
    _told("on-demand", "on-demand LRU", "missing experts one after the other by id, each fetched when its turn comes"),
    _told(
        "lru",
        "+ preempt/reorder",
        "all missing experts requested when the gate has chosen; those at hand run first",
    ),
    replace(_NEXT_USE, config=replace(_NEXT_USE.config, ablation=Ablation(stream=False))),
    _told(
        "gate",
        "+ gate prefetch",
        "later layers' gates, asked early, say what to fetch next; off while it does not pay",
    ),
)


def to_compare(steps: bool, predictor: Path | None) -> tuple[System, ...]:
    """Return the systems that the demo compares; the first one fetches on demand.

    Args:
        steps: show each idea by itself, added to those before it; else on-demand LRU and the whole of promoe.
        predictor: folder of a predictor that was trained for the model; None: there is none.
    """
    trained = () if predictor is None else (_trained(steps, str(predictor)),)
    if steps:
        return (*SYSTEMS, *trained)
    meaning = "the default: evicts what is needed last, fetches ahead what later layers' gates foresee"
    return (SYSTEMS[0], _told("gate", "promoe", meaning), *trained)


def _trained(steps: bool, predictor: str) -> System:
    if steps:
        system = _told("gate", "+ learned prefetch", "what promoe-train learned says it instead")
    else:
        system = _told("gate", "promoe, trained", "the same with a predictor that promoe-train trained")
    return replace(system, predictor=predictor)
