from __future__ import annotations

import dataclasses

import pytest
from synthetic_runs import MIB, make_run, make_stats, resident_stats

from promoe.stats.counts import LayerStats, PhaseStats
from promoe.stats.recorder import Recorder
from promoe.stats.totals import Stats
from promoe.stats.words import advice, comparison, coverage, meaning


def rules(stats: Stats, **timings: float) -> list[str]:
    return [found.rule for found in advice(make_run(stats=stats, **timings))]  # type: ignore[arg-type]


def with_decode(stats: Stats, **values: object) -> Stats:
    return dataclasses.replace(stats, decode=dataclasses.replace(stats.decode, **values))  # type: ignore[arg-type]


def test_coverage_is_what_the_best_fixed_choice_serves() -> None:
    phase = PhaseStats(layers=(LayerStats(expert_counts=(6, 0)), LayerStats(expert_counts=(1, 3))))
    assert coverage(phase) == [0.0, 0.6, 0.9, 1.0, 1.0]
    assert coverage(PhaseStats()) == []


def test_meaning_tells_stall_hits_traffic_and_waste() -> None:
    sentences = meaning(make_run(stats=make_stats(predictor="gate", wasted_every=5), bound_s=0.016))
    text = " ".join(sentences)
    assert "Compute waited 30.0% of decode time" in text
    assert "room for 25.0% of the experts; 50.0% of the needed ones" in text
    assert "16.7% of the prefetched bytes were never used" in text
    assert "Prefetch was on for 100% of the layer visits" in text
    assert "Prefill took 100 ms per pass of 16 tokens" in text
    assert "it needed 100% of all experts" in text
    assert "1.25x as long" in text


def test_meaning_without_prefetch_says_that_all_was_on_demand() -> None:
    assert any("all of it on demand" in sentence for sentence in meaning(make_run()))


def test_meaning_names_the_layers_that_wait() -> None:
    first = make_run(stats=make_stats(layers=6))
    assert any("layer 0 alone, one of 6, has 37.5%" in s for s in meaning(first))
    even = with_decode(
        make_stats(), stall_s=4.0, layers=tuple(LayerStats(layer_visits=1, stall_s=1.0) for _ in range(4))
    )
    assert any("spread over the layers; the worst, layer 0, has 25.0%" in s for s in meaning(make_run(stats=even)))
    stalls = [0.0] * 15 + [9.0, 8.0]
    ends = with_decode(make_stats(), stall_s=17.0, layers=tuple(LayerStats(layer_visits=1, stall_s=s) for s in stalls))
    assert any(
        "2 of 17 layers (15, 16) have 100%" in s
        for s in meaning(make_run(stats=dataclasses.replace(ends, prefill=PhaseStats())))
    )


def test_meaning_of_prefill_alone() -> None:
    sentences = meaning(make_run(stats=make_stats(decode_passes=0)))
    assert sentences[0].startswith("Compute waited 20.0% of prefill time")


def test_advice_when_compute_hardly_waits_is_to_leave_it() -> None:
    assert rules(make_stats(stall_s=1e-5)) == ["stall below 5% of the time"]


def test_advice_when_everything_fits() -> None:
    assert rules(make_stats(slots=32)) == ["cache rate 100%"]
    assert rules(resident_stats()) == []


def test_advice_for_lru_without_prefetch() -> None:
    assert rules(make_stats(policy="lru", slots=4)) == [
        "policy is lru, stall at least 5%",
        "hit rate below 90%, stall at least 5%",
        "no predictor, stall at least 5%",
    ]


def test_cache_advice_names_a_size_that_holds_most_needs() -> None:
    stats = make_stats(slots=4)
    found = next(a for a in advice(make_run(stats=stats)) if a.rule.startswith("hit rate"))
    shares = coverage(stats.decode)
    enough = next(n for n, share in enumerate(shares) if share >= 0.9)
    assert f"{enough} of 32 experts" in found.text
    assert f'cache="{enough / 32:.0%}" ({enough:.1f} MiB)' in found.text


def test_advice_for_a_predictor_that_is_often_wrong() -> None:
    assert "more than 30% of prefetched bytes unused" in rules(make_stats(predictor="gate", wasted_every=1))


def test_advice_when_prefetch_is_mostly_off() -> None:
    rule = "prefetch on for less than 50% of the layer visits"

    def told(predictor: str, slot_bytes: int) -> str:
        stats = with_decode(make_stats(predictor=predictor), prefetch_on_visits=3)
        stats = dataclasses.replace(stats, cache_bytes=slot_bytes * stats.cache_slots)
        return next(found.text for found in advice(make_run(stats=stats)) if found.rule == rule)

    assert told("gate", 1 << 20).endswith("pays sooner (promoe-train).")
    assert told("of/ours", 1 << 20).endswith("cores busy with computing).")
    assert told("gate", 81 << 10).endswith(
        "Experts of 81.0 KiB arrive nearly as soon as they are named; larger ones gain."
    )


def test_advice_when_little_arrives_in_time() -> None:
    late = make_stats(predictor="gate", hits=1, ready=1)
    assert any(rule.startswith("ready rate less than 2 points") for rule in rules(late))
    timely = make_stats(predictor="gate", hits=1, ready=2)
    assert not any(rule.startswith("ready rate") for rule in rules(timely))


def test_advice_at_the_bound_and_after_failures() -> None:
    assert "TPOT within 15% of its bound" in rules(make_stats(), bound_s=0.018)
    assert "TPOT within 15% of its bound" not in rules(make_stats(), bound_s=0.010)
    recorder = Recorder([2], [10])
    recorder.visit(0, (1,), 0, 0, 0.0)
    recorder.failed("prefetch")
    failed = Stats.of(recorder, cache_slots=1, cache_bytes=10, link="", policy="lru", predictor=None)
    assert rules(failed)[0] == "any failed transfer"


def test_comparison_names_the_best_its_gain_and_its_price() -> None:
    runs = [
        make_run("resident", stats=make_stats(slots=32, hits=2, ready=2, stall_s=0), tpot_s=0.010),
        make_run("lru", tpot_s=0.040),
        make_run("better", tpot_s=0.020),
        make_run("worse", tpot_s=0.025),
    ]
    text = " ".join(comparison(runs, runs[1]))
    assert "“better” is 2.00x as fast as “lru”: 20.0 ms instead of 40.0 ms per token" in text
    assert "has 50.0% of the speed of “resident”, whose experts are all in memory, with 8.0 MiB of slots." in text
    assert "“better” 2.00x; “worse” 0.80x (slower)" in text
    assert comparison(runs, runs[2])[0] == "No run is faster than “better”."
    of_two = comparison(runs[1:3], runs[2])[0]
    assert of_two.startswith("“better” is 2.00x as fast as “lru”"), "of two runs, whichever the baseline is"
    single = "(one run each: how much of it is chance is not known)."
    assert of_two.endswith(single)
    assert comparison(runs, runs[1])[-1].endswith(single)


def test_comparison_says_when_intervals_overlap() -> None:
    def run(name: str, tpot_s: float, half_s: float) -> object:
        return make_run(name, tpot_s=tpot_s, tpot_interval_s=(tpot_s - half_s, tpot_s + half_s))

    runs = [run("a", 0.040, 0.001), run("b", 0.039, 0.001), run("c", 0.020, 0.001)]
    steps = comparison(runs, runs[0])[-1]  # type: ignore[arg-type]
    assert "“b” ~1.03x" in steps
    assert steps.endswith("(~: within what these prompts can tell).")
    assert "“c” 1.95x (~:" in steps
    resolved = comparison(runs[1:], runs[1])[0]  # type: ignore[arg-type]
    assert resolved.endswith(" MB per token."), "neither doubt"
    pair = comparison(runs[:2], runs[0])[0]  # type: ignore[arg-type]
    assert pair.endswith(", within what these prompts can tell.")


def test_comparison_without_times_claims_nothing() -> None:
    runs = [make_run("a", stats=resident_stats()), make_run("b", stats=resident_stats())]
    assert comparison(runs, runs[0]) == []


@pytest.mark.parametrize(("bound_s", "reported"), [(0.0205, False), (0.021, True)])
def test_a_time_well_below_its_bound_is_reported(bound_s: float, reported: bool) -> None:
    runs = [make_run("a", bound_s=bound_s), make_run("b")]
    assert any("Measuring error" in sentence for sentence in comparison(runs, runs[0])) is reported


def test_the_cache_that_is_advised_holds_what_is_said_of_it() -> None:
    """205 of 384 experts are 53.4%, of which 53% would be 203 slots."""
    recorder = Recorder([384], [MIB])
    recorder.begin_pass("decode", 1, 1)
    for expert_idx in range(227):
        recorder.visit(0, [expert_idx], 0, 0, 1.0)
    recorder.end_pass(400.0)
    stats = Stats.of(recorder, cache_slots=96, cache_bytes=96 * MIB, link="", policy="next_use", predictor=None)
    (text,) = [a.text for a in advice(make_run(stats=stats)) if "90% of the needs fell on" in a.text]
    assert "on 205 of 384 experts" in text
    assert 'cache="54%"' in text
    assert int(0.53 * 384) < 205 <= int(0.54 * 384)
