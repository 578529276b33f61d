from __future__ import annotations

import pytest

from commands.plan.planned import link, sizes, time_model, times
from promoe.commands.plan import show
from promoe.commands.plan.choice import Choice
from promoe.commands.plan.sizes import Room
from promoe.commands.plan.verification import Verified
from promoe.stats.text_columns import NARROWEST_TEXT, WIDEST_TEXT
from promoe.transfer.cpu_contention import Taken


@pytest.mark.parametrize("columns", [20, 80, 120, 300])
def test_nothing_is_wider_than_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    found = time_model(over=link(slowdown=1.5, convert_s=0.001))
    room = Room("RAM", 8 * 2**30, sizes().other_bytes, 2**20)
    choice = Choice(found(0.5), "because", "The link limits it: " + "so much " * 30, True)
    lines = [
        *show.model_lines(sizes(), 4096),
        *show.machine_lines(room, 0.5),
        *show.measured_lines(found, {"direct": link(slowdown=1.5, convert_s=0.001)}, Taken(2, 1.0, 0.1)),
        *show.routing_lines(found.routings),
        *show.choice_lines(choice, {"packing": "packed " * 30, "bits": "fewer " * 30}, []),
    ]
    assert max(map(len, lines)) <= max(NARROWEST_TEXT, min(columns, WIDEST_TEXT))
    table = show.table_lines(sizes(), [found(0.25), found(0.5)], [1.0], found(0.5))
    assert max(map(len, table)) <= 80


@pytest.mark.parametrize(("by_others", "said"), [(0.8, True), (0.1, False), (None, False)])
def test_cores_that_others_kept_busy_are_said(by_others: float | None, said: bool) -> None:
    taken = None if by_others is None else Taken(2, by_others, 0.0)
    text = " ".join(" ".join(show.measured_lines(time_model(), {}, taken)).split())
    assert ("cores other processes took 0.80 of 2 cores" in text) == said
    assert ("OMP_NUM_THREADS=1, or torch.set_num_threads(1) in Python. Then plan again." in text) == said


def test_a_table_of_caches() -> None:
    found = time_model(compute=times(0.05, 0.01))
    head, first, second, large = show.table_lines(sizes(), [found(0.25), found(0.5)], [1.0], found(0.5))
    assert head.split()[0] == "cache"
    assert first.startswith("  25% ")
    assert second.startswith("> 50% ")
    assert large.split() == ["100%", "16", "64.0", "MiB", "does", "not", "fit"]
    assert f"{1000 * found(0.25).slowest.tpot_s:.0f}" in first


def test_verified_rates_and_whether_the_machine_was_the_same() -> None:
    found = time_model()
    known = found(0.25).slowest
    one = Verified(found(0.25), known, known.tpot_s / 1.1, known.ttft_s * 2, 0.5, "page cache, 2 readers (as asked)")
    lines = show.verified_lines([one], 0.1, 0.11)
    assert "over page cache, 2 readers. Ratios" in lines[0]
    assert "changed" not in " ".join(lines)
    assert lines[-2].split()[:3] == ["25%", "TPOT,", "ms"]
    assert lines[-2].split()[-4::3] == ["1.10", "50.0"]
    assert "0.50" in lines[-1]
    assert "changed meanwhile: computing a token took 100 ms before, and 200 ms after" in " ".join(
        " ".join(show.verified_lines([one], 0.1, 0.2)).split()
    )


def test_a_verdict() -> None:
    room = Room("RAM", 8 * 2**30, 0, 0)
    for largest, verdict in ((1.0, "yes, with slots for all"), (0.37, "yes, with slots for up to 37%"), (0.0, "no,")):
        assert verdict in show.machine_lines(room, largest)[-1]
