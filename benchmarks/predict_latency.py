"""What one prediction of a trained predictor takes beside a decoding model, and what it costs the model.

    python benchmarks/predict_latency.py [--tokens 120] [--kind residual] [--lookahead 1 2 8] [--json FILE]

The predictor is of the size that real models need: hidden size 2048, 64 experts, top 8, 27 MoE layers, random weights.
The demo model, widened and all resident, decodes on one core less than there is; whenever a layer's experts are about to
run, which is when the runtime posts a visit too, a prediction is posted to a thread beside it, each from another of the
27 layers, so that weights are cold as they are in use. Every second token is decoded without predictions: the slowdown is
the ratio per pair of tokens. Printed: median time per prediction beside the model (wanted: at most 400 us) and alone, and
the slowdown of decode (wanted: at most 3%) with its 95% interval.
"""

from __future__ import annotations

import argparse
import itertools
import json
import threading
import time
from collections import deque
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn

from promoe.demo.command import DTYPE, Demo
from promoe.demo.options import Options
from promoe.demo.systems import OnDisk
from promoe.measure import paired_speedup
from promoe.moe_layers import find_moe_layers
from promoe.predictors import LayerVisit, PredictorContext
from promoe.predictors.learned import LearnedPredictor
from promoe.predictors.trained import TrainedConfig, TrainedPredictor
from promoe.threads import ThreadBeside
from promoe.training.fit_command import default_width

LAYERS, HIDDEN, EXPERTS, TOP_K = 27, 2048, 64, 8
WARM_UP_TOKENS = 10


class Gate(nn.Module):
    """What a predictor's context needs of a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(EXPERTS, HIDDEN))


def make_predictor(kind: str, lookahead: int) -> LearnedPredictor:
    """Random weights, of the size that real models need."""
    width = default_width(kind, HIDDEN)
    trained = TrainedPredictor(TrainedConfig(kind, "any", LAYERS, HIDDEN, EXPERTS, TOP_K, lookahead, width))
    nn.init.normal_(trained.network.outer, std=0.01)
    context = PredictorContext([Gate() for _ in range(LAYERS)], [EXPERTS] * LAYERS, [TOP_K] * LAYERS, "any")
    return LearnedPredictor(trained, context, lookahead)


class Beside:
    """Predicts in a thread, as the runtime does, whatever is posted; the layers take turns."""

    def __init__(self, predictor: LearnedPredictor) -> None:
        self._predictor = predictor
        self._layers = itertools.cycle(range(LAYERS))
        self._gate_input = torch.randn(1, HIDDEN).to(DTYPE)
        self._condition = threading.Condition()
        self._waiting: deque[int] = deque(maxlen=2)
        self.on = False
        self.times_s: list[float] = []
        self.thread = ThreadBeside(self._run, "predictor")
        self.thread.start()

    def post(self, *_: Any) -> None:
        """A layer's experts are about to run."""
        if self.on:
            with self._condition:
                self._waiting.append(next(self._layers))
                self._condition.notify()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._waiting:
                    self._condition.wait()
                layer_idx = self._waiting.popleft()
            self.times_s.append(self._predict(layer_idx))

    def _predict(self, layer_idx: int) -> float:
        """Seconds it took."""
        visit = LayerVisit(1, "decode", layer_idx, self._gate_input, [list(range(TOP_K))])
        start_s = time.perf_counter()
        self._predictor.predict(visit)
        return time.perf_counter() - start_s

    def alone(self) -> float:
        """Median seconds with nothing else going on."""
        return median([self._predict(next(self._layers)) for _ in range(10 * LAYERS)][LAYERS:])


def decode(model: Any, inputs: torch.Tensor, beside: Beside, num_tokens: int) -> tuple[list[float], list[float]]:
    """Seconds per token without and with predictions, pair by pair, in changing order."""
    times: dict[bool, list[float]] = {False: [], True: []}
    with torch.inference_mode():
        output = model(inputs, use_cache=True)
        for number in range(WARM_UP_TOKENS + num_tokens):
            pair, second = divmod(number, 2)
            beside.on = bool(second) != bool(pair % 2)
            token = output.logits[:, -1:].argmax(-1)
            start_s = time.perf_counter()
            output = model(token, past_key_values=output.past_key_values, use_cache=True)
            if number >= WARM_UP_TOKENS:
                times[beside.on].append(time.perf_counter() - start_s)
    beside.on = False
    return times[False], times[True]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--kind", default="residual")
    parser.add_argument("--lookahead", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--json", type=Path, default=Path("promoe-out/benchmarks/predict_latency.json"))
    options = parser.parse_args()
    demo = Demo(Options())
    checkpoint = demo.example.widened(demo.out, demo.options.repeat, DTYPE)
    model = OnDisk(checkpoint, DTYPE).resident()
    torch.set_num_threads(max(1, torch.get_num_threads() - 1))
    result = []
    for lookahead in options.lookahead:
        beside = Beside(make_predictor(options.kind, lookahead))
        alone_us = 1e6 * beside.alone()
        hooks = [layer.experts.register_forward_pre_hook(beside.post) for layer in find_moe_layers(model)]
        without_s, with_s = decode(model, demo.task.warm_up["input_ids"], beside, options.tokens)
        for hook in hooks:
            hook.remove()
        ratio = paired_speedup(with_s, without_s)
        times_us = [1e6 * seconds for seconds in beside.times_s[LAYERS:]]
        print(
            f"{options.kind}, k = 1..{lookahead}: {median(times_us):.0f} us per prediction (median; 90% within "
            f"{quantiles(times_us, n=10)[-1]:.0f}; {len(times_us)} predictions; wanted: at most 400), {alone_us:.0f} alone"
        )
        print(
            f"  decode with / without: {ratio.value:.3f} ({ratio.low:.3f} - {ratio.high:.3f}), {1e3 * median(with_s):.1f} "
            f"against {1e3 * median(without_s):.1f} ms; wanted: at most 1.03; {torch.get_num_threads()} threads compute"
        )
        result.append(
            {
                "kind": options.kind,
                "lookahead": lookahead,
                "median_us": median(times_us),
                "alone_us": alone_us,
                "decode": ratio,
            }
        )
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=2))
    print(f"written to {options.json}")


if __name__ == "__main__":
    main()
