"""What patching must leave, or put back, exactly as it was: everything that a model's modules hold."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch import nn


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Per module its class and attributes, containers (hooks, parameters, buffers, ...) with their contents in order.

    Attributes are compared by identity, so the parameters must be the very same objects with the same storage.
    """
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[f"{name} class"] = _Same(type(module))
        for key, value in module.__dict__.items():
            if isinstance(value, dict):
                found[f"{name}.{key}"] = [(item, _Same(content)) for item, content in value.items()]
            elif isinstance(value, bool):
                found[f"{name}.{key}"] = value
            else:
                found[f"{name}.{key}"] = _Same(value)
    for name, tensor in model.state_dict(keep_vars=True).items():
        where = None if tensor.is_meta else (tensor.data_ptr(), tensor._version)
        found[f"state {name}"] = (where, tensor.shape, tensor.dtype, tensor.requires_grad)
    return found


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Two snapshots agree, in contents and in order."""
    changed = {key for key in before.keys() & after.keys() if before[key] != after[key]}
    differing = sorted(changed | before.keys() ^ after.keys())
    assert not differing, [(key, before.get(key), after.get(key)) for key in differing[:5]]
    assert list(before) == list(after)


@contextmanager
def leaving_untouched(*models: nn.Module) -> Iterator[None]:
    """What happens inside leaves these models, and the number of open files, as they were."""
    before, files = [snapshot(model) for model in models], open_files()
    yield
    for model, earlier in zip(models, before, strict=True):
        assert_same(earlier, snapshot(model))
    assert not opened_since(files)


def open_files() -> Counter[tuple[int, int]]:
    """How often this process has each file open, by its device and number; nothing where the system does not tell."""
    found: Counter[tuple[int, int]] = Counter()
    for descriptor in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError):  # that of the folder itself, closed by now
            status = os.fstat(int(descriptor))
            found[status.st_dev, status.st_ino] += 1
    return found


def opened_since(before: Counter[tuple[int, int]]) -> list[str]:
    """What is open now and was not then. Files of earlier tests that were closed in between do not count."""
    left = open_files() - before
    return [f"device {device}, file {number}: {count} more" for (device, number), count in left.items()]


class _Same:
    """Equal only to a holder of the same object, which it keeps alive."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self._value).__name__} at {id(self._value):#x}"
