"""What holds for all tests."""

from __future__ import annotations

import ast
from pathlib import Path

from hypothesis import settings

TESTS = Path(__file__).parent


def test_no_test_has_a_deadline() -> None:
    assert settings.default.deadline is None
    for path in TESTS.rglob("*.py"):
        if path == TESTS / "conftest.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("settings", "register_profile"):
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert given.get("deadline", "None") == "None", f"{path}:{node.lineno}"
                # What a test suppresses replaces what the profile does.
                assert given.get("suppress_health_check", "list(HealthCheck)") == "list(HealthCheck)", (
                    f"{path}:{node.lineno}"
                )
