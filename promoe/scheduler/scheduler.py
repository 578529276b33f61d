"""Decides what layers need and will need, so what is fetched and which residents make room for it.

Every method is one atomic operation of a pure state machine; the caller holds one lock around it. Times do not occur:
a *step* is one layer visit. See docs/structure.md for the life of a token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from . import eviction
from .cache import RESIDENT
from .calibration import Calibration
from .config import NullObserver, Observer, SchedulerConfig
from .fetch_queue import FetchQueue
from .forecast_accuracy import ForecastAccuracy
from .reuse import MAX_LOG_ODDS, Floats, LearnedReuse, ReusePrior
from .visit import Visit

# How far the probabilities of experts that are streamed are from 1: enough for an order.
SURELY = 1e-6


class Scheduler(FetchQueue):
    """A pure state machine over pools of slots.

    Gates, visits and forecasts tell it what layers need now and will need soon. It queues the fetches, and keeps the
    order in which residents make room up to date.

    Args:
        config: sizes and switches.
        observer: counts what happens.
        reuse: what a reuse prior has learned of this model before. None: start from what holds for any model.
        taught: another scheduler that is shown each visit before this one is. Both use its reuse prior.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        observer: Observer | None = None,
        reuse: LearnedReuse | None = None,
        taught: Scheduler | None = None,
    ) -> None:
        self.reuse = reuse
        self.prefetch_on = config.prefetch
        self.step = 0
        max_experts = max(config.num_experts)
        self._prior_learns = taught is None and (config.eviction == "next_use" or config.prefetch)
        if taught is None:
            self._prior = ReusePrior(config.num_layers, max_experts, learned=reuse)
        else:
            assert not config.hints, "hints of one scheduler would be known to the other"
            self._prior = taught._prior
        policy = eviction.create(config.eviction, config.num_layers, max_experts, self._prior)
        super().__init__(config, observer or NullObserver(), policy)
        self._num_next = 1  # tokens that the next visits are expected to have
        self.calibration = Calibration(config.num_experts)
        self._accuracy = ForecastAccuracy(self.observer)
        self._chosen: list[Sequence[int]] = [()] * config.num_layers  # by each layer's latest hint or visit
        self._num_experts = sum(config.num_experts)
        self._fits = sum(pool.num_slots for pool in config.pools) >= self._num_experts

    @property
    def everything_resident(self) -> bool:
        """Whether every expert is in a slot. Then there are as many slots, and none will ever be evicted."""
        return self._fits and sum(len(cache.slot_of) for cache in self.caches) == self._num_experts

    # -- what a layer needs -------------------------------------------------------------------------------------

    def hint(self, layer_idx: int, ids: Sequence[int]) -> int:
        """Queue the missing experts that a layer's gate has chosen. Returns how many are resident.

        They are fetched after pinned experts, and the layer's speculation is dropped. Pins nothing; may be repeated, be
        wrong, or never be followed by a visit.
        """
        caches, base = self.caches_by_code, layer_idx * self.max_experts
        codes = [base + expert_idx for expert_idx in ids]
        missing = [code for code in codes if caches[code].state[code] != RESIDENT]
        if self.config.hints:
            self._forget_hint(layer_idx)
            self._hinted[layer_idx] = set(codes)
            self._hint_queue.extend(missing)
            self._speculation.drop(layer_idx)
            self.current_layer = layer_idx
            self._chosen[layer_idx] = ids
            self._prior.announce(layer_idx, ids)
            self.eviction.announced(layer_idx)
            self._invalidate()
        return len(codes) - len(missing)

    def begin_visit(
        self,
        layer_idx: int,
        ids: Sequence[int],
        tokens: Sequence[Sequence[int]] | None = None,
        num_sequences: int = 1,
    ) -> Visit:
        """Begin a layer's forward, which needs exactly these (distinct) experts.

        Args:
            layer_idx: the MoE layer.
            ids: experts that its tokens use, `most_needed_first`: those of a kind (resident, in flight, the rest) run, and
                are fetched, in this order.
            tokens: the experts of each real token `[num_tokens][top_k]`, oldest first, for the reuse prior; None if
                the visit has one token.
            num_sequences: tokens that the layer's next visit is expected to have (sequences being decoded).
        """
        self.step += 1
        self.current_layer = layer_idx
        self._chosen[layer_idx] = ids
        tokens = [ids] if tokens is None else tokens
        # A prompt in place of the expected decode step says nothing about how good the forecasts were.
        outcome = ids if len(tokens) <= self._num_next else None
        self._accuracy.visited(layer_idx, outcome)
        if self.config.calibrate:
            self.calibration.observe(layer_idx, outcome)
        self._num_next = num_sequences
        if tokens and self._prior_learns and not self.everything_resident:
            self._prior.observe(layer_idx, tokens)
        self.eviction.visited(layer_idx, ids, tokens, num_sequences)
        self._speculation.drop(layer_idx)
        if not self._forget_hint(layer_idx):
            self._invalidate()  # else the hint was the layer event: one ordering of victims serves both
        return Visit(self, layer_idx, ids)

    # -- what layers will need ----------------------------------------------------------------------------------

    def forecast(self, steps_ahead: int, layer_idx: int, probabilities: npt.ArrayLike) -> None:
        """Take a predictor's forecast of a layer's next visit, which is `steps_ahead` steps from now.

        Creates, re-orders or withdraws speculation. What was fetched of a withdrawn expert stays until its slot is
        needed. A forecast that comes after its layer's turn is dropped.

        Args:
            steps_ahead: layer visits from the current one; may cross the end of the pass.
            layer_idx: the layer forecast.
            probabilities: the probability of use by that visit, `[num_experts]`.
        """
        num_layers = self.config.num_layers
        assert 0 <= layer_idx < num_layers, f"a forecast of layer {layer_idx}, {num_layers} layers"
        if not 0 < steps_ahead <= num_layers or layer_idx in self._hinted:
            return
        num_experts = self.config.num_experts[layer_idx]
        p_next = np.asarray(probabilities, dtype=np.float64)
        assert p_next.shape == (num_experts,), f"layer {layer_idx}: {p_next.shape} probabilities, {num_experts} experts"
        # NaN must not enter the fit, which would never forget it. One operation finds it; a forward waits for this.
        if math.isnan(p_next.dot(p_next)):
            p_next = np.where(np.isnan(p_next), 0.0, p_next)
        self._accuracy.forecast(layer_idx, steps_ahead, p_next)
        if self.config.calibrate:
            prior = self._prior.probability(layer_idx, self._num_next)[:num_experts]
            chosen = self._chosen[(layer_idx - steps_ahead) % num_layers]
            p_next = self.calibration.calibrate(layer_idx, steps_ahead, p_next, prior, chosen)
        self._expect(steps_ahead, layer_idx, p_next, wanted=self.prefetch_on)

    def foresee_reuse(self, layer_idx: int, log_odds: npt.ArrayLike, begun: bool) -> None:
        """Take a predictor's forecast of which experts a layer's next visits will use. Affects eviction, fetches nothing.

        Args:
            layer_idx: the layer whose gate input the forecast was made from, and that it is about.
            log_odds: of use within the next visits, `[num_experts]`; see `ReusePrior.foresee`.
            begun: whether the visit that it was made from has begun.
        """
        num_experts = self.config.num_experts[layer_idx]
        odds = np.asarray(log_odds, dtype=np.float32)
        assert odds.shape == (num_experts,), f"layer {layer_idx}: {odds.shape} log odds, {num_experts} experts"
        if not np.isfinite(odds).all():
            return  # NaN or infinity must not enter the prior, which would never forget it
        if self._prior.foresee(layer_idx, np.minimum(np.maximum(odds, -MAX_LOG_ODDS), MAX_LOG_ODDS), begun):
            self.eviction.announced(layer_idx)
            self._invalidate()

    def stream(self, steps_ahead: int, layer_idx: int) -> None:
        """Want all absent experts of a layer, because many tokens will use nearly all of them: those used most come first.

        This needs no predictor, so it does not matter whether prefetch is on.
        """
        if layer_idx not in self._hinted:
            usual = self._prior.probability(layer_idx, 1)[: self.config.num_experts[layer_idx]]
            self._expect(steps_ahead, layer_idx, 1.0 - SURELY * (1.0 - usual), wanted=True)

    def score_forecasts(self) -> None:
        """Report the accuracy of all forecasts whose visit has come to the observer, which otherwise waits for a batch."""
        self._accuracy.score()

    def withdraw_forecasts(self) -> None:
        """Forget all speculation, for example when prefetch is switched off."""
        for layer_idx in range(self.config.num_layers):
            self._speculation.drop(layer_idx)
            self.eviction.forecast(layer_idx, None)
        self._invalidate()

    def start_from(self, rates: Sequence[Sequence[float]]) -> None:
        """Take how often experts were used before. Eviction uses it until it has seen enough itself.

        Args:
            rates: uses per token of each layer's experts, `[num_layers][num_experts]`.
        """
        for layer_idx, of_layer in enumerate(rates):
            if self._prior.start_from(layer_idx, of_layer):
                self.eviction.announced(layer_idx)
        self.eviction.popular(rates)
        self._invalidate()

    def _expect(self, steps_ahead: int, layer_idx: int, p_next: Floats, wanted: bool) -> None:
        self.eviction.forecast(layer_idx, p_next)
        self._invalidate()
        if wanted:
            self._speculation.replace(layer_idx, self.step + steps_ahead, self._worth_sending(layer_idx, p_next))

    def _worth_sending(self, layer_idx: int, p_next: Floats) -> list[tuple[int, float]]:
        caches, base = self.caches_by_code, layer_idx * self.max_experts
        threshold = self._budget.threshold
        wishes = [(base + expert_idx, p) for expert_idx, p in enumerate(p_next.tolist()) if p >= threshold]
        return [(c, p) for c, p in wishes if caches[c].state[c] != RESIDENT and c not in self._failed_speculation]

    # -- another number of slots --------------------------------------------------------------------------------

    def prepare_resize(self, pool_idx: int, num_slots: int) -> dict[int, int]:
        """Evict residents until `num_slots` slots hold the rest. Call it while it `is_still` and not `is_used`.

        Returns:
            For each slot with an expert, the slot that its bytes must be in after the resize.
        """
        for layer_idx in list(self._hinted):
            self._forget_hint(layer_idx)
        self.withdraw_forecasts()
        self._reclaimers[pool_idx].shrink_to(num_slots, self.current_layer)
        return self.caches[pool_idx].kept_slots(num_slots)

    def resize(self, pool_idx: int, num_slots: int, kept: Mapping[int, int]) -> None:
        """Resize a pool, as prepared by `prepare_resize`, which returned `kept`."""
        self.caches[pool_idx].resize(num_slots, kept)
        self._fits = sum(cache.num_slots for cache in self.caches) >= self._num_experts
        self._reclaimers[pool_idx].invalidate()
