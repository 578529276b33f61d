"""The weights from which the reuse prior starts: a logistic regression of use within the next visits.

    python benchmarks/reuse_prior.py TRACE.npz ... [--fit 70] [--tokens 30000]

Of the first `--fit` per cent of each trace's prompts, half a million pairs of a visit and an expert are drawn; features are
the log odds of the decayed frequencies. One line per trace, and one for all of them together, which is what ships
(`promoe.scheduler.reuse.START_WEIGHTS`).
"""

from __future__ import annotations

import argparse

import numpy as np
from sklearn.linear_model import LogisticRegression

from promoe.scheduler.reuse import HALF_LIVES_TOKENS, HORIZON_VISITS, P_MAX, P_MIN
from promoe.training.baselines import used
from promoe.training.routing_traces import load_npz

SAMPLES, WARM_UP = 500_000, 1000


def samples(path: str, share: float, num_tokens: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    fit, _ = load_npz(path).split(share)
    fit = fit.first(num_tokens)
    features, outcomes = [], []
    per_layer = SAMPLES // fit.num_layers
    for layer_idx in range(fit.num_layers):
        use = used(fit, layer_idx)
        frequency = np.empty((len(HALF_LIVES_TOKENS), *use.shape), dtype=np.float32)
        for row, half_life in zip(frequency, HALF_LIVES_TOKENS, strict=True):
            decay, now = 0.5 ** (1 / half_life), np.full(use.shape[1], 0.1, dtype=np.float32)
            for token_idx, uses in enumerate(use):
                now = now * decay + (1 - decay) * uses
                row[token_idx] = now
        soon = np.zeros_like(use)
        for ahead in range(1, HORIZON_VISITS + 1):
            soon[:-ahead] = np.maximum(soon[:-ahead], use[ahead:])
        tokens = rng.integers(WARM_UP, len(use) - HORIZON_VISITS, per_layer)
        experts = rng.integers(0, use.shape[1], per_layer)
        p = np.clip(frequency[:, tokens, experts], P_MIN, P_MAX)
        features.append(np.log(p / (1 - p)).T)
        outcomes.append(soon[tokens, experts])
    return np.concatenate(features), np.concatenate(outcomes)


def weights(features: np.ndarray, outcomes: np.ndarray) -> str:
    fitted = LogisticRegression(C=10.0).fit(features, outcomes)
    return ", ".join(f"{value:.3f}" for value in (*fitted.coef_[0], *fitted.intercept_))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--fit", type=float, default=70, help="per cent of the prompts")
    parser.add_argument("--tokens", type=int, default=30_000)
    options = parser.parse_args()
    rng, found = np.random.default_rng(0), []
    print(f"half-lives {HALF_LIVES_TOKENS} tokens, use within {HORIZON_VISITS} visits; weights, then the constant")
    for path in options.traces:
        found.append(samples(path, options.fit / 100, options.tokens, rng))
        print(f"{path}: {weights(*found[-1])}")
    together = [np.concatenate(part) for part in zip(*found, strict=True)]
    print(f"all together: {weights(*together)}")


if __name__ == "__main__":
    main()
