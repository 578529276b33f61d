from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from promoe.stores.fingerprint import SAMPLE_BYTES, SAMPLES, Fingerprint

CONTENT = struct.pack("<Q", 2) + b"{}" + bytes(100)
DAY_NS = 86400 * 10**9


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(CONTENT)
    os.utime(tmp_path / "file", ns=(10**18, 10**18))
    return tmp_path / "file"


@pytest.fixture
def fd(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


def write(path: Path, content: bytes) -> None:
    with path.open("r+b") as file:
        file.write(content)


def touch(path: Path) -> None:
    os.utime(path, ns=(10**18 + DAY_NS, 10**18 + DAY_NS))


def rewrite_the_header(path: Path) -> None:
    write(path, struct.pack("<Q", 2) + json.dumps([]).encode())


def differences(found: Fingerprint, fd: int, path: Path) -> str:
    return found.look_again(fd, fd, path)[1]


def test_nothing_changed(path: Path, fd: int) -> None:
    found = Fingerprint.of(fd)
    assert found.size_bytes == len(CONTENT)
    os.utime(path, ns=(0, 10**18))  # when it was read
    path.chmod(0o600)
    os.link(path, path.with_name("another name"))
    path.unlink()
    assert found.look_again(fd, fd, path) == (found, "")


def test_the_time_alone_changed(path: Path, fd: int) -> None:
    """The bytes are compared once; from then on, the file is compared with the new time."""
    found = Fingerprint.of(fd)
    touch(path)
    again, changes = found.look_again(fd, fd, path)
    assert changes == ""
    assert again == replace(found, modified_ns=10**18 + DAY_NS)
    path.rename(path.with_name("elsewhere"))
    assert again.look_again(fd, fd, path) == (again, ""), "wherever it is by now"
    assert differences(found, fd, path) == ""


@pytest.mark.parametrize("size_bytes", [SAMPLES * SAMPLE_BYTES, SAMPLES * SAMPLE_BYTES + 1, 10**7])
def test_samples_are_of_the_whole_file(path: Path, size_bytes: int) -> None:
    content = CONTENT + os.urandom(size_bytes - len(CONTENT))
    path.write_bytes(content)
    fd = os.open(path, os.O_RDONLY)
    found = Fingerprint.of(fd)
    for position in (len(CONTENT), (size_bytes - SAMPLE_BYTES) * 7 // (SAMPLES - 1), size_bytes - 1):
        with path.open("r+b") as file:
            file.seek(position)
            file.write(bytes([content[position] ^ 1]))
            file.flush()
            touch(path)
            assert "same header, other bytes" in differences(found, fd, path), position
            file.seek(position)
            file.write(content[position : position + 1])
    touch(path)
    assert differences(found, fd, path) == ""
    os.close(fd)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: os.truncate(path, 50), ["size 110 -> 50 bytes", "modified", "same header, other bytes"]),
        (lambda path: os.truncate(path, 0), ["size 110 -> 0 bytes", "another header"]),
        (lambda path: write(path, CONTENT + b"more"), ["size 110 -> 114 bytes", "modified", "same header"]),
        (lambda path: write(path, CONTENT[:-1] + b"x"), ["modified 2001-09-", "same header, other bytes"]),
        (rewrite_the_header, ["modified", "another header"]),
    ],
)
def test_what_changed_is_said(path: Path, fd: int, change: Callable[[Path], None], said: list[str]) -> None:
    found = Fingerprint.of(fd)
    change(path)
    changes = differences(found, fd, path)
    assert [part for part in said if part not in changes] == []


def test_another_file_of_the_same_name(path: Path, fd: int) -> None:
    found = Fingerprint.of(fd)
    path.rename(path.with_name("old"))
    path.write_bytes(CONTENT)
    os.utime(path, ns=(10**18, 10**18))
    other = os.open(path, os.O_RDONLY)
    assert differences(found, fd, path) == "", "who holds the old one reads the old one"
    assert differences(found, other, path) == "another file in its place, same header"
    path.unlink()
    assert differences(found, other, path) == "another file in its place, header: No such file or directory"
    os.close(other)
