"""Devices beside the processor that slots can be on: what promoe needs of one (`base`), and GPUs (`cuda`)."""

from promoe.transfer.devices.base import Device, Event, Pinned, Queue, open_device, send

__all__ = ["Device", "Event", "Pinned", "Queue", "open_device", "send"]
