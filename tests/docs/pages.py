"""Read the pages of the documentation: fenced blocks, code in sentences, links, headings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: its file, relative to the root of the repository.
        line: line number of its first line of code in that file, from 1.
        language: the word after the fence.
        text: the code.
    """

    page: str
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        """Return file and line in the form that editors and terminals turn into a link."""
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command line in a block or in a sentence.

    Attributes:
        where: file and line.
        words: program and arguments, without environment variables before it and without a redirection after it.
    """

    where: str
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(self.words)


def name_of(page: Path) -> str:
    """Return the page's path in the repository, since there are two files README.md."""
    return page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name


def tokens(page: Path) -> Iterator[Token]:
    """Yield all tokens of a page, inline ones included, each with its position in the file."""
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8")):
        yield token
        for child in token.children or ():
            child.map = token.map
            yield child


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks, from top to bottom."""
    return [
        Block(name_of(page), token.map[0] + 2, token.info.strip(), token.content)
        for token in tokens(page)
        if token.type in ("fence", "code_block") and token.map is not None
    ]


def commands_in(block: Block) -> list[Command]:
    """Return the command lines of a shell block. Continued lines are joined, comments left out."""
    found, line = [], block.line
    for text in re.split(r"(?<!\\)\n", block.text):
        if words := _words(text.replace("\\\n", " ")):
            found.append(Command(f"{block.page}:{line}", words))
        line += text.count("\n") + 1
    return found


def commands_in_sentences(page: Path, programs: tuple[str, ...]) -> list[Command]:
    """Return the inline code that begins with one of these programs."""
    return [
        Command(f"{name_of(page)}:{token.map[0] + 1}", words)
        for token in tokens(page)
        if token.type == "code_inline" and token.map is not None
        if re.match(rf"([A-Z_]+=\S+ )*({'|'.join(map(re.escape, programs))}) ", token.content)
        and (words := _words(token.content))
    ]


def _words(text: str) -> tuple[str, ...]:
    words = shlex.split(text, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        del words[0]
    return tuple(words[: words.index(">")] if ">" in words else words)


def links(page: Path) -> list[tuple[int, str]]:
    """Return line and target of every link and picture."""
    found = []
    for token in tokens(page):
        target = {"link_open": "href", "image": "src"}.get(token.type)
        if target is not None and token.map is not None:
            found.append((token.map[0] + 1, str(token.attrGet(target))))
    return found


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: its headings in the form that GitHub gives them."""
    stream = list(tokens(page))
    headings = [after.content for token, after in pairwise(stream) if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
