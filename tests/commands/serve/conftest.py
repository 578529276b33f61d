from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .support import Served, serving, write_plain


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plain(tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.fixture
def served(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    with serving(folder, monkeypatch) as server:
        yield server
