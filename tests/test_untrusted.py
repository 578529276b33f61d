"""Files of others: opened if they are plain, JSON that stands for one value."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from promoe.errors import shown
from promoe.untrusted import MAX_JSON_BYTES, loads, open_plain, read_json


def test_json_is_what_it_says() -> None:
    assert loads('{"a": [1, 2.5, null, "ü\\u00fc\\ud83d\\ude00"]}'.encode()) == {"a": [1, 2.5, None, "üü\U0001f600"]}
    assert loads(b"[NaN]")[0] != loads(b"[NaN]")[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Expecting value"),
        (b"\xff", "utf-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"1" * 5000, "digits"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "'c' is there twice"),
        (b'["\\ud800"]', "surrogates"),
        (b'{"\\udfff": 1}', "surrogates"),
        ('{"a": 1}'.encode("utf-16"), "utf-8"),
    ],
)
def test_json_that_stands_for_nothing(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loads(content)


def test_constants_can_be_refused() -> None:
    for constant in (b"NaN", b"-Infinity", b"[Infinity]"):
        with pytest.raises(ValueError, match="is no JSON"):
            loads(constant, constants=False)


def test_what_is_no_plain_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "link", Path("/dev/null")):
        with pytest.raises(OSError, match="Not a plain file"):
            open_plain(path)
    for name in ("absent", "x" * 5000, "a\0b"):
        with pytest.raises(OSError, match=r"No such file|too long|null byte"):
            open_plain(tmp_path / name)


def test_links_to_plain_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"[1]")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert read_json(tmp_path / "b") == [1]


def test_a_file_that_is_too_large_is_not_parsed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b" ")
    os.truncate(tmp_path / "a", MAX_JSON_BYTES + 1)
    with pytest.raises(ValueError, match="larger than 100 MiB"):
        read_json(tmp_path / "a")


def test_values_in_messages_are_short() -> None:
    assert shown("a") == "'a'"
    assert shown("x" * 1000) == "'" + "x" * 199 + "..."
    assert shown(10**5000) == "int that cannot be written"
