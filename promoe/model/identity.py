"""Tells two models apart by the files that their answers follow from, without reading all weights."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

from promoe.errors import CheckpointError
from promoe.files import open_plain
from promoe.model.gguf.finding import find_gguf, is_gguf
from promoe.model.hub import CONFIG_NAME, base_of
from promoe.model.slot_index import INDEX
from promoe.stores.tensor_files import TensorFiles

# Files of weights: their headers and some bytes of each tensor are compared. Of every other file, all are.
_WEIGHTS = ("*.safetensors",)
_OTHERS = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.jinja",
    "*.tiktoken",
    "*.index.json",
)
DIGITS = 12
# Bytes that are read of each tensor.
SAMPLE_BYTES = 64


def identity_of(path_or_id: str, experts: str = "auto", kernels: str = "exact") -> str:
    """Return a digest of a checkpoint, of the form of its experts, and of its products.

    Copies of a checkpoint have the same one. Of each tensor a few bytes are read: tensors that were trained further differ in
    nearly all of them. A model of the hub is known by the name of its repository and its commit.

    Args:
        path_or_id: as for `promoe.from_pretrained`.
        experts: as for `promoe.from_pretrained`.
        kernels: as in `PromoeConfig`.

    Raises:
        CheckpointError: there is no such checkpoint, or a file cannot be read.
    """
    facts: list[object] = [experts, kernels]
    try:
        if is_gguf(path_or_id):
            files = find_gguf(path_or_id)
            facts += [fact[1:] for fact in _weights(files)]  # whatever they are called
            facts += _form(files[0].parent, experts)
        else:
            for name in dict.fromkeys([path_or_id, base_of(path_or_id)]):
                facts += _checkpoint(name)
                facts += _form(Path(name), experts)
    except OSError as error:
        raise CheckpointError(f"A file of '{path_or_id[:500]}' cannot be read: {error}.") from error
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:DIGITS]


def _checkpoint(name: str) -> Iterator[object]:
    folder = Path(name)
    if not os.path.isdir(name):
        from transformers.utils import cached_file

        found = cached_file(name, CONFIG_NAME, _raise_exceptions_for_missing_entries=False)
        yield [name, Path(found).parent.name if found else ""]  # a snapshot's folder is named by its commit
        return
    yield _weights(_files(folder, _WEIGHTS))
    yield [_content_of(path) for path in _files(folder, _OTHERS)]


def _form(folder: Path, experts: str) -> Iterator[object]:
    """Yield what says how experts were written in another form, where they were."""
    chosen = Path(experts) / INDEX
    beside = [path / INDEX for path in sorted(folder.glob("*promoe-*")) if path.name.endswith(f"promoe-{experts}")]
    yield from map(_content_of, [path for path in [chosen, *beside] if path.is_file()])


def _files(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def _weights(paths: Sequence[Path]) -> list[list[object]]:
    """Return for each file its name, its size, and checksums of its header and of a few bytes of each tensor."""
    found: list[list[object]] = []
    with closing(TensorFiles.open(paths)) as files:
        for file in files.files:
            crc, sample = 0, bytearray(SAMPLE_BYTES)
            for tensor in sorted(file.tensors.values(), key=lambda one: one.offset_bytes):
                # From the middle: rows of padding are first or last.
                view = memoryview(sample)[: min(SAMPLE_BYTES, tensor.nbytes)]
                file.read_into(tensor.offset_bytes + (tensor.nbytes - len(view)) // 2, view)
                crc = zlib.crc32(view, crc)
            found.append([file.path.name, file.size_bytes, file.fingerprint.header_crc, crc])
    return found


def _content_of(path: Path) -> list[str]:
    with open(open_plain(path), "rb") as file:
        return [path.name, hashlib.sha256(file.read()).hexdigest()]
