from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from untouched import open_files, opened_since

from promoe.stores import open_files as module
from promoe.stores.open_files import RAISED_LIMIT, Descriptor, KeptFile, OpenFiles, raise_limit, reopened

FILES = 5


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("files")
    for idx in range(FILES):
        (folder / str(idx)).write_bytes(bytes([idx]) * 100)
    return [folder / str(idx) for idx in range(FILES)]


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    before = open_files()
    yield
    assert not opened_since(before)


def opened(path: Path) -> Descriptor:
    return Descriptor(path, os.open(path, os.O_RDONLY))


def content(descriptor: Descriptor) -> int:
    """The byte of which the file consists."""
    return os.pread(descriptor.fd, 1, 50)[0]


@settings(max_examples=60)
@given(
    limit=st.integers(1, FILES),
    pinned=st.sets(st.integers(0, FILES - 1)),
    steps=st.lists(st.tuples(st.sampled_from(["read", "hold", "drop", "close"]), st.integers(0, FILES - 1))),
)
def test_any_order_of_reads(paths: list[Path], limit: int, pinned: set[int], steps: list[tuple[str, int]]) -> None:
    """A read finds its own file. No more are open than are kept, held by reads, or must stay open."""
    before = open_files()
    kept = OpenFiles(limit)
    files = [KeptFile(opened(path), idx in pinned, kept) for idx, path in enumerate(paths)]
    held: dict[int, Descriptor] = {}
    used = [idx for idx in range(FILES) if idx not in pinned][-limit:]  # from least to most recently
    closed: set[int] = set()
    for step, idx in steps:
        if step == "close":
            files[idx].close()
            closed.add(idx)
            used = [one for one in used if one != idx]
        elif step == "drop":
            held.pop(idx, None)
        elif idx in closed:
            with pytest.raises(OSError, match="closed"):
                files[idx].descriptor(lambda: pytest.fail("was opened"))
        else:
            there = idx in pinned or idx in used

            def reopen(idx: int = idx, there: bool = there) -> Descriptor:
                assert not there, "it was among those used last"
                return opened(paths[idx])

            descriptor = files[idx].descriptor(reopen)
            assert content(descriptor) == idx
            if step == "hold":
                held[idx] = descriptor
            del descriptor
            if idx not in pinned:
                used = [*(one for one in used if one != idx), idx][-limit:]
        assert len(kept) == len(used)
        assert [content(descriptor) for descriptor in held.values()] == list(held)
        most = len(used) + len(pinned - closed) + len(held)
        assert sum((open_files() - before).values()) <= most
    del files, held
    assert len(kept) == 0
    assert not opened_since(before)


def test_threads_read_their_own_files(paths: list[Path]) -> None:
    """Each read holds its descriptor, while others open and close files under the numbers that become free."""
    kept = OpenFiles(1)
    files = [KeptFile(opened(path), among=kept) for path in paths]
    together = threading.Barrier(8)

    def read(seed: int) -> None:
        together.wait()
        for step in range(400):
            idx = (step * (seed + 1) + seed) % FILES
            descriptor = files[idx].descriptor(lambda idx=idx: opened(paths[idx]))
            for _ in range(3):
                assert content(descriptor) == idx

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, range(8)))
    for file in files:
        file.close()
    assert len(kept) == 0


def test_closed_while_it_is_opened_again(paths: list[Path]) -> None:
    kept = OpenFiles(1)
    first, second = (KeptFile(opened(path), among=kept) for path in paths[:2])

    def reopen() -> Descriptor:
        first.close()
        return opened(paths[0])

    with pytest.raises(OSError, match="closed") as raised:
        first.descriptor(reopen)
    assert raised.value.errno == errno.EBADF
    del raised  # its traceback has the descriptor
    assert len(kept) == 0, "the second one made room for it"
    assert content(second.descriptor(lambda: opened(paths[1]))) == 1
    second.close()


def test_too_many_open_files_of_others(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that nobody reads are closed until a file can be opened; if none is left, it cannot."""
    monkeypatch.setattr(module, "raise_limit", lambda: False)
    kept = OpenFiles(4)
    files = [KeptFile(opened(path), among=kept) for path in paths[:4]]

    def open_one() -> Descriptor:
        if len(kept) > 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return opened(paths[4])

    assert content(kept.opened(open_one)) == 4
    assert content(files[3].descriptor(lambda: pytest.fail("was closed"))) == 3

    def refuse() -> Descriptor:
        raise OSError(errno.EMFILE, "Too many open files")

    with pytest.raises(OSError, match="Too many open files"):
        kept.opened(refuse)
    assert len(kept) == 0
    with pytest.raises(OSError, match=r"again: Too many .* may have \d+ files open: raise the limit \(ulimit -n\)"):
        files[0].descriptor(lambda: reopened(paths[0], refuse))


def test_files_that_are_gone_are_named(paths: list[Path]) -> None:
    with pytest.raises(FileNotFoundError, match=r"again: No such file.*Put it back as it was, or open .*gone"):
        reopened(Path("/gone"), lambda: opened(Path("/gone")))


class TestTheLimit:
    @pytest.fixture
    def system(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        """The limits of a system that has its own maximum, as macOS does."""
        values: dict[str, Any] = {"limits": (256, resource.RLIM_INFINITY), "most": 10240}

        def setrlimit(kind: int, limits: tuple[int, int]) -> None:
            assert kind == resource.RLIMIT_NOFILE
            assert limits[1] == values["limits"][1], "the hard limit stays"
            if limits[0] > values["most"]:
                raise ValueError("current limit exceeds maximum limit")
            values["limits"] = limits

        monkeypatch.setattr(resource, "getrlimit", lambda kind: values["limits"])
        monkeypatch.setattr(resource, "setrlimit", setrlimit)
        return values

    def test_is_raised_when_it_is_needed(self, system: dict[str, Any], paths: list[Path]) -> None:
        kept = OpenFiles()
        for number in range(128):
            kept.keep(number, Descriptor(paths[0], -1))
        assert (len(kept), system["limits"][0]) == (128, 256)
        for number in range(128, 5000):
            kept.keep(number, Descriptor(paths[0], -1))
        assert (len(kept), system["limits"][0]) == (RAISED_LIMIT // 2, RAISED_LIMIT)
        assert kept.find(4999) is not None
        assert kept.find(0) is None

    @pytest.mark.parametrize(
        ("limits", "most", "raised"),
        [
            ((256, resource.RLIM_INFINITY), 10240, RAISED_LIMIT),
            ((256, 1024), 10240, 1024),
            ((256, 10**6), 10**6, RAISED_LIMIT),
            ((256, resource.RLIM_INFINITY), 300, 256),
            ((64, 64), 10240, 64),
            ((8192, 10**6), 10**6, 8192),
            ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 10**6, resource.RLIM_INFINITY),
        ],
    )
    def test_is_raised_as_far_as_the_system_allows(
        self, system: dict[str, Any], limits: tuple[int, int], most: int, raised: int
    ) -> None:
        system |= {"limits": limits, "most": most}
        assert raise_limit() == (raised != limits[0])
        assert system["limits"] == (raised, limits[1])
        assert not raise_limit()

    def test_is_raised_before_a_file_is_closed_for_others(self, system: dict[str, Any], paths: list[Path]) -> None:
        kept = OpenFiles()
        file = KeptFile(opened(paths[0]), among=kept)

        def open_one() -> Descriptor:
            if system["limits"][0] == 256:
                raise OSError(errno.EMFILE, "Too many open files")
            return opened(paths[1])

        assert content(kept.opened(open_one)) == 1
        assert content(file.descriptor(lambda: pytest.fail("was closed"))) == 0
        file.close()
