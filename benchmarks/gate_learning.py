"""How much better the default predictor gets while it runs: the share of the experts used that it names, token by token.

    python benchmarks/gate_learning.py [--prompts 24] [--new-tokens 40] [--lookahead 4]
        [--json promoe-out/benchmarks/gate_learning.json]

The demo model answers held-out prompts; what its gates see in decode is kept, and shown to predictors in that order: the
gates as they are, `gate`, which corrects them as it goes, and the trained predictor. Printed per distance: of the experts
that a layer used, the share among the top-k predicted (predictions into the next token are left out), in stretches.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
import transformers
from common import save
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import promoe
from promoe.commands.bench.example import find_example
from promoe.predictors import LayerVisit, Predictor, PredictorContext, TrainedPredictor
from promoe.predictors.gate import GatePredictor
from promoe.predictors.learned import LearnedPredictor
from promoe.runtime.assembly import predictor_context
from promoe.units import aligned

# Tokens after which a new stretch begins.
STRETCHES = (0, 30, 100, 300)

Token = list[LayerVisit]


class FixedGates(GatePredictor):
    """The gates as they are."""

    def _learn(self, visit: LayerVisit) -> None:
        pass


@torch.inference_mode()
def decoded(model: PreTrainedModel, prompts: Sequence[torch.Tensor], new_tokens: int) -> list[Token]:
    """Each token of decode, as the visits of its layers."""
    layers = promoe.find_moe_layers(model)
    tokens: list[Token] = []
    token: Token = []

    def keep(layer: promoe.MoELayer, gate_input: torch.Tensor, output: object) -> None:
        hidden, chosen = gate_input.reshape(-1, gate_input.shape[-1]), layer.chosen(output)
        assert chosen is not None
        if len(hidden) == 1:
            token.append(LayerVisit(len(tokens), "decode", layer.layer_idx, hidden.clone(), chosen.tolist()))
        if layer is layers[-1] and token:
            tokens.append(list(token))
            token.clear()

    for layer in layers:
        layer.gate.register_forward_hook(lambda gate, args, output, layer=layer: keep(layer, args[0], output))
    for prompt in prompts:
        model.generate(prompt, max_new_tokens=new_tokens, do_sample=False)
    return tokens


def accuracy(predictor: Predictor, context: PredictorContext, tokens: Sequence[Token]) -> dict[int, list[float]]:
    """By distance, for each token: the share of the experts used that are among the top-k predicted, over all layers."""
    found: dict[int, list[float]] = {}
    for token in tokens:
        shares: dict[int, list[float]] = {}
        for visit in token:
            for forecast in predictor.predict(visit):
                if forecast.layer_idx <= visit.layer_idx:
                    continue
                top_k = context.top_k[forecast.layer_idx]
                named = set(np.argsort(-forecast.probabilities)[:top_k].tolist())
                used = token[forecast.layer_idx].chosen[0]
                shares.setdefault(forecast.steps_ahead, []).append(len(named.intersection(used)) / top_k)
        for steps_ahead, values in shares.items():
            found.setdefault(steps_ahead, []).append(fmean(values))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=40)
    parser.add_argument("--lookahead", type=int, default=4)
    parser.add_argument("--json", type=Path, default=Path("promoe-out/benchmarks/gate_learning.json"))
    options = parser.parse_args()
    transformers.logging.disable_progress_bar()
    example = find_example()
    tokenizer = AutoTokenizer.from_pretrained(example.checkpoint)
    model = AutoModelForCausalLM.from_pretrained(example.checkpoint, dtype=torch.bfloat16)
    prompts = [tokenizer(text, return_tensors="pt").input_ids for text in example.prompts(options.prompts)]
    tokens = decoded(model, prompts, options.new_tokens)
    context = predictor_context(promoe.find_moe_layers(model), model.config.model_type)
    predictors = {
        "gates as they are": FixedGates(context, options.lookahead),
        "gate": GatePredictor(context, options.lookahead),
        "trained": LearnedPredictor(TrainedPredictor.load(str(example.predictor)), context, options.lookahead),
    }
    bounds = [*(start for start in STRETCHES if start < len(tokens)), len(tokens)]
    spans = list(pairwise(bounds))
    table = [("accuracy, %", "k", *(f"tokens {start}-{end - 1}" for start, end in spans))]
    results = {}
    for name, predictor in predictors.items():
        by_distance = accuracy(predictor, context, tokens)
        for steps_ahead, values in sorted(by_distance.items()):
            shares = [100 * fmean(values[start:end]) for start, end in spans]
            table.append((name, str(steps_ahead), *(f"{share:.1f}" for share in shares)))
            results[f"{name}, k = {steps_ahead}"] = dict(zip(map(str, spans), shares, strict=True))
    print("\n".join(aligned(table)))
    save(options.json, results)


if __name__ == "__main__":
    main()
