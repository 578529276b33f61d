"""What one prediction of a trained predictor takes beside a decoding model, and what it costs the model.

    python benchmarks/predict_latency.py [--tokens 300] [--kind residual] [--lookahead 1 2 8] [--json FILE]

Prints, for each lookahead: the median microseconds per prediction beside the model (wanted: at most 400) and alone, and
the ratio of decode with to decode without predictions (wanted: at most 1.03), token by token in pairs, with its 95%
bootstrap interval.

The predictor is of the size that real models need: hidden size 2048, 64 experts, top 8, 27 MoE layers, random weights.
The demo model with experts of real size, every expert in its slot, decodes on one core less than there is. The runtime
hands each layer's visit to the predictor's thread as it always does; that asks the large predictor in place of the
model's own, each time for another of the 27 layers, so that weights are cold as they are in use.

Takes about three minutes on two cores.
"""

from __future__ import annotations

import itertools
import time
from statistics import median, quantiles
from typing import Any

import torch
from common import DTYPE, heldout_prompts, make_parser, open_slots, save, widened_demo
from torch import nn
from transformers import PreTrainedModel

from promoe.commands.measure import paired_speedup
from promoe.predictors import Forecast, LayerVisit, PredictorContext
from promoe.predictors.folded import FoldedPredictor
from promoe.predictors.trained import NETWORKS, TrainedConfig, TrainedPredictor
from promoe.runtime.prediction import Forecaster
from promoe.scheduler.reuse import LearnedReuse
from promoe.training.fit import default_width

LAYERS, HIDDEN, EXPERTS, TOP_K = 27, 2048, 64, 8
WARM_UP_TOKENS = 10


class Gate(nn.Module):
    """The part of a gate that a predictor's context needs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(EXPERTS, HIDDEN))


def make_predictor(kind: str, lookahead: int) -> FoldedPredictor:
    """Return a predictor with random weights, of the size that real models need."""
    width, foresees_reuse = default_width(kind, HIDDEN), NETWORKS[kind].may_foresee_reuse
    config = TrainedConfig(kind, "any", LAYERS, HIDDEN, EXPERTS, TOP_K, lookahead, width, foresees_reuse=foresees_reuse)
    trained = TrainedPredictor(config)
    nn.init.normal_(trained.network.outer, std=0.01)
    if foresees_reuse:
        trained.keep_reuse(LearnedReuse.foreseeing(trained.typical_reuse(), weight=1.0))
    context = PredictorContext([Gate() for _ in range(LAYERS)], [EXPERTS] * LAYERS, [TOP_K] * LAYERS, "any")
    return FoldedPredictor(trained, context, lookahead)


class InTurn:
    """A predictor that asks one of another model's size at each visit, for the next of its layers, and forecasts nothing."""

    def __init__(self, predictor: FoldedPredictor) -> None:
        self._predictor = predictor
        self._layers = itertools.cycle(range(LAYERS))
        self._gate_input = torch.randn(1, HIDDEN).to(DTYPE)
        self.times_s: list[float] = []

    def predict(self, visit: LayerVisit) -> list[Forecast]:
        """Ask the large predictor, and note how long it takes."""
        large = LayerVisit(visit.pass_idx, visit.phase, next(self._layers), self._gate_input, [list(range(TOP_K))])
        start_s = time.perf_counter()
        self._predictor.predict(large)
        self.times_s.append(time.perf_counter() - start_s)
        return []

    def alone(self) -> float:
        """Return the median seconds of a prediction with nothing else going on."""
        visit = LayerVisit(1, "decode", 0, self._gate_input, [])
        for _ in range(10 * LAYERS):
            self.predict(visit)
        median_s = median(self.times_s[LAYERS:])
        self.times_s.clear()
        return median_s


class Switched(Forecaster):
    """A forecaster that is of use when this script says so."""

    on = False

    @property
    def of_use(self) -> bool:
        """Whether it is switched on."""
        return self.on


@torch.inference_mode()
def fill(model: PreTrainedModel) -> None:
    """Run long prompts until every expert that they use is in its slot."""
    torch.manual_seed(0)
    before = -1
    while (moved := model.promoe.stats().total.bytes_total) != before:
        before = moved
        model(torch.randint(3, model.config.vocab_size, (1, 512)), use_cache=False)


@torch.inference_mode()
def decode(model: Any, prompt: torch.Tensor, forecaster: Switched, num_tokens: int) -> tuple[list[float], list[float]]:
    """Return the seconds per token without and with predictions, pair by pair, in changing order."""
    times: dict[bool, list[float]] = {False: [], True: []}
    output = model(prompt, use_cache=True)
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


def measure(model: Any, prompt: torch.Tensor, kind: str, lookahead: int, num_tokens: int) -> dict[str, Any]:
    """Print and return the figures of one lookahead."""
    asked, runtime = InTurn(make_predictor(kind, lookahead)), model.promoe.runtime
    alone_us = 1e6 * asked.alone()
    forecaster = runtime.forecaster = Switched(asked, runtime.engine)
    without_s, with_s = decode(model, prompt, forecaster, num_tokens)
    runtime.forecaster = None
    forecaster.close()
    ratio, times_us = paired_speedup(with_s, without_s), [1e6 * seconds for seconds in asked.times_s[LAYERS:]]
    print(
        f"{kind}, k = 1..{lookahead}: {median(times_us):.0f} us per prediction (median; 90% within "
        f"{quantiles(times_us, n=10)[-1]:.0f}; {len(times_us)} predictions; wanted: at most 400), {alone_us:.0f} alone"
    )
    print(
        f"  decode with / without: {ratio.value:.3f} ({ratio.low:.3f} - {ratio.high:.3f}), {1e3 * median(with_s):.1f} "
        f"against {1e3 * median(without_s):.1f} ms; wanted: at most 1.03; {torch.get_num_threads()} threads compute"
    )
    return {
        "kind": kind,
        "lookahead": lookahead,
        "median_us": median(times_us),
        "alone_us": alone_us,
        "decode": ratio,
    }


def main() -> None:
    parser = make_parser(__doc__, __file__)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--kind", default="residual")
    parser.add_argument("--lookahead", type=int, nargs="+", default=[1, 2, 8])
    options = parser.parse_args()
    checkpoint, (prompt,) = widened_demo(), heldout_prompts(1)
    torch.set_num_threads(max(1, torch.get_num_threads() - 1))
    model: Any = open_slots(checkpoint, "100%")
    fill(model)
    save(options.json, [measure(model, prompt, options.kind, k, options.tokens) for k in options.lookahead])
    model.promoe.close()


if __name__ == "__main__":
    main()
