"""Links: how a chunk of an expert gets from its store into a slot, and when it is there."""

from __future__ import annotations

from promoe.transfer.links.base import Link
from promoe.transfer.links.emulated import EmulatedLink
from promoe.transfer.links.faults import Fault, FaultyLink
from promoe.transfer.links.file import FileLink
from promoe.transfer.links.host import HostLink

__all__ = ["EmulatedLink", "Fault", "FaultyLink", "FileLink", "HostLink", "Link"]
