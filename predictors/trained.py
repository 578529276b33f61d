"""A trained predictor as files, safetensors and JSON only: networks, calibration, and the model that it is for."""

# No `from __future__ import annotations`: the mixin reads the type of `config` to restore it from JSON.
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from huggingface_hub import ModelCard, PyTorchModelHubMixin, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from torch import nn

from promoe.errors import CheckpointError, ConfigError
from promoe.files import read_json
from promoe.scheduler.reuse import START_WEIGHTS, LearnedReuse
from promoe.stores.tensor_files import TensorFile

from .network import MlpNetwork, Network, ResidualNetwork

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"

CARD = """---
{{ card_data }}
---

# Which experts {{ base_model }} will use

A predictor of kind `{{ kind }}` for [promoe](https://arxiv.org/abs/2410.22134): from what a gate sees it says which experts the
next {{ lookahead }} MoE layers will use, so that these can be fetched ahead of need. It changes when weights are
loaded, never what is computed.

```python
import promoe

model = promoe.from_pretrained("{{ base_model }}", cache="25%", predictor="THIS FOLDER OR ID")
```

For models of type `{{ model_type }}` with {{ num_layers }} MoE layers, {{ num_experts }} experts, top {{ top_k }}, hidden
size {{ hidden_size }}; others are refused.

## Accuracy

Share of the experts used on held-out prompts that are among the top {{ top_k }} predicted, k MoE layers ahead, in percent:

{{ evaluation }}

## Training

{{ training }}
"""

PUBLISHED = "promoe-paper"
NETWORKS: dict[str, type[Network]] = {"residual": ResidualNetwork, "mlp": MlpNetwork, PUBLISHED: MlpNetwork}
TRAINED_KINDS = tuple(NETWORKS)
# Bound of each size in a configuration. All of them together are compared with the weights' file.
MAX_SIZE = 2**31
# Tensors that a file may lack are zeros of up to so many elements. They could be larger than the file.
MAX_ABSENT = 2**28
OPTIONAL_TENSORS = ("reuse_weights", "reuse_associations")
WEIGHT_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class TrainedConfig:
    """What a trained predictor is, and which model it was trained for.

    Args:
        kind: "residual", "mlp" or "promoe-paper".
        model_type: the model's family in Transformers.
        num_layers: MoE layers.
        hidden_size: of the gate input.
        num_experts: of each layer.
        top_k: experts per token.
        lookahead: the largest distance.
        width: units of the hidden layers.
        base_model: the model whose gates it predicts.
        base_revision: that model's commit on the hub, if known.
        foresees_reuse: whether it also foresees which experts a layer's own next visits use; "residual" only.
        versions: versions of the libraries that trained it.
    """

    kind: str
    model_type: str
    num_layers: int
    hidden_size: int
    num_experts: int
    top_k: int
    lookahead: int
    width: int
    base_model: str = ""
    base_revision: str | None = None
    foresees_reuse: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in NETWORKS:
            raise ConfigError(f"A trained predictor is of kind {', '.join(NETWORKS)}. Got {self.kind!r:.80} instead.")
        for name in ("num_layers", "hidden_size", "num_experts", "top_k", "lookahead", "width"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < MAX_SIZE:
                raise ConfigError(
                    f"{name} of a trained predictor must be a whole number from 1 to {MAX_SIZE - 1}. Got {value!r:.80} instead."
                )
        for name, kinds in (
            ("model_type", str),
            ("base_model", str),
            ("base_revision", (str, type(None))),
            ("foresees_reuse", bool),
            ("versions", Mapping),
        ):
            if not isinstance(getattr(self, name), kinds):
                raise ConfigError(
                    f"{name} of a trained predictor cannot be {getattr(self, name)!r:.80}. Train it anew."
                )
        if self.foresees_reuse and not NETWORKS[self.kind].may_foresee_reuse:
            able = ", ".join(kind for kind, network in NETWORKS.items() if network.may_foresee_reuse)
            raise ConfigError(f"A trained predictor of kind {self.kind} foresees no reuse; only {able} does.")
        if self.lookahead > self.num_layers:
            raise ConfigError(
                f"The lookahead must be at most the number of MoE layers, {self.num_layers}. Got {self.lookahead} instead."
            )

    def mismatch(self, **sizes: Any) -> tuple[str, Any, Any] | None:
        """Return (field, what it was trained for, what was found) of the first field that differs; None: it fits."""
        differing = ((name, getattr(self, name), found) for name, found in sizes.items())
        return next(((name, own, found) for name, own, found in differing if own != found), None)

    def predicts(self, layer_idx: int, steps_ahead: int) -> bool:
        """Return whether it predicts the layer `steps_ahead` of this one.

        "residual" also looks into the next token. "promoe-paper" looks at one distance, and from the first layer also at
        what is nearer.
        """
        if self.kind == "residual":
            return steps_ahead <= self.lookahead
        in_token = layer_idx + steps_ahead < self.num_layers
        if self.kind == "mlp":
            return in_token and steps_ahead <= self.lookahead
        return in_token and (steps_ahead == self.lookahead or (layer_idx == 0 and steps_ahead < self.lookahead))


class TrainedPredictor(
    nn.Module,
    PyTorchModelHubMixin,
    library_name="promoe",
    tags=["mixture-of-experts", "promoe"],
    model_card_template=CARD,
):
    """Networks and the calibration of their scores, with `save_pretrained`, `from_pretrained` and `push_to_hub`."""

    def __init__(self, config: TrainedConfig) -> None:
        super().__init__()
        self.config = config
        self.network = NETWORKS[config.kind](
            config.num_layers,
            config.hidden_size,
            config.num_experts,
            config.lookahead,
            config.width,
            config.foresees_reuse,
        )
        # Log odds = slope * (score - threshold) + offset, per layer and distance.
        self.slope = nn.Buffer(torch.ones(config.num_layers, config.lookahead))
        self.offset = nn.Buffer(torch.zeros(config.num_layers, config.lookahead))
        # What the reuse prior has learned of the model; all zeros: nothing.
        self.reuse_weights = nn.Buffer(torch.zeros(len(START_WEIGHTS) + config.foresees_reuse))
        self.reuse_associations = nn.Buffer(torch.zeros(config.num_layers, config.num_experts, config.num_experts))

    def learned_reuse(self) -> LearnedReuse | None:
        """Return what the model's reuse prior may start from; None: it was not fitted.

        Raises:
            ConfigError: not all of its numbers are finite.
        """
        if not self.reuse_weights.any():
            return None
        if not (self.reuse_weights.isfinite().all() and self.reuse_associations.isfinite().all()):
            raise ConfigError("The reuse prior of the trained predictor is damaged: not all of its numbers are finite.")
        foreseen = self.typical_reuse() if self.config.foresees_reuse else None
        if foreseen is not None and not np.isfinite(foreseen).all():
            raise ConfigError("The networks of the trained predictor are damaged: not all of their numbers are finite.")
        return LearnedReuse(self.reuse_weights.float().numpy(), self.reuse_associations.float().numpy(), foreseen)

    def typical_reuse(self) -> npt.NDArray[np.float32]:
        """Return the log odds of reuse `[L, E]` that it foresees when gates see the mean of the training data."""
        with torch.inference_mode():
            log_odds: npt.NDArray[np.float32] = (
                self.reuse_log_odds(self.network.mean.float()[None])[:, 0].float().numpy()
            )
        return log_odds

    def keep_reuse(self, learned: LearnedReuse) -> None:
        """Store what a reuse prior has learned of the model."""
        self.reuse_weights.copy_(torch.from_numpy(learned.weights))
        self.reuse_associations.copy_(torch.from_numpy(learned.associations))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # Predictors that were trained before there was a reuse prior do not have these.
        for name in OPTIONAL_TENSORS:
            state_dict.setdefault(f"{prefix}{name}", getattr(self, name))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def scores(self, gate_inputs: torch.Tensor) -> torch.Tensor:
        """Return scores `[L, K, n, E]` from gate inputs `[n, L, H]`, see `Network.forward`."""
        result: torch.Tensor = self.network(gate_inputs)[:, : self.config.lookahead]
        return result

    def reuse_log_odds(self, gate_inputs: torch.Tensor) -> torch.Tensor:
        """Return the log odds `[L, n, E]` that each layer's next visits use an expert, from gate inputs `[n, L, H]`."""
        assert self.config.foresees_reuse, "not trained for it"
        result: torch.Tensor = self.network(gate_inputs)[:, -1]
        return result

    def log_odds(self, scores: torch.Tensor) -> torch.Tensor:
        """Return calibrated log odds `[L, K, n, E]` of use from scores of the same shape."""
        distance = above_threshold(scores, self.config.top_k)
        return distance * self.slope[..., None, None] + self.offset[..., None, None]

    def generate_model_card(self, *args: Any, evaluation: str = "", training: str = "", **kwargs: Any) -> ModelCard:
        """Return the card as Markdown; `evaluation` and `training` are sections of it."""
        shown = asdict(self.config) | {"base_model": self.config.base_model or "the model"}
        missing = "Not said."
        return super().generate_model_card(
            *args, **shown, evaluation=evaluation or missing, training=training or missing, **kwargs
        )

    @classmethod
    def load(cls, path_or_id: str) -> "TrainedPredictor":
        """Open a trained predictor in a folder or on the hub.

        Raises:
            ConfigError: there is none, or its files are damaged or contradict each other.
        """
        try:
            if os.path.isdir(path_or_id):
                _check_folder(Path(path_or_id))
            predictor: TrainedPredictor = cls.from_pretrained(path_or_id)
            damaged = [name for name, tensor in predictor.state_dict().items() if not tensor.isfinite().all()]
            if damaged:
                raise ValueError(f"not all of its numbers are finite: {damaged[0]}. Train it anew")
            return predictor
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            raise ConfigError(
                f"There is no trained predictor {path_or_id[:500]!r}: neither a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, "
                f"nor an id of the hub that can be reached ({type(error).__name__}: {error})."
            ) from error
        except (ValueError, TypeError, RuntimeError, SafetensorError, CheckpointError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{path_or_id!r} is not a trained predictor: {type(error).__name__}: {error}") from error

    @classmethod
    def _from_pretrained(cls, *, model_id: str, config: Any = None, **kwargs: Any) -> "TrainedPredictor":
        # Not the mixin's own, which prints, makes networks of any size, and opens a pickle if there are no safetensors.
        if not isinstance(config, TrainedConfig):
            raise ValueError(f"{CONFIG_FILE} does not say what it is")
        if os.path.isdir(model_id):
            weights = Path(model_id) / WEIGHTS_FILE
        else:
            names = ("revision", "cache_dir", "force_download", "token", "local_files_only")
            options: dict[str, Any] = {name: kwargs[name] for name in names if name in kwargs}
            weights = Path(hf_hub_download(model_id, WEIGHTS_FILE, **options))
        _check_weights(cls, config, weights)
        predictor = cls(config)
        cls._load_as_safetensor(predictor, str(weights), "cpu", True)
        return predictor


def _check_folder(folder: Path) -> None:
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not os.path.isfile(folder / name):
            raise FileNotFoundError(f"{folder} has no {name}")
    if not isinstance(read_json(folder / CONFIG_FILE), dict):
        raise ValueError(f"{CONFIG_FILE} holds no object")


def _check_weights(predictor: type[TrainedPredictor], config: TrainedConfig, path: Path) -> None:
    """Raise ValueError if the file's tensors are not those of a predictor of these sizes. Allocates no memory for them."""
    with torch.device("meta"):
        expected = predictor(config).state_dict()
    file = TensorFile.open(path)
    file.close()
    for name, tensor in expected.items():
        found = file.tensors.get(name)
        if found is not None and (found.shape != tuple(tensor.shape) or found.dtype_name not in WEIGHT_DTYPES):
            raise ValueError(
                f"{path.name} has {name} as {found.dtype_name} {list(found.shape)}, and {CONFIG_FILE} says "
                f"{list(tensor.shape)} of {', '.join(WEIGHT_DTYPES)}"
            )
        if found is None and (name not in OPTIONAL_TENSORS or tensor.numel() > MAX_ABSENT):
            raise ValueError(f"{path.name} has no {name} {list(tensor.shape)}")


def above_threshold(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return scores `[..., E]` minus the threshold between the last that is chosen and the first that is not."""
    if top_k >= scores.shape[-1]:
        return scores - scores.amin(-1, keepdim=True)
    ranked = scores.topk(top_k + 1, dim=-1).values
    return scores - (ranked[..., -2:].mean(-1, keepdim=True))
