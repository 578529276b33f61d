from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from promoe.errors import ConfigError, PromoeError, shown
from promoe.files import MAX_JSON_BYTES, check_writable, loads, open_plain, read_json, write_atomically


def test_check_writable_returns_the_path_and_leaves_nothing(tmp_path: Path) -> None:
    assert check_writable(str(tmp_path / "new.json")) == tmp_path / "new.json"
    assert list(tmp_path.iterdir()) == []


def test_check_writable_keeps_an_existing_file(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("old")
    check_writable(tmp_path / "old.json")
    assert (tmp_path / "old.json").read_text() == "old"


@pytest.mark.parametrize(
    ("make_path", "found"),
    [
        (lambda tmp: tmp, "is a folder"),
        (lambda tmp: tmp / "none" / "trace.json", "does not exist"),
        (lambda tmp: Path("/dev/null"), "not a plain file"),
        (lambda tmp: tmp / ("n" * 300), "Cannot write"),
    ],
)
def test_unwritable_paths_raise_with_the_path_and_the_reason(tmp_path: Path, make_path, found: str) -> None:  # type: ignore[no-untyped-def]
    path = make_path(tmp_path)
    for attempt in (lambda: check_writable(path), lambda: write_atomically(path, ["x"])):
        with pytest.raises(ConfigError, match=found) as caught:
            attempt()
        assert str(path) in str(caught.value)
        assert isinstance(caught.value, PromoeError)


def test_a_folder_that_refuses_files_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("promoe.files.tempfile.NamedTemporaryFile", refuse)
    with pytest.raises(ConfigError, match="Permission denied"):
        check_writable(tmp_path / "a")


def test_write_replaces_the_file_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    assert write_atomically(path, ["ä", "b\n"]) == path
    assert path.read_bytes() == "äb\n".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_an_exception_while_writing_keeps_the_old_file_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def pieces() -> Iterator[str]:
        yield "half"
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        write_atomically(path, pieces())
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_a_config_error_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(source: str, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("promoe.files.os.replace", full)
    with pytest.raises(ConfigError, match="No space left"):
        write_atomically(tmp_path / "a.txt", ["x"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="POSIX permission bits")
def test_the_file_has_ordinary_permissions(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        path = write_atomically(tmp_path / "a.txt", ["x"])
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_file_name_that_is_no_utf8_can_be_written_about(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    assert write_atomically(tmp_path / "page.html", [f"of {name}"]).read_text() == "of caf?"


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
        (b'["\\ud800"]', "half a character"),
        (b'{"\\udfff": 1}', "half a character"),
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
