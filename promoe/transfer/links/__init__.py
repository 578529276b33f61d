"""Links: how a chunk of an expert gets from its store into a slot, and when it is there.

Bandwidth probes are in `promoe.transfer.links.probe`.
"""

from __future__ import annotations

from promoe.transfer.links.base import Link, QueueingLink
from promoe.transfer.links.emulated import BoundEmulatedLink, EmulatedLink
from promoe.transfer.links.faults import Fault, FaultyLink
from promoe.transfer.links.file import FileLink, FileStore, drop_page_cache
from promoe.transfer.links.host import HostLink

__all__ = [
    "BoundEmulatedLink",
    "EmulatedLink",
    "Fault",
    "FaultyLink",
    "FileLink",
    "FileStore",
    "HostLink",
    "Link",
    "QueueingLink",
    "drop_page_cache",
]
