from __future__ import annotations

import os

import pytest
import torch

from promoe.errors import ConfigError
from promoe.links import BoundEmulatedLink, EmulatedLink, FileLink, HostLink, open_link
from promoe.memory import HugePageRegion
from promoe.stores.base import Chunk
from promoe.stores.host import HostStore

from .conftest import MakeStore, RawFileStore


@pytest.fixture
def file_store(make_store: MakeStore) -> RawFileStore:
    return make_store([os.urandom(5000)], [[Chunk(0, 5000, 0, 0, 5000)]])


@pytest.fixture
def host_store() -> HostStore:
    return HostStore([{"up": torch.zeros(2, 4)}])


@pytest.mark.parametrize("name", ["auto", "file"])
def test_a_store_on_disk_gets_a_file_link(name: str, file_store: RawFileStore) -> None:
    link = open_link(name, file_store)
    assert isinstance(link, FileLink)
    slot = HugePageRegion(5000)
    link.transfer(Chunk(0, 5000, 0, 0, 5000), slot.memory, slot.address)
    assert bytes(slot.memory) == file_store.files[0].content
    link.close()


def test_planned_bytes_reach_the_choice(file_store: RawFileStore) -> None:
    link = open_link("file", file_store, planned_bytes=1 << 60)
    assert "free RAM" in link.describe() or "no O_DIRECT" in link.describe()
    assert "fit into" not in link.describe()
    link.close()


@pytest.mark.parametrize("name", ["auto", "host"])
def test_a_store_in_ram_gets_a_host_link(name: str, host_store: HostStore) -> None:
    assert isinstance(open_link(name, host_store), HostLink)


def test_an_emulated_link_is_bound(host_store: HostStore, file_store: RawFileStore) -> None:
    spec = EmulatedLink(1e9)
    for store in (host_store, file_store):
        link = open_link(spec, store)
        assert isinstance(link, BoundEmulatedLink)
        assert link.spec is spec


def test_a_file_link_needs_files(host_store: HostStore) -> None:
    with pytest.raises(ConfigError, match='link="file" reads experts from files, but they are in RAM'):
        open_link("file", host_store)


def test_an_unknown_link(host_store: HostStore) -> None:
    with pytest.raises(ConfigError, match="Got 'pcie' instead"):
        open_link("pcie", host_store)
