"""Experts that are modules, `expert_0`, `expert_1`, ... in an `nn.ModuleDict`, each with parameters of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .base import Adapter, ExpertTensor, module_with, part_with


class ExpertModulesAdapter(Adapter):
    """The adapter of experts that are modules in a dictionary."""

    def problem(self, experts: nn.Module) -> str | None:
        """Return why the module cannot be served: its experts must have the same tensors."""
        found = [experts.get_submodule(key).named_parameters() for key in _keys(experts)]
        shapes = [{name: (parameter.shape, parameter.dtype) for name, parameter in expert} for expert in found]
        return None if all(shape == shapes[0] for shape in shapes) else "its experts have different tensors"

    def tensors(self, experts: nn.Module) -> tuple[ExpertTensor, ...]:
        """Return the parameters of an expert's module."""
        keys = _keys(experts)
        return tuple(
            _tensor(name, parameter, keys) for name, parameter in experts.get_submodule(keys[0]).named_parameters()
        )

    def stand_in(self, experts: nn.Module, banks: Mapping[str, Any]) -> nn.Module:
        """Return a stand-in whose dictionary makes an expert's module when it is asked for it."""
        return module_with(experts, {"_modules": _Experts(experts._modules, _keys(experts), banks)})


def _keys(experts: nn.Module) -> list[str]:
    """Return the names of the experts' modules. The dictionary may have other modules as well."""
    count: Any = experts.num_experts
    return [f"expert_{number}" for number in range(count)]


def _tensor(name: str, parameter: torch.Tensor, keys: list[str]) -> ExpertTensor:
    shape = tuple(parameter.shape)
    return ExpertTensor(name, shape, parameter.dtype, tuple(f"{key}.{name}" for key in keys), shape)


class _Experts(Mapping[str, nn.Module | None]):
    """The dictionary's modules. Experts take their parameters from the banks."""

    def __init__(self, modules: Mapping[str, nn.Module | None], keys: list[str], banks: Mapping[str, Any]) -> None:
        self._modules = modules
        self._numbers = {key: number for number, key in enumerate(keys)}
        self._banks = banks

    def __getitem__(self, key: str) -> nn.Module | None:
        module, number = self._modules[key], self._numbers.get(key)
        if module is None or number is None:
            return module
        return _with_parameters(module, {name: bank[number] for name, bank in self._banks.items()})

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


def _with_parameters(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a stand-in for `module` with these parameters, by path, in place of its own."""
    stand_in = part_with(module, {name: tensor for name, tensor in tensors.items() if "." not in name})
    children: dict[str, dict[str, torch.Tensor]] = {}
    for path, tensor in tensors.items():
        child, dot, rest = path.partition(".")
        if dot:
            children.setdefault(child, {})[rest] = tensor
    for name, of in children.items():
        stand_in.__dict__[name] = _with_parameters(module.get_submodule(name), of)
    return stand_in
