"""The first blocks of a model with made-up weights, to be timed where the model itself is not to be opened.

Blocks, head and embedding are the model's own modules with as many parameters; experts are slots that hold made-up ones,
run as promoe runs them. Only what takes time is as in the model, not what comes out.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from promoe.errors import UnsupportedModelError
from promoe.experts.adapters.base import get_tensor
from promoe.experts.kernels.formats import Formats
from promoe.experts.layer_call import LayerCall
from promoe.experts.moe_layers import MoELayer, find_moe_layers
from promoe.experts.routed_ids import chosen_experts
from promoe.model.attach import attach
from promoe.stores.layout import ExpertLayout, TensorSpec
from promoe.transfer.memory import SlotPool

# Of made-up experts; more than a processor's caches hold.
EXPERTS_BYTES = 2**30
FEWEST_BLOCKS, FEWEST_MOE_LAYERS = 4, 2
PATTERN_ELEMENTS = 2**20
SPREAD = 0.02


class Timed(NamedTuple):
    """What a pass took."""

    pass_s: float
    others_s: float
    """Of the whole model, without its routed experts: blocks that were left out take as long as those like them."""
    experts_s: float
    """Of the routed experts in the blocks that there are."""
    experts_used: int
    """In these blocks."""
    experts_bytes: int
    """Of their weights."""
    pairs: int
    """Of tokens and experts, in these blocks."""


class StandIn:
    """A model of few blocks that can be run and timed.

    Args:
        model: on the meta device; its blocks beyond those that are kept are taken from it, and it is filled.
        layers: its MoE layers.
        experts_bytes: that made-up experts may take.
        formats: of the experts in their slots.

    Attributes:
        model: to be called.
        layers: its MoE layers.
        blocks: those that are kept.
        num_blocks: of the whole model.
        num_layers: MoE layers of the whole model.
        packed: whether experts are.
        layer_s: least seconds that everything but experts took for each MoE layer here and one token.
        pause_s: sleep so long before each expert, which is then run by itself; None: all at once.

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
        del self.blocks[_kept(kinds, [layer.name for layer in layers], _path_of(model, self.blocks)) :]
        config = model.config.get_text_config()
        # Not the number of blocks: one of LongCat-Flash's has two layers for the KV cache.
        config.num_hidden_layers = config.num_hidden_layers * len(self.blocks) // self.num_blocks
        self.model: Any = model
        self.layers = find_moe_layers(model, allow_meta=True)
        _fill(model, {id(get_tensor(layer.experts, path)) for layer in self.layers for path in layer.paths})
        self._pools = _filled_pools(self.layers, experts_bytes, formats)
        self.packed = any(formats.get(layer.layout) for layer in self.layers)
        self.pause_s: float | None = None
        self.layer_s = math.inf
        self._experts_s, self._experts_used, self._experts_bytes, self._pairs = 0.0, 0, 0, 0
        self._blocks_s = [0.0] * len(self.blocks)
        self._undo = ExitStack()
        for layer in self.layers:
            self._undo.callback(attach(layer, self._run(layer), lambda *args: None))
        for idx, block in enumerate(self.blocks):
            self._undo.callback(self._time(idx, block))

    def run(self, ids: torch.Tensor, cache: Any = None) -> tuple[Any, Timed]:
        """One pass over tokens `[1, num_tokens]` after those of `cache`; returns the cache after it, and times."""
        self._experts_s, self._experts_used, self._experts_bytes, self._pairs = 0.0, 0, 0, 0
        start_s = time.perf_counter()
        with torch.inference_mode():
            cache = self.model(input_ids=ids, past_key_values=cache, use_cache=True).past_key_values
        pass_s = time.perf_counter() - start_s
        by_kind: dict[Any, list[float]] = {}
        for kind, seconds in zip(self._kinds, self._blocks_s, strict=False):
            by_kind.setdefault(kind, []).append(seconds)
        all_blocks_s = sum(sum(by_kind[kind]) / len(by_kind[kind]) for kind in self._kinds)
        around_s = pass_s - self._experts_s - sum(self._blocks_s)
        others_s = around_s + all_blocks_s
        return cache, Timed(pass_s, others_s, self._experts_s, self._experts_used, self._experts_bytes, self._pairs)

    def release(self) -> None:
        """Give the memory of made-up experts back, and leave the model to others; it cannot be run here any more."""
        self._undo.close()
        for pool in self._pools.values():
            pool.close()

    close = release

    def _run(self, layer: MoELayer) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        def run(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            start_s = time.perf_counter()
            tokens, ids = chosen_experts(index)
            ids = [idx for idx in ids if idx < layer.num_experts]
            rows = self._rows(layer.layer_idx, ids)
            call = LayerCall(layer, hidden, index, weights, tokens)
            result = call.run_resident(rows) if self.pause_s is None else call.run_groups(self._one_by_one(rows))
            self._experts_s += time.perf_counter() - start_s
            self._experts_used += len(ids)
            self._experts_bytes += len(ids) * layer.layout.payload_bytes
            self._pairs += index.numel()
            return result

        return run

    def _rows(self, layer_idx: int, ids: Sequence[int]) -> dict[int, Any]:
        """Expert id -> tensors of a made-up expert; each has slots of its own as far as they go."""
        layer = self.layers[layer_idx]
        pool, first = self._pools[layer.layout], layer_idx * layer.num_experts
        return {idx: pool.tensors((first + idx) % pool.num_slots) for idx in ids}

    def _one_by_one(self, rows: dict[int, Any]) -> Iterator[dict[int, Any]]:
        for expert_idx, row in rows.items():
            time.sleep(self.pause_s or 0.0)
            yield {expert_idx: row}

    def _time(self, idx: int, block: nn.Module) -> Callable[[], None]:
        """Note what a block takes without its experts."""
        begun: list[tuple[float, float]] = []

        def begin(*_: Any) -> None:
            begun.append((time.perf_counter(), self._experts_s))

        def end(*_: Any) -> None:
            start_s, experts_s = begun.pop()
            self._blocks_s[idx] = time.perf_counter() - start_s - (self._experts_s - experts_s)

        handles = [block.register_forward_pre_hook(begin), block.register_forward_hook(end)]

        def undo() -> None:
            for handle in handles:
                handle.remove()

        return undo


def blocks_of(model: nn.Module, layers: Sequence[MoELayer]) -> nn.ModuleList:
    """The list of decoder layers that all MoE layers are in.

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
    """What makes blocks alike: the parameters that they have, and the kind of attention."""
    types = getattr(model.config.get_text_config(), "layer_types", None)
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())
    return (types[idx] if types is not None and idx < len(types) else None, shapes)


def _kept(kinds: Sequence[Any], names: Sequence[str], path: str) -> int:
    """How many of the first blocks: all kinds must be among them, some of each of MoE layers."""
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
    """Random numbers near zero, repeated: quicker than to draw them all."""
    result = torch.zeros(shape, dtype=dtype)
    if dtype.is_floating_point:
        flat, pattern = result.view(-1), _pattern(dtype)
        for part in flat.split(len(pattern)):
            part.copy_(pattern[: len(part)])
    return result


def _pattern(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (SPREAD * torch.randn(PATTERN_ELEMENTS, generator=generator)).to(dtype)


def _filled_pools(layers: Sequence[MoELayer], nbytes: int, formats: Formats) -> dict[ExpertLayout, SlotPool]:
    """Made-up experts of each shape: no more than the layers have, and at least as many as a token uses."""
    counts: dict[ExpertLayout, int] = {}
    for layer in layers:
        counts[layer.layout] = counts.get(layer.layout, 0) + layer.num_experts
    fewest, pools = max(layer.top_k or 1 for layer in layers), {}
    for layout, count in counts.items():
        num_slots = max(fewest, min(count, nbytes // len(counts) // layout.slot_bytes))
        pools[layout] = SlotPool(layout.in_formats(formats.get(layout, {})), num_slots)
        _fill_slots(pools[layout])
    return pools


def _fill_slots(pool: SlotPool) -> None:
    for spec in pool.layout.tensors:
        made_up = _made_up(spec)
        for slot in range(pool.num_slots):
            memory = torch.frombuffer(pool.slot(slot), dtype=torch.uint8)
            memory[spec.offset_bytes : spec.end_bytes].copy_(made_up)


def _made_up(spec: TensorSpec) -> torch.Tensor:
    """Return the bytes of one made-up tensor as it lies in a slot."""
    count, pattern = math.prod(spec.shape), _pattern(spec.dtype)
    elements = pattern.repeat(-(-count // len(pattern)))[:count]
    if spec.format is not None:
        return spec.format.pack(elements.view(spec.shape))
    return elements.view(torch.uint8)


def token_ids(model: Any, count: int) -> torch.Tensor:
    """Some `[1, count]`, different from each other as far as the vocabulary goes."""
    vocabulary = model.config.get_text_config().vocab_size
    return torch.tensor([list(itertools.islice(_spread(vocabulary), count))])


def _spread(vocabulary: int) -> Iterator[int]:
    for number in itertools.count(1):
        yield number * 7919 % vocabulary
