"""What config.json says of single modules, in checkpoints of GPTQ, AWQ and AutoRound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from promoe.stores.encodings.patterns import matches

# An expression in AutoRound's extra_config has one of these, and a name none.
_SPECIAL = frozenset("*+?^$()[]{}|\\")
# With so many bits or more, a module is not quantised.
NOT_QUANTISED = 16


class Overrides:
    """A `quantization_config` with what it says of one module in place of what it says of all.

    GPTQModel has a `dynamic` of expressions that match from a name's beginning: the first one counts. AutoRound has an
    `extra_config` of names, and of expressions that match anywhere in a name.
    """

    def __init__(self, quantization: Mapping[str, Any]) -> None:
        """Sort the entries into names and expressions."""
        self._of_all = quantization
        self._patterns = list(_entries(quantization.get("dynamic")))
        # Those with "-:" are of modules that are not quantised.
        self._dynamic = {
            pattern.removeprefix("+:"): fields
            for pattern, fields in _entries(quantization.get("dynamic")).items()
            if fields and not pattern.startswith("-:")
        }
        self._by_name = _entries(quantization.get("extra_config"))
        self._anywhere = {name: fields for name, fields in self._by_name.items() if _SPECIAL & {*name}}

    def of(self, module: str) -> Mapping[str, Any]:
        """Return what counts for a module.

        Raises:
            CheckpointError: an expression cannot be used.
        """
        if not self._dynamic and not self._by_name:
            return self._of_all
        dynamic = (fields for pattern, fields in self._dynamic.items() if matches(pattern, module))
        extra = (fields for pattern, fields in self._anywhere.items() if matches(pattern, module, anywhere=True))
        return {**self._of_all, **next(dynamic, {}), **(self._by_name.get(module) or next(extra, {}))}

    def is_left_out(self, module: str) -> bool:
        """Return whether the first of GPTQModel's expressions that matches a module says that it is not quantised.

        Raises:
            CheckpointError: an expression cannot be used.
        """
        own = (one for one in self._patterns if matches(one.removeprefix("+:").removeprefix("-:"), module))
        return next(own, "").startswith("-:")


def of_one(quantization: Mapping[str, Any], modules: Sequence[str]) -> Mapping[str, Any]:
    """Return what counts for a module that may have several names: what is said of one of them, or else of all modules.

    Raises:
        CheckpointError: an expression cannot be used.
    """
    overrides = Overrides(quantization)
    if any(map(overrides.is_left_out, modules)):
        return {**quantization, "bits": NOT_QUANTISED}
    return next((found for found in map(overrides.of, modules) if found != quantization), quantization)


def _entries(found: Any) -> dict[str, Mapping[str, Any]]:
    if not isinstance(found, Mapping):
        return {}
    return {str(key): fields for key, fields in found.items() if isinstance(fields, Mapping)}
