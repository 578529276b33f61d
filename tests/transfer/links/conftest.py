from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from promoe.scheduler import ExpertKey
from promoe.stores.base import Chunk, Store
from promoe.stores.layout import ExpertLayout
from promoe.transfer.links.direct import WHOLE_PAGES, DirectFiles, DirectUnsupportedError


@dataclass
class RawFile:
    path: Path
    content: bytes
    closed: bool = False
    keep_open: bool = False

    def check_unchanged(self, fd: int) -> None:
        """Accept every file."""


class RawFileStore(Store):
    """Ranges of files of random bytes: experts of one MoE layer, given as lists of chunks."""

    def __init__(self, files: Sequence[RawFile], experts: Sequence[Sequence[Chunk]]) -> None:
        self.files = files
        self.layouts: Sequence[ExpertLayout] = []
        self.num_experts: Sequence[int] = [len(experts)]
        self.expert_bytes = sum(chunk.nbytes for chunks in experts for chunk in chunks)
        self._experts = experts
        self._fds = [os.open(file.path, os.O_RDONLY) for file in files]

    def chunks(self, key: ExpertKey) -> Sequence[Chunk]:
        return self._experts[key.expert_idx]

    def chunk_bytes(self, layer_idx: int) -> tuple[int, ...]:
        return tuple(chunk.nbytes for chunk in self._experts[0])

    def expected(self, chunk: Chunk) -> bytes:
        start = chunk.source_offset_bytes
        return self.files[chunk.source_idx].content[start : start + chunk.source_nbytes]

    def read(self, chunk: Chunk, destination: memoryview) -> None:
        path, nbytes = self.files[chunk.source_idx].path, len(destination)
        assert nbytes == chunk.source_nbytes
        if chunk.parts:
            for part in chunk.parts:
                target = destination[part.offset_bytes : part.offset_bytes + part.nbytes]
                assert os.preadv(self._fds[part.source_idx], [target], part.source_offset_bytes) == part.nbytes
            return
        count = os.preadv(self._fds[chunk.source_idx], [destination], chunk.source_offset_bytes)
        if count < nbytes:
            raise OSError(5, f"expected {nbytes} bytes at offset {chunk.source_offset_bytes}, found {count}", str(path))

    def describe(self, chunk: Chunk) -> str:
        return f"file {self.files[chunk.source_idx].path.name}, offset {chunk.source_offset_bytes}"

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []


MakeStore = Callable[..., RawFileStore]


@pytest.fixture(scope="session")
def raw_files(tmp_path_factory: pytest.TempPathFactory) -> list[RawFile]:
    """Two files that do not end on a block. Read only."""
    folder = tmp_path_factory.mktemp("experts")
    files = []
    for idx, nbytes in enumerate((100_003, 70_000)):
        content = os.urandom(nbytes)
        (folder / f"part-{idx}.bin").write_bytes(content)
        files.append(RawFile(folder / f"part-{idx}.bin", content))
    return files


@pytest.fixture
def make_store(tmp_path: Path) -> Iterator[MakeStore]:
    """Return a function that makes a store over new files: `make_store(contents, experts)`."""
    stores: list[RawFileStore] = []

    def make(contents: Sequence[bytes], experts: Sequence[Sequence[Chunk]]) -> RawFileStore:
        files: list[RawFile] = []
        for content in contents:
            path = tmp_path / f"own-{len(stores)}-{len(files)}.bin"
            path.write_bytes(content)
            files.append(RawFile(path, content))
        stores.append(RawFileStore(files, experts))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture(scope="session")
def has_direct(raw_files: list[RawFile]) -> bool:
    try:
        DirectFiles({i: file.path for i, file in enumerate(raw_files)}).close()
    except DirectUnsupportedError:
        return False
    return True


@pytest.fixture
def needs_direct(has_direct: bool) -> None:
    if not has_direct:
        pytest.skip("the folder for temporary files is on a file system without O_DIRECT")


@pytest.fixture
def whole_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the file system require whole pages, or not say what it requires."""
    monkeypatch.setattr("promoe.transfer.links.direct.direct_alignment", lambda fd: WHOLE_PAGES)


@pytest.fixture(params=["page_cache", "direct", "direct, whole pages"])
def mode(request: pytest.FixtureRequest, has_direct: bool) -> str:
    if request.param != "page_cache" and not has_direct:
        pytest.skip("the folder for temporary files is on a file system without O_DIRECT")
    if request.param == "direct, whole pages":
        request.getfixturevalue("whole_pages")
    return str(request.param).split(",")[0]
