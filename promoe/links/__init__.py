"""Links: how a chunk of an expert gets from its store into a slot, and when it is there.

`open_link` turns what a user asked for into a link. Bandwidth probes are in `promoe.links.probe`.
"""

from __future__ import annotations

from promoe.errors import ConfigError
from promoe.links.base import Link
from promoe.links.emulated import BoundEmulatedLink, EmulatedLink
from promoe.links.file import FileLink, FileStore, drop_page_cache
from promoe.links.host import HostLink
from promoe.stores.base import Store

__all__ = [
    "BoundEmulatedLink",
    "EmulatedLink",
    "FileLink",
    "FileStore",
    "HostLink",
    "Link",
    "drop_page_cache",
    "open_link",
]


def open_link(link: str | EmulatedLink, store: Store, *, planned_bytes: int = 0) -> Link:
    """The link that a user asked for, over `store`.

    Args:
        link: "file", "host", "auto" (file for a store on disk, else host), or an `EmulatedLink`.
        store: where the experts are.
        planned_bytes: RAM that slots will take but do not yet; see `FileLink`.

    Raises:
        ConfigError: an unknown link, or one that does not fit the store.
        OSError: a file cannot be opened.
    """
    if isinstance(link, EmulatedLink):
        return link.bind(store)
    on_disk = isinstance(store, FileStore)
    name = ("file" if on_disk else "host") if link == "auto" else link
    if name == "host":
        return HostLink(store)
    if name == "file":
        if isinstance(store, FileStore):
            return FileLink(store, planned_bytes=planned_bytes)
        raise ConfigError(
            'link="file" reads experts from files, but they are in RAM. Use store="disk", or an EmulatedLink.'
        )
    raise ConfigError(f'The \'link\' must be "auto", "file", "host" or an EmulatedLink. Got {link!r} instead.')
