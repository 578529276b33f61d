"""Each test that docs/reliability.md names exists, and the page names each test of this folder."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
DOCUMENT = TESTS.parent / "docs" / "reliability.md"


def named() -> set[str]:
    """Return every `folder/file.py::function` of the page."""
    return set(re.findall(r"`([\w/]+\.py::\w+)`", DOCUMENT.read_text(encoding="utf-8")))


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_test_that_is_named_exists() -> None:
    names = named()
    assert len(names) > 20
    missing = {name for name in names if name.split("::")[1] not in functions(TESTS / name.split("::")[0])}
    assert not missing


def test_every_test_here_is_named() -> None:
    names = named()
    unnamed = {
        name
        for path in Path(__file__).parent.glob("test_*.py")
        if path != Path(__file__).resolve()
        for function in functions(path)
        if (name := f"reliability/{path.name}::{function}") not in names
    }
    assert not unnamed
