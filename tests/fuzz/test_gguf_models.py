"""Models and tokenizers in GGUF files whose metadata and tensors lie."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_bytes import TYPE_IDS, file_bytes, string, tensor
from gguf_checkpoints import write_gguf
from hypothesis import example, given
from hypothesis import strategies as st
from stores.checkpoints import expert_tensors

from promoe.experts.guard import is_guard
from promoe.model.gguf.tokenizer import make_tokenizer
from promoe.model.opening import open_without_experts
from promoe.model.tokenizer import load_tokenizer
from promoe.scheduler import ExpertKey
from promoe.stores.tensor_files import TensorFile

from .inputs import fuzzed, outcome
from .mutations import DEEP, LEAVES, TEXTS, damaged, mutated


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "model.gguf"


Tree = dict[str, Any]


def tree_of(path: Path) -> tuple[Tree, bytes]:
    """A file as a tree like JSON, and the bytes of its tensors."""
    content = path.read_bytes()
    file = TensorFile.open(path)
    file.close()
    first = min(where.offset_bytes for where in file.tensors.values())
    tensors = {
        name: {"shape": list(where.shape), "kind": where.dtype_name, "offset": where.offset_bytes - first}
        for name, where in file.tensors.items()
    }
    return {"keys": dict(file.metadata or {}), "tensors": tensors}, content[first:]


def of_tree(tree: Any, content: bytes) -> bytes:
    """The file of a tree. What GGUF cannot say is left out."""
    tree = tree if isinstance(tree, dict) else {}
    keys, tensors = tree.get("keys"), tree.get("tensors")
    entries = []
    for name, one in tensors.items() if isinstance(tensors, dict) else ():
        if not isinstance(one, dict):
            continue
        shape, kind, offset = one.get("shape"), one.get("kind"), one.get("offset")
        shape = [size % 2**64 for size in shape if type(size) is int] if isinstance(shape, list) else []
        number = TYPE_IDS.get(kind, 99) if isinstance(kind, str) else kind % 2**32 if type(kind) is int else 0
        place = offset % 2**64 if type(offset) is int else 0
        entries.append(tensor(_text(name).decode("utf-8", "ignore"), shape, number, place))
    written = [_key(name, one) for name, one in (keys.items() if isinstance(keys, dict) else ())]
    return file_bytes([one for one in written if one is not None], entries, content)


def _text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _key(name: str, value: Any) -> bytes | None:
    found = _value(value)
    return None if found is None else string(_text(name)) + struct.pack("<I", found[0]) + found[1]


def _value(value: Any) -> tuple[int, bytes] | None:
    """The number of a type, and the value."""
    if isinstance(value, bool):
        return 7, bytes([value])
    if isinstance(value, int):
        return (4, struct.pack("<I", value)) if 0 <= value < 2**32 else (11, struct.pack("<q", value % 2**63))
    if isinstance(value, float):
        return 12, struct.pack("<d", value)
    if isinstance(value, str):
        return 8, string(_text(value))
    if isinstance(value, list):
        parts = [found for found in map(_value, value) if found is not None]
        kind = parts[0][0] if parts else 4
        same = [content for one, content in parts if one == kind]
        return 9, struct.pack("<IQ", kind, len(same)) + b"".join(same)
    return None


SMALL = st.one_of(
    st.integers(-2, 70), st.booleans(), st.sampled_from(("", "x", "qwen2moe", "llama", "gpt2", "yarn", [], 0.5, 2**40, 2**62)),
    st.sampled_from(TEXTS), st.lists(LEAVES, max_size=3),
)  # fmt: skip
SIZES = {"hidden": 32, "intermediate": 32, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("fuzz"), "qwen3_moe", weight_type="Q8_0", **SIZES)


@pytest.fixture(scope="module")
def tree(model: Path) -> tuple[Tree, bytes]:
    return tree_of(model)


def opened(path: Path) -> dict[str, torch.Tensor]:
    """Everything but the experts, and that the experts can be read."""
    found = open_without_experts(path)
    try:
        for layer in found.layers:
            for expert_idx in range(layer.num_experts):
                expert_tensors(found.store, ExpertKey(layer.layer_idx, expert_idx))
        return {name: one for name, one in found.model.state_dict().items() if not is_guard(one)}
    finally:
        found.store.close()


def check_model(target: str, path: Path, content: bytes) -> None:
    path.write_bytes(content)
    outcome(target, lambda: opened(path))


@fuzzed(40)
@given(data=st.data())
def test_models(path: Path, tree: tuple[Tree, bytes], data: st.DataObject) -> None:
    """Values of keys, and entries of tensors, replaced, dropped, renamed and exchanged."""
    whole, content = tree
    check_model("gguf model", path, of_tree(data.draw(mutated(whole, SMALL)), content))


def test_the_whole_model_is_opened(path: Path, tree: tuple[Tree, bytes], model: Path) -> None:
    path.write_bytes(of_tree(*tree))
    found, expected = opened(path), opened(model)
    assert all(torch.equal(found[name], one) for name, one in expected.items())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_count", 2**31),
        ("block_count", 100),
        ("block_count", [2, 2]),
        ("expert_count", 2**31),
        ("expert_count", 2**62),
        ("expert_used_count", 2**31),
        ("embedding_length", 2**40),
        ("attention.head_count", 0),
        ("attention.head_count", [4, 0]),
        ("attention.head_count_kv", 3),
        ("attention.key_length", 2**31),
        ("feed_forward_length", 2**62),
        ("expert_feed_forward_length", 0),
        ("context_length", 2**62),
        ("rope.freq_base", float("nan")),
        ("rope.freq_base", 0.0),
        ("rope.scaling.type", "yarn"),
        ("rope.scaling.factor", float("inf")),
        ("attention.layer_norm_rms_epsilon", "x"),
        ("expert_gating_func", 99),
    ],
)
def test_sizes_that_lie(path: Path, tree: tuple[Tree, bytes], name: str, value: Any) -> None:
    whole, content = tree
    keys = {**whole["keys"], f"qwen3moe.{name}": value}
    check_model("gguf model", path, of_tree({**whole, "keys": keys}, content))


@fuzzed(40)
@given(data=st.data())
def test_scales_of_any_kind(path: Path, tree: tuple[Tree, bytes], data: st.DataObject) -> None:
    """Bytes of the tensors, among them NaN and infinite scales: whatever they are, they are weights."""
    whole, content = tree
    path.write_bytes(of_tree(whole, data.draw(damaged(content)).ljust(len(content), b"\xff")))
    assert outcome("gguf weights", lambda: opened(path)) is not None


TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": ["a", "b", "Ġ", "Ġa", "ab", "<|end|>", "<x>", "▁", "<0x41>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 1, 1, 3, 4, 1, 6],
    "tokenizer.ggml.scores": [0.0, -1.0, -2.0, -3.0, -4.0, 0.0, 0.0, -5.0, 0.0],
    "tokenizer.ggml.merges": ["Ġ a", "a b"],
    "tokenizer.ggml.bos_token_id": 5,
    "tokenizer.ggml.eos_token_id": 5,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.add_space_prefix": True,
    "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
}


def check_tokenizer(metadata: Any) -> None:
    def encode() -> Any:
        made = make_tokenizer(Path("model.gguf"), metadata if isinstance(metadata, dict) else {})
        ids = made("ab a<|end|><x>A\ud7ff ä")["input_ids"]
        return made.decode(ids)

    outcome("gguf tokenizer", encode)


@fuzzed(150)
@given(metadata=mutated(TOKENIZER | {"tokenizer.ggml.model": "gpt2"}, SMALL))
@example(metadata={**TOKENIZER, "tokenizer.ggml.tokens": ["a"] * 9})
@example(metadata={**TOKENIZER, "tokenizer.ggml.tokens": [""] * 9})
@example(metadata={**TOKENIZER, "tokenizer.ggml.merges": ["a b"] * 9})
@example(metadata={**TOKENIZER, "tokenizer.ggml.bos_token_id": 2**63})
@example(metadata={**TOKENIZER, "tokenizer.ggml.bos_token_id": -1})
def test_byte_level_tokenizers(metadata: Any) -> None:
    check_tokenizer(metadata)


@fuzzed(100)
@given(metadata=mutated({**TOKENIZER, "tokenizer.ggml.model": "llama"}, SMALL))
@example(
    metadata={"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["x" * DEEP], "tokenizer.ggml.scores": [0.0]}
)
@example(
    metadata={
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["x" * length for length in range(1, 600)],
        "tokenizer.ggml.scores": [float("nan")] * 599,
    }
)
def test_sentencepiece_tokenizers(metadata: Any) -> None:
    check_tokenizer(metadata)


@fuzzed(60)
@given(data=st.data())
def test_tokenizers_of_files(path: Path, tree: tuple[Tree, bytes], data: st.DataObject) -> None:
    whole, content = tree
    keys = data.draw(mutated(whole["keys"], SMALL, most=2))
    path.write_bytes(of_tree({**whole, "keys": keys}, content))
    outcome("gguf tokenizer", lambda: load_tokenizer(str(path))("What is it?"))
