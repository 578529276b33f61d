"""Keeps the reference's logits in a temporary file, because those of a large vocabulary do not fit in memory."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import TracebackType

import torch

from promoe.errors import ConfigError
from promoe.model.spool import IN_RAM, file_system
from promoe.units import format_memory

# What may be kept in a folder that is in RAM.
MOST_IN_RAM_BYTES = 128 * 2**20


class LogitsSpool:
    """Rows of logits in a file, in the dtype that the model gave them: they are read back with the same bits.

    Disk: `rows * vocabulary * itemsize` bytes. Memory: the rows that are written or read at a time. The file has no name
    (or is removed with the process), and ends with the `with` block.

    Args:
        folder: where the file is; None: the system's folder for temporary files.
        num_rows: how many rows will be written. Disk space is checked with the first ones.

    Raises:
        ConfigError: the folder cannot be written.
    """

    def __init__(self, folder: str | None, num_rows: int) -> None:
        self._folder = Path(tempfile.gettempdir() if folder is None else folder)
        self._num_rows = num_rows
        self._row_bytes = 0
        self._written = 0
        self._dtype = torch.float32
        try:
            self._file = tempfile.TemporaryFile(prefix="promoe-quality-", dir=self._folder)  # noqa: SIM115
        except OSError as error:
            raise self._cannot_write(error) from error

    def __enter__(self) -> LogitsSpool:
        """Do nothing: the file is open."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the file."""
        self._file.close()

    def __len__(self) -> int:
        """Return the number of rows that were written."""
        return self._written

    def append(self, logits: torch.Tensor) -> None:
        """Write rows `[n, vocabulary]`, all of one dtype and width.

        Raises:
            ConfigError: there is too little room for all rows, or the file cannot be written.
        """
        content = logits.contiguous().view(torch.uint8)
        if not self._row_bytes:
            self._row_bytes, self._dtype = content.shape[1], logits.dtype
            self._check_room()
        assert (content.shape[1], logits.dtype) == (self._row_bytes, self._dtype), (logits.shape, logits.dtype)
        try:
            self._file.write(content.numpy().data)
            self._file.flush()
        except OSError as error:
            raise self._cannot_write(error) from error
        self._written += len(logits)

    def read(self, start: int, end: int) -> torch.Tensor:
        """Return rows `start` to `end` (exclusive), `[end - start, vocabulary]`."""
        self._file.seek(start * self._row_bytes)
        content = bytearray((end - start) * self._row_bytes)
        count = self._file.readinto(content)
        assert count == len(content), (start, end, count)
        return torch.frombuffer(content, dtype=self._dtype).view(end - start, -1)

    def _check_room(self) -> None:
        nbytes, free_bytes = self._num_rows * self._row_bytes, shutil.disk_usage(self._folder).free
        what = f"The logits of {self._num_rows:,} tokens take {format_memory(nbytes)}"
        remedy = "Choose another folder with --spool, or read fewer tokens with --tokens."
        if nbytes > free_bytes:
            raise ConfigError(f"{what}, but '{self._folder}' has only {format_memory(free_bytes)} free. {remedy}")
        if nbytes > MOST_IN_RAM_BYTES and (kind := file_system(self._folder)) in IN_RAM:
            raise ConfigError(f"{what}, and '{self._folder}' is in RAM ({kind}). {remedy}")

    def _cannot_write(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"Logits cannot be written into '{self._folder}': {error.strerror or error}. Choose another folder with --spool."
        )
