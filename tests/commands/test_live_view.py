from __future__ import annotations

import dataclasses
import math
import re
import sys

import pytest
from served import PROMPTS, greedy, served

from promoe.commands import live_view as live
from promoe.commands.live_view import Figures, Panel, Reading, metered, no_link, one_line
from promoe.runtime.resident import ResidentHandle
from promoe.stats.counts import Counts, PhaseStats
from promoe.stats.recorder import Recorder
from promoe.stats.totals import Stats

ZERO = Counts()
LATER = Counts(needed=40, hits=20, ready=30, stall_s=0.5, bytes_demand=3_000_000, bytes_prefetched=1_000_000)
FIGURES = Figures.between(Reading(10.0, 1, 2.0, ZERO), Reading(12.0, 5, 3.5, LATER))


def test_figures_are_of_what_happened_between_two_readings() -> None:
    assert (
        Figures(
            tokens_per_s=2.0,
            hit_rate=0.5,
            ready_rate=0.75,
            link_use=0.75,
            stall_share=0.25,
            bytes_per_token=1_000_000,
            demand_share=0.75,
        )
        == FIGURES
    )


def test_figures_of_no_time_are_no_numbers() -> None:
    reading = Reading(1.0, 1, 0.0, ZERO)
    assert all(math.isnan(value) for value in Figures.between(reading, reading))


class Model:
    """What a panel reads: counts that grow by the same amount with each token."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.tokens = 1
        recorder = Recorder([8], [1000])
        self._plain = Stats.of(recorder, cache_slots=4, cache_bytes=4000, link="", policy="", predictor=None)

    def stats(self) -> Stats:
        n = self.tokens
        counts = {"needed": 8 * n, "hits": 4 * n, "ready": 6 * n, "stall_s": 0.05 * n, "bytes_demand": 500_000 * n}
        decode = PhaseStats(**counts, bytes_prefetched=500_000 * n)
        return dataclasses.replace(self._plain, prefill=PhaseStats(), decode=decode)

    def busy_s(self) -> float:
        return 0.1 * self.tokens

    def clock(self) -> float:
        return self.now_s

    def next(self, seconds: float = 0.2) -> int:
        self.now_s += seconds
        self.tokens += 1
        return self.tokens


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def panel(model: Model) -> Panel:
    panel = Panel(model.stats, model.busy_s, model.clock)
    panel.begin()
    return panel


def hide_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("rich.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)


@pytest.fixture(params=["rich", "plain"])
def with_or_without_rich(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if request.param == "plain":
        hide_rich(monkeypatch)
    return str(request.param)


def visible(text: str) -> list[str]:
    return re.sub("\033\\[[0-9;]*m", "", text).splitlines()


@pytest.mark.parametrize("columns", [79, 119])
def test_the_panel_shows_every_figure_in_its_room(
    columns: int, with_or_without_rich: str, panel: Panel, model: Model
) -> None:
    text = panel.text(model.next(), (columns, 8))
    lines = visible(text)
    assert len(lines) <= live.PANEL_LINES
    assert max(map(len, lines)) <= columns
    shown = "\n".join(lines)
    assert "2 tokens, 5.00 tokens/s" in shown
    for label, share in (("hit rate", "50.0%"), ("ready rate", "75.0%"), ("link use", "50.0%"), ("stall", "25.0%")):
        assert re.search(rf"{label}\W+{share}\s+{share}", shown), (label, shown)
    assert "moved 1.00 MB per token now, 1.00 so far (50.0% prefetched), 2.00 in all" in shown
    assert ("╭" in shown) == (with_or_without_rich == "rich")
    assert ("\033[" in text) == (with_or_without_rich == "rich")


def test_now_is_the_last_readings_and_so_far_all_of_them(
    panel: Panel, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_rich(monkeypatch)
    for _ in range(live.WINDOW):
        panel.text(model.next(seconds=1.0), (80, 8))
    for _ in range(live.WINDOW - 1):
        text = panel.text(model.next(seconds=0.2), (80, 8))
    assert "40 tokens, 5.00 tokens/s" in text
    link = re.search(r"link use +(\S+)% +(\S+)%", text)
    assert link is not None
    now, so_far = map(float, link.groups())
    assert now == 50.0
    assert so_far == pytest.approx(100 * 0.1 * 39 / (20 * 1.0 + 19 * 0.2), abs=0.05)


@pytest.mark.parametrize("room", [(79, 5), (60, 8), (79, 1)])
def test_a_small_terminal_gets_one_line(room: tuple[int, int], panel: Panel, model: Model) -> None:
    text = panel.text(model.next(), room)
    assert text.startswith("2 tokens, 5.00 tokens/s, hit rate 50.0%")
    assert "\n" not in text
    assert len(text) <= room[0]


def test_one_line_leaves_out_what_is_not_known_and_what_has_no_room() -> None:
    assert one_line(5, FIGURES, 100) == (
        "5 tokens, 2.00 tokens/s, hit rate 50.0%, link use 75.0%, ready rate 75.0%, stall 25.0%"
    )
    unmetered = FIGURES._replace(link_use=math.nan)
    assert one_line(5, unmetered, 100) == "5 tokens, 2.00 tokens/s, hit rate 50.0%, ready rate 75.0%, stall 25.0%"
    assert one_line(5, FIGURES, 45) == "5 tokens, 2.00 tokens/s, hit rate 50.0%"


def test_the_link_of_a_served_model_is_metered_and_put_back() -> None:
    with served("qwen2_moe", cache="top-k") as model:
        engine = model.promoe.runtime.engine
        link = engine.link
        with metered(model.promoe) as busy_s:
            greedy(model, PROMPTS["one"])
            assert model.promoe.stats().link == link.describe()
            assert busy_s() > 0
        assert engine.link is link


def test_a_model_without_a_link_has_no_link_use() -> None:
    with metered(object.__new__(ResidentHandle)) as busy_s:
        assert math.isnan(busy_s())
    assert math.isnan(no_link())
