from __future__ import annotations

import dataclasses
import json
import math

import pytest
from synthetic_runs import MIB, make_stats, resident_stats

from promoe.stats.counts import Counts, ForecastStats, LayerStats, PhaseStats
from promoe.stats.over_time import Stretch
from promoe.stats.recorder import Recorder
from promoe.stats.totals import Stats


def test_rates_per_phase_and_in_total() -> None:
    stats = make_stats(layers=4, experts=8, top_k=2, hits=1, ready=1, decode_passes=10)
    assert stats.decode.hit_rate == 0.5
    assert stats.prefill.hit_rate == 0.0
    assert stats.hit_rate == stats.total.hit_rate == 40 / (40 * 2 + 4 * 8)
    assert stats.ready_rate == stats.total.ready_rate
    assert stats.layer_visits == 44
    assert stats.cache_rate == 0.25


def test_times_per_pass() -> None:
    stats = make_stats(stall_s=1e-3, pass_s=0.02, layers=4)
    assert stats.tpot_s == pytest.approx(0.02)
    assert stats.ttft_s == pytest.approx(0.1)
    assert stats.decode.stall_per_pass_s == pytest.approx(0.006)  # layer 0 three times, three others once
    assert stats.decode.stall_share == pytest.approx(0.3)
    assert stats.stall_s == pytest.approx(stats.prefill.stall_s + stats.decode.stall_s)


def test_bytes_per_token_and_waste() -> None:
    stats = make_stats(predictor="gate", layers=4, top_k=2, hits=1, decode_passes=10, wasted_every=5)
    decode = stats.decode
    assert decode.bytes_demand == 0
    assert decode.bytes_prefetched == (40 + 8) * MIB
    assert decode.bytes_wasted == 8 * MIB
    assert decode.wasted_share == pytest.approx(8 / 48)
    assert decode.mb_per_token == pytest.approx(48 * MIB / 10 / 1e6)
    assert stats.bytes_demand == stats.prefill.bytes_demand == 32 * MIB
    assert stats.bytes_prefetched == decode.bytes_prefetched
    assert stats.bytes_wasted == decode.bytes_wasted
    assert stats.evictions == 40
    assert stats.prefetch_on_share == 1.0


def test_nothing_counted_is_nan_not_an_error() -> None:
    stats = resident_stats()
    phase = stats.decode
    for value in (
        stats.hit_rate,
        stats.ready_rate,
        stats.tpot_s,
        stats.ttft_s,
        stats.prefetch_on_share,
        phase.stall_share,
        phase.mb_per_token,
        phase.wasted_share,
        phase.pass_s,
    ):
        assert math.isnan(value)
    assert stats.stall_s == 0.0
    assert ("hit rate", "–", "–", "–") in stats.rows()
    assert "–" not in stats.summary(), "a table of nothing"
    assert len(stats.summary().splitlines()) == 2


def test_a_model_without_experts_has_no_cache_rate() -> None:
    empty = Stats.of(Recorder([], []), cache_slots=0, cache_bytes=0, link="", policy="lru", predictor=None)
    assert math.isnan(empty.cache_rate)
    assert Stats.from_json(json.loads(json.dumps(empty.to_json(), allow_nan=False))) == empty


def test_bytes_used_in_a_later_phase_never_make_the_pending_negative() -> None:
    phase = PhaseStats(bytes_prefetched=10, bytes_prefetch_used=30)
    assert phase.bytes_pending == 0


@pytest.mark.parametrize(
    "stats", [make_stats(predictor="gate", wasted_every=3, lookahead=2), make_stats(), resident_stats()]
)
def test_json_round_trip(stats: Stats) -> None:
    text = json.dumps(stats.to_json(), allow_nan=False)
    assert Stats.from_json(json.loads(text)) == stats


def test_json_holds_the_derived_rates_too() -> None:
    stats = make_stats()
    values = json.loads(json.dumps(stats.to_json()))
    assert values["decode"]["hit_rate"] == 0.5
    assert values["total"]["layers"][0]["needed"] == stats.total.layers[0].needed
    assert values["cache_rate"] == 0.25
    assert values["decode"]["wasted_share"] is None


def test_total_adds_every_counter_of_every_layer() -> None:
    stats = make_stats(predictor="gate")
    for field in dataclasses.fields(PhaseStats):
        if field.name != "layers":
            parts = getattr(stats.prefill, field.name) + getattr(stats.decode, field.name)
            assert getattr(stats.total, field.name) == parts, field.name
    for name in (field.name for field in dataclasses.fields(Counts)):
        assert getattr(stats.total, name) == pytest.approx(sum(getattr(layer, name) for layer in stats.total.layers))
    assert stats.total.expert_counts[1][2] == stats.prefill.expert_counts[1][2] + stats.decode.expert_counts[1][2]


@pytest.mark.parametrize("record", [Stats, PhaseStats, LayerStats, Counts, ForecastStats, Stretch])
def test_every_field_is_documented(record: type) -> None:
    import ast
    import inspect
    import textwrap

    body = ast.parse(textwrap.dedent(inspect.getsource(record))).body[0].body  # type: ignore[attr-defined]
    for i, node in enumerate(body):
        if isinstance(node, ast.AnnAssign):
            following = body[i + 1]
            assert isinstance(following, ast.Expr), f"{record.__name__}.{node.target.id}"  # type: ignore[union-attr]
            assert isinstance(following.value, ast.Constant)


def test_stats_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_stats().cache_slots = 3  # type: ignore[misc]


def test_summary_is_short_and_aligned() -> None:
    stats = make_stats(predictor="gate")
    lines = stats.summary().splitlines()
    assert 10 <= len(lines) <= 16
    assert str(stats) == stats.summary()
    table = lines[2:]
    assert len({len(line) for line in table}) == 1, "columns end at the same place"
    assert "8 slots for 32 experts (25.0%), 8.0 MiB" in lines[0]
    hit = next(line for line in lines if line.startswith("hit rate"))
    assert hit.split() == ["hit", "rate", "0%", "50.0%", "35.7%"]


def test_summary_tells_of_trouble_only_when_there_was_some() -> None:
    recorder = Recorder([2], [10])
    recorder.failed("demand")
    recorder.stale_completion()
    stats = Stats.of(recorder, cache_slots=1, cache_bytes=10, link="", policy="lru", predictor=None)
    assert stats.summary().splitlines()[-1] == "trouble   1 demand transfers failed, 1 late transfers ignored"
    assert "trouble" not in make_stats().summary()


def test_the_run_is_there_in_stretches_and_its_forecasts_by_distance() -> None:
    stats = make_stats(layers=4, experts=8, decode_passes=10, lookahead=3)
    assert [stretch.passes for stretch in stats.over_time] == [1] * 10
    assert sum(sum(stretch.expert_counts) for stretch in stats.over_time) == stats.decode.needed
    assert [forecast.steps_ahead for forecast in stats.forecasts] == [1, 2, 3]
    assert [forecast.visits for forecast in stats.forecasts] == [40] * 3
    assert [forecast.accuracy for forecast in stats.forecasts] == [1.0, 0.75, 0.7]
    assert stats.forecasts[0].chance == pytest.approx(2 / 8)
