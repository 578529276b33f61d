"""Measures what many prompts at once take: steps of continuous batching, and experts with many tokens."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from promoe.commands.plan.stand_in import StandIn, Timed, token_ids
from promoe.commands.plan.throughput import Step, StepCost
from promoe.commands.plan.time_model import Curve
from promoe.errors import UnsupportedModelError
from promoe.experts.kernels.fast import FastProducts
from promoe.runtime.paged import PagedRunner, is_paged

# Sequences at once, tokens of each prompt, tokens of a step: few and many sequences, short and long ones.
STEPS = ((2, 32, 128), (32, 64, 512), (4, 384, 256))
NEW_TOKENS = 8
# Tokens of the passes in which experts are timed.
TOKENS = (1, 8, 32, 64, 128, 256)
ROUNDS = 3


def measure_steps(stand_in: StandIn) -> StepCost:
    """Time steps of continuous batching without routed experts.

    Raises:
        UnsupportedModelError: continuous batching cannot serve the model.
    """
    if not is_paged(stand_in.model):
        raise UnsupportedModelError(
            "Transformers' continuous batching cannot serve this model, so that its prompts go in padded batches. Those are "
            "not planned: give promoe batch --at-once and --cache."
        )
    stand_in.with_experts = False
    try:
        _steps(stand_in, *STEPS[0])  # the first run allocates and compiles
        return StepCost.fitted([step for sizes in STEPS for step in _steps(stand_in, *sizes)])
    finally:
        stand_in.with_experts = True


def _steps(stand_in: StandIn, sequences: int, prompt: int, step_tokens: int) -> list[tuple[Step, float]]:
    """Return the steps of some sequences, and the seconds of each."""
    watch = _Watch(stand_in)
    with ExitStack() as stack:
        model = stand_in.model
        stack.callback(model.register_forward_pre_hook(watch.begin, with_kwargs=True).remove)
        stack.callback(model.register_forward_hook(watch.end).remove)
        kv_tokens = 2 * sequences * (prompt + NEW_TOKENS)  # with room to spare, or sequences would wait
        runner = stack.enter_context(PagedRunner(model, sequences, step_tokens, kv_tokens))
        for number in range(sequences):
            ids = token_ids(model, prompt + number)[0, number:].tolist()
            runner.add(number, ids, NEW_TOKENS)
        for _ in range(sequences):
            runner.next()
    return watch.steps


class _Watch:
    """Notes each pass of a stand-in, and what Transformers does until the next one."""

    def __init__(self, stand_in: StandIn) -> None:
        self._stand_in = stand_in
        self._start_s = self._end_s = 0.0
        self._step = Step(0, 0, 0)
        self.steps: list[tuple[Step, float]] = []

    def begin(self, model: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Note how large the pass is."""
        self._start_s = time.perf_counter()
        if self.steps:  # what lies between two passes belongs to the first
            step, seconds = self.steps[-1]
            self.steps[-1] = step, seconds + self._start_s - self._end_s
        masks = kwargs["attention_mask"]
        shapes = [mask.shape for mask in (masks.values() if isinstance(masks, Mapping) else [masks])]
        tokens = max(shape[-2] for shape in shapes)
        self._step = Step(len(kwargs["cu_seq_lens_q"]) - 1, tokens, max(shape[-1] for shape in shapes) - tokens)
        self._stand_in.begin()

    def end(self, *_: Any) -> None:
        """Note what it took."""
        self._end_s = time.perf_counter()
        timed = self._stand_in.end(self._end_s - self._start_s)
        self.steps.append((self._step, timed.others_s))


def measure_experts(stand_in: StandIn, kernels: str) -> tuple[Curve, int]:
    """Return the seconds of an expert by its rows, with exact or fast products, and the bytes of the expert."""
    stand_in.fast = FastProducts() if kernels == "fast" else None
    try:
        points: dict[float, float] = {}
        stand_in.run(token_ids(stand_in.model, TOKENS[-1]))
        for tokens in TOKENS:
            runs: list[Timed] = [stand_in.run(token_ids(stand_in.model, tokens))[1] for _ in range(ROUNDS)]
            points[runs[0].pairs / runs[0].experts_used] = min(run.experts_s / run.experts_used for run in runs)
        return Curve(tuple(sorted(points.items()))), runs[0].experts_bytes // runs[0].experts_used
    finally:
        stand_in.fast = None
