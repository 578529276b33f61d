"""The handle of a model whose experts are all in fast memory. The stock forward runs, and nothing is fetched."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from os import PathLike

from torch import nn

from promoe.config import PromoeConfig
from promoe.errors import PatchStateError
from promoe.experts.moe_layers import MoELayer
from promoe.model.placement import Placed
from promoe.runtime.handle import Handle, written
from promoe.runtime.popularity import Popularity, most_used, usage_rates
from promoe.runtime.sizes import CacheSize
from promoe.stats.recorder import Recorder
from promoe.stats.totals import Stats
from promoe.stats.tracing import Tracer


class ResidentHandle(Handle):
    """`model.promoe` if all experts are in fast memory. All counters stay at zero."""

    def __init__(
        self,
        model_name: str,
        layers: Sequence[MoELayer],
        config: PromoeConfig,
        store: str,
        placed: Placed | None = None,
    ) -> None:
        self.config = config
        self._placed = placed or Placed()
        self._model_name = model_name
        self._store = store
        num_experts = [layer.num_experts for layer in layers]
        self._recorder = Recorder(num_experts, [layer.layout.payload_bytes for layer in layers])
        self._bytes = sum(layer.num_experts * layer.layout.payload_bytes for layer in layers)

    def __repr__(self) -> str:
        return f"<promoe handle of {self._model_name}: all experts in memory>"

    def stats(self) -> Stats:
        """Return counters that are all zero: no expert is ever fetched."""
        return Stats.of(
            self._recorder,
            cache_slots=sum(self._recorder.num_experts),
            cache_bytes=self._bytes,
            link="none: every expert is in memory and the stock forward runs",
            policy=self.config.eviction,
            predictor=None,
            store=self._store,
        )

    def reset_stats(self) -> None:
        """Do nothing: nothing is counted."""

    def warm(self, popularity: Popularity) -> int:
        """Check `popularity`, and return how many experts it has above zero. All of them are in memory already."""
        num_experts = self._recorder.num_experts
        return len(most_used(usage_rates(popularity, num_experts, [1] * len(num_experts))))

    def resize(self, cache: CacheSize) -> None:
        """Refuse: there are no slots."""
        raise PatchStateError(
            "Every expert of this model is in memory and used in place, so there is no cache to resize. Open it with a "
            "smaller cache (promoe.from_pretrained), or with PromoeConfig(bypass=False)."
        )

    def trace(self, path: str | PathLike[str] | None = None) -> AbstractContextManager[Tracer]:
        """Record a timeline without events."""
        return written(Tracer(self._model_name), path)

    def close(self) -> None:
        """Do nothing: no thread runs."""

    def detach(self, model: nn.Module) -> None:
        """Remove the handle from `model`, and move back what was moved to a device."""
        self._placed.undo()
        del model.promoe
