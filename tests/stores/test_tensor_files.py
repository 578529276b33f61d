from __future__ import annotations

import errno
import json
import os
import resource
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from untouched import open_files as files_open_now
from untouched import opened_since

from promoe.errors import CheckpointError
from promoe.stores import open_files, tensor_files
from promoe.stores.safetensors_header import TORCH_DTYPES, TensorRange
from promoe.stores.tensor_files import TensorFile, TensorFiles, locate_files, remedy
from stores.checkpoints import read_header, save, shards, write_header


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(12.0).reshape(3, 4), "b": torch.arange(5).to(torch.bfloat16)}, path)
    return path


def open_error(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        TensorFile.open(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_what_nobody_closed_is_closed_when_it_is_gone(file: Path) -> None:
    files = files_open_now()
    opened = TensorFile.open(file)
    assert opened_since(files)
    del opened
    assert not opened_since(files)
    opened = TensorFile.open(file)
    opened.close()
    opened.close()
    with file.open("rb") as other:  # which may have got the same number
        del opened
        assert other.read(1)


def test_tensors_are_where_the_header_says(file: Path) -> None:
    opened = TensorFile.open(file, file_idx=7)
    a, b = opened.tensors["a"], opened.tensors["b"]
    assert (a.shape, a.dtype, a.nbytes, a.file_idx) == ((3, 4), torch.float32, 48, 7)
    assert (b.shape, b.dtype, b.nbytes) == ((5,), torch.bfloat16, 10)
    content = bytearray(48)
    opened.read_into(a.offset_bytes, memoryview(content))
    assert torch.equal(torch.frombuffer(content, dtype=torch.float32), torch.arange(12.0))
    assert opened.size_bytes == file.stat().st_size
    opened.close()


def test_every_dtype_has_the_formats_size(tmp_path: Path) -> None:
    tensors = {name: torch.zeros(3).to(dtype) for name, dtype in TORCH_DTYPES.items()}
    save_file(tensors, tmp_path / "all.safetensors")
    files = TensorFiles.open([tmp_path / "all.safetensors"])
    assert {name: where.dtype for name, where in files.tensors.items()} == TORCH_DTYPES
    assert {name: where.dtype_name for name, where in files.tensors.items()} == {name: name for name in TORCH_DTYPES}
    files.close()


def test_truncated_file(file: Path) -> None:
    size_bytes = file.stat().st_size
    os.truncate(file, size_bytes - 1)
    message = open_error(file)
    assert f"expected {size_bytes} bytes by its header, found {size_bytes - 1} bytes (truncated)" in message


def test_file_that_is_too_long(file: Path) -> None:
    size_bytes = file.stat().st_size
    file.write_bytes(file.read_bytes() + b"??")
    assert f"expected {size_bytes} bytes by its header, found {size_bytes + 2} bytes" in open_error(file)


def test_truncated_inside_the_header(file: Path) -> None:
    os.truncate(file, 30)
    assert "found 22 bytes (truncated)" in open_error(file)


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 64, struct.pack("<Q", 1) + b"{"])
def test_files_of_another_kind(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    assert f"in a file of {len(content)} bytes" in open_error(tmp_path / "x.safetensors")


@pytest.mark.parametrize("header", [b'{"a": {"dtype"', b"[1, 2]   ", b"\xff\xfe\x00\x00", b"[" * 60000])
def test_headers_that_are_not_json_objects(file: Path, header: bytes) -> None:
    write_header(file, header)
    assert "its header is not a JSON object" in open_error(file)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [3, 5]},
        {"data_offsets": [48, 0]},
        {"data_offsets": [0]},
        {"data_offsets": "ab"},
        {"dtype": "F64"},
        {"shape": [-3, -4]},
        {"shape": None},
    ],
)
def test_entries_that_contradict_themselves(file: Path, change: dict[str, object]) -> None:
    header = read_header(file)
    header["a"] = {**header["a"], **change}
    write_header(file, json.dumps(header).encode())
    assert "the header's entry for 'a' is" in open_error(file)


def test_missing_file(tmp_path: Path) -> None:
    assert "No such file" in open_error(tmp_path / "none.safetensors")


def test_no_descriptor_is_left_open_by_a_failure(tmp_path: Path) -> None:
    save(tmp_path, shard_size="50KB")
    os.truncate(shards(tmp_path)[-1], 100)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(3):
        with pytest.raises(CheckpointError):
            TensorFiles.open(shards(tmp_path))
    after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert after == before


def test_short_reads_name_offset_and_bytes(file: Path) -> None:
    opened = TensorFile.open(file)
    with pytest.raises(OSError, match=f"expected 100 bytes at offset {opened.size_bytes - 40}, found 40") as caught:
        opened.read_into(opened.size_bytes - 40, memoryview(bytearray(100)))
    assert caught.value.filename == str(file)
    opened.close()


def test_a_file_that_shrinks_later_is_a_short_read(file: Path) -> None:
    opened = TensorFile.open(file)
    os.truncate(file, opened.tensors["a"].offset_bytes + 8)
    with pytest.raises(OSError, match=r"expected 48 bytes at offset .*, found 8"):
        opened.read_into(opened.tensors["a"].offset_bytes, memoryview(bytearray(48)))
    opened.close()


def test_reading_after_close(file: Path) -> None:
    opened = TensorFile.open(file)
    opened.close()
    opened.close()
    with pytest.raises(OSError, match="Cannot read 4 bytes at offset 8: closed"):
        opened.read_into(8, memoryview(bytearray(4)))


@pytest.fixture
def one_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all files, only the one that was read last stays open."""
    monkeypatch.setattr(open_files.OPEN_FILES, "_limit", 1)


@pytest.mark.usefixtures("one_stays_open")
class TestOpenedAgain:
    def test_reads_are_right(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The path was relative, and the program has changed its directory since."""
        monkeypatch.chdir(save(tmp_path / "model", shard_size="50KB").parent)
        before = files_open_now()
        files = TensorFiles.open([path.relative_to(tmp_path) for path in shards(tmp_path / "model")])
        assert len(files.files) > 3
        monkeypatch.chdir("/")
        for tensor in files.tensors.values():
            content = bytearray(tensor.nbytes)
            files.read_into(tensor, memoryview(content))
            path = tmp_path / files.files[tensor.file_idx].path
            start = tensor.offset_bytes
            assert content == path.read_bytes()[start : start + tensor.nbytes]
        assert len(opened_since(before)) == 1
        files.close()
        assert not opened_since(before)

    @pytest.mark.parametrize(
        ("change", "number", "what"),
        [
            ("another", errno.ESTALE, r"changed since the model was opened \(another file in its place.*same header\)"),
            ("shorter", errno.ESTALE, r"changed since the model was opened \(size \d+ -> \d+ bytes, .*another header"),
            (
                "gone",
                errno.ENOENT,
                r"Cannot open the file again: No such file.*Put it back as it was, or open the model",
            ),
            ("a folder", errno.EINVAL, r"Cannot open the file again: Not a plain file.*Put it back as it was"),
            ("touched", None, ""),
        ],
    )
    def test_another_file(self, file: Path, tmp_path: Path, change: str, number: int | None, what: str) -> None:
        other = tmp_path / "other.safetensors"
        other.write_bytes(file.read_bytes())
        opened, last = TensorFile.open(file), TensorFile.open(other)
        status = file.stat()
        if change == "another":  # which has the same name, size, time and content
            file.rename(tmp_path / "kept")
            file.write_bytes(other.read_bytes())
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        elif change == "shorter":
            file.write_bytes(b"{}")
        elif change == "touched":
            os.utime(file, ns=(0, 0))
        else:
            file.unlink()
            if change == "a folder":
                file.mkdir()
        content = bytearray(48)
        if number is None:
            opened.read_into(opened.tensors["a"].offset_bytes, memoryview(content))
            assert torch.equal(torch.frombuffer(content, dtype=torch.float32), torch.arange(12.0))
        else:
            with pytest.raises(OSError, match=what) as raised:
                opened.read_into(opened.tensors["a"].offset_bytes, memoryview(content))
            assert (raised.value.errno, raised.value.filename) == (number, str(file))
            assert content == bytes(48), "nothing was read"
        opened.close()
        last.close()

    def test_a_file_that_must_stay_open(self, file: Path, tmp_path: Path) -> None:
        """Nobody can open it again: its name is gone."""
        other = tmp_path / "other.safetensors"
        other.write_bytes(file.read_bytes())
        opened, last = TensorFile.open(file, keep_open=True), TensorFile.open(other)
        file.unlink()
        content = bytearray(48)
        opened.read_into(opened.tensors["a"].offset_bytes, memoryview(content))
        assert torch.equal(torch.frombuffer(content, dtype=torch.float32), torch.arange(12.0))
        opened.close()
        last.close()


def test_reads_in_pieces_are_put_together(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:5]], offset))
    opened = TensorFile.open(file)
    content = bytearray(48)
    opened.read_into(opened.tensors["a"].offset_bytes, memoryview(content))
    assert torch.equal(torch.frombuffer(content, dtype=torch.float32), torch.arange(12.0))
    opened.close()


def test_device_errors_name_offset_and_bytes(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> int:
        raise OSError(5, "Input/output error")

    opened = TensorFile.open(file)
    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(OSError, match=r"Cannot read 8 bytes at offset 16, found 0: Input/output error"):
        opened.read_into(16, memoryview(bytearray(8)))
    opened.close()


class TestLocateFiles:
    def test_single_file_and_shards(self, tmp_path: Path) -> None:
        one, many = save(tmp_path / "one"), save(tmp_path / "many", shard_size="50KB")
        assert locate_files(one) == locate_files(one / "model.safetensors") == [one / "model.safetensors"]
        assert len(shards(many)) > 3
        assert locate_files(many) == locate_files(many / "model.safetensors.index.json") == shards(many)

    def test_a_name_of_its_own(self, tmp_path: Path) -> None:
        """`transformers_weights` of config.json, which Transformers 5 reads."""
        save(tmp_path)
        other = (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
        with pytest.raises(CheckpointError, match=r"No model\.safetensors"):
            locate_files(tmp_path)
        assert locate_files(tmp_path, "other.safetensors") == [other]
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"transformers_weights": "other.safetensors"}))
        assert locate_files(tmp_path) == [other]
        (tmp_path / "config.json").write_text(json.dumps(config | {"transformers_weights": "../other.safetensors"}))
        with pytest.raises(
            CheckpointError, match=r"config\.json names the file '\.\./other\.safetensors', which lies outside"
        ):
            locate_files(tmp_path)

    def test_other_formats(self, tmp_path: Path) -> None:
        (tmp_path / "pytorch_model.bin").write_bytes(b"x")
        with pytest.raises(CheckpointError, match=r"Found pytorch_model\.bin\. .*save_pretrained"):
            locate_files(tmp_path)

    @pytest.mark.parametrize(
        ("index", "what"),
        [
            ("", "is not a valid JSON file: Expecting value"),
            ("{}", "cannot be used: KeyError: 'weight_map'"),
            ('{"weight_map": 3}', "cannot be used: AttributeError"),
            ('{"weight_map": {"a": 1, "b": "c"}}', "names 1 where the name of a file is expected"),
            ("[]", "cannot be used: TypeError"),
            ('{"weight_map": {"a": "b.safetensors"}}', 'it has no "metadata".*add "metadata": {} to it'),
            (
                "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n",
                "a Git LFS pointer; run `git lfs pull`",
            ),
        ],
    )
    def test_damaged_index(self, tmp_path: Path, index: str, what: str) -> None:
        (tmp_path / "model.safetensors.index.json").write_text(index)
        with pytest.raises(CheckpointError, match=rf"index.*{what}"):
            locate_files(tmp_path)

    def test_shard_named_in_the_index_is_gone(self, tmp_path: Path) -> None:
        save(tmp_path, shard_size="50KB")
        gone = shards(tmp_path)[1]
        gone.unlink()
        with pytest.raises(
            CheckpointError, match=f"{gone.name}: No such file .*not complete: download or copy that file"
        ):
            TensorFiles.open(locate_files(tmp_path))

    def test_what_a_stale_index_says_of_tensors_does_not_count(self, tmp_path: Path) -> None:
        save(tmp_path, shard_size="50KB")
        files = TensorFiles.open(locate_files(tmp_path))
        index = tmp_path / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        (shard, count), *_ = Counter(content["weight_map"].values()).most_common()
        assert count > 1
        name = next(name for name, listed in content["weight_map"].items() if listed == shard)
        content["weight_map"][name] = next(path.name for path in shards(tmp_path) if path.name != shard)
        content["weight_map"]["nobody.has.it"] = shard
        index.write_text(json.dumps(content))
        again = TensorFiles.open(locate_files(tmp_path))
        assert again.tensors == files.tensors
        for opened in (files, again):
            opened.close()


class TestRemedies:
    """The remedy that the error names works."""

    def test_a_file_of_somebody_else(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(path: Any) -> int:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

        monkeypatch.setattr(tensor_files, "open_plain", refuse)
        with pytest.raises(CheckpointError, match=r"Permission denied\. Give this user the right to read it"):
            TensorFile.open(tmp_path / "model.safetensors")

    def test_a_pointer_of_git_lfs(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
        with pytest.raises(CheckpointError, match=r"is a Git LFS pointer of \d+ bytes, .*`git lfs pull`"):
            TensorFile.open(path)

    def test_a_process_that_may_not_open_one_more_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        save(tmp_path, shard_size="50KB")
        monkeypatch.setattr(open_files, "raise_limit", lambda: False)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
        try:
            with pytest.raises(CheckpointError, match=rf"may have {lowest_free} files open.*`ulimit -n \d+`"):
                TensorFiles.open(locate_files(tmp_path))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        TensorFiles.open(locate_files(tmp_path)).close()

    @pytest.mark.parametrize(
        ("number", "what"),
        [(errno.EIO, "Check the disk"), (errno.ENFILE, "close other programs"), (errno.ESTALE, "Try again")],
    )
    def test_others(self, number: int, what: str) -> None:
        assert what in remedy(OSError(number, os.strerror(number)))


def test_some_rows_of_a_tensor() -> None:
    whole = TensorRange("t", 3, 100, 5 * 2 * 4, (5, 2), "F32")
    assert whole.rows(1, 3) == TensorRange("t", 3, 108, 16, (2, 2), "F32")
    assert whole.rows(4, 8) == TensorRange("t", 3, 132, 8, (1, 2), "F32")
