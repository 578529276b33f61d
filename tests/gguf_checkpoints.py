"""Tiny random MoE models in GGUF files, written as llama.cpp's converter writes them, with the `gguf` package.

How each family is converted stands in `gguf_converters`, which knows nothing of how promoe reads such files.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf_converters import CONVERTERS, Converter
from tiny_models import spread_weights
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

# Where a block of a type has its scale and its minimum (fp16), of those that `gguf.quants.quantize` cannot write.
_SCALES = {
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)},
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"), (0,)),
}
_SPECIAL = ["<|end|>", "<|human|>", "<|gpt|>"]
_MERGES = [("Ġ", "t"), ("h", "e"), ("i", "n"), ("Ġt", "he"), ("a", "n"), ("r", "e")]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|human|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|gpt|>{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer in the files: bytes, a few merges and three special tokens, as GPT-2 has them."""
    vocabulary = {token: idx for idx, token in enumerate(_tokens())}
    bpe = Tokenizer(models.BPE(vocabulary, merges=_MERGES))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|end|>",
        pad_token="<|end|>",
        extra_special_tokens={"human_token": "<|human|>", "gpt_token": "<|gpt|>"},
        chat_template=CHAT_TEMPLATE,
    )


def _tokens() -> list[str]:
    return _SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(pair) for pair in _MERGES]


def tiny_model(
    family: str, *, hidden: int = 64, intermediate: int = 32, seed: int = 0, **fields: Any
) -> PreTrainedModel:
    """The model that `write_gguf` writes: in fp32, in eval mode.

    Args:
        family: one of `CONVERTERS`, named for its `model_type` in Transformers.
        hidden: hidden size; a multiple of 256 for K types.
        intermediate: of one expert; a multiple of 256 for K types.
        seed: of the weights.
        fields: further fields of the configuration.
    """
    config = AutoConfig.for_model(
        CONVERTERS[family].model_type,
        **{
            "vocab_size": len(_tokens()),
            "hidden_size": hidden,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "bos_token_id": None,
            "eos_token_id": 0,
            "pad_token_id": 0,
            "tie_word_embeddings": False,
            **CONVERTERS[family].fields(hidden, intermediate),
            **fields,
        },
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    spread_weights(model, seed)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.8, 1.2, generator=torch.Generator().manual_seed(seed))
    return model.eval()


def write_gguf(
    folder: Path,
    family: str,
    *,
    weight_type: str = "BF16",
    expert_type: str | None = None,
    types: Mapping[str, str] | None = None,
    parts: int = 1,
    **fields: Any,
) -> Path:
    """Write a tiny model as a GGUF file, or several.

    Args:
        folder: where to; it is made.
        family: one of `CONVERTERS`, named for its `model_type` in Transformers.
        weight_type: the ggml type of matrices ("F32", "BF16", "Q8_0", "Q4_K", ...). Types that the `gguf` package cannot
            quantise to get random blocks. Rows that are no whole number of blocks are in F16, norms and gates in F32.
        expert_type: that of routed experts; by default `weight_type`.
        types: of tensors whose names have a part, such as "blk.1.ffn_down_exps", if they differ from these.
        parts: number of files.
        fields: of `tiny_model`.

    Returns:
        The path of the file, or of the first part.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if gguf.GGML_QUANT_SIZES[GGMLQuantizationType[expert_type or weight_type]][0] == 256:
        fields = {"hidden": 256, "intermediate": 256, **fields}
    model = tiny_model(family, **fields)
    converter = CONVERTERS[family]
    tensors = dict(converted(converter, model, dict(model.state_dict())))
    tensors |= converter.unused(model.config, tensors)
    per_part = -(-len(tensors) // parts) if parts > 1 else 0
    path = folder / f"tiny-{family.replace(' ', '-')}-{expert_type or weight_type}.gguf"
    writer = GGUFWriter(path, converter.architecture, split_max_tensors=per_part)
    converter.metadata(model.config, writer)
    _add_tokenizer(writer)
    for position, (name, tensor) in enumerate(tensors.items()):
        kind = _type_of(name, tensor, weight_type, expert_type or weight_type, types or {})
        values = converter.computed(name, tensor).contiguous().numpy()
        writer.add_tensor(name, _encoded(values, kind, seed=position), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(folder.glob(f"{path.stem}*.gguf"))


def converted(
    converter: Converter, model: PreTrainedModel, state_dict: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a GGUF file, by name, before any arithmetic on them."""
    config = model.config
    names = gguf.get_tensor_name_map(converter.arch, converter.block_count(config))
    for name, tensor in state_dict.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for one, value in converter.tensors(config, name, tensor):
            found = one if one.startswith("blk.") else names.get_name(one, try_suffixes=(".weight", ".bias"))
            if found is None:
                raise ValueError(f"{converter.architecture} has no tensor for {one!r}")
            yield found, value


def read_gguf(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file and of the parts beside it, dequantised by the `gguf` package, in fp32."""
    parts = [path] if "-of-" not in path.stem else sorted(path.parent.glob(path.stem.split("-0000")[0] + "-*.gguf"))
    found = {}
    for part in parts:
        for tensor in GGUFReader(part).tensors:
            shape = tuple(int(size) for size in reversed(tensor.shape))
            values = gguf.dequantize(np.array(tensor.data), tensor.tensor_type)
            found[tensor.name] = torch.from_numpy(values.astype(np.float32)).reshape(shape)
    return found


def dequantised_model(path: Path, family: str, dtype: torch.dtype, **fields: Any) -> PreTrainedModel:
    """Return the tiny model with the weights that a file of `write_gguf` has, each rounded once to `dtype`.

    Which element of the model each element of the file is, is found by converting indices in place of weights.
    """
    if any(tensor.tensor_type in _OF_256 for tensor in GGUFReader(path).tensors):
        fields = {"hidden": 256, "intermediate": 256, **fields}
    model, converter = tiny_model(family, **fields), CONVERTERS[family]
    state_dict = dict(model.state_dict())
    sizes = [tensor.numel() for tensor in state_dict.values()]
    places = torch.arange(sum(sizes)).split(sizes)
    numbered = {
        name: place.view(tensor.shape) for place, (name, tensor) in zip(places, state_dict.items(), strict=True)
    }
    flat = torch.full((sum(sizes),), torch.nan)
    in_file = read_gguf(path)
    for name, where in converted(converter, model, numbered):
        flat[where.reshape(-1)] = converter.computed_back(name, in_file[name]).reshape(-1)
    with torch.no_grad():
        for values, (name, tensor) in zip(flat.split(sizes), state_dict.items(), strict=True):
            if name == "lm_head.weight" and model.config.tie_word_embeddings:
                continue
            assert not values.isnan().any(), name
            tensor.copy_(values.view(tensor.shape))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        for tensor in (*loaded.parameters(), *loaded.buffers()):
            tensor.data = tensor.data.clone()  # mapped tensors are not aligned
    return loaded


_OF_256 = {kind for kind, (elements, _) in gguf.GGML_QUANT_SIZES.items() if elements == 256}


def _type_of(
    name: str, tensor: torch.Tensor, weight_type: str, expert_type: str, types: Mapping[str, str]
) -> GGMLQuantizationType:
    if (
        tensor.dim() < 2
        or "_norm." in name
        or "ffn_gate_inp" in name
        or name.endswith(".bias")
        or ".ssm_conv" in name
        or name.endswith((".ssm_a", ".ssm_d", ".scale"))
    ):
        return GGMLQuantizationType.F32
    usual = expert_type if "_exps." in name else weight_type
    kind = GGMLQuantizationType[next((kind for part, kind in types.items() if part in name), usual)]
    return kind if tensor.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0 else GGMLQuantizationType.F16


def _encoded(values: np.ndarray, kind: GGMLQuantizationType, seed: int) -> np.ndarray:
    if kind.name not in _SCALES:
        return gguf.quantize(values, kind)
    elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (values.size // elements, nbytes), dtype=np.uint8)
    scale, *minimum = _SCALES[kind.name]
    _set_half(blocks, scale, np.ones(len(blocks)))
    for where in minimum:
        _set_half(blocks, where, np.zeros(len(blocks)))
    # The spread of each block is that of the values in its place; minima are about the mean.
    units = gguf.dequantize(blocks, kind)
    wanted = values.reshape(units.shape).std(1) / np.maximum(units.std(1), 1e-3)
    _set_half(blocks, scale, wanted)
    if minimum:
        _set_half(blocks, minimum[0], np.ones(len(blocks)))
        offset = (units - gguf.dequantize(_with_half(blocks, scale, np.ones(len(blocks))), kind)).mean(1)
        _set_half(blocks, minimum[0], wanted * units.mean(1) / np.maximum(offset, 1e-3))
    return blocks.reshape(*values.shape[:-1], -1)


def _set_half(blocks: np.ndarray, where: int, values: np.ndarray) -> None:
    blocks[:, where : where + 2] = values.astype(np.float16).reshape(-1, 1).view(np.uint8)


def _with_half(blocks: np.ndarray, where: int, values: np.ndarray) -> np.ndarray:
    blocks = blocks.copy()
    _set_half(blocks, where, values)
    return blocks


def _add_tokenizer(writer: GGUFWriter) -> None:
    tokens = _tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in _SPECIAL else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in _MERGES])
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
