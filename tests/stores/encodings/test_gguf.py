from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf_bytes import sound

from promoe.errors import CheckpointError
from promoe.stores.encodings.base import EncodedTensor
from promoe.stores.encodings.gguf import find_blocks
from promoe.stores.safetensors_header import TensorRange
from promoe.stores.tensor_files import TensorFiles


def test_blocks_are_weights_to_decode(tmp_path: Path) -> None:
    scale = torch.tensor([0.5], dtype=torch.float16).view(torch.uint8).numpy().tobytes()
    block = scale + bytes(range(32))
    path = tmp_path / "model.gguf"
    path.write_bytes(sound({"a": ((3, 2, 32), "Q8_0", 6 * block), "b": ((2,), "F32", bytes(8))}))
    files = TensorFiles.open([path])
    found = find_blocks(files.tensors)
    a, b = found["a"], found["b"]
    assert isinstance(b, TensorRange)
    assert b is files.tensors["b"]
    assert isinstance(a, EncodedTensor)
    assert (a.shape, a.nbytes, a.dtype_name) == ((3, 2, 32), 6 * 34, "Q8_0")
    (part,) = a.parts
    assert (part.shape, part.dtype) == ((3, 2, 34), torch.uint8)
    content = torch.empty(part.shape, dtype=torch.uint8)
    files.read_into(part, content.view(-1).numpy().data)
    out = torch.empty(2, 32)
    a.encoding.decode([content[1]], out)
    assert torch.equal(out, (torch.arange(32) * 0.5).expand(2, 32))
    files.close()


def test_blocks_that_nobody_decodes_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"'t' is in Q8_K \(GGUF type 15\), .* such as Q4_K_M"):
        find_blocks({"t": TensorRange("t", 0, 0, 292, (256,), "Q8_K")})
