"""Links lead somewhere, the index knows every page, and the structure every module."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from .pages import PAGES, ROOT, anchors, links, name_of


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_what_is_there(page: Path) -> None:
    broken = []
    for line, target in links(page):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(f"{name_of(page)}:{line}: {target}")
    assert not broken


def test_the_index_names_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    named = {target.partition("#")[0] for _, target in links(index)}
    assert {page.name for page in PAGES if page.parent == index.parent} - {"README.md"} <= named
    assert "docs/README.md" in {target for _, target in links(ROOT / "README.md")}


def modules() -> set[str]:
    """Of the library, by their paths in `promoe/`; the two linked packages once."""
    files = [
        file.relative_to(ROOT)
        for room in ("promoe", "predictors", "training")
        for file in (ROOT / room).rglob("*.py")
        if file.name != "__init__.py"
    ]
    linked = {Path("promoe", "predictors"), Path("promoe", "training")}
    return {str(file.with_suffix("")).removeprefix("promoe/") for file in files if linked.isdisjoint(file.parents)}


def test_the_structure_names_every_module_and_no_other() -> None:
    rows = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8").splitlines()
    named = {name for row in rows if row.startswith("| `") for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    found = modules()
    assert len(found) > 200
    assert not {module for module in found if not any(fnmatch(module, name) for name in named)}
    assert not {name for name in named if not any(fnmatch(module, name) for module in found)}
