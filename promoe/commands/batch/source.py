"""Where the prompts of a batch come from: a file of JSON lines, or a column of a data set."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from promoe.commands.batch.lines import read_lines
from promoe.errors import ConfigError, shown


@dataclass(frozen=True)
class Source:
    """Prompts that can be read several times, in the same order.

    Args:
        name: a file of JSON lines; or, with a column, the id of a data set of the hub, or its folder.
        column: that has the prompts: texts, or lists of messages; None: it is a file.
        split: of the data set.
    """

    name: str
    column: str | None = None
    split: str = "train"

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield lines that are not empty, and their numbers from 1 on. Rows of a data set become such lines.

        Raises:
            ConfigError: it cannot be read, or has no such column.
        """
        if self.column is not None:
            yield from self._rows(self.column)
            return
        try:
            yield from read_lines(Path(self.name))
        except OSError as error:
            raise ConfigError(
                f"The prompts cannot be read: {error}. INPUT must be a file of JSON lines, or with --column a data set."
            ) from error

    def _rows(self, column: str) -> Iterator[tuple[int, bytes]]:
        try:
            import datasets
        except ImportError as error:
            raise ConfigError("A data set needs the package datasets: pip install 'promoe[train]'.") from error
        try:
            rows: Any = datasets.load_dataset(self.name, split=self.split)  # files that are mapped, not read
            for number, row in enumerate(rows, 1):
                if column not in row:
                    raise ConfigError(
                        f"The data set {self.name} has no column {shown(column)}, but {', '.join(sorted(row))}. Name one with "
                        "--column."
                    )
                field = "messages" if isinstance(row[column], list) else "prompt"
                yield number, json.dumps({field: row[column]}).encode()
        except ConfigError:
            raise
        except Exception as error:  # of the hub, of files, of their formats
            raise ConfigError(
                f"The data set {self.name}, split {self.split}, cannot be read: {type(error).__name__}: {str(error)[:500]} "
                "Give the id of a data set of the hub, or its folder, and one of its splits with --split."
            ) from error
