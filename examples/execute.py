"""Execute the notebooks: each source `NN_name.py` beside this file becomes `NN_name.ipynb` with outputs.

    python examples/execute.py [01 03 ...]

What goes to stderr (progress, warnings) is printed here and not kept. Names of temporary folders are removed from outputs.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jupytext
import nbclient

FOLDER = Path(__file__).resolve().parent
SECONDS_PER_CELL = 1800
MAX_BYTES = 400_000
TEMPORARY = re.compile(re.escape(tempfile.gettempdir()) + r"/promoe-\w+/?")


def execute(source: Path) -> Path:
    """Run a notebook in a fresh kernel in its own folder, write it, and return the file."""
    notebook = jupytext.read(source)
    client = nbclient.NotebookClient(
        notebook, timeout=SECONDS_PER_CELL, coalesce_streams=True, record_timing=False,
        resources={"metadata": {"path": str(FOLDER)}},
    )  # fmt: skip
    client.execute()
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # a random id would change each time
        if cell.cell_type == "code":
            cell.outputs = [_cleaned(output) for output in cell.outputs if not _is_noise(output)]
    path = source.with_suffix(".ipynb")
    jupytext.write(notebook, path)
    size = path.stat().st_size
    assert size < MAX_BYTES, f"{path.name} has {size:,} bytes, more than {MAX_BYTES:,}: draw less"
    return path


def _is_noise(output: Any) -> bool:
    if output.output_type == "stream" and output.name == "stderr":
        print(output.text, file=sys.stderr)
        return True
    return False


def _cleaned(output: Any) -> Any:
    if output.output_type == "stream":
        output.text = TEMPORARY.sub("", output.text)
    for kind, content in output.get("data", {}).items():
        if kind.startswith("text/"):
            output.data[kind] = TEMPORARY.sub("", content)
    return output


def main(numbers: list[str]) -> None:
    """Execute the notebooks whose names begin with one of `numbers`, or all if there are none."""
    for source in sorted(FOLDER.glob("[0-9]*.py")):
        if not numbers or source.name.startswith(tuple(numbers)):
            begin_s = time.perf_counter()
            path = execute(source)
            print(f"{path.name}: {time.perf_counter() - begin_s:.0f} s, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
