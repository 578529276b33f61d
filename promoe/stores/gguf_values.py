"""Reads the values at the beginning of a GGUF file: numbers, strings and arrays, one after the other.

A length in a damaged or hostile file may be any number. So nothing is allocated for more bytes than the file has, and
neither the bytes nor the number of all values may exceed a limit.
"""

from __future__ import annotations

import os
import struct
from typing import Any

from promoe.files import MAX_JSON_BYTES

# As much as a safetensors header may have. A vocabulary of 260,000 tokens with its merges takes 15 MB.
MAX_HEADER_BYTES = MAX_JSON_BYTES
# Strings, elements of arrays and entries of a header, all together.
MAX_VALUES = 2**22
MAX_DEPTH = 4  # of arrays in arrays; no known file has any
STEP_BYTES = 1 << 20

STRING, ARRAY = 8, 9
# By the number of the type. Little-endian, without padding.
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SHORTEST_BYTES = {STRING: 8, ARRAY: 12} | {kind: struct.calcsize(f"<{code}") for kind, code in _FORMATS.items()}


class ValueReader:
    """Reads values of an open file from its beginning on, at most `MAX_HEADER_BYTES` in all.

    Every method raises ValueError, which says what is wrong, if the file does not hold what is asked for.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd = fd
        self._size_bytes = size_bytes
        self._buffer = b""
        self._buffer_start = 0
        self._position = 0  # in the buffer
        self._num_values = 0

    @property
    def offset_bytes(self) -> int:
        """Where the next value begins in the file."""
        return self._buffer_start + self._position

    def count(self, num_values: int, what: str) -> None:
        """Raise ValueError if the header would have more values than any sound one."""
        self._num_values += num_values
        if self._num_values > MAX_VALUES:
            raise ValueError(f"{what}: with {num_values} more values, it has more than {MAX_VALUES}")

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes."""
        self._need(nbytes)
        start = self._position
        self._position += nbytes
        return self._buffer[start : self._position]

    def numbers(self, code: str) -> tuple[Any, ...]:
        """Return the next numbers, by their format in the `struct` module."""
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))

    def string(self) -> str:
        """Return the next string: its length as 8 bytes, then UTF-8."""
        (text,) = self._strings(1)
        return text

    def value(self, kind: int, depth: int = 0) -> Any:
        """Return the next value of a type: a number, a bool, a string, or a list of them."""
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self._array(depth)
        if kind not in _FORMATS:
            raise ValueError(f"a value has type {kind}, which GGUF does not have")
        (number,) = self.numbers(_FORMATS[kind])
        return number

    def _array(self, depth: int) -> list[Any]:
        kind, length = self.numbers("IQ")
        if kind not in _SHORTEST_BYTES:
            raise ValueError(f"an array has elements of type {kind}, which GGUF does not have")
        self._check_rest(length * _SHORTEST_BYTES[kind], f"an array of {length} elements")
        self.count(length, "an array")
        if kind == STRING:
            return self._strings(length)
        if kind != ARRAY:
            return list(self.numbers(f"{length}{_FORMATS[kind]}"))
        if depth >= MAX_DEPTH:
            raise ValueError(f"arrays are nested more than {MAX_DEPTH} deep")
        return [self._array(depth + 1) for _ in range(length)]

    def _strings(self, num_strings: int) -> list[str]:
        # A vocabulary has hundreds of thousands of them, so there is no call per string.
        found: list[str] = []
        buffer, position = self._buffer, self._position
        for _ in range(num_strings):
            end = position + 8
            length = int.from_bytes(buffer[position:end], "little")
            if end + length > len(buffer):
                self._position = position
                (length,) = self.numbers("Q")
                self._need(length)
                buffer, end = self._buffer, self._position
            position = end + length
            found.append(buffer[end:position].decode("utf-8"))
        self._position = position
        return found

    def _need(self, nbytes: int) -> None:
        """Read on until the buffer has the next `nbytes`."""
        missing = nbytes - (len(self._buffer) - self._position)
        if missing <= 0:
            return
        self._check_rest(nbytes, f"{nbytes} bytes")
        rest = self._buffer[self._position :]
        self._buffer_start += self._position
        self._position = 0
        more = os.pread(self._fd, max(missing, STEP_BYTES), self._buffer_start + len(rest))
        self._buffer = rest + more
        if len(self._buffer) < nbytes:
            raise ValueError(f"the file ends at byte {self._buffer_start + len(self._buffer)}")

    def _check_rest(self, nbytes: int, what: str) -> None:
        end = self.offset_bytes + nbytes
        if end > self._size_bytes:
            raise ValueError(
                f"{what} at byte {self.offset_bytes}, and the file ends at byte {self._size_bytes} (truncated)"
            )
        if end > MAX_HEADER_BYTES:
            raise ValueError(f"{what} at byte {self.offset_bytes} of a header, which has at most {MAX_HEADER_BYTES}")
