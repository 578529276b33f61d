"""Links have targets, the index names every page, and structure.md names every package."""

from __future__ import annotations

import re
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


def test_the_structure_names_every_package_and_no_other() -> None:
    rows = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8").splitlines()
    named = [row.split("`")[1] for row in rows if row.startswith("| `")]
    found = [f"{folder.name}/" for folder in (ROOT / "promoe").iterdir() if (folder / "__init__.py").is_file()]
    assert sorted(named) == sorted(found)


def test_what_stands_beside_the_packages_is_little_and_named() -> None:
    page = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    modules = {file.stem for file in (ROOT / "promoe").glob("*.py")} - {"__init__"}
    assert len(modules) < 8
    assert all(f"`{module}`" in page for module in modules)


def test_the_files_that_the_structure_names_are_there() -> None:
    page = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    named = {name for name in re.findall(r"`([a-z_/.]+)`", page) if "/" in name or name.endswith(".py")}
    files = [file.relative_to(ROOT / "promoe").as_posix() for file in ROOT.glob("promoe/*/**/*")]
    files += [file.relative_to(ROOT).as_posix() for file in (*ROOT.glob("*/*.py"), ROOT / "pyproject.toml")]
    # "links/" and "formats.py" stand for themselves wherever they are; "engine/visit" stands for a module.
    ends = {file.removesuffix(".py") for file in files} | {Path(file).name for file in files} | set(files)
    missing = {name for name in named if name.rstrip("/") not in ends | {file.partition("/")[0] for file in files}}
    assert not missing
