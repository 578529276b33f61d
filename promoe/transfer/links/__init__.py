"""Links: how a chunk of an expert gets from its store into a slot, and when it is there.

    base      what a link is
    file      disk to RAM, through the page cache or past it (`direct`)
    host      RAM to RAM
    pinned    RAM to a device; `cached` goes from disk to a device, with pinned RAM between; both are a `device` link
    emulated  a link of set speed
    verified, faults, metered   links over another one that check, spoil or time what it moves
    probe     how fast this machine can read files at best

Links do not know how experts are used.
"""

from __future__ import annotations

from promoe.transfer.links.base import Link
from promoe.transfer.links.disk import FileLink
from promoe.transfer.links.emulated import EmulatedLink
from promoe.transfer.links.faults import Fault, FaultyLink
from promoe.transfer.links.host import HostLink

__all__ = ["EmulatedLink", "Fault", "FaultyLink", "FileLink", "HostLink", "Link"]
