from __future__ import annotations

from pathlib import Path

import pytest

from .quantised import write_quantised, write_texts


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See `write_quantised`; not to be changed."""
    return write_quantised(tmp_path_factory.mktemp("quality"))


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"))
