"""Fields that the configurations of several families have."""

from __future__ import annotations

from typing import Any

from promoe.errors import shown

from .file import File


def common_fields(file: File, key_value_heads: int | None = None) -> dict[str, Any]:
    """Return the fields that the configurations of all families have.

    Args:
        file: the file.
        key_value_heads: their number, if layers differ in it.
    """
    heads = file.positive("attention.head_count")
    return {
        "vocab_size": file.rows("token_embd.weight"),
        "hidden_size": file.positive("embedding_length"),
        "num_hidden_layers": file.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads or file.positive("attention.head_count_kv", heads),
        "max_position_embeddings": file.whole("context_length"),
        "rms_norm_eps": file.real("attention.layer_norm_rms_epsilon"),
        # llama.cpp writes the output projection only if it is not the embedding.
        "tie_word_embeddings": "output.weight" not in file.shapes,
        **{f"{name}_token_id": file.token(key) for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))},
    }


def head_dim(file: File) -> int:
    """Return the size of one attention head."""
    heads, hidden = file.positive("attention.head_count"), file.positive("embedding_length")
    size = file.positive("attention.key_length", hidden // heads)
    file.refuse_unless("attention.value_length", (size,), f"but keys have {size} elements per head")
    return size


def attention_layers(file: File) -> tuple[list[bool], int]:
    """Return which layers have attention, and how many heads of keys these have. The others have none in the file."""
    counts = file.wholes("attention.head_count_kv")
    found = {count for count in counts if count}
    if len(counts) != file.num_layers or len(found) != 1:
        raise file.error(
            f"attention.head_count_kv is {shown(counts)}, but one number per layer was expected, 0 or the same"
        )
    return [bool(count) for count in counts], found.pop()


def expert_size(file: File) -> int:
    """Return the intermediate size of one expert. Without the key, experts share the size of a dense layer."""
    used = max(file.whole("expert_used_count"), 1)
    return file.whole("expert_feed_forward_length", file.whole("feed_forward_length", 0) // used)


def rope(file: File, rotated: int | None = None) -> dict[str, Any]:
    """Return the `rope_parameters` of a configuration.

    Args:
        file: the file.
        rotated: how many elements of a head are rotated, if all files of the family rotate as many; None: any number.
    """
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": file.real("rope.freq_base", 10000.0)}
    if found["rope_theta"] <= 1.0:
        raise file.error(f"rope.freq_base is {found['rope_theta']}, but a number above 1 was expected")
    if rotated is not None:
        file.refuse_unless("rope.dimension_count", (rotated,), f"but {rotated} was expected: the whole head")
    factor = file.real("rope.scaling.factor", file.real("rope.scale_linear", 0.0)) or 1.0
    kind = file.text("rope.scaling.type", "linear")
    if kind == "yarn":
        for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"):
            file.refuse_unless(key, (1.0,), "which Transformers and llama.cpp take for different things")
        found |= {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": file.positive(
                "rope.scaling.original_context_length", file.whole("context_length")
            ),
            "beta_fast": file.real("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": file.real("rope.scaling.yarn_beta_slow", 1.0),
        }
        if min(factor, found["beta_fast"], found["beta_slow"]) <= 0.0:
            raise file.error("the numbers of rope.scaling are not all above 0")
    elif kind == "linear" and factor != 1.0:
        found |= {"rope_type": "linear", "factor": factor}
    elif kind not in ("linear", "none"):
        raise file.error(f"rope.scaling.type is {kind!r}, but none, linear or yarn was expected")
    return found
