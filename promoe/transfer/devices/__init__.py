"""Devices beside the processor that slots can be on."""

from promoe.transfer.devices.base import Device, Event, Pinned, Queue, open_device, send

__all__ = ["Device", "Event", "Pinned", "Queue", "open_device", "send"]
