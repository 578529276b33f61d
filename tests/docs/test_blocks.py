"""Every fenced block and every command of the documentation runs, is checked, or is listed here with a reason.

A test follows a page as a reader would: it runs the blocks from top to bottom in one folder, so each finds what earlier ones
left. Python runs as written. Every command of ours is parsed by its own parser; those in blocks also run, with options that
make them small.
"""

from __future__ import annotations

import ast
import gc
import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from tiny_checkpoint import write_checkpoint

from .pages import PAGES, ROOT, Block, Command, blocks, commands_in, commands_in_sentences, name_of
from .programs import OURS, PROGRAMS, check, run

LANGUAGES = ("python", "bash", "text")

# Words that stand for something of the reader's, and what the tests use instead.
PLACEHOLDERS = {"MODEL": "model"}

# Commands by their first words, and the options that make them small.
SMALLER = {
    "promoe run": "--max-new-tokens 4",
    "promoe report": "",
    "promoe quantize": "",
    "promoe quality": "--tokens 200 --prompts 1 --max-new-tokens 4",
    "promoe-train collect": "--data prompts.jsonl --max-tokens 1500",
    "promoe-train fit": "--lookahead 2 --batch-size 128 --trainer.max-epochs 1 --trainer.accelerator cpu",
    "promoe-train evaluate": "--lookahead 1 --cache 25% --policy next_use --replay-tokens 50",
    "promoe-train export": "",
    "mkdir": "",
}

# Commands that are checked but not run, by their first words, and why.
NOT_RUN = {
    "promoe demo": "takes minutes and 4 GB; tests/commands/demo runs it on a tiny model",
    "promoe bench": "takes minutes and 4 GB; tests/commands/bench runs it on a tiny model",
    "promoe simulate": "its trace is the reader's; tests/commands/simulate runs it",
    "promoe plan": "measures the machine for half a minute; tests/commands/plan runs it",
    "promoe doctor": "measures the disk for seconds; tests/commands/doctor runs it",
    "promoe batch": "needs a file of prompts; tests/commands/batch runs it on a tiny model",
    "promoe serve": "ends when it is interrupted; tests/commands/serve runs it on a tiny model",
    "make": "sets up an environment of its own, over the network",
    "pip install": "needs the network",
    "git clone": "needs the network",
    "cd": "the test is in that folder already",
    "python -m venv": "the suite has an environment",
    ". .venv/bin/activate": "the suite has an environment",
    "python docs/api.py": "tests/docs/test_api.py compares what it prints",
    "hf download": "needs the network",
    "curl": "asks a server; tests/commands/serve does",
}

# Blocks of Python that are not run, by page and first line, and why.
PYTHON_NOT_RUN = {
    (
        "docs/howto.md",
        'model = promoe.from_pretrained(path, cache="25%", device="cuda")',
    ): "needs a GPU; tests/cuda runs it",
    ("docs/howto.md", "import lm_eval"): "needs a package and data from the network",
    ("docs/serving.md", "from openai import OpenAI"): "asks a server; tests/commands/serve does",
}
# Pages whose Python is signatures, not programs.
SIGNATURES = {"docs/api.md": "tests/docs/test_api.py compares them with the source"}

Pages = pytest.mark.parametrize("page", PAGES, ids=name_of)


def all_commands() -> list[Command]:
    in_blocks = [
        command
        for page in PAGES
        for block in blocks(page)
        if block.language == "bash"
        for command in commands_in(block)
    ]
    return in_blocks + [command for page in PAGES for command in commands_in_sentences(page, tuple(PROGRAMS))]


def entry_for(command: Command, table: dict[str, str]) -> str | None:
    """Return the name in a table, keyed by first words, that a command begins with; None if there is none."""
    return next((name for name in table if f"{command.text} ".startswith(f"{name} ")), None)


# -- without running anything -------------------------------------------------------------------------------------


@Pages
def test_every_block_says_what_it_is(page: Path) -> None:
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{block.where}: a fence is one of {LANGUAGES}, not {block.language!r}"
        if block.language == "text":  # what was printed, or a drawing: commands do not hide there
            hidden = [
                line
                for line in block.text.splitlines()
                if re.match(rf"\s*[$>]*\s*({'|'.join(map(re.escape, PROGRAMS))}) \S", line)
            ]
            assert not hidden, f"{block.where}: commands in a block of text: {hidden}"
        if block.language == "python":
            ast.parse(block.text, block.where)


@pytest.mark.parametrize("command", all_commands(), ids=lambda command: f"{command.where} {command.text[:40]}")
def test_a_command_is_what_it_says(command: Command) -> None:
    check(command)


def test_a_command_in_a_block_is_run_or_listed() -> None:
    for page in PAGES:
        for block in (block for block in blocks(page) if block.language == "bash"):
            for command in commands_in(block):
                small, not_run = entry_for(command, SMALLER), entry_for(command, NOT_RUN)
                assert (small is None) != (not_run is None), (
                    f"{command.where}: {command.text} is in none of the tables, or in both"
                )
                assert not_run is not None or command.words[0] in (*OURS, "mkdir"), command


def test_the_tables_list_nothing_that_is_not_there() -> None:
    commands = all_commands()
    for table in (SMALLER, NOT_RUN):
        assert {name for name in table if not any(entry_for(command, {name: ""}) for command in commands)} == set()
    first_lines = {
        (block.page, block.text.splitlines()[0])
        for page in PAGES
        for block in blocks(page)
        if block.language == "python"
    }
    assert set(PYTHON_NOT_RUN) <= first_lines
    assert set(SIGNATURES) <= set(map(name_of, PAGES))


# -- running ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", hidden=64, intermediate=64)


@pytest.fixture
def folder(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make the folder that a reader has: a checkout, a model, prompts, and a hub cache with `org/name`."""
    here = tmp_path / "here"
    here.mkdir()
    examples = here / "examples" / "sharegpt_moe"
    examples.mkdir(parents=True)
    (examples / "checkpoint").symlink_to(ROOT / "examples" / "sharegpt_moe" / "checkpoint")
    shutil.copytree(ROOT / "examples" / "sharegpt_moe" / "predictor", examples / "predictor")  # a page writes it anew
    shutil.copy(ROOT / "examples" / "sharegpt_moe" / "heldout_prompts.json", examples)
    (here / "model").symlink_to(tiny)
    records = [{"prompt": f"Question {number}: what is {'very ' * (number % 7)}good?"} for number in range(40)]
    (here / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    (here / "texts.jsonl").write_text('{"text": "What is very good?"}\n' * 20, encoding="utf-8")
    repository = tmp_path / "hub" / "models--org--name"
    shutil.copytree(tiny, repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(here)
    yield here
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "promoe-close":  # of models that nobody holds any more
            thread.join()


def follow(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the blocks of a page, and compare what it shows with what they print."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed, sentences = "", False
    try:
        for block in blocks(page):
            if block.language == "python" and (block.page, block.text.splitlines()[0]) not in PYTHON_NOT_RUN:
                # Lines are numbered as on the page, for tracebacks.
                exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), names)
                printed, sentences = capsys.readouterr().out, True
            elif block.language == "bash":
                codes = {command: run_small(command) for command in commands_in(block)}
                captured = capsys.readouterr()
                assert not any(codes.values()), f"{codes}\n{captured.err}"
                printed, sentences = captured.out + captured.err, False
            elif block.language == "text" and printed:
                assert_shown(block, printed, sentences)
                printed = ""
    finally:
        for value in names.values():
            if hasattr(value, "promoe") and hasattr(value.promoe, "close"):
                value.promoe.close()


def run_small(command: Command) -> int:
    name = entry_for(command, SMALLER)
    if name is None:
        return 0
    words = [PLACEHOLDERS.get(word, word) for word in command.words]
    return run([*words, *SMALLER[name].split()])


def assert_shown(block: Block, printed: str, sentences: bool) -> None:
    """Raise AssertionError unless the block's lines were printed.

    Of lines in columns, only the name is compared. With `sentences`, other lines that are not indented are compared without
    their numbers. Indented lists are skipped, because advice depends on measurements.
    """
    found, wanted = printed.splitlines(), [line for line in block.text.splitlines() if line != "..."]
    labels = {label(line) for line in found}
    missing = [line for line in wanted if label(line) is not None and label(line) not in labels]
    if sentences:
        said = {without_numbers(line) for line in found}
        missing += [
            line for line in wanted if line[:1].strip() and not label(line) and without_numbers(line) not in said
        ]
    assert not missing, f"{block.where}: not printed: {missing}; printed: {printed}"


def label(line: str) -> str | None:
    """Return the name at the beginning of a line in columns; None for other lines."""
    match = re.match(r"\s*([A-Za-z][^:]*?):?\s{2,}\S", line)
    return match[1] if match is not None else None


def without_numbers(line: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "#", line)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name_of(page))
        for page in PAGES
        if name_of(page) not in SIGNATURES
        and any(
            block.language == "python" or any(entry_for(c, SMALLER) for c in commands_in(block))
            for block in blocks(page)
            if block.language != "text"
        )
    ],
)
def test_a_page_can_be_followed(page: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    follow(page, capsys)


# -- the tests of this test ---------------------------------------------------------------------------------------


def test_a_block_that_fails_names_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```python\na = 1\n```\n\nand\n\n```python\nb = a\nb / 0\n```\n", encoding="utf-8")
    with pytest.raises(ZeroDivisionError) as caught:
        follow(page, capsys)
    assert (str(caught.traceback[-1].path), caught.traceback[-1].lineno + 1) == (str(page), 11)


def test_output_that_was_not_printed_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    code = "```python\nprint('hit rate    61.2%')\n```\n\n```text\nhit rate    74.0%\n{}\n```\n"
    page.write_text(code.format("..."), encoding="utf-8")
    follow(page, capsys)
    for other in ("ready rate  80.0%", "What to do"):
        page.write_text(code.format(other), encoding="utf-8")
        with pytest.raises(AssertionError, match=f"not printed: .'{other}"):
            follow(page, capsys)


@pytest.mark.parametrize(
    "text",
    [
        "promoe run MODEL",
        "promoe run MODEL hi --speed 9",
        "promoe fly",
        "make tea",
        "pip install .[tea]",
        "python benchmarks/decode.py --tea 1",
        "tea --hot",
    ],
)
def test_a_command_that_is_not_what_it_says_is_noticed(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((AssertionError, OSError)):
        check(Command("page.md:1", tuple(text.split())))
