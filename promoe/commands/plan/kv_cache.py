"""Finds what a model keeps of the tokens before, by asking the model itself on the meta device, where nothing is computed.

Whatever kinds of cache Transformers gives a family (all tokens, a window, a state), two passes of different length show
what each layer keeps. The experts are left out of these passes: which ones are used would have to be computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.fx.experimental import _config
from transformers import PreTrainedModel

from promoe.commands.plan.sizes import CacheLayer, KvCache
from promoe.experts.moe_layers import MoELayer
from promoe.model.attach import attach

# With it, a meta tensor counts as non-zero everywhere: as if all tokens had chosen an expert.
_SETTINGS: Any = _config
# Lengths of the two passes, less than any window.
LENGTHS = (2, 3)


def find_kv_cache(model: PreTrainedModel, layers: Sequence[MoELayer]) -> KvCache:
    """Return the KV cache of a model on the meta device, in its dtype; without layers where it cannot be found out."""
    if getattr(model.config, "is_encoder_decoder", False):
        return KvCache((), "not known for encoder-decoder models: it depends on both lengths")
    try:
        shorter, longer = ([_sizes(one) for one in _caches(model, layers, length)] for length in LENGTHS)
        found = tuple(_layer(*both) for both in zip(shorter, longer, strict=True))
    except Exception as error:  # of a family's own forward, which may want to compute what meta tensors do not have
        return KvCache((), f"not found out: the model does not run without weights ({type(error).__name__})")
    if not any(layer.token_bytes or layer.fixed_bytes for layer in found):
        return KvCache((), "not found out: the model returned an empty cache")
    return KvCache(found, "Transformers' default cache")


def _caches(model: PreTrainedModel, layers: Sequence[MoELayer], length: int) -> list[Any]:
    """Return the cache's layers after so many tokens."""
    with ExitStack() as stack, torch.inference_mode(), _SETTINGS.patch(meta_nonzero_assume_all_nonzero=True):
        for layer in layers:
            stack.callback(attach(layer, _nothing, lambda *args: None))
        ids = torch.ones((1, length), dtype=torch.long, device="meta")
        decoder: Any = model.get_decoder()  # without the parts that look for images among the tokens
        cache: Any = decoder(input_ids=ids, use_cache=True).past_key_values
    return list(cache.layers)


def _nothing(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Stand in for experts."""
    return torch.zeros_like(hidden)


def _sizes(layer: Any) -> tuple[str, int | None, list[torch.Tensor]]:
    """Return the kind of one layer of a cache, the most tokens that it keeps, and its tensors."""
    window = getattr(layer, "sliding_window", None) if getattr(layer, "is_sliding", False) else None
    tensors = [tensor for tensor in _tensors(vars(layer).values()) if tensor.is_meta and tensor.numel() > 1]
    if not type(layer).__module__.endswith(".cache_utils"):  # a family's own, which may keep more than its window
        return f"{type(layer).__name__}, at most", None, tensors
    kind = "full attention" if window is None else "sliding window"
    kind = "state" if getattr(layer, "keys", None) is None else kind
    return kind, None if window is None else window - 1, tensors


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value.values())
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _layer(shorter: Any, longer: Any) -> CacheLayer:
    (kind, most, before), (_, _, after) = shorter, longer
    first, second = (sum(tensor.nbytes for tensor in tensors) for tensors in (before, after))
    token_bytes = (second - first) // (LENGTHS[1] - LENGTHS[0])
    keys = [tensor for tensor in before if tensor.dim() == 4 and tensor.shape[-2] == LENGTHS[0]]
    heads = {int(tensor.shape[1]) for tensor in keys}
    widths = " + ".join(str(int(tensor.shape[-1])) for tensor in keys)
    head = next(iter(heads), 0)
    shape = f"{head} {'head' if head == 1 else 'heads'} x ({widths})" if len(heads) == 1 else ""
    return CacheLayer(kind, first - LENGTHS[0] * token_bytes, token_bytes, most, shape)
