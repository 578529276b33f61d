from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from promoe.commands.quality import spool
from promoe.commands.quality.spool import LogitsSpool
from promoe.errors import ConfigError


def random_logits(rows: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, 33), generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_come_back_with_the_same_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    first, second = random_logits(3, dtype), random_logits(9, dtype, seed=1)
    with LogitsSpool(str(tmp_path), 11) as kept:
        kept.append(first)
        assert torch.equal(kept.read(0, 3), first)
        kept.append(second[:-1])  # not the whole tensor, as the logits of a window are
        assert torch.equal(kept.read(3, 11), second[:-1])
        assert torch.equal(kept.read(2, 5), torch.cat((first, second))[2:5])
    assert not list(tmp_path.iterdir())


def test_too_little_room_is_noticed_with_the_first_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool.shutil, "disk_usage", lambda folder: SimpleNamespace(free=66 * 1000 - 1))
    message = (
        rf"The logits of 1,000 tokens take 64\.5 KiB, but '{tmp_path}' has only 64\.5 KiB free\. Choose another folder with "
        r"--spool, or read fewer tokens with --tokens\."
    )
    with LogitsSpool(str(tmp_path), 1000) as kept, pytest.raises(ConfigError, match=message):
        kept.append(random_logits(3, torch.bfloat16))


def test_a_folder_in_ram_takes_small_ones_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "file_system", lambda folder: "tmpfs")
    with LogitsSpool(str(tmp_path), 1000) as kept:
        kept.append(random_logits(3, torch.bfloat16))
    with (
        LogitsSpool(str(tmp_path), 3_000_000) as kept,
        pytest.raises(ConfigError, match=r"is in RAM \(tmpfs\)\. Choose another folder with --spool"),
    ):
        kept.append(random_logits(3, torch.bfloat16))


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"Logits cannot be written into '.*none': No such file or directory\. Choose"
    ):
        LogitsSpool(str(tmp_path / "none"), 10)


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    with LogitsSpool(str(tmp_path), 10) as kept:
        real: Any = kept._file

        class Full:
            close = real.close

            def write(self, content: Any) -> int:
                raise OSError(errno.ENOSPC, "No space left on device")

        kept._file = Full()  # type: ignore[assignment]
        with pytest.raises(ConfigError, match=r"No space left on device\. Choose another folder with --spool\."):
            kept.append(random_logits(3, torch.float32))
