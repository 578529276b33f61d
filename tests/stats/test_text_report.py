from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
from synthetic_runs import make_run, make_stats, resident_stats

from promoe.commands.charts.html_report import html_report
from promoe.errors import ConfigError
from promoe.stats.run import Run
from promoe.stats.text_report import text_comparison, text_report

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Parses a report; asserts that tags are balanced, and keeps the text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def five_runs() -> list[Run]:
    return [
        make_run("everything resident", stats=make_stats(slots=32, hits=2, ready=2, stall_s=0.0, pass_s=0.01)),
        make_run("on-demand LRU", stats=make_stats(policy="lru", pass_s=0.03), bound_s=0.015),
        make_run("+ preemption", stats=make_stats(policy="lru", pass_s=0.025), bound_s=0.015),
        make_run("+ next use", stats=make_stats(pass_s=0.022), tpot_s=0.021, tpot_interval_s=(0.020, 0.022)),
        make_run("+ prefetch", stats=make_stats(pass_s=0.018, predictor="gate", ready=2, wasted_every=4), ttft_s=0.09),
    ]


def report_of(tmp_path: Path, runs: list[Run], **kwargs: object) -> tuple[str, Page]:
    path = html_report(runs, tmp_path / "report.html", **kwargs)  # type: ignore[arg-type]
    source = path.read_text(encoding="utf-8")
    return source, Page(source)


def test_text_report_has_numbers_meaning_and_advice_with_its_rule() -> None:
    text = text_report(make_stats(policy="lru"), bound_s=0.016)
    assert text.startswith(make_stats(policy="lru").summary())
    assert "Compute waited 30.0% of decode time for experts: 6.00 ms of 20.0 ms per pass." in text
    assert "this run took 1.25x as long" in text
    assert "What to do" in text
    assert "(rule: policy is lru" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 100


def test_sentences_of_a_text_report_fit_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = text_report(make_stats(policy="lru"))
    sentences = text[text.index("What it means") :].splitlines()
    assert 70 <= max(map(len, sentences)) <= 80


def test_text_report_before_anything_ran_says_so() -> None:
    assert "No MoE layer has run yet." in text_report(make_stats(layers=0, experts=0))
    assert "every expert fits into memory" in text_report(resident_stats())


def test_text_comparison_is_an_aligned_table_and_words() -> None:
    text = text_comparison(five_runs(), baseline="on-demand LRU")
    head, units, *rows = text.split("\n\n")[0].splitlines()
    assert head.split() == [
        "TTFT",
        "TPOT",
        "speed",
        "hit",
        "ready",
        "stall",
        "moved",
        "wasted",
        "prefetch",
        "bound",
        "ratio",
    ]
    assert units.split()[:2] == ["ms", "ms"]
    assert [row[:20].strip() for row in rows] == [run.name for run in five_runs()]
    prefetch = rows[-1]
    assert prefetch.split()[2:5] == ["90.0", "18.0", "1.67x"]
    assert "21.0 [20.0, 22.0]" in rows[3]
    assert "“+ prefetch” is 1.67x as fast as “on-demand LRU”" in text


def test_the_baseline_is_the_first_run_that_does_not_hold_all_experts() -> None:
    assert "as fast as “on-demand LRU”" in " ".join(text_comparison(five_runs()).split())


@pytest.mark.parametrize(
    ("runs", "baseline", "message"),
    [
        ([], None, "at least one run"),
        ([make_run("a"), make_run("a")], None, "different names"),
        ([make_run("a")], "b", r"one of the runs' names \['a'\]. Got 'b'"),
    ],
)
def test_bad_input_is_a_config_error_and_writes_nothing(
    tmp_path: Path, runs: list[Run], baseline: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        html_report(runs, tmp_path / "r.html", baseline=baseline)
    with pytest.raises(ConfigError, match=message):
        text_comparison(runs, baseline=baseline)
    assert list(tmp_path.iterdir()) == []


def test_html_report_into_a_missing_folder_raises(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        html_report([make_run()], tmp_path / "none" / "r.html")


def test_html_report_loads_nothing(tmp_path: Path) -> None:
    source, page = report_of(tmp_path, five_runs())
    assert "http:" not in source
    assert "https:" not in source
    assert "@import" not in source
    assert set(re.findall(r"url\(([^)]*)\)", source)) <= {"#p-stall", "#p-wasted"}
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "base"), tag
        assert not {"src", "href", "srcset"} & attributes.keys(), tag
    policy = next(a for t, a in page.tags if t == "meta" and "content" in a)
    assert "default-src 'none'" in str(policy["content"])


def test_html_report_shows_conditions_table_words_and_every_run(tmp_path: Path) -> None:
    _, page = report_of(tmp_path, five_runs(), title="Five runs", conditions={"Model": "tiny", "Threads": "2"})
    for expected in (
        "Five runs",
        "Model",
        "tiny",
        "Threads",
        "TTFT",
        "TPOT",
        "MB/token",
        "What it means",
        "What to do",
    ):
        assert expected in page.text, expected
    assert len([1 for tag, a in page.tags if tag == "section" and a.get("class") == "run"]) == 5
    assert len([1 for tag, a in page.tags if tag == "button" and a.get("role") == "tab"]) == 5
    assert "4 MoE layers, 32 experts, 32.0 MiB of expert weights" in page.text


def test_every_chart_has_title_axis_labels_with_units_and_hover_titles(tmp_path: Path) -> None:
    source, _ = report_of(tmp_path, five_runs())
    charts = re.findall(r"<figure.*?</figure>", source, re.DOTALL)
    assert len(charts) == 4 + 1 + 2 + 5 * 5  # of all runs, of what they needed, of each
    for chart in charts:
        assert re.search(r"<h3>[^<]+</h3><p>[^<]+</p>", chart)
        drawing = ElementTree.fromstring(re.search(r"<svg.*?</svg>", chart, re.DOTALL)[0])  # type: ignore[index]
        labels = re.findall(r'class="(?:axis-label mid|x-name|y-name)"[^>]*>([^<]+)<', chart)
        assert labels, chart[:200]
        assert all(re.search(r"\(.+\)", label) for label in labels), labels
        empty = "zero in every layer" in chart
        assert empty or next(drawing.iter("title"), None) is not None, chart[:200]


def test_one_run_needs_no_comparison(tmp_path: Path) -> None:
    _, page = report_of(tmp_path, [make_run("only one")])
    assert "In short" not in page.text
    assert "baseline" not in page.text
    assert not [1 for _, a in page.tags if a.get("role") == "tab"]
    assert "only one" in page.text


def test_eight_large_runs_stay_small_enough_to_mail(tmp_path: Path) -> None:
    runs = [
        make_run(f"run {i}", stats=make_stats(layers=48, experts=128, top_k=8, hits=4, ready=6, shift=i))
        for i in range(8)
    ]
    source, _ = report_of(tmp_path, runs)
    assert len(source) < 3_000_000
    assert source.count("data-heat=") == 8


def test_the_heat_map_is_drawn_once_when_all_runs_needed_the_same(tmp_path: Path) -> None:
    source, page = report_of(tmp_path, [*five_runs(), make_run("loaded", tpot_s=0.01, stats=resident_stats())])
    assert source.count("data-heat=") == 1
    assert "the same in all runs" in page.text


def test_every_string_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script> & \"q\""
    stats = make_stats(predictor=evil, policy=evil)
    runs = [make_run(evil, stats=stats, note=evil), make_run(evil + "2", stats=stats, bound_s=0.1)]
    source, page = report_of(tmp_path, runs, title=evil, conditions={evil: evil})
    assert source.count("<script>") == 1
    assert evil.split()[0] not in source
    assert evil in page.text


def test_a_time_below_its_bound_is_called_a_measuring_error(tmp_path: Path) -> None:
    runs = [make_run("honest", bound_s=0.019), make_run("impossible", bound_s=0.03)]
    source, page = report_of(tmp_path, runs)
    assert "Measuring error, faster than possible: “impossible” (0.67x its bound)" in page.text
    assert source.count('class="alarm"') == 1


def test_a_run_without_counters_is_shown_with_its_times(tmp_path: Path) -> None:
    runs = [make_run("loaded", stats=resident_stats(), tpot_s=0.01), make_run("served")]
    _, page = report_of(tmp_path, runs)
    assert "has 50.0% of the speed of “loaded”, whose experts are all in memory, with 8.0 MiB of slots." in page.text
    assert "nan" not in page.text


def test_report_on_nothing_at_all(tmp_path: Path) -> None:
    source, page = report_of(tmp_path, [make_run("nothing", stats=make_stats(layers=0, experts=0, decode_passes=0))])
    assert "No MoE layer has run yet." in page.text
    assert ">nan<" not in source


def test_dark_mode_and_paper_are_styled(tmp_path: Path) -> None:
    source, _ = report_of(tmp_path, [make_run()])
    assert "@media screen and (prefers-color-scheme:dark)" in source
    assert "@media print" in source
    used = set(re.findall(r"var\((--[a-z0-9]+)\)", source))
    for block in re.findall(r"\{color-scheme:(?:light|dark);(.*?)\}", source, re.DOTALL):
        assert used <= set(re.findall(r"(--[a-z0-9]+):", block)), "every colour exists in every mode"
