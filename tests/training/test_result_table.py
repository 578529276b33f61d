"""The table of an evaluation: its heads, its dashes, its width."""

from __future__ import annotations

from promoe.training.result_table import WIDTH, accuracy_columns, cache_columns, legend, percent, table

from .results import calibration, figures

CACHES = [("lru", "25%"), ("lru", "100%")]


def test_a_row_per_kind_and_lookahead() -> None:
    result = {"gate": {"1": figures(0.775), "8": figures(None)}, "token": {"1": figures(0.5), "8": figures(0.5)}}
    columns = accuracy_columns(result) + cache_columns(CACHES, " misses", "recall", "precision")
    assert table(result, columns) == [
        "            accuracy, %                 lru misses",
        "kind     k          all  exact  cover    25%  100%",
        "gate     1         77.5   38.8    4.2  61/48   –/–",
        "         8            –      –      –  61/48   –/–",
        "token  any         50.0   25.0    4.2  61/48   –/–",
    ]


def test_there_are_columns_for_what_there_is() -> None:
    result = {
        "a": {"1": figures(0.5, prefill=figures(0.4), decode=figures(0.6), next_token_accuracy=0.3)},
        "b": {"1": figures(0.7, decode=figures(0.8), calibration=calibration(0.0315))},
    }
    assert table(result, accuracy_columns(result)) == [
        "         ─────── accuracy, % ───────",
        "kind  k   all  prefill  decode  next  exact  cover  Brier",
        "a     1  50.0     40.0    60.0  30.0   25.0    4.2      –",
        "b     1  70.0        –    80.0     –   35.0    4.2  0.032",
    ]


def test_figures_that_only_look_the_same_keep_their_rows() -> None:
    result = {"gate": {"1": figures(0.5001), "2": figures(0.5002)}}
    assert [line.split()[-4] for line in table(result, accuracy_columns(result))[2:]] == ["1", "2"]


def test_a_single_lookahead_keeps_its_number() -> None:
    result = {"token": {"4": figures(0.5)}}
    assert table(result, accuracy_columns(result))[-1].split()[:2] == ["token", "4"]


def test_without_groups_there_is_one_head() -> None:
    result = {"token": {"4": figures(0.5)}}
    assert table(result, accuracy_columns(result)[1:])[0].split() == ["kind", "k", "exact", "cover"]


def test_the_legend_says_what_is_shown_and_fits_the_terminal() -> None:
    plain = {"a": {"1": figures(0.5)}}
    full = {"a": {"1": figures(0.5, next_token_accuracy=0.3, calibration=calibration(0.1))}}
    words = " ".join(legend(accuracy_columns(plain)))
    assert words.startswith("accuracy: share of the experts used that are predicted; exact: ")
    assert "Brier" not in words
    lines = legend(accuracy_columns(full), "misses: those")
    assert "Brier" in " ".join(lines)
    assert lines[-1].endswith("misses: those.")
    assert max(map(len, lines)) <= WIDTH


def test_the_table_of_all_that_there_is_fits_the_terminal() -> None:
    caches = [(policy, rate) for policy in ("lru", "next_use") for rate in ("12.5%", "25%", "50%")]
    one = figures(0.5, prefill=figures(0.4), decode=figures(0.6), next_token_accuracy=0.3, calibration=calibration(0.1))
    one["misses"] = {
        policy: dict.fromkeys(("12.5%", "25%", "50%"), one["misses"]["lru"]["25%"]) for policy, _ in caches
    }
    result = {"residual (run-12)": {"1": one}}
    lines = table(result, accuracy_columns(result) + cache_columns(caches, " misses", "recall", "precision"))
    assert 100 < max(map(len, lines)) <= WIDTH


def test_percent() -> None:
    assert [percent(0.12345), percent(0.12345, 0), percent(None), percent(1.0)] == ["12.3", "12", "–", "100.0"]
