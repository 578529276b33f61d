"""What one prediction of a trained predictor takes beside a decoding model, and what it costs the model.

    python benchmarks/predict_latency.py [--tokens 300] [--kind residual] [--lookahead 1 2 8] [--json FILE]

The predictor is of the size that real models need: hidden size 2048, 64 experts, top 8, 27 MoE layers, random weights.
The demo model, widened and every expert in its slot, decodes on one core less than there is. The runtime hands each layer's
visit to the predictor's thread as it always does; asked is the large predictor in place of the model's own, each time for
another of the 27 layers, so that weights are cold as they are in use. Every second token is decoded without predictions:
the slowdown is the ratio per pair of tokens. Printed: median time per prediction beside the model (wanted: at most 400 us)
and alone, and the slowdown of decode (wanted: at most 3%) with its 95% interval.
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import transformers
from common import save
from torch import nn
from transformers import PreTrainedModel

import promoe
from promoe.commands.demo.command import Demo
from promoe.commands.demo.options import Options
from promoe.commands.measure import paired_speedup
from promoe.predictors import Forecast, LayerVisit, PredictorContext
from promoe.predictors.learned import LearnedPredictor
from promoe.predictors.trained import NETWORKS, TrainedConfig, TrainedPredictor
from promoe.runtime.prediction import Forecaster
from promoe.scheduler.reuse import LearnedReuse
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
    foresees_reuse = NETWORKS[kind].may_foresee_reuse
    config = TrainedConfig(kind, "any", LAYERS, HIDDEN, EXPERTS, TOP_K, lookahead, width, foresees_reuse=foresees_reuse)
    trained = TrainedPredictor(config)
    nn.init.normal_(trained.network.outer, std=0.01)
    if foresees_reuse:
        trained.keep_reuse(LearnedReuse.foreseeing(trained.typical_reuse(), weight=1.0))
    context = PredictorContext([Gate() for _ in range(LAYERS)], [EXPERTS] * LAYERS, [TOP_K] * LAYERS, "any")
    return LearnedPredictor(trained, context, lookahead)


class InTurn:
    """Asks a predictor of another model's size, at each visit for its next layer; answers nothing."""

    def __init__(self, predictor: LearnedPredictor) -> None:
        self._predictor = predictor
        self._layers = itertools.cycle(range(LAYERS))
        self._gate_input = torch.randn(1, HIDDEN).bfloat16()
        self.times_s: list[float] = []

    def predict(self, visit: LayerVisit) -> list[Forecast]:
        """See `Predictor`."""
        in_its_place = LayerVisit(
            visit.pass_idx, visit.phase, next(self._layers), self._gate_input, [list(range(TOP_K))]
        )
        start_s = time.perf_counter()
        self._predictor.predict(in_its_place)
        self.times_s.append(time.perf_counter() - start_s)
        return []

    def alone(self) -> float:
        """Median seconds with nothing else going on."""
        visit = LayerVisit(1, "decode", 0, self._gate_input, [])
        for _ in range(10 * LAYERS):
            self.predict(visit)
        median_s = median(self.times_s[LAYERS:])
        self.times_s.clear()
        return median_s


class Switched(Forecaster):
    """One that is of use when we say so."""

    on = False

    @property
    def of_use(self) -> bool:
        """Whether it is switched on."""
        return self.on


def fill(model: PreTrainedModel) -> None:
    """Run long prompts until every expert that they use is in its slot."""
    torch.manual_seed(0)
    before = -1
    while (moved := model.promoe.stats().total.bytes_total) != before:
        before = moved
        with torch.inference_mode():
            model(torch.randint(3, model.config.vocab_size, (1, 512)), use_cache=False)


def decode(model: Any, inputs: torch.Tensor, forecaster: Switched, num_tokens: int) -> tuple[list[float], list[float]]:
    """Seconds per token without and with predictions, pair by pair, in changing order."""
    times: dict[bool, list[float]] = {False: [], True: []}
    with torch.inference_mode():
        output = model(inputs, use_cache=True)
        for number in range(WARM_UP_TOKENS + num_tokens):
            pair, second = divmod(number, 2)
            forecaster.on = bool(second) != bool(pair % 2)
            token = output.logits[:, -1:].argmax(-1)
            start_s = time.perf_counter()
            output = model(token, past_key_values=output.past_key_values, use_cache=True)
            if number >= WARM_UP_TOKENS:
                times[forecaster.on].append(time.perf_counter() - start_s)
            forecaster.drain()
    forecaster.on = False
    return times[False], times[True]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--kind", default="residual")
    parser.add_argument("--lookahead", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--json", type=Path, default=Path("promoe-out/benchmarks/predict_latency.json"))
    options = parser.parse_args()
    transformers.logging.disable_progress_bar()
    demo = Demo(Options())
    checkpoint = demo.example.widened(demo.out, demo.options.repeat, torch.bfloat16)
    torch.set_num_threads(max(1, torch.get_num_threads() - 1))
    config = promoe.PromoeConfig(governor=False, bypass=False, read_mode="direct")
    model = promoe.from_pretrained(checkpoint, cache="100%", predictor=None, config=config)
    fill(model)
    runtime = model.promoe.runtime
    result = []
    for lookahead in options.lookahead:
        asked = InTurn(make_predictor(options.kind, lookahead))
        alone_us = 1e6 * asked.alone()
        forecaster = runtime.forecaster = Switched(asked, runtime.engine)
        without_s, with_s = decode(model, torch.tensor([demo.task.prompts[0].ids]), forecaster, options.tokens)
        runtime.forecaster = None
        forecaster.close()
        ratio = paired_speedup(with_s, without_s)
        times_us = [1e6 * seconds for seconds in asked.times_s[LAYERS:]]
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
    save(options.json, result)
    print(f"written to {options.json}")


if __name__ == "__main__":
    main()
