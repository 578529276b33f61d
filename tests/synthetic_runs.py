"""Runs with made-up but consistent numbers, for tests of whatever reads statistics."""

from __future__ import annotations

from promoe.stats.lanes import Lanes, Transfer, Work
from promoe.stats.recorder import Recorder
from promoe.stats.run import Run
from promoe.stats.totals import Stats

MIB = 2**20


def make_stats(
    *,
    layers: int = 4,
    experts: int = 8,
    top_k: int = 2,
    slots: int | None = None,
    hits: int = 1,
    ready: int = 1,
    stall_s: float = 1e-3,
    pass_s: float = 0.02,
    decode_passes: int = 10,
    policy: str = "next_use",
    predictor: str | None = None,
    wasted_every: int = 0,
    shift: int = 0,
    lookahead: int = 0,
) -> Stats:
    """One prefill pass of 16 tokens that needs all experts, then decode passes of one token.

    In each decode visit `hits` of `top_k` experts are resident and `ready` do not wait; layer 0 stalls three times as
    long as the others. Missing experts (1 MiB) are prefetched with a predictor, else fetched on demand; every
    `wasted_every`-th pass one more is prefetched in vain. `shift` moves the experts that are needed. Forecasts up to
    `lookahead` layers ahead name all needed experts in every k-th pass, else all but one.
    """
    recorder = Recorder([experts] * layers, [MIB] * layers)
    recorder.prefetch_switched(predictor is not None)
    recorder.begin_pass("prefill", 16, 1)
    for layer in range(layers):
        recorder.visit(layer, range(experts), 0, 0, 5 * stall_s)
        recorder.transferred(layer, "demand", experts * MIB)
    recorder.end_pass(5 * pass_s)
    for number in range(decode_passes):
        recorder.begin_pass("decode", 1, 1)
        for layer in range(layers):
            needed = [(number % 3 + layer + shift + i) % experts for i in range(top_k)]
            recorder.visit(layer, needed, hits, ready, 3 * stall_s if layer == 0 else stall_s)
            for _ in range(top_k - hits):
                recorder.transferred(layer, "prefetch" if predictor else "demand", MIB)
                if predictor:
                    recorder.prefetch_used(layer, MIB)
                recorder.evicted(layer)
            for ahead in range(1, lookahead + 1):
                recorder.forecast_scored(ahead, top_k, top_k - (number % ahead != 0), top_k**2 / experts)
            if wasted_every and number % wasted_every == 0:
                recorder.transferred(layer, "prefetch", MIB)
                recorder.wasted(layer, MIB)
        recorder.end_pass(pass_s)
    slots = layers * experts // 4 if slots is None else slots
    return Stats.of(
        recorder,
        cache_slots=slots,
        cache_bytes=slots * MIB,
        link="emulated 12.0 GB/s, 20 µs",
        policy=policy,
        predictor=predictor,
        store="HostStore",
    )


def make_run(
    name: str = "a run",
    *,
    tpot_s: float | None = None,
    tpot_interval_s: tuple[float, float] | None = None,
    ttft_s: float | None = None,
    bound_s: float | None = None,
    note: str = "",
    stats: Stats | None = None,
    token: Lanes | None = None,
) -> Run:
    """A run over `stats`, by default `make_stats()`."""
    return Run(name, stats or make_stats(), tpot_s, tpot_interval_s, ttft_s, bound_s, note, token)


def make_token(layers: int = 4, layer_s: float = 5e-3) -> Lanes:
    """A decode pass: in each layer half of the time is experts', of which the odd layers wait half for a transfer.

    While the even layers compute, a second reader prefetches an expert in two chunks for the next one.
    """
    visits, waits, transfers = [], [], []
    for layer in range(layers):
        start_s = (layer + 0.5) * layer_s
        visits.append(Work(layer, start_s, start_s + layer_s / 2))
        if layer % 2:
            waits.append(Work(layer, start_s, start_s + layer_s / 4))
            transfers.append(Transfer("link worker 0", "demand", layer, 3, start_s, start_s + layer_s / 4))
        else:
            for part in (0, 1):
                begin_s = start_s + part * layer_s / 8
                transfers.append(Transfer("link worker 1", "prefetch", layer + 1, 5, begin_s, begin_s + layer_s / 8))
    predictions = [Work(layer, (layer + 0.4) * layer_s, (layer + 0.45) * layer_s) for layer in range(layers)]
    return Lanes("decode", 1, layers * layer_s, *map(tuple, (visits, waits, predictions, transfers)))


def resident_stats(layers: int = 4, experts: int = 8) -> Stats:
    """A model whose experts are all loaded and not served by slots: nothing is counted."""
    return Stats.of(
        Recorder([experts] * layers, [MIB] * layers),
        cache_slots=layers * experts,
        cache_bytes=layers * experts * MIB,
        link="none",
        policy="next_use",
        predictor=None,
    )
