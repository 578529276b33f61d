"""The first blocks of a model with made-up weights, to be timed where the model itself is not opened.

Blocks, head and embedding are the model's own modules with as many parameters; experts are slots that hold made-up ones,
run as promoe runs them. The times are those of the model, the output is not.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from promoe.errors import UnsupportedModelError
from promoe.experts.adapters.base import get_tensor
from promoe.experts.kernels.fast import FastProducts
from promoe.experts.kernels.formats import Formats, form_in_words
from promoe.experts.layer_call import LayerCall
from promoe.experts.moe_layers import MoELayer, find_moe_layers
from promoe.experts.routed_ids import chosen_experts
from promoe.model.attach import attach
from promoe.stores.layout import ExpertLayout, TensorSpec
from promoe.transfer.memory import SlotPool

# Bytes of made-up experts: more than a processor's caches hold.
EXPERTS_BYTES = 2**30
FEWEST_BLOCKS, FEWEST_MOE_LAYERS = 4, 2
PATTERN_ELEMENTS = 2**20
SPREAD = 0.02


@dataclass
class Timed:
    """What a pass took, in seconds, and what it ran.

    Args:
        pass_s: the whole pass.
        others_s: the whole model without its routed experts: blocks that were left out take as long as those like them.
        experts_s: the routed experts in the blocks that there are.
        experts_used: how many these were.
        experts_bytes: the bytes of their weights, as they lie in slots.
        pairs: pairs of a token and an expert in these blocks.
    """

    pass_s: float = 0.0
    others_s: float = 0.0
    experts_s: float = 0.0
    experts_used: int = 0
    experts_bytes: int = 0
    pairs: int = 0


class StandIn:
    """A model of few blocks that can be run and timed.

    Args:
        model: on the meta device. It loses the blocks that are not kept, and the others are filled.
        layers: its MoE layers.
        experts_bytes: bytes that made-up experts may take.
        formats: formats of the experts in their slots.

    Attributes:
        model: the model to be called.
        layers: its MoE layers.
        blocks: the blocks that are kept.
        num_blocks: blocks of the whole model.
        num_layers: MoE layers of the whole model.
        form: the form of the experts, in words; empty: plain.
        layer_s: least seconds that everything but experts took for each MoE layer here and one token.
        pause_s: seconds of sleep before each expert, which is then run by itself; None: all are run at once.
        with_experts: whether the routed experts are run; else they give zeros.
        fast: makes their products in the way that takes least time; None: the exact ones are made.

    Raises:
        UnsupportedModelError: the model has no one list of blocks.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[MoELayer],
        experts_bytes: int = EXPERTS_BYTES,
        formats: Formats = MappingProxyType({}),
    ) -> None:
        self.blocks = blocks_of(model, layers)
        self.num_blocks, self.num_layers = len(self.blocks), len(layers)
        kinds = [_kind(model, idx, block) for idx, block in enumerate(self.blocks)]
        self._kinds = kinds
        del self.blocks[_num_kept(kinds, [layer.name for layer in layers], _path_of(model, self.blocks)) :]
        config = model.config.get_text_config()
        # Not the number of blocks: one of LongCat-Flash's has two layers for the KV cache.
        config.num_hidden_layers = config.num_hidden_layers * len(self.blocks) // self.num_blocks
        if (types := vars(config).get("layer_types")) is not None:  # a paged KV cache has room for all that it names
            config.layer_types = types[: config.num_hidden_layers]
        self.model: Any = model
        self.layers = find_moe_layers(model, allow_meta=True)
        _fill(model, {id(get_tensor(layer.experts, path)) for layer in self.layers for path in layer.paths})
        self._pools = _filled_pools(self.layers, experts_bytes, formats)
        self.form = form_in_words((pool.layout, 1) for pool in self._pools.values())
        self.pause_s: float | None = None
        self.with_experts = True
        self.fast: FastProducts | None = None
        self.layer_s = math.inf
        self._timed = Timed()
        self._blocks_s = [0.0] * len(self.blocks)
        self._undo = ExitStack()
        for layer in self.layers:
            self._undo.callback(attach(layer, self._run(layer), lambda *args: None))
        for idx, block in enumerate(self.blocks):
            self._undo.callback(self._time_block(idx, block))

    def run(self, ids: torch.Tensor, cache: Any = None) -> tuple[Any, Timed]:
        """Run tokens `[1, num_tokens]` after those of `cache`, and return the cache after it, and times."""
        self.begin()
        start_s = time.perf_counter()
        with torch.inference_mode():
            cache = self.model(input_ids=ids, past_key_values=cache, use_cache=True).past_key_values
        return cache, self.end(time.perf_counter() - start_s)

    def begin(self) -> None:
        """Forget the last pass: one begins."""
        self._timed = Timed()

    def end(self, pass_s: float) -> Timed:
        """Return the times of the pass that began last, and took so long."""
        timed = self._timed
        timed.pass_s = pass_s
        by_kind: dict[Any, list[float]] = {}
        for kind, seconds in zip(self._kinds, self._blocks_s, strict=False):
            by_kind.setdefault(kind, []).append(seconds)
        all_blocks_s = sum(sum(by_kind[kind]) / len(by_kind[kind]) for kind in self._kinds)
        timed.others_s = timed.pass_s - timed.experts_s - sum(self._blocks_s) + all_blocks_s
        return timed

    def close(self) -> None:
        """Give the memory of made-up experts back, and leave the model to others; it cannot be run here any more."""
        self._undo.close()
        for pool in self._pools.values():
            pool.close()

    def _run(self, layer: MoELayer) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        def run(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            if not self.with_experts:
                return torch.zeros_like(hidden)
            start_s = time.perf_counter()
            tokens, ids = chosen_experts(index)
            ids = [idx for idx in ids if idx < layer.num_experts]
            rows = self._rows(layer.layer_idx, ids)
            call = LayerCall(layer, hidden, index, weights, tokens, fast=self.fast)
            result = call.run_resident(rows) if self.pause_s is None else call.run_groups(self._one_by_one(rows))
            self._timed.experts_s += time.perf_counter() - start_s
            self._timed.experts_used += len(ids)
            self._timed.experts_bytes += len(ids) * self._pools[layer.layout].layout.payload_bytes
            self._timed.pairs += index.numel()
            return result

        return run

    def _rows(self, layer_idx: int, ids: Sequence[int]) -> dict[int, Any]:
        """Return the tensors of a made-up expert for each id; each has a slot of its own as far as they go."""
        layer = self.layers[layer_idx]
        pool, first = self._pools[layer.layout], layer_idx * layer.num_experts
        return {idx: pool.tensors((first + idx) % pool.num_slots) for idx in ids}

    def _one_by_one(self, rows: dict[int, Any]) -> Iterator[dict[int, Any]]:
        for expert_idx, row in rows.items():
            time.sleep(self.pause_s or 0.0)
            yield {expert_idx: row}

    def _time_block(self, idx: int, block: nn.Module) -> Callable[[], None]:
        """Note the seconds that a block takes without its experts; return what undoes this."""
        begun: list[tuple[float, float]] = []

        def begin(*_: Any) -> None:
            begun.append((time.perf_counter(), self._timed.experts_s))

        def end(*_: Any) -> None:
            start_s, experts_s = begun.pop()
            self._blocks_s[idx] = time.perf_counter() - start_s - (self._timed.experts_s - experts_s)

        handles = [block.register_forward_pre_hook(begin), block.register_forward_hook(end)]

        def undo() -> None:
            for handle in handles:
                handle.remove()

        return undo


def blocks_of(model: nn.Module, layers: Sequence[MoELayer]) -> nn.ModuleList:
    """Return the list of decoder layers that all MoE layers are in.

    Raises:
        UnsupportedModelError: there is none.
    """
    parts = [layer.name.split(".") for layer in layers]
    for end in range(1, min(map(len, parts))):
        path = ".".join(parts[0][:end])
        found = model.get_submodule(path)
        if isinstance(found, nn.ModuleList) and all(one[:end] == parts[0][:end] for one in parts):
            return found
    raise UnsupportedModelError(
        f"{type(model).__name__} does not have all of its MoE layers in one list of blocks, so that no few of them can be run "
        "alone."
    )


def _path_of(model: nn.Module, module: nn.Module) -> str:
    names: dict[nn.Module, str] = {one: name for name, one in model.named_modules()}
    return names[module]


def _kind(model: PreTrainedModel, idx: int, block: nn.Module) -> tuple[Any, ...]:
    """Return what makes blocks alike: the parameters that they have, and the kind of attention."""
    types = getattr(model.config.get_text_config(), "layer_types", None)
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())
    return (types[idx] if types is not None and idx < len(types) else None, shapes)


def _num_kept(kinds: Sequence[Any], names: Sequence[str], path: str) -> int:
    """Return how many of the first blocks are kept: enough for all kinds of blocks and for some MoE layers."""
    with_experts = [int(name.removeprefix(f"{path}.").split(".")[0]) for name in names]
    all_kinds = max(kinds.index(kind) for kind in set(kinds)) + 1
    some = with_experts[min(FEWEST_MOE_LAYERS, len(with_experts)) - 1] + 1
    return min(len(kinds), max(FEWEST_BLOCKS, all_kinds, some))


def _fill(model: nn.Module, left_out: set[int]) -> None:
    """Give every tensor on meta memory and small numbers, but for experts; tied ones stay tied."""
    made: dict[int, torch.Tensor] = {}
    with torch.inference_mode(False), torch.no_grad():
        for module in model.modules():
            for registry in (module._parameters, module._buffers):
                for name, tensor in registry.items():
                    if tensor is None or not tensor.is_meta or id(tensor) in left_out:
                        continue
                    if id(tensor) not in made:
                        filled = _small(tensor.shape, tensor.dtype)
                        made[id(tensor)] = (
                            nn.Parameter(filled, requires_grad=False) if isinstance(tensor, nn.Parameter) else filled
                        )
                    registry[name] = made[id(tensor)]  # type: ignore[assignment]


def _small(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return random numbers near zero."""
    result = torch.zeros(shape, dtype=dtype)
    if dtype.is_floating_point:
        _repeat(_pattern(dtype), result.view(-1))
    return result


def _repeat(pattern: torch.Tensor, into: torch.Tensor) -> None:
    """Fill a flat tensor with a repeated pattern: quicker than to draw all its numbers."""
    for part in into.split(len(pattern)):
        part.copy_(pattern[: len(part)])


def _pattern(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (SPREAD * torch.randn(PATTERN_ELEMENTS, generator=generator)).to(dtype)


def _filled_pools(layers: Sequence[MoELayer], nbytes: int, formats: Formats) -> dict[ExpertLayout, SlotPool]:
    """Return made-up experts of each shape: no more than the layers have, and at least as many as a token uses."""
    counts: Counter[ExpertLayout] = Counter()
    for layer in layers:
        counts[layer.layout] += layer.num_experts
    fewest, pools = max(layer.top_k or 1 for layer in layers), {}
    for layout, count in counts.items():
        num_slots = max(fewest, min(count, nbytes // len(counts) // layout.slot_bytes))
        pools[layout] = SlotPool(layout.in_formats(formats.get(layout, {})), num_slots)
        _fill_slots(pools[layout])
    return pools


def _fill_slots(pool: SlotPool) -> None:
    """Fill the slots with small numbers."""
    for spec in pool.layout.tensors:
        made_up = _made_up(spec)
        for slot in range(pool.num_slots):
            memory = torch.frombuffer(pool.slot(slot), dtype=torch.uint8)
            memory[spec.offset_bytes : spec.end_bytes].copy_(made_up)


def _made_up(spec: TensorSpec) -> torch.Tensor:
    """Return the bytes of one made-up tensor as it lies in a slot."""
    elements = torch.empty(spec.shape, dtype=spec.dtype)
    _repeat(_pattern(spec.dtype), elements.view(-1))
    return elements.view(-1).view(torch.uint8) if spec.format is None else spec.format.pack(elements)


def token_ids(model: Any, count: int) -> torch.Tensor:
    """Return some token ids `[1, count]`, different from each other as far as the vocabulary goes."""
    vocabulary = model.config.get_text_config().vocab_size
    return torch.tensor([[number * 7919 % vocabulary for number in range(1, count + 1)]])
