"""What a Transformers MoE layer looks like: finds the experts modules of a model, or says why the model is not supported.

An experts module is recognised by contract, never by its family: its class is decorated with transformers'
`use_experts_implementation` (so its weights are all in direct parameters and its kernels can be called with a stand-in
for `self`), its forward takes `(hidden_states[T, H], index[T, K], weights[T, K])`, and every direct parameter is a stack
`[num_experts, ...]` of one row per expert. Whatever resembles experts without meeting the contract is an error: an
experts module that was skipped would be a model that silently does not fit.

Knows nothing of slots, caches or files.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from promoe.errors import UnsupportedModelError
from promoe.guard import is_guard
from promoe.layout import ExpertLayout

IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
TESTED_FAMILIES = ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "deepseek_v2", "deepseek_v3", "gpt_oss")
# Classes that hold experts in another way; named only so that the error can say which family it is.
_OTHER_EXPERTS = {
    "Llama4TextExperts": "llama4",
    "DbrxExperts": "dbrx",
    "LongcatFlashExperts": "longcat_flash",
    "JetMoeParallelExperts": "jetmoe",
    "SwitchTransformersExperts": "switch_transformers",
    "NllbMoeExperts": "nllb_moe",
}
_DECORATOR_MARKS = ("has_gate", "has_bias", "is_transposed", "num_experts", "config")
_GATE_NAMES = ("gate", "router")
_ROW_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SUPPORTED = f"Tested families: {', '.join(TESTED_FAMILIES)}; others whose experts follow the same contract work too."


@dataclass(frozen=True)
class MoELayer:
    """One MoE layer of a model: its experts module, the gate beside it, and the shapes of one expert.

    Attributes:
        name: path of the experts module in the model, for example "model.layers.3.mlp.experts".
        layer_idx: position among the model's MoE layers, 0..L-1 (not the index of the decoder layer).
        experts: the experts module; each of its `parameter_names` is a stack `[num_experts, ...]`.
        gate: the router beside it; its output tuple holds the chosen experts' ids (see `gate_indices`).
        gate_name: path of the gate.
        block_name: path of the module that holds both.
        num_experts: E, the routed experts.
        top_k: experts per token K, or None where neither gate nor config says.
        layout: one expert's tensors, in the order of `parameter_names`.
        eager_forward: the family's own undecorated loop over experts, `(self, hidden, index, weights)`.
    """

    name: str
    layer_idx: int
    experts: nn.Module
    gate: nn.Module
    gate_name: str
    block_name: str
    num_experts: int
    top_k: int | None
    layout: ExpertLayout
    eager_forward: Callable[..., torch.Tensor]

    @cached_property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of the stacked tensors, in the module's own order."""
        return tuple(spec.name for spec in self.layout.tensors)

    @cached_property
    def stacked_shapes(self) -> tuple[tuple[str, torch.Size, torch.dtype], ...]:
        """Per tensor: name, shape of the whole stack `[num_experts, ...]`, dtype."""
        return tuple((s.name, torch.Size((self.num_experts, *s.shape)), s.dtype) for s in self.layout.tensors)

    @property
    def implementation(self) -> str:
        """The experts implementation in force now: `generate` and the user may switch it between calls.

        Raises:
            UnsupportedModelError: it is not one of "eager", "batched_mm", "grouped_mm".
        """
        return _implementation(self.name, self.experts)

    @property
    def stock_forward(self) -> Callable[..., torch.Tensor]:
        """The unmodified transformers function in force now: `(self, hidden[T, H], index[T, K], weights[T, K]) -> [T, H]`."""
        return self.stock_forward_of(self.implementation)

    def stock_forward_of(self, implementation: str) -> Callable[..., torch.Tensor]:
        """The unmodified transformers function of one of the supported implementations."""
        if implementation == "eager":
            return self.eager_forward
        forward: Callable[..., torch.Tensor] = ALL_EXPERTS_FUNCTIONS[implementation]
        return forward


def find_moe_layers(model: nn.Module, *, allow_meta: bool = False) -> list[MoELayer]:
    """The MoE layers of `model`, in model order. Changes nothing.

    Args:
        model: any module; usually a transformers model.
        allow_meta: accept experts on the meta device (their weights are to be read from files).

    Raises:
        UnsupportedModelError: there are no MoE layers; or one of them is kept, sharded, quantised or run in a way that
            is not supported. The message names the module, what was found and what to do.
    """
    layers: list[MoELayer] = []
    unmet: list[tuple[str, nn.Module, str]] = []
    for name, module in model.named_modules():
        problem = _contract_problem(name, module)
        if problem is None:
            layers.append(_describe_layer(model, name, module, len(layers), allow_meta))
        elif problem:
            unmet.append((name, module, problem))
    blocks = {layer.block_name for layer in layers}
    for name, module, problem in unmet:
        if not (_always_active(module) and name.rpartition(".")[0] in blocks):
            raise _unmet_error(model, name, module, problem)
    if not layers:
        raise UnsupportedModelError(
            f"{_model_name(model)} has no MoE layers: no module of it holds routed experts, so there is nothing to "
            f"offload. Use the model as it is. {_SUPPORTED}"
        )
    return layers


def gate_indices(gate_output: Any, index_like: torch.Tensor | None = None) -> torch.Tensor | None:
    """The chosen experts' ids `[T, K]` in a gate's output, found by dtype: their position differs between versions.

    Args:
        gate_output: what the gate's forward returned, a tensor or a tuple.
        index_like: the index that the experts were really given, where known: settles which of several integer tensors
            it is, by storage.

    Returns:
        The int64 ids, one row per token; None where the output has none, or several that cannot be told apart.
    """
    outputs = gate_output if isinstance(gate_output, (tuple, list)) else (gate_output,)
    found = [x for x in outputs if isinstance(x, torch.Tensor) and x.dtype == torch.int64 and x.ndim >= 2]
    if index_like is not None and len(found) > 1:
        found = [x for x in found if x.data_ptr() == index_like.data_ptr() and x.numel() == index_like.numel()]
    if len(found) != 1:
        return None
    return found[0] if found[0].ndim == 2 else found[0].reshape(-1, found[0].shape[-1])


def gate_logits(output: Any, num_experts: int) -> torch.Tensor | None:
    """The first floating tensor `[..., num_experts]` of a gate's output: logits, or what stands for them."""
    parts = output if isinstance(output, tuple | list) else (output,)
    for part in parts:
        if isinstance(part, torch.Tensor) and part.is_floating_point() and part.shape[-1] == num_experts:
            return part
    return None


def _contract_problem(name: str, module: nn.Module) -> str | None:
    """None: `module` meets the contract of an experts module. "": nothing like experts. Else: what is missing."""
    decorated = _decorated_forward(type(module)) is not None and all(hasattr(module, m) for m in _DECORATOR_MARKS)
    if not decorated:
        return "it is not built with use_experts_implementation" if _resembles_experts(name, module) else ""
    assert isinstance(module.num_experts, int), f"{name}.num_experts is {module.num_experts!r}"
    arguments = list(inspect.signature(_eager_forward(module)).parameters.values())[1:]
    if len(arguments) < 3 or any(a.default is a.empty for a in arguments[3:]):
        return f"its forward takes ({', '.join(a.name for a in arguments)}) instead of (hidden, index, weights)"
    shapes = {n: tuple(t.shape) for n, t in _direct_tensors(module)}
    if not any(len(shape) == 3 for shape in shapes.values()):
        return f"it has no stacked weights [num_experts, ., .]; its tensors: {shapes}"
    for tensor, shape in shapes.items():
        if len(shape) not in (2, 3) or shape[0] != module.num_experts:
            return f"{tensor} has shape {shape} where [{module.num_experts}, ...] with 2 or 3 dimensions is expected"
    return None


def _resembles_experts(name: str, module: nn.Module) -> bool:
    # Also nn.ModuleList and nn.ModuleDict under the usual name: one module per expert, as remote code and 4.x have it.
    by_class = re.search(r"Experts\d*$", type(module).__name__) is not None
    return by_class or (name.rpartition(".")[2] == "experts" and any(True for _ in module.parameters()))


def _always_active(module: nn.Module) -> bool:
    """Shared experts: stacked like routed ones, but their forward takes no index, so every one runs for every token."""
    return len(inspect.signature(type(module).forward).parameters) == 3


def _unmet_error(model: nn.Module, name: str, module: nn.Module, problem: str) -> UnsupportedModelError:
    cls = type(module).__name__
    family = _OTHER_EXPERTS.get(cls)
    if family is not None:
        return UnsupportedModelError(
            f"{_model_name(model)} keeps its experts in {cls} ({name!r}), as the {family} family does: not supported yet. "
            f"{_SUPPORTED}"
        )
    return UnsupportedModelError(
        f"{name!r} ({cls}) looks like a module of routed experts, but {problem}. Skipping it would leave its experts in "
        f"fast memory, so {_model_name(model)} is refused. {_SUPPORTED}"
    )


def _describe_layer(model: nn.Module, name: str, module: nn.Module, layer_idx: int, allow_meta: bool) -> MoELayer:
    _require_local(model, name, module)
    for tensor_name, tensor in _direct_tensors(module):
        _require_plain(f"{name}.{tensor_name}", tensor, allow_meta)
    _implementation(name, module)
    block_name = name.rpartition(".")[0]
    block = model.get_submodule(block_name)
    gate_name, gate = _gate_of(block, block_name, name)
    num_experts: int = module.num_experts  # type: ignore[assignment]
    return MoELayer(
        name=name,
        layer_idx=layer_idx,
        experts=module,
        gate=gate,
        gate_name=gate_name,
        block_name=block_name,
        num_experts=num_experts,
        top_k=_top_k_of(gate, block, module),
        layout=ExpertLayout.of({n: (tuple(t.shape[1:]), t.dtype) for n, t in _direct_tensors(module)}),
        eager_forward=_eager_forward(module),
    )


def _require_local(model: nn.Module, name: str, module: nn.Module) -> None:
    parallel = getattr(module, "_is_expert_parallel", False)
    distributed = getattr(getattr(model, "config", None), "distributed_config", None)
    if parallel or getattr(distributed, "enable_expert_parallel", False):
        raise UnsupportedModelError(
            f"{name!r} is expert parallel: its experts are split over processes. Load the model without "
            "enable_expert_parallel / ep_size."
        )
    if "forward" in module.__dict__:
        raise UnsupportedModelError(
            f"{name!r} has a forward of its own instance ({module.__dict__['forward']!r}): something wraps it, such as "
            "accelerate's device_map hooks or tensor parallelism. Load the model without device_map and tp_plan, or remove "
            "the hook (accelerate.hooks.remove_hook_from_module(model, recurse=True))."
        )


def _require_plain(name: str, tensor: torch.Tensor, allow_meta: bool) -> None:
    if is_guard(tensor):  # in files: the layer is described as it will run, and a guard computes nothing by itself
        return
    # A subclass (DTensor, torchao, ...) keeps its bytes elsewhere; copying rows of it would not copy the weights.
    if type(tensor) not in (nn.Parameter, torch.Tensor):
        raise UnsupportedModelError(
            f"{name!r} is a {type(tensor).__module__}.{type(tensor).__qualname__}, not a plain tensor: quantised or sharded "
            "experts of this kind are not supported yet. Load the model without that quantisation or sharding."
        )
    if tensor.is_meta and not allow_meta:
        raise UnsupportedModelError(
            f"{name!r} is on the meta device: it has no weights to serve. Load the model's weights into memory (no "
            "device_map offload), or open it with promoe.from_pretrained."
        )
    if tensor.dtype not in _ROW_DTYPES:
        raise UnsupportedModelError(
            f"{name!r} is {tensor.dtype}: quantised experts are not supported yet. Load the model with "
            "dtype=torch.bfloat16, float16 or float32 (for gpt_oss: Mxfp4Config(dequantize=True))."
        )


def _implementation(name: str, module: nn.Module) -> str:
    implementation = getattr(module.config, "_experts_implementation", None) or "eager"
    if implementation not in IMPLEMENTATIONS:
        raise UnsupportedModelError(
            f"{name!r} runs its experts with experts_implementation={implementation!r}. Supported: "
            f"{', '.join(IMPLEMENTATIONS)}. Call model.set_experts_implementation('grouped_mm'), or load with "
            "experts_implementation='grouped_mm'."
        )
    return str(implementation)


def _gate_of(block: nn.Module, block_name: str, experts_name: str) -> tuple[str, nn.Module]:
    for gate_name in _GATE_NAMES:
        gate = getattr(block, gate_name, None)
        if isinstance(gate, nn.Module):
            return f"{block_name}.{gate_name}" if block_name else gate_name, gate
    raise UnsupportedModelError(
        f"{experts_name!r} has no gate beside it: {type(block).__name__} ({block_name!r}) has no submodule called "
        f"{' or '.join(_GATE_NAMES)}. If an adapter wraps the experts, merge and unload it first."
    )


def _top_k_of(gate: nn.Module, block: nn.Module, experts: nn.Module) -> int | None:
    for owner, attribute in ((gate, "top_k"), (block, "top_k"), (experts.config, "num_experts_per_tok")):
        value = getattr(owner, attribute, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _direct_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _decorated_forward(cls: type) -> Callable[..., Any] | None:
    """The nearest forward that wraps another, past subclasses that replaced it (a patched module stays recognisable)."""
    for base in cls.__mro__:
        forward = base.__dict__.get("forward")
        if hasattr(forward, "__wrapped__"):
            return forward
    return None


def _eager_forward(module: nn.Module) -> Callable[..., torch.Tensor]:
    decorated = _decorated_forward(type(module))
    assert decorated is not None, f"{type(module).__name__} is not decorated"
    # Unwrapped to the core: some quantisers decorate a class once per layer.
    core: Callable[..., torch.Tensor] = inspect.unwrap(decorated)
    return core


def model_type_of(model: nn.Module) -> str | None:
    """The model's family in Transformers, where it says."""
    return getattr(getattr(model, "config", None), "model_type", None)


def _model_name(model: nn.Module) -> str:
    model_type = model_type_of(model)
    return f"{type(model).__name__} (model_type {model_type!r})" if model_type else type(model).__name__
