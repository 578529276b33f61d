"""The file of answers: lines are added whole, and what is in it need not be computed again."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

from promoe.errors import ConfigError
from promoe.files import check_writable, loads

# Seconds between two times that lines are made to last through a power cut.
SYNC_EVERY_S = 1.0
# How each line begins.
BEGINNING = b'{"id": "batch_req_'


class ResultFile:
    """A file of answers that is open for adding to. One process at a time has it open.

    Args:
        path: created if it does not exist. If its last line is not whole, that line is removed.

    Raises:
        ConfigError: it cannot be written, another process writes it, or it holds something else.
    """

    def __init__(self, path: Path) -> None:
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
            self.done = self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> set[str]:
        done: set[str] = set()
        end = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    whole = line.startswith(BEGINNING) and line.endswith(b"\n")
                    custom_id = loads(line)["custom_id"] if whole else None
                except (ValueError, KeyError, TypeError):
                    custom_id = None
                if not isinstance(custom_id, str):
                    self._check_torn(line, file.read(1), number)
                    break
                done.add(custom_id)
                end += len(line)
        os.truncate(self._file.fileno(), end)
        return done

    def _check_torn(self, line: bytes, following: bytes, number: int) -> None:
        """Raise ConfigError unless this is the last line, and was being written when the process or the machine stopped."""
        begun = line[: len(BEGINNING)].rstrip(b"\0")
        nothing = number == 1 and not begun
        if following or nothing or not BEGINNING.startswith(begun):
            raise ConfigError(
                f"Line {number} of {self.path} is no answer of a batch. Choose another file with --out; nothing was changed."
            )

    def add(self, answer: dict[str, Any]) -> None:
        """Add one answer.

        Raises:
            ConfigError: it cannot be written.
        """
        line = json.dumps(answer, ensure_ascii=False).encode() + b"\n"
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
        self.done.add(answer["custom_id"])

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


def answer_line(custom_id: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the line of an answer, as OpenAI's batches have it."""
    response = {"status_code": 200, "request_id": f"req-{custom_id}", "body": body}
    return {"id": f"batch_req_{custom_id}", "custom_id": custom_id, "response": response, "error": None}


def error_line(custom_id: str, message: str) -> dict[str, Any]:
    """Return the line of a request that is not answered."""
    error = {"code": "invalid_request", "message": message}
    return {"id": f"batch_req_{custom_id}", "custom_id": custom_id, "response": None, "error": error}
