from __future__ import annotations

import pytest

from promoe.stats.recorder import Recorder


def recorder(layers: int = 2, experts: int = 4) -> Recorder:
    return Recorder([experts] * layers, [100] * layers)


def test_a_visit_counts_for_its_layer_its_experts_and_the_open_phase() -> None:
    r = recorder()
    r.begin_pass("decode", 1, 1)
    r.visit(1, (0, 3), hits=1, ready=2, stall_s=0.25)
    r.visit(1, (3,), hits=0, ready=0, stall_s=0.5)
    decode = r.phase_stats("decode")
    layer = decode.layers[1]
    assert (layer.layer_visits, layer.needed, layer.hits, layer.ready, layer.stall_s) == (2, 3, 1, 2, 0.75)
    assert layer.expert_counts == (1, 0, 0, 2)
    assert (decode.layer_visits, decode.needed, decode.stall_s) == (2, 3, 0.75)
    assert decode.layers[0].layer_visits == 0
    assert r.phase_stats("prefill").layer_visits == 0


def test_a_visit_belongs_to_its_own_pass_whichever_began_last() -> None:
    r = recorder()
    r.begin_pass("prefill", 9, 1)
    r.begin_pass("decode", 1, 1)
    r.visit(0, (0, 1, 2), hits=3, ready=3, stall_s=0.5, phase="prefill")
    r.visit(0, (3,), hits=0, ready=0, stall_s=0.25, phase="decode")
    assert [r.phase_stats(p).needed for p in ("prefill", "decode")] == [3, 1]
    assert [r.stall_s(p) for p in ("prefill", "decode")] == [0.5, 0.25]


def test_what_happens_outside_of_passes_is_no_decode() -> None:
    r = recorder()
    r.begin_pass("decode", 1, 1)
    r.end_pass(0.5)
    r.outside()
    r.transferred(0, "demand", 100)
    r.visit(0, (3,), hits=0, ready=0, stall_s=0.25)
    assert [r.phase_stats(p).bytes_demand for p in ("prefill", "decode")] == [100, 0]
    assert [r.phase_stats(p).needed for p in ("prefill", "decode")] == [1, 0]


def test_passes_tokens_and_time_are_counted_when_a_pass_ends() -> None:
    r = recorder()
    r.begin_pass("prefill", 12, 3)
    assert r.phase_stats("prefill").passes == 0
    r.end_pass(2.0)
    r.begin_pass("decode", 3, 3)
    r.end_pass(0.5)
    prefill, decode = r.phase_stats("prefill"), r.phase_stats("decode")
    assert (prefill.passes, prefill.tokens, prefill.sequences, prefill.duration_s) == (1, 12, 3, 2.0)
    assert (decode.passes, decode.tokens, decode.sequences, decode.duration_s) == (1, 3, 3, 0.5)


def test_an_aborted_pass_keeps_its_visits_but_not_its_time() -> None:
    r = recorder()
    r.begin_pass("decode", 1, 1)
    r.visit(0, (1,), 0, 0, 0.1)
    r.end_pass(9.0, aborted=True)
    decode = r.phase_stats("decode")
    assert (decode.passes, decode.passes_aborted, decode.duration_s, decode.tokens) == (0, 1, 0.0, 0)
    assert decode.layer_visits == 1


def test_overlapping_passes_end_by_their_number() -> None:
    r = recorder()
    first = r.begin_pass("prefill", 10, 1)
    second = r.begin_pass("decode", 1, 1)
    r.end_pass(3.0, first)
    r.end_pass(0.25, second)
    assert r.phase_stats("prefill").duration_s == 3.0
    assert r.phase_stats("decode").duration_s == 0.25


def test_ending_what_was_not_begun_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="without a begun pass"):
        recorder().end_pass(1.0)


def test_bytes_are_booked_by_cause() -> None:
    r = recorder()
    r.begin_pass("decode", 1, 1)
    r.transferred(0, "demand", 100)
    r.transferred(0, "prefetch", 30)
    r.transferred(1, "prefetch", 50)
    r.prefetch_used(1, 20)
    r.wasted(0, 30)
    r.wasted(0, 100, "demand")
    decode = r.phase_stats("decode")
    assert (decode.bytes_demand, decode.bytes_prefetched, decode.bytes_total) == (100, 80, 180)
    assert (decode.bytes_wasted, decode.bytes_wasted_demand, decode.bytes_wasted_prefetch) == (130, 100, 30)
    assert decode.bytes_pending == 30
    assert [layer.bytes_prefetched for layer in decode.layers] == [30, 50]


def test_what_happens_between_passes_belongs_to_the_last_phase_begun() -> None:
    r = recorder()
    r.transferred(0, "demand", 1)
    r.begin_pass("decode", 1, 1)
    r.end_pass(1.0)
    r.transferred(0, "demand", 10)
    assert r.phase_stats("prefill").bytes_demand == 1
    assert r.phase_stats("decode").bytes_demand == 10


def test_prefetch_on_share_is_over_layer_visits_and_repeats_are_no_switch() -> None:
    r = recorder()
    r.begin_pass("decode", 1, 1)
    r.visit(0, (), 0, 0, 0.0)
    for on in (True, True, False):
        r.prefetch_switched(on)
        r.visit(0, (), 0, 0, 0.0)
    decode = r.phase_stats("decode")
    assert (decode.prefetch_on_visits, decode.prefetch_on_share, decode.prefetch_switches) == (2, 0.5, 2)


def test_the_rest_is_counted() -> None:
    r = recorder()
    r.failed("demand")
    r.failed("prefetch")
    r.failed("prefetch")
    r.evicted(1)
    r.stale_completion()
    r.predictor_time(0.5)
    r.predictor_time(0.25)
    prefill = r.phase_stats("prefill")
    assert (prefill.failures_demand, prefill.failures_prefetch) == (1, 2)
    assert (prefill.evictions, prefill.layers[1].evictions, prefill.stale_completions) == (1, 1, 1)
    assert (prefill.predictor_calls, prefill.predictor_s) == (2, 0.75)


def test_reset_zeroes_counters_but_keeps_open_passes_and_the_switch() -> None:
    r = recorder()
    r.prefetch_switched(True)
    r.begin_pass("decode", 1, 1)
    r.visit(0, (1,), 1, 1, 1.0)
    r.reset()
    r.visit(0, (2,), 1, 1, 0.0)
    r.end_pass(0.5)
    decode = r.phase_stats("decode")
    assert (decode.passes, decode.layer_visits, decode.stall_s, decode.prefetch_on_visits) == (1, 1, 0.0, 1)
    assert decode.expert_counts[0] == (0, 0, 1, 0)


def test_frozen_statistics_do_not_follow_the_recorder() -> None:
    r = recorder()
    before = r.phase_stats("prefill")
    r.visit(0, (1,), 1, 1, 0.0)
    assert before.layer_visits == 0
    assert before.expert_counts[0] == (0, 0, 0, 0)


def test_forecasts_are_summed_per_distance() -> None:
    r = recorder()
    r.forecast_scored(2, 2, 1, 1.0)
    r.forecast_scored(1, 2, 2, 1.0)
    r.forecast_scored(2, 2, 0, 0.5)
    near, far = r.forecast_stats()
    assert (near.steps_ahead, near.visits, near.accuracy, near.chance) == (1, 1, 1.0, 0.5)
    assert (far.steps_ahead, far.visits, far.needed, far.named) == (2, 2, 4, 1)
    assert (far.accuracy, far.chance) == (0.25, 0.375)
    r.reset()
    assert r.forecast_stats() == ()
