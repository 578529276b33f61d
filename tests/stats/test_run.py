from __future__ import annotations

import math

import pytest
from synthetic_runs import make_run, make_stats, resident_stats


def test_times_come_from_the_statistics_unless_measured() -> None:
    run = make_run()
    assert run.time_per_token_s == pytest.approx(0.02)
    assert run.time_to_first_s == pytest.approx(0.1)
    measured = make_run(tpot_s=0.03, ttft_s=0.2)
    assert (measured.time_per_token_s, measured.time_to_first_s) == (0.03, 0.2)


def test_compute_and_stall_add_up_to_the_time_shown() -> None:
    compute_s, stall_s = make_run(tpot_s=0.04).split("decode")
    assert compute_s + stall_s == pytest.approx(0.04)
    assert stall_s / 0.04 == pytest.approx(0.3)
    assert make_run(stats=resident_stats(), tpot_s=0.04).split("decode") == (0.04, 0.0)


def test_a_stall_longer_than_the_pass_leaves_no_negative_compute() -> None:
    assert make_run(stats=make_stats(stall_s=1.0)).split("decode")[0] == 0.0


def test_bound_ratio() -> None:
    assert make_run(tpot_s=0.03, bound_s=0.02).bound_ratio == pytest.approx(1.5)
    assert math.isnan(make_run().bound_ratio)


def test_reports_speak_of_decode_unless_there_was_none() -> None:
    assert make_run().phase_name == "decode"
    prompt_only = make_run(stats=make_stats(decode_passes=0))
    assert prompt_only.phase_name == "prefill"
    assert prompt_only.phase is prompt_only.stats.prefill
