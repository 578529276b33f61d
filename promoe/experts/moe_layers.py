"""Find the MoE layers of a Transformers model, or say why the model is not supported.

An adapter (`promoe.experts.adapters`) knows how a module keeps and calls its experts. This module uses it to describe a
layer: its experts, the gate beside them, and the shapes of one expert. A module that resembles experts and cannot be
served is an error: if it were skipped, its experts would silently stay in fast memory.

Nothing here knows of slots, caches or files.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from promoe.errors import ConfigError, PatchStateError, UnsupportedModelError, shown
from promoe.experts.adapters import Adapter, ExpertTensor, adapter_for
from promoe.experts.adapters.base import all_paths, get_tensor
from promoe.experts.requirements import require_local, require_no_adapter, require_plain
from promoe.stores.layout import ExpertLayout

_GATE_NAMES = ("gate", "router")
_SUPPORTED = (
    "Supported: every MoE family of Transformers that docs/support.md lists, and others with the same contract."
)


class ModelGoneError(PatchStateError):
    """A layer was asked for a module of a model that has been garbage collected."""


@dataclass(frozen=True)
class MoELayer:
    """One MoE layer of a model: its experts module, the gate beside it, and the shapes of one expert.

    Attributes:
        name: path of the experts module in the model, for example "model.layers.3.mlp.experts".
        layer_idx: position among the model's MoE layers, 0..L-1 (not the index of the decoder layer).
        adapter: knows how the experts module keeps its tensors and is called.
        tensors: the tensors of one expert, and where the module keeps them.
        gate: the router beside the experts; its output holds the ids of the chosen experts (see `chosen`).
        gate_name: path of the gate in the model.
        block_name: path of the module that contains the experts and the gate.
        num_experts: number of routed experts, E.
        num_ids: number of ids that the gate may choose from; ids from E on need no weights.
        top_k: experts per token, K; None if neither the gate nor the config has it.
        layout: how one expert's tensors lie in a slot, in the order of `tensors`.
        eager_forward: the family's own undecorated loop over experts, `(self, hidden, index, weights)`.
    """

    name: str
    layer_idx: int
    adapter: Adapter
    tensors: tuple[ExpertTensor, ...]
    gate: nn.Module
    gate_name: str
    block_name: str
    num_experts: int
    num_ids: int
    top_k: int | None
    layout: ExpertLayout
    eager_forward: Callable[..., torch.Tensor]
    _experts: weakref.ref[nn.Module]
    _block: weakref.ref[nn.Module]
    _kept: tuple[nn.Module, ...]

    @property
    def experts(self) -> nn.Module:
        """The experts module."""
        return self._still_there(self._experts)

    @property
    def block(self) -> nn.Module:
        """The module that holds experts and gate."""
        return self._still_there(self._block)

    @property
    def is_alive(self) -> bool:
        """Whether the experts module and the block still exist."""
        return self._experts() is not None and self._block() is not None

    def _still_there(self, ref: weakref.ref[nn.Module]) -> nn.Module:
        module = ref()
        if module is None:
            raise ModelGoneError(
                f"The model that had the layer {self.name!r} is gone. Keep the model, not only its handle."
            )
        return module

    def released(self) -> MoELayer:
        """Return a copy of the layer that does not keep its experts and its block alive.

        A patched experts module refers to the runtime, and the runtime refers to the layers. Without this reference
        cycle, a model is freed as soon as nobody refers to it.
        """
        return replace(self, _kept=())

    @cached_property
    def own_name(self) -> str:
        """The experts module's name in its block."""
        return self.name.rpartition(".")[2]

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Paths of the parameters and buffers of the experts module that hold expert weights, in the module's order."""
        return tuple(all_paths(self.tensors))

    def rows(self) -> dict[str, torch.Tensor | list[torch.Tensor]]:
        """Return each tensor of the experts by name: those of all experts as the module holds them, not copied."""
        return {tensor.name: tensor.rows(self.experts, self.num_experts) for tensor in self.tensors}

    def parameters(self) -> list[torch.Tensor]:
        """Return the tensors at `paths`."""
        return [get_tensor(self.experts, path) for path in self.paths]

    def chosen(self, gate_output: Any) -> torch.Tensor | None:
        """Return the ids `[T, K]` of the experts that the gate's output chooses; None if they cannot be read from it."""
        return self.adapter.chosen(self.gate, self.block, gate_output)

    @cached_property
    def stacked_shapes(self) -> tuple[tuple[str, torch.Size, torch.dtype], ...]:
        """For each tensor: its name, the shape of the whole stack `[num_experts, ...]`, and its dtype."""
        return tuple((s.name, torch.Size((self.num_experts, *s.shape)), s.dtype) for s in self.layout.tensors)

    @cached_property
    def row_sizes(self) -> tuple[int, ...]:
        """All sizes that a row may have in the experts' computation."""
        return tuple({size for _, shape, _ in self.stacked_shapes for size in shape[1:]})

    @cached_property
    def activation_width(self) -> int:
        """Columns of the first product. Only for experts made by Transformers' `use_experts_implementation`."""
        experts: Any = self.experts
        shapes = {name: shape for name, shape, _ in self.stacked_shapes}
        return shapes["gate_up_proj" if experts.has_gate else "up_proj"][2 if experts.is_transposed else 1]

    @cached_property
    def second_width(self) -> int:
        """Columns of the second product's input. Only for experts made by Transformers' `use_experts_implementation`."""
        experts: Any = self.experts
        return {name: shape for name, shape, _ in self.stacked_shapes}["down_proj"][1 if experts.is_transposed else 2]

    @property
    def implementation(self) -> str:
        """The current experts implementation. `generate` and the user may switch it between calls.

        Raises:
            UnsupportedModelError: the adapter cannot run this implementation over slots.
        """
        return _implementation(self.name, self.adapter, self.experts)

    @property
    def stock_forward(self) -> Callable[..., torch.Tensor]:
        """The current unmodified function of Transformers: `(self, hidden[T, H], index[T, K], weights[T, K]) -> [T, H]`."""
        return self.stock_forward_of(self.implementation)

    def stock_forward_of(self, implementation: str) -> Callable[..., torch.Tensor]:
        """Return the unmodified function of Transformers for a supported implementation."""
        if implementation == "eager":
            return self.eager_forward
        forward: Callable[..., torch.Tensor] = ALL_EXPERTS_FUNCTIONS[implementation]
        return forward


def check_module(model: object) -> None:
    """Raise ConfigError unless `model` is a module of torch."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"The model must be a torch.nn.Module, such as a model of Transformers. Got {shown(model)} instead. Open a folder "
            "or hub id with promoe.from_pretrained; for a pipeline, pass its model."
        )


def find_moe_layers(model: nn.Module, *, allow_meta: bool = False) -> list[MoELayer]:
    """Return the MoE layers of `model`, in model order. Changes nothing.

    Args:
        model: any module; usually a model of Transformers.
        allow_meta: accept experts on the meta device, whose weights are in files.

    Raises:
        ConfigError: `model` is not a torch module.
        UnsupportedModelError: there are no MoE layers, or the experts of one are stored, sharded, quantised or run in a
            way that is not supported. The message names the module, what was found and what to do.
    """
    check_module(model)
    layers: list[MoELayer] = []
    unmet: list[tuple[str, nn.Module, str]] = []
    for name, module in model.named_modules():
        problem = _problem(name, module)
        if problem is None:
            layers.append(_describe_layer(model, name, module, len(layers), allow_meta))
        elif problem:
            unmet.append((name, module, problem))
    blocks = {layer.block_name for layer in layers}
    for name, module, problem in unmet:
        shared = _always_active(module) and name.rpartition(".")[0] in blocks
        if not shared and name not in blocks:  # a block may be called "experts" too
            require_no_adapter(model, name, module)
            raise _unmet_error(model, name, module, problem)
    if not layers:
        raise UnsupportedModelError(
            f"{_model_name(model)} has no MoE layers: no module of it holds routed experts, so there is nothing to "
            f"offload. Use the model as it is. {_SUPPORTED}"
        )
    return layers


def _problem(name: str, module: nn.Module) -> str | None:
    """Return why `module` cannot be served as experts; None: it can be; "": it does not resemble experts."""
    problem = adapter_for(module).problem(module)
    # An nn.ModuleList under the usual name has one module per expert, as in remote code and Transformers 4.
    if problem == "" and name.rpartition(".")[2] == "experts" and any(True for _ in module.parameters()):
        return f"it is a {type(module).__name__}, called in another way than the experts of Transformers 5"
    return problem


def _always_active(module: nn.Module) -> bool:
    """Return whether these are shared experts: stacked like routed ones, but run for every token.

    Their forward takes no index.
    """
    return len(inspect.signature(type(module).forward).parameters) == 3


def _unmet_error(model: nn.Module, name: str, module: nn.Module, problem: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name!r} ({type(module).__name__}) looks like a module of routed experts, but {problem}. Skipping it would leave its "
        f"experts in fast memory, so {_model_name(model)} is refused. {_SUPPORTED}"
    )


def _describe_layer(model: nn.Module, name: str, module: nn.Module, layer_idx: int, allow_meta: bool) -> MoELayer:
    adapter = adapter_for(module)
    require_no_adapter(model, name, module)
    require_local(model, name, module)
    tensors = adapter.tensors(module)
    for path in all_paths(tensors):
        require_plain(f"{name}.{path}", get_tensor(module, path), adapter.dtypes, allow_meta)
    _implementation(name, adapter, module)
    block_name = name.rpartition(".")[0]
    block = model.get_submodule(block_name)
    gate_name, gate = _gate_of(block, block_name, name)
    return MoELayer(
        name=name,
        layer_idx=layer_idx,
        adapter=adapter,
        tensors=tensors,
        gate=gate,
        gate_name=gate_name,
        block_name=block_name,
        num_experts=adapter.num_experts(module),
        num_ids=adapter.num_ids(module),
        top_k=_top_k_of(gate, block, module),
        layout=ExpertLayout.of({tensor.name: (tensor.shape, tensor.dtype) for tensor in tensors}),
        eager_forward=adapter.loop(module),
        _experts=weakref.ref(module),
        _block=weakref.ref(block),
        _kept=(module, block),
    )


def _implementation(name: str, adapter: Adapter, module: nn.Module) -> str:
    implementation, supported = adapter.implementation(module), adapter.implementations
    if implementation not in supported:
        raise UnsupportedModelError(
            f"{name!r} ({type(module).__name__}) runs its experts with experts_implementation={implementation!r}. Supported "
            f"for them: {', '.join(supported)}. Call model.set_experts_implementation({supported[-1]!r}), or load with "
            f"experts_implementation={supported[-1]!r}."
        )
    return implementation


def _gate_of(block: nn.Module, block_name: str, experts_name: str) -> tuple[str, nn.Module]:
    for gate_name in _GATE_NAMES:
        gate = getattr(block, gate_name, None)
        if isinstance(gate, nn.Module):
            return f"{block_name}.{gate_name}" if block_name else gate_name, gate
    raise UnsupportedModelError(
        f"{experts_name!r} has no gate beside it: {type(block).__name__} ({block_name!r}) has no submodule called "
        f"{' or '.join(_GATE_NAMES)}. If something wraps the experts, remove it first."
    )


def _top_k_of(gate: nn.Module, block: nn.Module, experts: nn.Module) -> int | None:
    for owner, attribute in (
        (gate, "top_k"),
        (block, "top_k"),
        (getattr(experts, "config", None), "num_experts_per_tok"),
    ):
        value = getattr(owner, attribute, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def model_type_of(model: nn.Module) -> str | None:
    """Return the name of the model's family in Transformers; None if its config has none."""
    return getattr(getattr(model, "config", None), "model_type", None)


def _model_name(model: nn.Module) -> str:
    model_type = model_type_of(model)
    return f"{type(model).__name__} (model_type {model_type!r})" if model_type else type(model).__name__
