"""What a GGUF file is, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_bytes import file_bytes, key, sound

from promoe.errors import CheckpointError, PromoeError, UnsupportedModelError
from promoe.model.gguf.checkpoint import GgufCheckpoint

ARCHITECTURE = key("general.architecture", "str", "qwen3moe")
EXPERTS = key("qwen3moe.expert_count", "u32", 8)


def opened(path: Path, content: bytes) -> GgufCheckpoint:
    path.write_bytes(content)
    found = GgufCheckpoint.open([path])
    found.files.close()
    return found


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (("F32",), torch.float32),
        (("F32", "F16"), torch.float16),
        (("F32", "BF16"), torch.bfloat16),
        (("F32", "F16", "Q8_0"), torch.bfloat16),
        (("Q4_K",), torch.bfloat16),
    ],
)
def test_the_dtype_is_that_of_the_weights(tmp_path: Path, kinds: tuple[str, ...], expected: torch.dtype) -> None:
    sizes = {"F32": 1024, "F16": 512, "BF16": 512, "Q8_0": 272, "Q4_K": 144}
    tensors = {kind: ((256,), kind, bytes(sizes[kind])) for kind in kinds}
    assert opened(tmp_path / "m.gguf", sound(tensors, [ARCHITECTURE, EXPERTS])).dtype == expected


@pytest.mark.parametrize(
    ("keys", "error", "what"),
    [
        ([], CheckpointError, r"does not name its architecture \(general\.architecture is None\)"),
        ([key("general.architecture", "u32", 7)], CheckpointError, r"general\.architecture is 7"),
        ([key("general.architecture", "str", "llama")], UnsupportedModelError, r"model without experts .*'llama'"),
        ([ARCHITECTURE, key("qwen3moe.expert_count", "u32", 0)], UnsupportedModelError, "model without experts"),
        (
            [key("general.architecture", "str", "newmoe"), key("newmoe.expert_count", "u32", 8)],
            UnsupportedModelError,
            r"'newmoe', which promoe cannot open from GGUF\. It can open .*qwen3moe.* safetensors",
        ),
        ([ARCHITECTURE, key("general.type", "str", "adapter")], CheckpointError, r"an adapter \(LoRA\)\. Merge it"),
        ([key("general.architecture", "str", "clip")], CheckpointError, "vision or audio part of a model"),
        ([key("general.type", "str", "mmproj")], CheckpointError, "vision or audio part of a model"),
        ([key("general.type", "str", "imatrix")], CheckpointError, "an importance matrix"),
        ([ARCHITECTURE, EXPERTS, key("qwen3moe.block_count", "u32", 5000)], CheckpointError, "more than 4096"),
    ],
)
def test_files_of_other_kinds_are_named(tmp_path: Path, keys: list[bytes], error: type[PromoeError], what: str) -> None:
    with pytest.raises(error, match=what) as caught:
        opened(tmp_path / "m.gguf", file_bytes(keys))
    assert str(tmp_path / "m.gguf") in str(caught.value)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ({"eos": 5}, (5, None, 5)),
        ({"eos": 5, "eot": 7, "eom": 5, "bos": 1, "padding": 3}, ([5, 7], 1, 3)),
        ({}, ("kept", "kept", "kept")),
    ],
)
def test_generation_ends_where_the_file_says(tmp_path: Path, tokens: dict[str, int], expected: Any) -> None:
    keys = [key(f"tokenizer.ggml.{name}_token_id", "u32", number) for name, number in tokens.items()]

    class Model:
        class config:
            name_or_path = ""

        class generation_config:
            eos_token_id = bos_token_id = pad_token_id = "kept"

    path = tmp_path / "m.gguf"
    opened(path, file_bytes([ARCHITECTURE, EXPERTS, *keys])).describe(Model())
    told = Model.generation_config
    assert (told.eos_token_id, told.bos_token_id, told.pad_token_id) == expected
    assert Model.config.name_or_path == str(path)
