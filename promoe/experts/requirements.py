"""What an experts module must fulfil to be served. Every error says what was found and what to do."""

from __future__ import annotations

from collections.abc import Container
from types import MethodType

import torch
from torch import nn

from promoe.errors import UnsupportedModelError
from promoe.experts.guard import is_guard


def require_local(model: nn.Module, name: str, module: nn.Module) -> None:
    """Raise UnsupportedModelError if the experts are split over processes, or their forward is wrapped."""
    parallel = getattr(module, "_is_expert_parallel", False)
    distributed = getattr(getattr(model, "config", None), "distributed_config", None)
    if parallel or getattr(distributed, "enable_expert_parallel", False):
        raise UnsupportedModelError(
            f"{name!r} is expert parallel: its experts are split over processes. Load the model without "
            "enable_expert_parallel / ep_size."
        )
    for path, part in module.named_modules(prefix=name):
        if not runs_its_class_forward(part):
            wrapper = part.__dict__.get("_hf_hook", part.__dict__["forward"])
            raise UnsupportedModelError(
                f"{path!r} has a forward of its own instance ({type(wrapper).__name__}): something wraps it, such as "
                "accelerate's device_map hooks or tensor parallelism. Load the model without device_map and tp_plan, or "
                "remove the hook (accelerate.hooks.remove_hook_from_module(model, recurse=True))."
            )


def runs_its_class_forward(module: nn.Module) -> bool:
    """Return whether calling `module` runs the forward of its class, not one that the instance got from a wrapper."""
    own = module.__dict__.get("forward")
    if own is None:
        return True
    # When accelerate removes a hook, it leaves the forward that it had found in the instance's dictionary. That may be
    # the forward of the class that the module had while it was patched.
    if not isinstance(own, MethodType) or own.__self__ is not module:
        return False
    return own.__func__ is type(module).forward or getattr(own.__func__, "_promoe_base", None) is type(module)


def is_peft_module(module: nn.Module) -> bool:
    """Return whether `module` is one that PEFT puts into a model."""
    return type(module).__module__.partition(".")[0] == "peft"


def require_no_adapter(model: nn.Module, name: str, module: nn.Module) -> None:
    """Raise UnsupportedModelError if PEFT has put an adapter on the experts."""
    # PEFT's wrapper around the whole module is then its parent.
    for part in (model.get_submodule(name.rpartition(".")[0]), *module.modules()):
        if is_peft_module(part):
            raise UnsupportedModelError(
                f"{name!r} has an adapter on its experts ({type(part).__name__}). Slots would not contain what it adds to "
                "the weights. Merge it (PeftModel.merge_and_unload()) and patch the model that this returns; "
                "adapters on other modules can stay."
            )


def require_plain(name: str, tensor: torch.Tensor, dtypes: Container[torch.dtype], allow_meta: bool) -> None:
    """Raise UnsupportedModelError unless the tensor of experts is a plain one whose bytes can be copied."""
    if is_guard(tensor):  # a placeholder for weights in files, which was checked when the model was opened
        return
    # A subclass (DTensor, torchao, ...) keeps its bytes elsewhere, so copying its rows would not copy the weights.
    if type(tensor) not in (nn.Parameter, torch.Tensor):
        raise UnsupportedModelError(
            f"{name!r} is a {type(tensor).__module__}.{type(tensor).__qualname__}, not a plain tensor: quantised or sharded "
            "experts of this kind are not supported yet. Load the model without that quantisation or sharding."
        )
    if tensor.is_meta and not allow_meta:
        raise UnsupportedModelError(
            f"{name!r} is on the meta device and has no weights. Load the model's weights into memory (no "
            "device_map offload), or open it with promoe.from_pretrained."
        )
    if tensor.dtype not in dtypes:
        raise UnsupportedModelError(
            f"{name!r} is {tensor.dtype}: quantised experts are not supported yet. Load the model with "
            "dtype=torch.bfloat16, float16 or float32 (for gpt_oss: Mxfp4Config(dequantize=True))."
        )
