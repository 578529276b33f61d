"""Writes a checkpoint as a GGUF file, which llama.cpp opens. Knows two families: Qwen2-MoE and Qwen3-MoE.

Experts are read and written a layer at a time. The matrices get the type that was asked for, as llama.cpp's own
`llama-quantize` gives them: the router, the norms and the biases stay in fp32, embeddings have at least 8 bits, and a matrix
whose rows are not whole blocks keeps the type of the checkpoint.

The vocabulary has no texts (`tokenizer.ggml.model` is `none`): prompts are given as token ids.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from promoe.commands.bench.systems import EXACT
from promoe.errors import ConfigError
from promoe.experts.moe_layers import MoELayer
from promoe.model.opening import OpenedModel, open_without_experts
from promoe.scheduler import ExpertKey
from promoe.stores.base import Store, read_expert

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

Bytes = NDArray[np.uint8]

_PLAIN_TYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
# Quantised together: blocks are independent of each other, and a call for each row would take most of the time.
_ELEMENTS_PER_ROW = 4096


@dataclass(frozen=True)
class Architecture:
    """A family as llama.cpp computes it.

    Attributes:
        name: llama.cpp's name of it.
        renormalizes: whether the weights of the chosen experts are divided by their sum.
    """

    name: str
    renormalizes: bool


# build_moe_ffn of llama.cpp is called with norm_w = false in src/models/qwen2moe.cpp, with true in qwen3moe.cpp.
ARCHITECTURES = {
    "qwen2_moe": Architecture("qwen2moe", renormalizes=False),
    "qwen3_moe": Architecture("qwen3moe", renormalizes=True),
}


def architecture_of(config: Any) -> Architecture:
    """Return the architecture of a model.

    Raises:
        ConfigError: llama.cpp's files are not written for this family, or this member of it.
    """
    found = ARCHITECTURES.get(config.model_type)
    if found is None:
        raise ConfigError(
            f"GGUF files are written for {', '.join(ARCHITECTURES)}. Got a model of the family {config.model_type!r} instead. "
            "Leave llama-cpp out of --systems."
        )
    rope_type = config.rope_parameters.get("rope_type", "default")
    if rope_type != "default":
        raise ConfigError(
            f"GGUF files are written for models with plain rotary embeddings. This one has rope_type {rope_type!r}."
        )
    return found


def computes_alike(config: Any) -> bool:
    """Return whether llama.cpp computes what Transformers computes, but for rounding."""
    return bool(config.norm_topk_prob) == architecture_of(config).renormalizes


def write_gguf(checkpoint: Path, path: Path, gguf_type: str, dtype: torch.dtype) -> None:
    """Write the weights of a checkpoint into one GGUF file.

    Memory is bounded by the weights that are not experts, and one layer of experts in the file's type.

    Args:
        checkpoint: folder of the model.
        path: file to write.
        gguf_type: of the matrices: "q8_0", "q4_0", or "auto" for `dtype`.
        dtype: that the weights have before they are quantised.

    Raises:
        ConfigError: files are not written for this model.
        CheckpointError: the checkpoint cannot be read.
    """
    opened = open_without_experts(checkpoint, dtype=dtype)
    with closing(opened.store):
        _GGUF(opened, gguf_type, dtype).write(path)


class _GGUF:
    """A model on its way into a file."""

    def __init__(self, opened: OpenedModel, gguf_type: str, dtype: torch.dtype) -> None:
        from gguf import GGMLQuantizationType

        self.opened = opened
        self.config: Any = opened.model.config
        self.architecture = architecture_of(self.config)
        self._plain = GGMLQuantizationType[_PLAIN_TYPES[dtype]]
        self._wanted = self._plain if gguf_type == EXACT else GGMLQuantizationType[gguf_type.upper()]
        if len(opened.layers) != self.config.num_hidden_layers:
            raise ConfigError(
                f"GGUF files are written for models whose layers all have experts. This one has experts in "
                f"{len(opened.layers)} of {self.config.num_hidden_layers} layers."
            )

    def write(self, path: Path) -> None:
        """Write the file: first what all tensors are, then their bytes in the same order."""
        from gguf import GGUFWriter

        with closing(GGUFWriter(path, self.architecture.name)) as writer:
            self._add_config(writer)
            for name, shape in self._shapes().items():
                self._announce(writer, name, shape)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name, tensor in self._others().items():
                writer.write_tensor_data(self._encode(name, tensor))
            for layer in self.opened.layers:
                for stack in self._stacks(layer):
                    writer.write_tensor_data(stack)

    def _add_config(self, writer: GGUFWriter) -> None:
        config = self.config
        writer.add_name("promoe bench")
        writer.add_vocab_size(config.vocab_size)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        if hasattr(config, "shared_expert_intermediate_size"):
            writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
        writer.add_tokenizer_model("none")

    def _others(self) -> dict[str, torch.Tensor]:
        """Return what is not an expert, by its name in the file."""
        from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

        architecture = next(one for one in MODEL_ARCH if MODEL_ARCH_NAMES.get(one) == self.architecture.name)
        names = get_tensor_name_map(architecture, self.config.num_hidden_layers)
        experts = tuple(f"{layer.name}." for layer in self.opened.layers)
        found: dict[str, torch.Tensor] = {}
        for name, tensor in self.opened.model.state_dict().items():
            if name.startswith(experts):
                continue
            in_file = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert in_file is not None, f"{name} has no name in {self.architecture.name}"
            # The shared expert's gate [1, H] is a vector there.
            found[in_file] = tensor[0] if tensor.ndim == 2 and len(tensor) == 1 else tensor
        return found

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors by name, in the order in which they are written."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self._others().items()}
        hidden, width = self.config.hidden_size, self.config.moe_intermediate_size
        for layer in self.opened.layers:
            up, down = (layer.num_experts, width, hidden), (layer.num_experts, hidden, width)
            shapes |= zip(_stack_names(layer), (up, up, down), strict=True)
        return shapes

    def _type(self, name: str, shape: tuple[int, ...]) -> GGMLQuantizationType:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        if len(shape) == 1 or name.endswith("ffn_gate_inp.weight"):
            return GGMLQuantizationType.F32
        is_embedding = name in ("token_embd.weight", "output.weight")
        found = GGMLQuantizationType.Q8_0 if is_embedding and self._wanted != self._plain else self._wanted
        return found if shape[-1] % GGML_QUANT_SIZES[found][0] == 0 else self._plain

    def _byte_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        from gguf import GGML_QUANT_SIZES

        block, nbytes = GGML_QUANT_SIZES[self._type(name, shape)]
        return (*shape[:-1], shape[-1] // block * nbytes)

    def _announce(self, writer: GGUFWriter, name: str, shape: tuple[int, ...]) -> None:
        of_bytes = self._byte_shape(name, shape)
        # The writer derives the shape in elements from that in bytes.
        writer.add_tensor_info(name, of_bytes, np.dtype(np.uint8), math.prod(of_bytes), self._type(name, shape))

    def _encode(self, name: str, tensor: torch.Tensor) -> Bytes:
        """Return the bytes of a tensor in its type."""
        from gguf import quants

        shape = tuple(tensor.shape)
        values = tensor.detach().float().numpy().reshape(-1)
        row = math.gcd(values.size, _ELEMENTS_PER_ROW)
        if shape[-1] % 32 or row % 32:
            row = shape[-1]
        encoded: Any = quants.quantize(values.reshape(-1, row), self._type(name, shape))
        found: Bytes = np.ascontiguousarray(encoded).view(np.uint8).reshape(self._byte_shape(name, shape))
        return found

    def _stacks(self, layer: MoELayer) -> Iterator[Bytes]:
        """Yield gate, up and down of all experts of a layer."""
        width = self.config.moe_intermediate_size
        names = _stack_names(layer)
        stacks: list[Bytes] = []
        for expert_idx in range(layer.num_experts):
            rows = _read(layer, self.opened.store, expert_idx)
            gate_up, down = rows["gate_up_proj"], rows["down_proj"]
            for number, matrix in enumerate((gate_up[:width], gate_up[width:], down)):
                encoded = self._encode(names[number], matrix)
                if expert_idx == 0:
                    stacks.append(np.empty((layer.num_experts, *encoded.shape), np.uint8))
                stacks[number][expert_idx] = encoded
        yield from stacks


def _stack_names(layer: MoELayer) -> list[str]:
    """Return the names in the file of gate, up and down of a layer's experts."""
    number = layer.name.split(".")[2]  # model.layers.N.mlp.experts
    return [f"blk.{number}.ffn_{projection}_exps.weight" for projection in ("gate", "up", "down")]


def _read(layer: MoELayer, store: Store, expert_idx: int) -> dict[str, torch.Tensor]:
    """Read one expert; return its tensors by name."""
    slot = memoryview(bytearray(layer.layout.slot_bytes))
    read_expert(store, ExpertKey(layer.layer_idx, expert_idx), slot)
    return {
        spec.name: torch.frombuffer(
            slot, dtype=spec.dtype, count=spec.nbytes // spec.dtype.itemsize, offset=spec.offset_bytes
        ).view(spec.shape)
        for spec in layer.layout.tensors
    }
