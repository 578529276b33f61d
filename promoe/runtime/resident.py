"""The handle of a model whose experts are all in fast memory: the stock forward runs, nothing is fetched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike

from torch import nn

from promoe.config import PromoeConfig
from promoe.errors import PatchStateError
from promoe.experts.moe_layers import MoELayer
from promoe.files import check_writable
from promoe.model.placement import Placed
from promoe.runtime.popularity import Popularity, most_used, usage_rates
from promoe.runtime.sizes import CacheSize
from promoe.stats.recorder import Recorder
from promoe.stats.text_report import text_report
from promoe.stats.totals import Stats
from promoe.stats.tracing import Tracer


class ResidentHandle:
    """`model.promoe` where nothing needs to be served. Counters stay at zero; the answers say why."""

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
        """All zero: no expert is ever fetched."""
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
        """Nothing to reset."""

    def warm(self, popularity: Popularity) -> int:
        """Nothing to fetch: every expert is in memory. Checks the argument; returns how many experts are used at all."""
        return len(
            most_used(usage_rates(popularity, self._recorder.num_experts, [1] * len(self._recorder.num_experts)))
        )

    def resize(self, cache: CacheSize) -> None:
        """Refused: there are no slots."""
        raise PatchStateError(
            "Every expert of this model is in memory and used where it lies: there is no cache to resize. Open it with a "
            "smaller cache (promoe.from_pretrained), or with PromoeConfig(bypass=False)."
        )

    def report(self) -> str:
        """The same as text."""
        return text_report(self.stats())

    @contextmanager
    def trace(self, path: str | PathLike[str] | None = None) -> Iterator[Tracer]:
        """A timeline without events."""
        if path is not None:
            check_writable(path)
        tracer = Tracer(self._model_name)
        try:
            yield tracer
        finally:
            if path is not None:
                tracer.write(path)

    def close(self) -> None:
        """Nothing to stop."""

    def detach(self, model: nn.Module) -> None:
        """Remove the handle from `model`, which has it; what was moved to a device comes back."""
        self._placed.undo()
        del model.promoe
