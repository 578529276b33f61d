"""The ways to serve a model that the demo compares: each adds one idea to the one before."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from promoe.config import PromoeConfig, ReadMode
from promoe.model.model_class import class_to_open
from promoe.runtime.loading import from_pretrained
from promoe.runtime.patching import patch
from promoe.transfer.links import EmulatedLink
from promoe.transfer.memory import SLOT_ALIGNMENT_BYTES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RESIDENT = "all resident"


@dataclass(frozen=True)
class System:
    """Settings of a patched model under a name."""

    name: str
    config: PromoeConfig
    predictor: str | None = None
    meaning: str = ""


# `bypass` is off so that slots are measured even where they hold everything.
_BASE = PromoeConfig(bypass=False)
SYSTEMS = (
    System(
        "on-demand LRU",
        dataclasses.replace(
            _BASE, eviction="lru", early_preemption=False, reorder=False, begin_early=False, stream=False
        ),
        meaning="missing experts one after the other by id, each fetched when its turn comes",
    ),
    System(
        "+ preempt/reorder",
        dataclasses.replace(_BASE, eviction="lru", stream=False),
        meaning="all missing experts requested when the gate has chosen; those at hand run first",
    ),
    System(
        "+ next-use eviction",
        dataclasses.replace(_BASE, stream=False),
        meaning="evicts the expert whose next use is expected last",
    ),
    System(
        "+ gate prefetch",
        _BASE,
        predictor="gate",
        meaning="later layers' gates, asked early, say what to fetch next; off while it does not pay",
    ),
)


def to_compare(steps: bool, predictor: Path | None) -> tuple[System, ...]:
    """Return the systems that the demo compares, the first that fetches first.

    Args:
        steps: each idea by itself, added to those before it; else on-demand LRU and the whole of promoe alone.
        predictor: folder of a trained one for the model; None: there is none.
    """
    name = "+ learned prefetch" if steps else "promoe, trained"
    meaning = (
        "what promoe-train learned says it instead" if steps else "the same with a predictor that promoe-train trained"
    )
    learned = () if predictor is None else (System(name, _BASE, str(predictor), meaning),)
    if steps:
        return (*SYSTEMS, *learned)
    whole = System(
        "promoe",
        _BASE,
        predictor="gate",
        meaning="the default: evicts what is needed last, fetches ahead what later layers' gates foresee",
    )
    return (SYSTEMS[0], whole, *learned)


class Source(Protocol):
    """Where a part's models come from."""

    def resident(self) -> PreTrainedModel:
        """The unmodified model, everything in memory."""
        ...

    def patched(self, system: System, cache: str) -> PreTrainedModel:
        """The model with its experts in slots."""
        ...


class BehindLink:
    """A checkpoint in RAM whose experts come over an emulated link."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self.link: EmulatedLink | None = None

    def resident(self) -> PreTrainedModel:
        """The unmodified model."""
        return load_stock(self._checkpoint, self._dtype)

    def patched(self, system: System, cache: str) -> PreTrainedModel:
        """A copy of its own, patched."""
        assert self.link is not None, "set the link first: it follows from the measured compute time"
        model = self.resident()
        return patch(model, cache=cache, predictor=system.predictor, link=self.link, config=system.config)


class OnDisk:
    """A checkpoint whose experts are read from its files; past the page cache, unless a subclass says otherwise."""

    link: str | EmulatedLink = "auto"
    read_mode: ReadMode = "direct"

    def __init__(self, checkpoint: Path, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype

    def resident(self) -> PreTrainedModel:
        """The unmodified model, all of it in RAM."""
        return load_stock(self._checkpoint, self._dtype)

    def patched(self, system: System, cache: str) -> PreTrainedModel:
        """Opened without its experts."""
        config = dataclasses.replace(system.config, read_mode=self.read_mode)
        return from_pretrained(
            self._checkpoint,
            cache=cache,
            predictor=system.predictor,
            dtype=self._dtype,
            link=self.link,
            config=config,
        )


def load_stock(checkpoint: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The checkpoint as Transformers opens it, in eval mode, its tensors where slots would have them.

    The bits of a product can depend on its operands' alignment, and Transformers maps some tensors straight from the
    file, where they lie as it happens; those are copied to aligned memory.
    """
    # As promoe opens it: without code of the checkpoint, and no pickle.
    options = {"trust_remote_code": False, "use_safetensors": True}
    model: Any = class_to_open(checkpoint, options).from_pretrained(checkpoint, dtype=dtype, **options).eval()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.data_ptr() % SLOT_ALIGNMENT_BYTES:
                tensor.data = tensor.data.clone()
    result: PreTrainedModel = model
    return result
