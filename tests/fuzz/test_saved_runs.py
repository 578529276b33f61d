"""Saved runs, as `promoe report` reads them: what is damaged is refused, or shown; it never breaks the page or the reader."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from synthetic_runs import make_run, make_stats, make_token

from promoe.commands.charts.html_report import html_report
from promoe.stats.saved_run import load_run, save_run
from promoe.stats.text_report import text_comparison

from .inputs import fuzzed, outcome
from .mutations import DEEP, VALUES, damaged, json_bytes


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    stats = make_stats(layers=2, experts=3, decode_passes=3, predictor="gate", lookahead=1)
    run = make_run("a", stats=stats, tpot_s=0.1, tpot_interval_s=(0.1, 0.2), bound_s=0.1, token=make_token(2))
    return save_run(run, tmp_path_factory.mktemp("fuzz") / "run.json", {"model": "tiny"})


@pytest.fixture(scope="module")
def whole(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text())
    return values


class Elements(HTMLParser):
    """What a page has for elements; scripts and styles are ours."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.scripts = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {name for name, _ in attrs if name.startswith("on") or name in ("src", "href")}, (tag, attrs)
        self.scripts += tag == "script"


def check(target: str, path: Path, content: bytes) -> None:
    path.write_bytes(content)
    saved = outcome(target, lambda: load_run(path))
    if saved is None:
        return
    page = html_report([saved.run], path.with_suffix(".html"), "fuzz", saved.conditions).read_text()
    assert Elements(page).scripts == 1
    assert not re.search(r'(?:x|y|width|height|d)="[^"]*(?:nan|inf)', page)
    assert saved.run.name in text_comparison([saved.run])


@fuzzed(60)
@given(data=st.data())
def test_trees(path: Path, whole: dict[str, Any], data: st.DataObject) -> None:
    check("saved run: tree", path, data.draw(json_bytes(whole, VALUES)))


@fuzzed(20)
@given(data=st.data())
@example(data=None)
def test_bytes(path: Path, whole: dict[str, Any], data: st.DataObject | None) -> None:
    content = json.dumps(whole).encode()
    check("saved run: bytes", path, b"[" * DEEP if data is None else data.draw(damaged(content)))
