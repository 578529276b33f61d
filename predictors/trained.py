"""A trained predictor as a thing to keep: networks, calibration, and which model it is for. Safetensors and JSON only."""

# No `from __future__ import annotations`: the mixin reads the type of `config` to rebuild it from JSON.
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, PyTorchModelHubMixin
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from torch import nn

from promoe.errors import ConfigError
from promoe.scheduler.reuse import START_WEIGHTS, LearnedReuse

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

NETWORKS: dict[str, type[Network]] = {"residual": ResidualNetwork, "mlp": MlpNetwork, "promoe-paper": MlpNetwork}
TRAINED_KINDS = tuple(NETWORKS)


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
        lookahead: largest distance.
        width: of the hidden layers.
        base_model: whose gates it predicts.
        base_revision: its commit on the hub, if known.
        versions: of the libraries that trained it.
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
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in NETWORKS:
            raise ConfigError(f"A trained predictor is of kind {', '.join(NETWORKS)}. Got {self.kind!r} instead.")
        for name in ("num_layers", "hidden_size", "num_experts", "top_k", "lookahead", "width"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(
                    f"{name} of a trained predictor must be a whole number from 1. Got {value!r} instead."
                )
        if self.lookahead > self.num_layers:
            raise ConfigError(
                f"The lookahead must be at most the number of MoE layers, {self.num_layers}. Got {self.lookahead} instead."
            )

    def mismatch(self, **sizes: Any) -> tuple[str, Any, Any] | None:
        """(field, what it was trained for, what was found) of the first field that differs; None: it fits."""
        differing = ((name, getattr(self, name), found) for name, found in sizes.items())
        return next(((name, own, found) for name, own, found in differing if own != found), None)

    def predicts(self, layer_idx: int, steps_ahead: int) -> bool:
        """Whether it looks `steps_ahead` from this layer: on into the next token, or as the paper has it, at one distance,
        and from the first layer what lies nearer."""
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
    """Networks, and what turns their scores into probabilities. `save_pretrained`, `from_pretrained`, `push_to_hub`."""

    def __init__(self, config: TrainedConfig) -> None:
        super().__init__()
        self.config = config
        self.network = NETWORKS[config.kind](
            config.num_layers, config.hidden_size, config.num_experts, config.lookahead, config.width
        )
        # Log odds = slope * (score - threshold) + offset, per layer and distance.
        self.slope = nn.Buffer(torch.ones(config.num_layers, config.lookahead))
        self.offset = nn.Buffer(torch.zeros(config.num_layers, config.lookahead))
        # What the reuse prior has learned of the model; all zero: nothing.
        self.reuse_weights = nn.Buffer(torch.zeros(len(START_WEIGHTS)))
        self.reuse_associations = nn.Buffer(torch.zeros(config.num_layers, config.num_experts, config.num_experts))

    def learned_reuse(self) -> LearnedReuse | None:
        """What the model's reuse prior may start from; None: it was not fitted.

        Raises:
            ConfigError: it holds what no fit can be.
        """
        if not self.reuse_weights.any():
            return None
        if not (self.reuse_weights.isfinite().all() and self.reuse_associations.isfinite().all()):
            raise ConfigError("The reuse prior of the trained predictor is damaged: not all of its numbers are finite.")
        return LearnedReuse(self.reuse_weights.float().numpy(), self.reuse_associations.float().numpy())

    def keep_reuse(self, learned: LearnedReuse) -> None:
        """Keep what a reuse prior has learned of the model."""
        self.reuse_weights.copy_(torch.from_numpy(learned.weights))
        self.reuse_associations.copy_(torch.from_numpy(learned.associations))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # Predictors that were trained before there was a reuse prior to fit have none.
        for name in ("reuse_weights", "reuse_associations"):
            state_dict.setdefault(f"{prefix}{name}", getattr(self, name))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def scores(self, gate_inputs: torch.Tensor) -> torch.Tensor:
        """Scores `[L, K, n, E]` from gate inputs `[n, L, H]`, see `Network.forward`."""
        result: torch.Tensor = self.network(gate_inputs)
        return result

    def log_odds(self, scores: torch.Tensor) -> torch.Tensor:
        """Calibrated log odds `[L, K, n, E]` of use from such scores."""
        distance = above_threshold(scores, self.config.top_k)
        return distance * self.slope[..., None, None] + self.offset[..., None, None]

    def generate_model_card(self, *args: Any, evaluation: str = "", training: str = "", **kwargs: Any) -> ModelCard:
        """The card, as Markdown; `evaluation` and `training` are sections of it."""
        shown = asdict(self.config) | {"base_model": self.config.base_model or "the model"}
        missing = "Not said."
        return super().generate_model_card(
            *args, **shown, evaluation=evaluation or missing, training=training or missing, **kwargs
        )

    @classmethod
    def load(cls, path_or_id: str) -> "TrainedPredictor":
        """Open a folder or hub id.

        Raises:
            ConfigError: there is none, or its files are damaged or do not fit together.
        """
        folder = Path(path_or_id)
        try:
            if folder.is_dir():
                _check_folder(folder)
            return cls.from_pretrained(path_or_id)
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            raise ConfigError(
                f"There is no trained predictor {path_or_id!r}: neither a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, nor "
                f"an id of the hub that can be reached ({type(error).__name__}: {error})."
            ) from error
        except (ValueError, TypeError, RuntimeError, SafetensorError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{path_or_id!r} is not a trained predictor: {type(error).__name__}: {error}") from error

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **kwargs: Any) -> "TrainedPredictor":
        folder = Path(model_id)
        if folder.is_dir():  # not through the mixin, which prints
            predictor = cls(kwargs["config"])
            cls._load_as_safetensor(predictor, str(folder / WEIGHTS_FILE), "cpu", True)
            return predictor
        kwargs |= {"map_location": "cpu", "strict": True}
        result: TrainedPredictor = super()._from_pretrained(model_id=model_id, **kwargs)
        return result

    @classmethod
    def _load_as_pickle(cls, model: Any, model_file: str, map_location: str, strict: bool) -> Any:
        raise ConfigError(f"{model_file} is a pickle, which can run code. Predictors are kept as {WEIGHTS_FILE}.")


def _check_folder(folder: Path) -> None:
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} has no {name}")
    if not isinstance(json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8")), dict):
        raise ValueError(f"{CONFIG_FILE} holds no object")


def above_threshold(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """Scores `[..., E]` less the middle between the last that would be chosen and the first that would not."""
    if top_k >= scores.shape[-1]:
        return scores - scores.amin(-1, keepdim=True)
    ranked = scores.topk(top_k + 1, dim=-1).values
    return scores - (ranked[..., -2:].mean(-1, keepdim=True))
