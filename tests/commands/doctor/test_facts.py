from __future__ import annotations

from pathlib import Path

import pytest
import torch

from promoe.commands.doctor import facts as module
from promoe.commands.doctor.facts import PACKAGES, find_facts
from promoe.errors import ConfigError
from promoe.transfer.links.direct import DirectUnsupportedError


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROBE_FILE_BYTES", 2 * module.REQUEST_BYTES)
    monkeypatch.setattr(module, "COPIED_BYTES", 1 << 16)


def test_this_machine(tmp_path: Path) -> None:
    facts = find_facts(tmp_path)
    assert set(facts.versions) == {"python", *PACKAGES}
    assert facts.versions["torch"] == torch.__version__
    assert facts.threads == torch.get_num_threads()
    assert 0 < (facts.free_ram_bytes or 1) <= facts.total_ram_bytes
    assert facts.disk.folder == str(tmp_path.resolve())
    assert min(facts.disk.cached_bytes_per_s, facts.copy_bytes_per_s, facts.disk.direct_bytes_per_s or 1) > 0
    assert bool(facts.gpus) == torch.cuda.is_available()
    assert not list(tmp_path.iterdir())  # what was measured with is gone


def test_a_file_system_without_direct_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = module.probe_file

    def refuse(path: Path, request_bytes: int, depth: int, mode: str, seconds: float) -> object:
        if mode == "direct":
            raise DirectUnsupportedError(22, "no O_DIRECT")
        return found(path, request_bytes, depth, "page_cache", 0.01)

    monkeypatch.setattr(module, "probe_file", refuse)
    assert find_facts(tmp_path).disk.direct_bytes_per_s is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("folder", ["missing", "file"])
def test_a_folder_that_nothing_can_be_written_to(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=rf"disk of '.*{folder}' could not be measured.*Name a folder"):
        find_facts(tmp_path / folder)


def test_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HUGE_PAGES", tmp_path / "enabled")
    assert module._huge_pages() == "unknown"
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    assert module._huge_pages() == "madvise"


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        ({"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "300000", "KMP_BLOCKTIME": "200"}, None),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, "OMP_WAIT_POLICY=PASSIVE"),
        ({"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "0"}, "GOMP_SPINCOUNT=0"),
        ({"KMP_BLOCKTIME": "0"}, "KMP_BLOCKTIME=0"),
    ],
)
def test_what_has_threads_sleep(
    environment: dict[str, str], found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in module.SLEEP_AT_ONCE:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert find_facts(tmp_path).sleep_at_once == found
