"""What was known of a missing expert when its gate chose it: why a prefetch that should have been there was not.

    python benchmarks/foresight.py [--caches 50%] [--predictors gate examples/sharegpt_moe/predictor]
        [--settings lookahead=2 ...] [--prompts 4] [--new-tokens 32] [--out promoe-out] [--json FILE]

Experts per token of the widened demo model, decoding held-out prompts one by one, read past the page cache, prefetch always on;
the first prompt only fills the slots. Of those that a gate chooses some are in slots. Of the others, by what their latest
forecast was worth after calibration:

under way: being fetched; beside it, how much of such an expert had come by then.
queued: sure enough, but nothing of it had been sent yet.
too dear: at least as sure as `min_probability`, but not as sure as the budget of waste asked for.
unsure: less sure than that, but at least half as sure.
unforeseen: all others, and those of layers that nothing was forecast for.

Each predictor is run under the default and under each of `--settings` (fields of `PromoeConfig`, commas between them).
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from common import save, widened_demo
from lockstep import DEFAULT, opened
from transformers import PreTrainedModel

from promoe.scheduler import Scheduler
from promoe.scheduler.cache import LOADING, RESIDENT
from promoe.units import aligned

KINDS = ("in slots", "under way", "queued", "too dear", "unsure", "unforeseen")
ARRIVED = "arrived of those under way"


class Watched:
    """Counts what a scheduler's hints find.

    Args:
        scheduler: its `hint` and `_expect` are wrapped.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.counts: Counter[str] = Counter()
        self._scheduler = scheduler
        self._latest: dict[int, Any] = {}  # layer -> probabilities of its latest forecast
        self._hint, self._expect = scheduler.hint, scheduler._expect
        scheduler.hint, scheduler._expect = self.hint, self.expect  # type: ignore[method-assign]

    def expect(self, steps_ahead: int, layer_idx: int, p_next: Any, wanted: bool) -> None:
        """As `Scheduler._expect`."""
        self._latest[layer_idx] = p_next
        self._expect(steps_ahead, layer_idx, p_next, wanted)

    def hint(self, layer_idx: int, ids: Sequence[int]) -> int:
        """As `Scheduler.hint`."""
        forecast = self._latest.pop(layer_idx, None)
        for expert_idx in ids:
            self.counts[self._kind(layer_idx, expert_idx, forecast)] += 1
        return self._hint(layer_idx, ids)

    def _kind(self, layer_idx: int, expert_idx: int, forecast: Any) -> str:
        scheduler = self._scheduler
        cache, code = scheduler.cache_of(layer_idx), layer_idx * scheduler.max_experts + expert_idx
        if cache.state[code] == RESIDENT:
            return "in slots"
        if cache.state[code] == LOADING:
            self.counts[ARRIVED] += cache.loads[code].done_bytes / scheduler.config.expert_bytes[layer_idx]  # type: ignore[assignment]
            return "under way"
        least, probability = scheduler.config.min_probability, 0.0 if forecast is None else forecast[expert_idx]
        if probability >= scheduler._budget.threshold:
            return "queued"
        if probability >= least:
            return "too dear"
        return "unsure" if probability >= least / 2 else "unforeseen"


@torch.inference_mode()
def decode(model: PreTrainedModel, prompts: Sequence[torch.Tensor], new_tokens: int) -> dict[str, float]:
    """Counts per token."""
    watched = Watched(model.promoe.runtime.engine.scheduler)  # type: ignore[union-attr]
    total: Counter[str] = Counter()
    for number, prompt in enumerate(prompts):
        output = model(prompt, use_cache=True)
        watched.counts.clear()
        for _ in range(new_tokens):
            token = output.logits[:, -1:].argmax(-1)
            output = model(token, past_key_values=output.past_key_values, use_cache=True)
        if number:
            total += watched.counts
    tokens = (len(prompts) - 1) * new_tokens
    stall_ms = 1e3 * model.promoe.stats().decode.stall_s / (tokens + new_tokens)  # type: ignore[union-attr]
    return {kind: total[kind] / tokens for kind in (*KINDS, ARRIVED)} | {"stall_ms": stall_ms}


def show(results: dict[str, dict[str, float]]) -> None:
    """As a table."""
    rows = [("experts per token", *KINDS, "arrived", "waiting, ms per token")]
    for name, found in results.items():
        arrived = f"{100 * found[ARRIVED] / max(1e-9, found['under way']):.0f}%"
        rows.append((name, *(f"{found[kind]:.1f}" for kind in KINDS), arrived, f"{found['stall_ms']:.1f}"))
    print("\n".join(aligned(rows)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--caches", nargs="+", default=["50%"])
    parser.add_argument("--predictors", nargs="+", default=["gate", "examples/sharegpt_moe/predictor"])
    parser.add_argument("--settings", nargs="*", default=[])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("promoe-out"))
    parser.add_argument("--json", type=Path, default=Path("promoe-out/benchmarks/foresight.json"))
    options = parser.parse_args()
    transformers.logging.disable_progress_bar()
    checkpoint, prompts = widened_demo(options.out, options.prompts + 1)
    results = {}
    for cache in options.caches:
        for predictor in options.predictors:
            for setting in (DEFAULT, *options.settings):
                model = opened(checkpoint, cache, predictor, setting)
                results[f"{cache}, {Path(predictor).name}, {setting}"] = decode(model, prompts, options.new_tokens)
                model.promoe.close()  # type: ignore[union-attr]
    show(results)
    save(options.json, results)


if __name__ == "__main__":
    main()
