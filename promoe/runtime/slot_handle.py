"""The handle of a model whose experts are served from slots."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from os import PathLike

import torch
from torch import nn

from promoe.config import PromoeConfig
from promoe.errors import ConfigError, PatchStateError, shown
from promoe.experts.kernels.formats import form_in_words
from promoe.model.passes import PassState, describe_forwards, threads_in_forward
from promoe.runtime.handle import Handle, written
from promoe.runtime.hot_path import Runtime
from promoe.runtime.popularity import Popularity, most_used, usage_rates
from promoe.runtime.sizes import CacheSize, plan_pools, slots_per_layer
from promoe.scheduler.governor import Governor
from promoe.stats.totals import Stats
from promoe.stats.tracing import PASS, Tracer, latest_passes
from promoe.stores import Store, layout_counts
from promoe.transfer.cpu_contention import BusyCores, busy_cores_logger
from promoe.transfer.memory import Pool

logger = logging.getLogger(__name__)


class SlotHandle(Handle):
    """`model.promoe` if experts are fetched into slots.

    Attributes:
        runtime: the running parts, for tests and benchmarks. Not part of the public API.
    """

    def __init__(
        self,
        model: nn.Module,
        config: PromoeConfig,
        runtime: Runtime,
        store: Store,
        pools: Sequence[Pool],
        predictor: str | None,
        restore: Callable[[], None],
    ) -> None:
        self.config = config
        self.runtime = runtime
        self._model = weakref.ref(model)
        self._model_name = type(model).__name__
        self._store = store
        self._pools = tuple(pools)
        self._predictor = predictor
        self._undo = ExitStack()
        self._restore = restore
        self._renewing = threading.RLock()
        self._stall_s, self._fetched_bytes, self._aborted = 0.0, 0, 0  # sums of all decode passes so far
        self._busy_cores = None if runtime.on_device else BusyCores(torch.get_num_threads)
        self._governor = Governor() if predictor is not None and config.ablation.governor else None
        with runtime.engine.lock:
            runtime.engine.recorder.prefetch_switched(predictor is not None)

    def __repr__(self) -> str:
        return f"<promoe handle of {self._model_name}: {self.stats().cache_slots} slots>"

    def stats(self) -> Stats:
        """See `Handle.stats`."""
        engine = self.runtime.engine
        with engine.lock:
            self._score_forecasts()
            return Stats.of(
                engine.recorder,
                cache_slots=sum(pool.num_slots for pool in self._pools),
                cache_bytes=sum(pool.nbytes for pool in self._pools),
                link=engine.link.describe(),
                policy=self.config.eviction,
                predictor=f"{self._predictor} (failed)" if self.runtime.predictor_failed else self._predictor,
                store=_described(self._store),
                kernels="" if self.runtime.fast is None else self.runtime.fast.in_words,
            )

    def reset_stats(self) -> None:
        """See `Handle.reset_stats`."""
        engine = self.runtime.engine
        with engine.lock:
            self._score_forecasts()
            engine.recorder.reset()

    def warm(self, popularity: Popularity) -> int:
        """See `Handle.warm`."""
        engine, layers = self.runtime.engine, self.runtime.layers
        num_experts = [layer.num_experts for layer in layers]
        rates = usage_rates(popularity, num_experts, [layer.top_k or 1 for layer in layers])
        return engine.warm(most_used(rates), rates)

    def resize(self, cache: CacheSize) -> None:
        """See `Handle.resize`."""
        if cache == "auto":
            raise ConfigError(
                "The 'cache' argument of resize must be a size such as \"6GiB\" or \"50%\". Got 'auto' instead."
            )
        engine, layers = self.runtime.engine, self.runtime.layers
        store = self._store
        plans = plan_pools(cache, store.layouts, store.num_experts, hot=store.hot)
        present = [pool.layers for pool in engine.scheduler.config.pools]
        if [plan.spec.layers for plan in plans] != present:
            held, wanted = "each layer has slots of its own", 'slots for each layer, such as "2 per layer"'
            if slots_per_layer(cache) is not None:
                held, wanted = "layers share their slots", 'a size or a share, such as "50%"'
            raise ConfigError(
                f"In this {self._model_name} {held}, and resize cannot change that. Give {wanted}, or open the model again. "
                f"Got {shown(cache)} instead."
            )
        model = self._model()
        if model is not None and (names := threads_in_forward(model, layers)):
            raise PatchStateError(
                f"The cache of this {self._model_name} cannot be resized while {describe_forwards(names)}. Nothing was "
                "changed. Call resize between two forwards, for example in a stopping criterion."
            )
        engine.resize([plan.spec.num_slots for plan in plans])

    @contextmanager
    def trace(self, path: str | PathLike[str] | None = None) -> Iterator[Tracer]:
        """See `Handle.trace`."""
        engine = self.runtime.engine
        if engine.tracer is not None:
            raise PatchStateError("A timeline of this model is being recorded already. End that one first.")
        tracer = Tracer(self._model_name) if path is not None else latest_passes(self._model_name)
        with written(tracer, path):
            engine.tracer = tracer
            try:
                yield tracer
            finally:
                engine.tracer = None

    def close(self) -> None:
        """See `Handle.close`."""
        self.runtime.close()
        model = self._model()
        if model is None or not threads_in_forward(model, self.runtime.layers):
            for pool in self._pools:
                pool.close()

    def pass_begins(self) -> None:
        """Begin a forward pass. If Ctrl-C interrupted a change of the cache, first replace it by an empty one.

        If other passes are running, this is left to a later pass.
        """
        engine, model = self.runtime.engine, self._model()
        if not engine.torn or not engine.renewable or model is None or self.runtime.visiting:
            return
        with self._renewing:
            if engine.torn and not threads_in_forward(model, self.runtime.layers, but=threading.get_ident()):
                engine.renew()
                if not engine.torn:
                    logger.warning(
                        "An exception (such as Ctrl-C) interrupted a change of the cache of this %s. It starts again empty.",
                        self._model_name,
                    )

    def pass_ended(self, state: PassState, duration_s: float) -> None:
        """End a pass that raised no error: check that it ran its experts through promoe, and whether prefetching pays."""
        if (model := self._model()) is not None:
            self.runtime.check_entered(state, model)
        if (tracer := self.runtime.engine.tracer) is not None:  # another thread may end the timeline at any time
            end_s = state.start_s + duration_s
            tracer.span(PASS, f"{state.phase} pass", state.start_s, end_s, phase=state.phase, tokens=state.num_tokens)
        if (
            self._busy_cores is not None
            and state.phase == "decode"
            and (told := self._busy_cores.pass_ended(duration_s))
        ):
            busy_cores_logger.warning("The cores are busy: %s", told)
        if self._governor is not None and state.phase == "decode" and not self.runtime.predictor_failed:
            engine = self.runtime.engine
            with engine.lock:
                before_s, self._stall_s = self._stall_s, engine.recorder.stall_s("decode")
                before_bytes, self._fetched_bytes = self._fetched_bytes, engine.recorder.fetched_bytes("decode")
                before_aborted, self._aborted = self._aborted, engine.recorder.passes_aborted("decode")
                if self._aborted > before_aborted:  # the differences include what the aborted passes fetched
                    return
                on = self._governor.pass_ended(
                    duration_s, _since(self._stall_s, before_s), _since(self._fetched_bytes, before_bytes)
                )
            engine.set_prefetch(on)

    def keep(self, undo: ExitStack) -> None:
        """Keep the steps that undo the patch, for `detach`."""
        self._undo = undo

    def detach(self, model: nn.Module) -> None:
        """See `Handle.detach`."""
        with self.runtime.passes.ending(self._check_idle):
            self._restore()
            self.abandon()

    def abandon(self) -> None:
        """Undo everything, but do not restore the experts: the caller has done that."""
        try:
            self._undo.close()
        finally:
            self._store.close()

    def _score_forecasts(self) -> None:
        """Score the forecasts that are due. Skipped in a signal handler, which may have interrupted a change of them."""
        if self.runtime.engine.times_held() == 1:
            self.runtime.engine.scheduler.score_forecasts()

    def _check_idle(self) -> None:
        model = self._model()
        if model is not None and (names := threads_in_forward(model, self.runtime.layers)):
            raise PatchStateError(
                f"This {self._model_name} cannot be unpatched while {describe_forwards(names)}. Nothing was changed. Wait "
                "until the model has returned, also in its hooks. Or call model.promoe.close(), which makes forwards that "
                "need experts raise EngineClosedError, and then unpatch it."
            )


def _since(now: float, before: float) -> float:
    """Return the increase of a counter since it was `before`. If it is lower now, it was reset in between."""
    return now - before if now >= before else now


def _described(store: Store) -> str:
    """Return the kind of a store, and the form of its experts if they are not plain."""
    return ", ".join(filter(None, (type(store).__name__, form_in_words(layout_counts(store)))))
