"""The file of answers: lines are added whole, and what is in it need not be computed again.

The `id` of each answer says to what it belongs: a digest of the model, its form and its products, and one of what the line asks
for. An answer is never taken for that of another model or of another line.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from promoe.errors import ConfigError, shown
from promoe.files import check_writable, loads

# Seconds between two times that lines are made to last through a power cut.
SYNC_EVERY_S = 1.0
# How each line begins, and its id: digests of the model and of the line.
BEGINNING = b'{"id": "batch_req_'
_ID = re.compile(r"batch_req_([0-9a-f]+)_([0-9a-f]+)")
# Names of lines that a message lists.
MOST_NAMED = 5


class ResultFile:
    """A file of answers that is open for adding to. One process at a time has it open.

    Args:
        path: created if it does not exist. If its last line is not whole, that line is removed.

    Attributes:
        done: digest of each line that has an answer or an error, by the line's name.

    Raises:
        ConfigError: it cannot be written, another process writes it, or it holds something else.
    """

    def __init__(self, path: Path) -> None:
        self.done: dict[str, str] = {}
        self._models: dict[str, str] = {}
        self._model = ""
        self.path = check_writable(path)
        try:
            self._file = self.path.open("a+b", buffering=0)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ConfigError(f"Another process writes answers into {path}. Choose another file with --out.") from error
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error}. Choose another file with --out.") from error
        self._synced_s = time.monotonic()
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        end = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not self._note(line):
                    self._check_torn(line, file.read(1), number)
                    break
                end += len(line)
        os.truncate(self._file.fileno(), end)

    def _note(self, line: bytes) -> bool:
        """Note what a line is the answer to, and return whether it is a whole one."""
        if not line.startswith(BEGINNING) or not line.endswith(b"\n"):
            return False
        try:
            answer = loads(line)
            name, found = answer["custom_id"], _ID.fullmatch(answer["id"])
            model = answer["response"]["body"]["model"] if answer["response"] else ""
        except (ValueError, KeyError, TypeError):
            return False
        if found is None or not isinstance(name, str):
            return False
        self.done[name] = found[2]
        self._models[found[1]] = self._models.get(found[1]) or str(model)
        return True

    def belong_to(self, digest: str, name: str) -> None:
        """Let answers be those of a model from now on.

        Args:
            digest: digest of the model, its form and its products.
            name: its name, for people.

        Raises:
            ConfigError: there are answers of another one.
        """
        self._model = digest
        for other, its_name in self._models.items():
            if other != digest:
                raise ConfigError(
                    f"{self.path} has answers of another model, of experts in another form, or of other kernels: they are of "
                    f"{shown(its_name) if its_name else 'a model without a name'} ({other}), and this is {shown(name)} "
                    f"({digest}). Choose another file with --out."
                )

    def check_unchanged(self, lines: Mapping[str, str]) -> None:
        """Check that lines that are answered ask for what they asked for then.

        Args:
            lines: digests of lines, by their names.

        Raises:
            ConfigError: some do not.
        """
        changed = [name for name, digest in lines.items() if self.done.get(name, digest) != digest]
        if changed:
            some = ", ".join(changed[:MOST_NAMED]) + (", ..." if len(changed) > MOST_NAMED else "")
            raise ConfigError(
                f"{self.path} has answers to {len(changed)} lines that ask for something else now ({some}): they were changed "
                "or moved, or --seed or --max-tokens was. Delete these answers from it to have the lines answered anew, or "
                "choose another file with --out."
            )

    def _check_torn(self, line: bytes, following: bytes, number: int) -> None:
        """Raise ConfigError unless this is the last line, and was being written when the process or the machine stopped."""
        begun = line[: len(BEGINNING)].rstrip(b"\0")
        nothing = number == 1 and not begun
        if following or nothing or not BEGINNING.startswith(begun) or _is_whole(line):
            raise ConfigError(
                f"Line {number} of {self.path} is no answer of a batch. Choose another file with --out; nothing was changed."
            )

    def add(self, answer: dict[str, Any], digest: str) -> None:
        """Add one answer, or one error.

        Args:
            answer: as `answer_line` or `error_line` return it.
            digest: digest of the line that it is for.

        Raises:
            ConfigError: it cannot be written.
        """
        if answer["response"] is not None:
            answer["response"]["body"]["system_fingerprint"] = f"fp_{self._model}"
        assert self._model, "it is not known whose answers these are"
        whole = {"id": f"batch_req_{self._model}_{digest}", **answer}
        line = json.dumps(whole, ensure_ascii=False).encode() + b"\n"
        before = os.fstat(self._file.fileno()).st_size
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(f"{written} of {len(line)} bytes were written")
            if (now_s := time.monotonic()) - self._synced_s > SYNC_EVERY_S:
                os.fsync(self._file.fileno())
                self._synced_s = now_s
        except OSError as error:
            os.truncate(self._file.fileno(), before)
            raise ConfigError(
                f"An answer could not be written into {self.path}: {error}. Free some space and type the same command again: "
                "it goes on from there."
            ) from error
        self.done[answer["custom_id"]] = digest

    def close(self) -> None:
        """Close the file, after its lines have reached the disk."""
        if self._file.closed:
            return
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise ConfigError(
                f"Whether all answers in {self.path} are on the disk is not known: {error}. Type the same command "
                "again: it answers what is missing."
            ) from error
        finally:
            self._file.close()

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _is_whole(line: bytes) -> bool:
    """Return whether a line was written to its end, by whomever."""
    try:
        loads(line)
    except ValueError:
        return False
    return line.endswith(b"\n")


def answer_line(custom_id: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the line of an answer, as OpenAI's batches have it but for its id."""
    response = {"status_code": 200, "request_id": f"req-{custom_id}", "body": body}
    return {"custom_id": custom_id, "response": response, "error": None}


def error_line(custom_id: str, message: str) -> dict[str, Any]:
    """Return the line of a request that is not answered, but for its id."""
    error = {"code": "invalid_request", "message": message}
    return {"custom_id": custom_id, "response": None, "error": error}
