"""One call, on the unmodified model and on the same model in promoe's hands: all that comes back is compared bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from served import LinkOver, check_integrity, config, plain_link, served, slots_of, stock
from torch import nn
from transformers import PreTrainedModel

import promoe
from promoe.stats.totals import Stats

FAMILY = "qwen3_moe"
SLOTS = 8  # of 24 experts: room to fetch ahead, and every prompt evicts
Call = Callable[[PreTrainedModel], Any]


def unmodified(family: str = FAMILY, implementation: str = "grouped_mm") -> PreTrainedModel:
    """The reference; the experts implementation is said each time, because other tests change it."""
    model = stock(family)
    assert not hasattr(model, "promoe")
    model.set_experts_implementation(implementation)
    return model


def assert_same(
    call: Call,
    *,
    family: str = FAMILY,
    implementation: str = "grouped_mm",
    predictor: Any = "gate",
    seed: int = 0,
    **kwargs: Any,
) -> Stats:
    """`call(model)` gives the same bits, while the model's experts come and go. Returns what was counted.

    Args:
        call: returns tensors in any nesting; the global generator is seeded before it.
        family: of the model.
        implementation: of its experts.
        predictor: of the patched model.
        seed: of the global generator.
        kwargs: more for `served`.
    """
    wanted = seeded(call, unmodified(family, implementation), seed)
    with served(family, implementation=implementation, cache=SLOTS, predictor=predictor, **kwargs) as model:
        found = seeded(call, model, seed)
        stats: Stats = model.promoe.stats()
    assert_same_bits(found, wanted)
    assert_served(stats)
    return stats


def assert_same_patched(call: Call, model: PreTrainedModel, *, seed: int = 0, **kwargs: Any) -> Stats:
    """`assert_same` for a model of the caller's, which is patched for that long and must not be patched before."""
    wanted = seeded(call, copy.deepcopy(model), seed)
    with patched(model, **kwargs):
        found = seeded(call, model, seed)
        stats: Stats = model.promoe.stats()
    assert_same_bits(found, wanted)
    assert_served(stats)
    return stats


@contextmanager
def patched(
    model: PreTrainedModel, *, cache: str | int = SLOTS, predictor: Any = "gate", **fields: Any
) -> Iterator[None]:
    """A model in promoe's hands, its free slots full of NaN."""
    link = LinkOver(plain_link)
    promoe.patch(model, cache=slots_of(model, cache), predictor=predictor, link=link, config=config(**fields))
    try:
        yield
        check_integrity(model)
    finally:
        promoe.unpatch(model)


def seeded(call: Call, model: nn.Module, seed: int = 0) -> Any:
    """What `call` returns for a model, after seeding the global generator, which sampling uses."""
    torch.manual_seed(seed)
    return call(model)


def assert_served(stats: Stats) -> None:
    """Experts were fetched because a forward needed them, and had to make room for others."""
    assert stats.bytes_demand > 0
    assert stats.total.needed > stats.total.hits
    assert stats.evictions > 0


def assert_same_bits(found: Any, wanted: Any) -> None:
    """Both are made of the same tensors, bit by bit, none of them NaN, and there is at least one."""
    ours, theirs = dict(_leaves(found, "result")), dict(_leaves(wanted, "result"))
    assert list(ours) == list(theirs)
    assert any(isinstance(value, torch.Tensor) for value in theirs.values()), "nothing to compare"
    for path, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert ours[path].dtype == value.dtype, path
            assert torch.equal(ours[path], value), f"{path} differs"
        else:
            assert ours[path] == value, path


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):  # also every output class of transformers
        for key, part in value.items():
            yield from _leaves(part, f"{path}.{key}")
    elif isinstance(value, tuple | list):
        yield f"len({path})", len(value)
        for idx, part in enumerate(value):
            yield from _leaves(part, f"{path}[{idx}]")
    elif hasattr(value, "layers"):  # a KV cache
        yield from _leaves([(layer.keys, layer.values) for layer in value.layers], path)
    else:
        yield path, value
