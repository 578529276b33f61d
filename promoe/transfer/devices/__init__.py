"""Devices beside the processor that slots can be on."""

from __future__ import annotations

import torch

from promoe.errors import ConfigError
from promoe.transfer.devices.base import Device, Event, Pinned, Queue
from promoe.transfer.devices.sending import send

__all__ = ["Device", "Event", "Pinned", "Queue", "open_device", "send"]


def open_device(device: str | torch.device) -> Device | None:
    """The device of a name; None: the processor itself.

    Raises:
        ConfigError: there is no such device, or slots cannot be on it.
    """
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f'The \'device\' argument must be "cpu" or "cuda". Got {device!r} instead.') from error
    if kind == "cpu":
        return None
    if kind != "cuda":
        raise ConfigError(f'The \'device\' argument must be "cpu" or "cuda". Got {str(device)!r} instead.')
    from promoe.transfer.devices.cuda import CudaDevice

    return CudaDevice(device)
