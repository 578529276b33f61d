"""Predicts how many tokens per second many prompts at once give, what limits them, and which sizes give most. Pure.

A roofline in levels, after MoE-Lightning (Cao et al. 2024, equations 4 to 14): a step takes no less than its products, than
reading its weights from memory, and than the link takes for the experts that have no slot. In place of peaks there are
curves that were measured. The search is brute force over a grid.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, combinations

import numpy as np
import numpy.typing as npt

from promoe.commands.plan.sizes import WORKSPACE_BYTES, ModelSizes
from promoe.commands.plan.time_model import Curve
from promoe.runtime.paged import PAGE_TOKENS
from promoe.scheduler.many_tokens import STREAMED_SHARE
from promoe.units import ratio

# What is tried: sequences at once, and tokens of a step.
AT_ONCE = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
STEP_TOKENS = (128, 256, 512, 1024, 2048)
# Up to this many times the time for one row, reading an expert's weights limits its products.
MEMORY_BOUND = 1.5
# More sequences at once are chosen only if they give so much more.
WORTH_MORE = 1.01

Usage = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class BatchWork:
    """What a file of prompts asks for.

    Args:
        answers: how many.
        prompt_tokens: mean tokens of a prompt.
        new_tokens: mean tokens of an answer; as long as it may be, where that is not known.
        longest: tokens of the longest prompt with its answer.
    """

    answers: int
    prompt_tokens: float
    new_tokens: float
    longest: int


@dataclass(frozen=True, slots=True)
class Step:
    """A step of continuous batching.

    Args:
        sequences: that have tokens in it.
        tokens: of all of them.
        kept: tokens of all sequences in the KV cache.
    """

    sequences: float
    tokens: float
    kept: float


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step without routed experts: `fixed_s + sequence_s S + token_s T + pair_s T C`.

    T tokens of S sequences, beside C tokens of all sequences in the KV cache.
    """

    fixed_s: float
    sequence_s: float
    token_s: float
    pair_s: float

    def __call__(self, step: Step) -> float:
        """Return the seconds of a step."""
        return self.fixed_s + self.sequence_s * step.sequences + step.tokens * (self.token_s + self.pair_s * step.kept)

    @classmethod
    def fitted(cls, steps: Sequence[tuple[Step, float]]) -> StepCost:
        """Fit steps and their seconds: the least relative squares among costs that are not negative."""
        terms = np.array([[1.0, step.sequences, step.tokens, step.tokens * step.kept] for step, _ in steps]) / np.array(
            [[seconds] for _, seconds in steps]
        )
        best, least = np.zeros(4), math.inf
        for used in map(list, chain.from_iterable(combinations(range(4), count) for count in range(1, 5))):
            found = np.linalg.lstsq(terms[:, used], np.ones(len(steps)), rcond=None)[0]
            error = float(np.square(terms[:, used] @ found - 1).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(4), error
                best[used] = found
        return cls(*best.tolist())


@dataclass(frozen=True)
class BatchMachine:
    """What was measured of a machine with a model.

    Args:
        others: a step without routed experts.
        experts: `kernels` ("exact", "fast") -> rows of an expert -> its seconds.
        expert_bytes: bytes of the expert that was measured.
        bytes_per_s: bytes in slots that the link brings per second while the model computes.
        slowdown: how many times as long computing takes meanwhile.
        group_s: what it costs to run an expert by itself, in place of together with others.
        usage: for each layer, the share of tokens that use each expert `[num_experts]`.
    """

    others: StepCost
    experts: Mapping[str, Curve]
    expert_bytes: int
    bytes_per_s: float
    slowdown: float
    group_s: float
    usage: tuple[Usage, ...]


@dataclass(frozen=True, slots=True)
class Setting:
    """How a file is answered.

    Args:
        at_once: the most sequences that are computed together.
        step_tokens: the most tokens of a step.
        kv_tokens: tokens of the KV cache.
        rate: share of the routed experts that have slots.
        kernels: "exact" or "fast".
    """

    at_once: int
    step_tokens: int
    kv_tokens: int
    rate: float
    kernels: str


@dataclass(frozen=True, slots=True)
class StepTime:
    """What a step takes, in seconds: all of it, and each roof alone.

    Args:
        total_s: with what overlaps.
        others_s: everything but routed experts: attention, gates, head, drawing tokens.
        groups_s: what it costs to run experts by themselves, where there are slots for few of a layer's.
        products_s: routed experts, where their products limit them.
        memory_s: routed experts, where reading their weights from memory limits them.
        link_s: experts that have no slot, over the link.
    """

    total_s: float = 0.0
    others_s: float = 0.0
    groups_s: float = 0.0
    products_s: float = 0.0
    memory_s: float = 0.0
    link_s: float = 0.0

    @property
    def compute_s(self) -> float:
        """The seconds of the processor."""
        return self.others_s + self.groups_s + self.products_s + self.memory_s

    def times(self, factor: float) -> StepTime:
        """Return what so many of these steps take."""
        return StepTime(*(factor * getattr(self, name) for name in self.__slots__))

    def plus(self, other: StepTime) -> StepTime:
        """Return what both take."""
        return StepTime(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class Expected:
    """What a setting gives.

    Args:
        setting: the setting.
        spent: what all steps take.
        tokens_per_s: generated tokens / (prompts and answers).
    """

    setting: Setting
    spent: StepTime
    tokens_per_s: float

    @property
    def limit(self) -> str:
        """What takes longest: "the link", or of computing "products", "memory", "few slots" or "attention and the rest"."""
        spent = self.spent
        if spent.link_s > spent.compute_s:
            return "the link"
        roofs = {
            "products": spent.products_s,
            "memory": spent.memory_s,
            "few slots": spent.groups_s,
            "attention and the rest": spent.others_s,
        }
        return max(roofs, key=lambda name: roofs[name])


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a user has fixed; None: the plan chooses. `kernels` is what may be chosen from."""

    at_once: int | None = None
    step_tokens: int | None = None
    kv_tokens: int | None = None
    rate: float | None = None
    kernels: tuple[str, ...] = ("exact",)


class BatchModel:
    """Predicts one model on one machine for one file.

    Args:
        sizes: the model's.
        machine: measured.
        work: the file's.
    """

    def __init__(self, sizes: ModelSizes, machine: BatchMachine, work: BatchWork) -> None:
        self.sizes, self.machine, self.work = sizes, machine, work
        self._step = lru_cache(maxsize=None)(self._step_uncached)

    def step(self, step: Step, setting: Setting) -> StepTime:
        """Return what a step takes with slots and kernels of a setting."""
        return self._step(step, setting.rate, setting.kernels)

    def _step_uncached(self, step: Step, rate: float, kernels: str) -> StepTime:
        machine, curve, tokens = self.machine, self.machine.experts[kernels], step.tokens
        products_s = memory_s = groups_s = missing_bytes = used = 0.0
        slots = rate * self.sizes.num_experts
        for layer, usage in zip(self.sizes.layers, machine.usage, strict=True):
            probable = np.sort(1 - (1 - usage) ** tokens)[::-1]
            active = float(probable.sum())
            nbytes = layer.layout.payload_bytes
            rows = tokens * layer.top_k / active
            expert_s = active * curve(rows) * nbytes / machine.expert_bytes
            if curve(rows) <= MEMORY_BOUND * curve(1.0):
                memory_s += expert_s
            else:
                products_s += expert_s
            whole, part = divmod(rate * layer.num_experts, 1)
            kept_experts = float(probable[: int(whole)].sum())
            if int(whole) < len(probable):
                kept_experts += part * float(probable[int(whole)])
            if rate < 1:  # with slots for a layer's experts and the next one's, many run together
                groups_s += max(0.0, 1 - slots / (2 * active)) * active * machine.group_s
            missing_bytes += max(0.0, active - kept_experts) * nbytes
            used += active / layer.num_experts
        link_s = 0.0 if rate >= 1 else missing_bytes / machine.bytes_per_s
        others_s = machine.others(step)
        computing = products_s + memory_s + groups_s
        if used >= STREAMED_SHARE * len(self.sizes.layers):  # the next layer's experts come beforehand
            total_s = _overlapped(others_s + computing, link_s, machine.slowdown)
        else:
            total_s = others_s + _overlapped(computing, link_s, machine.slowdown)
        return StepTime(total_s, others_s, groups_s, products_s, memory_s, link_s)

    def expected(self, setting: Setting) -> Expected:
        """Return what a setting gives: prompts are read in full steps, then each step writes a token per sequence."""
        work = self.work
        at_once = min(setting.at_once, max(1, int(setting.kv_tokens / self._kv_tokens_each)))
        rounds = math.ceil(work.answers / at_once)
        sequences = work.answers / rounds
        prompts = sequences * work.prompt_tokens
        full = min(prompts, float(setting.step_tokens))
        reading = self.step(Step(full / work.prompt_tokens, full, prompts / 2), setting).times(prompts / full)
        writing = self.step(self._decode(sequences), setting).times(max(0.0, work.new_tokens - 1))
        spent = reading.plus(writing).times(rounds)
        return Expected(setting, spent, work.answers * work.new_tokens / spent.total_s)

    def hidden_from(self, setting: Setting) -> int | None:
        """Return from how many sequences at once on loading takes no longer than computing; None: not up to 4,096.

        Klotski's inequality 7 (Fang et al. 2025) where attention and gates stay in memory, so that its 4 to 6 ask for less.
        """
        for number in range(1, 4097):
            found = self.step(self._decode(number), setting)
            if found.link_s <= found.compute_s:
                return number
        return None

    def _decode(self, sequences: float) -> Step:
        """Return a step in which each sequence has a token of its answer, half of which is there."""
        return Step(sequences, sequences, sequences * (self.work.prompt_tokens + self.work.new_tokens / 2))

    def kv_tokens(self, at_once: int) -> int:
        """Return the tokens of a KV cache in which so many sequences have room, in whole pages."""
        tokens = max(float(self.work.longest), at_once * self._kv_tokens_each)
        return math.ceil(tokens / PAGE_TOKENS) * PAGE_TOKENS

    @property
    def _kv_tokens_each(self) -> float:
        return self.work.prompt_tokens + self.work.new_tokens + PAGE_TOKENS / 2  # the last page is half full

    def settings(self, memory_bytes: int | None, wanted: Wanted) -> Iterator[Setting]:
        """Yield all settings of the grid that fit: slots have what the KV cache leaves.

        Args:
            memory_bytes: for everything that the process holds; None: unknown, so that all fits.
            wanted: what is fixed.
        """
        most = max(1, self.work.answers)
        several = (
            [wanted.at_once] if wanted.at_once is not None else [n for n in AT_ONCE if n < most] + [min(most, 512)]
        )
        for at_once in several:
            kv_tokens = self.kv_tokens(at_once) if wanted.kv_tokens is None else wanted.kv_tokens
            for step_tokens in STEP_TOKENS if wanted.step_tokens is None else [wanted.step_tokens]:
                if step_tokens < at_once:
                    continue
                rate = self._rate(memory_bytes, kv_tokens, step_tokens, wanted.rate)
                if rate is not None:
                    for kernels in wanted.kernels:
                        yield Setting(at_once, step_tokens, kv_tokens, rate, kernels)

    def _rate(self, memory_bytes: int | None, kv_tokens: int, step_tokens: int, rate: float | None) -> float | None:
        sizes = self.sizes
        if memory_bytes is None:
            return 1.0 if rate is None else rate
        left = memory_bytes - sizes.other_bytes - self.kv_bytes(kv_tokens) - workspace_bytes(step_tokens, kv_tokens)
        if rate is not None:
            return rate if sizes.slots(rate).nbytes <= left else None
        share = min(1.0, left / sizes.slots_bytes)
        share = math.floor(1000 * share) / 1000
        return share if share >= sizes.least_rate else None

    def kv_bytes(self, kv_tokens: int) -> int:
        """Return the bytes of a KV cache of so many tokens, of all sequences together."""
        return kv_tokens * sum(layer.token_bytes for layer in self.sizes.kv.layers)

    def best(self, memory_bytes: int | None, wanted: Wanted) -> Expected | None:
        """Return the setting with the best throughput that fits; None: none fits. Of about equal ones, the smallest."""
        found: Expected | None = None
        for setting in self.settings(memory_bytes, wanted):
            one = self.expected(setting)
            if found is None or one.tokens_per_s > WORTH_MORE * found.tokens_per_s:
                found = one
        return found


def workspace_bytes(step_tokens: int, kv_tokens: int) -> int:
    """Return the bytes beside weights and KV cache: what promoe takes, and the attention mask of a step in 16 bits."""
    return WORKSPACE_BYTES + 2 * step_tokens * (kv_tokens + step_tokens)


def memory_rows(curve: Curve) -> float:
    """Return the rows from which products limit an expert, not reading its weights: where the two roofs meet."""
    (first, first_s), (before, before_s), (last, last_s) = curve.points[0], curve.points[-2], curve.points[-1]
    slope = (last_s - before_s) / (last - before)
    return math.inf if slope <= 0 else max(first, first_s / slope)


def _overlapped(compute_s: float, link_s: float, slowdown: float) -> float:
    """Return how long both take beside each other; computing is slower while bytes are on their way."""
    return link_s + max(0.0, compute_s - ratio(link_s, slowdown))
