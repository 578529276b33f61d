"""One part of the demo: every system on every prompt, interleaved, its tokens verified, its time set beside its bound."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from promoe.commands.demo.systems import RESIDENT, SYSTEMS, Source, System
from promoe.commands.lower_bound import (
    bytes_per_token,
    link_bandwidth,
    needed_bytes,
    token_bound_s,
)
from promoe.commands.measure import (
    REPETITION_PENALTY,
    Estimate,
    Generation,
    generate,
    interleaved,
    paired_estimates,
    paired_speedup,
    tpots_s,
    ttfts_s,
)
from promoe.errors import PromoeError
from promoe.experts.moe_layers import MoELayer, find_moe_layers
from promoe.stats.recorder import Recorder
from promoe.stats.routing import RoutedPass, RoutingRecorder
from promoe.stats.run import Run
from promoe.stats.totals import Stats
from promoe.units import is_number

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Inputs = dict[str, torch.Tensor]
# The prompt of the warm-up fills the slots; a few tokens make everything else ready.
WARM_UP_TOKENS = 8


class TokensDifferError(PromoeError):
    """A system generated other tokens than the unmodified model: the one thing that must not happen."""


@dataclass(frozen=True)
class Task:
    """What every system has to do: answers of equal length, greedy.

    Args:
        warm_up: a prompt that is answered first, and not measured.
        prompts: those that are measured, each `input_ids` and `attention_mask` `[1, n]`.
        new_tokens: tokens to generate for each.
        pad_token_id: for `model.generate`.
    """

    warm_up: Inputs
    prompts: Sequence[Inputs]
    new_tokens: int
    pad_token_id: int | None

    def run(self, model: PreTrainedModel, inputs: Inputs) -> Generation:
        """Answer one prompt; the end of text is suppressed, so that all answers have the same length."""
        new_tokens = min(WARM_UP_TOKENS, self.new_tokens) if inputs is self.warm_up else self.new_tokens
        return generate(
            model,
            inputs,
            new_tokens,
            min_new_tokens=new_tokens,
            repetition_penalty=REPETITION_PENALTY,
            pad_token_id=self.pad_token_id,
        )


class Reference(NamedTuple):
    """What the unmodified model does with the task, warm-up first: its answers and its routing."""

    answers: list[Generation]
    routing: list[list[RoutedPass]]
    layers: Sequence[MoELayer]

    @property
    def compute_s(self) -> float:
        """Seconds per token, from its quicker tokens: what else the machine was busy with meanwhile is not its own."""
        return float(np.quantile([gap_s for answer in self.answers[1:] for gap_s in answer.gaps_s], 0.25))

    @property
    def token_bytes(self) -> int:
        """Bytes of all routed experts that one token needs."""
        return sum((layer.top_k or 1) * layer.layout.payload_bytes for layer in self.layers)


class Result(NamedTuple):
    """One part's outcome."""

    runs: list[Run]
    speedup: Estimate
    """Full system against the first that fetches, per prompt: median and interval."""
    compute_s: float | None
    """C: TPOT with everything resident; None where that did not fit."""
    bandwidth_bytes_per_s: float
    """W."""
    link: str
    answers: dict[str, list[Generation]]
    """By system, one per measured prompt."""


def record(model: PreTrainedModel, task: Task, layers: Sequence[MoELayer] | None = None) -> Reference:
    """Let a model do the task with its routing recorded. The `layers` of a model whose experts are on disk are given."""
    layers = find_moe_layers(model) if layers is None else list(layers)
    answers, routing = [], []
    with RoutingRecorder(model, layers) as recorder:
        for inputs in _bar([task.warm_up, *task.prompts], "reference"):
            answers.append(task.run(model, inputs))
            routing.append(recorder.take())
    return Reference(answers, routing, layers)


def compare(
    source: Source,
    resident: PreTrainedModel | None,
    reference: Reference,
    task: Task,
    cache: str,
    timeline: Path,
    systems: Sequence[System] = SYSTEMS,
) -> Result:
    """Measure all systems on the task.

    Args:
        source: opens the systems.
        resident: the unmodified model; None where it does not fit.
        reference: its answers; every system must give the same.
        task: what to do.
        cache: slots of each system.
        timeline: file for a timeline of the last system answering the first prompt once more.
        systems: those with slots, in order.

    Raises:
        TokensDifferError: a system's tokens are not the reference's. Nothing is reported of such a run.
    """
    with ExitStack() as stack:
        models: dict[str, Any] = {} if resident is None else {RESIDENT: resident}
        for system in systems:
            models[system.name] = source.patched(system, cache)
            stack.callback(models[system.name].promoe.close)
        engine = models[systems[-1].name].promoe.runtime.engine
        bandwidth = link_bandwidth(engine.link, engine.store)
        _warm_up(models, reference, task)
        times = _measure(models, reference, task)
        compute_s = median(tpots_s(times[RESIDENT])) if resident is not None else None
        tpots = paired_estimates({name: tpots_s(answers) for name, answers in times.items()})
        stats = {
            name: resident_stats(reference.layers) if name == RESIDENT else model.promoe.stats()
            for name, model in models.items()
        }
        # A disk's speed drifts: what a system got from it in a whole token, the disk could give.
        reached = (stats[system.name].decode.bytes_per_token / tpots[system.name].value for system in systems)
        bandwidth = max(bandwidth, *filter(is_number, reached))
        runs = []
        for name, model in models.items():
            bound_s = None
            if name != RESIDENT:
                config = model.promoe.runtime.engine.scheduler.config
                missed = median(bytes_per_token(config, reference.routing)[1:])
                bound_s = token_bound_s(compute_s, needed_bytes(missed, stats[name].decode), bandwidth)
            runs.append(_run(name, stats[name], times[name], tpots[name], bound_s))
        _draw_timeline(models[systems[-1].name], task, timeline)
        slow, fast = (tpots_s(times[system.name]) for system in (systems[0], systems[-1]))
        return Result(runs, paired_speedup(slow, fast), compute_s, bandwidth, engine.link.describe(), times)


def resident_stats(layers: Sequence[MoELayer]) -> Stats:
    """Statistics of a model that fetches nothing: all zero, every expert in memory."""
    recorder = Recorder([layer.num_experts for layer in layers], [layer.layout.payload_bytes for layer in layers])
    return Stats.of(
        recorder,
        cache_slots=sum(recorder.num_experts),
        cache_bytes=sum(layer.num_experts * layer.layout.payload_bytes for layer in layers),
        link="none: the unmodified model",
        policy="none",
        predictor=None,
    )


def verify(name: str, prompt_idx: int, answer: Generation, expected: Generation) -> None:
    """Raise TokensDifferError unless two answers have the same tokens."""
    if answer.tokens == expected.tokens:
        return
    pairs = zip(answer.tokens, expected.tokens, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(answer.tokens), len(expected.tokens)))
    raise TokensDifferError(
        f"“{name}” generated other tokens than the unmodified model: prompt {prompt_idx}, from token {same} on: "
        f"{list(answer.tokens[same : same + 5])} instead of {list(expected.tokens[same : same + 5])}. The promise of "
        "identical output is broken; please report it with the versions above."
    )


def _warm_up(models: dict[str, Any], reference: Reference, task: Task) -> None:
    for name, model in _bar(models.items(), "warming up"):
        verify(name, 0, task.run(model, task.warm_up), reference.answers[0])
        if name != RESIDENT:
            model.promoe.reset_stats()


def _measure(models: dict[str, Any], reference: Reference, task: Task) -> dict[str, list[Generation]]:
    with tqdm(total=len(models) * len(task.prompts), desc="measuring", unit="answer", disable=None, leave=False) as bar:

        def on_done(name: str, idx: int, answer: Generation) -> None:
            bar.update()
            bar.set_postfix_str(name)
            verify(name, idx + 1, answer, reference.answers[idx + 1])

        systems = {name: functools.partial(task.run, model) for name, model in models.items()}
        return interleaved(systems, task.prompts, on_done)


def _run(name: str, stats: Stats, answers: list[Generation], tpot: Estimate, bound_s: float | None) -> Run:
    return Run(
        name,
        stats,
        tpot_s=tpot.value,
        tpot_interval_s=(tpot.low, tpot.high) if len(answers) > 1 else None,
        ttft_s=median(ttfts_s(answers)),
        bound_s=bound_s,
    )


def _draw_timeline(model: Any, task: Task, path: Path) -> None:
    with model.promoe.trace(path):
        task.run(model, task.prompts[0])


def _bar(items: Any, name: str) -> Any:
    return tqdm(items, desc=name, unit="answer", disable=None, leave=False)
