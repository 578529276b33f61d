from __future__ import annotations

import io

import pytest

from promoe.terminal import LiveText, opening_bar


class Terminal(io.StringIO):
    """What a terminal would be sent."""

    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def never() -> str:
    raise AssertionError("a status nobody sees was made")


def test_text_alone_goes_out_where_stderr_is_no_terminal() -> None:
    out, err = io.StringIO(), io.StringIO()
    live = LiveText(out, err)
    live.status(never)
    live.text("one ")
    live.text("")
    live.text("two")
    live.end()
    assert out.getvalue() == "one two\n"
    assert err.getvalue() == ""


def test_no_status_on_a_dumb_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    err = Terminal()
    LiveText(Terminal(), err).status(never)
    assert err.getvalue() == ""


def test_piped_text_stays_clean_while_the_status_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out, err, clock = io.StringIO(), Terminal(), Clock()
    live = LiveText(out, err, clock)
    live.status(lambda: "1 token")
    live.text("hello")
    clock.now_s = 0.05
    live.status(never)  # too soon
    clock.now_s = 0.2
    live.status(lambda: "2 tokens")
    live.end()
    assert out.getvalue() == "hello\n"
    assert "\r\033[K1 token" in err.getvalue()
    assert "\r\033[K2 tokens" in err.getvalue()
    assert err.getvalue().endswith("\r\033[K"), "the status is taken away at the end"


def test_on_one_terminal_the_status_is_erased_before_text_and_drawn_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Terminal()
    live = LiveText(screen, screen)
    live.status(lambda: "working")
    live.text("hello\n")
    live.end()
    sent = screen.getvalue()
    drawn = sent.index("working")
    assert sent.index("\033[J", drawn) < sent.index("hello") < sent.index("working", drawn + 1)
    assert sent.count("\0337") == sent.count("\0338") == 2, "the cursor returns to the text each time"
    assert sent.endswith("\033[J"), "no empty line after text that ended its own"


def test_a_status_is_cut_to_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("promoe.terminal._columns", lambda: 20)
    err = Terminal()
    LiveText(io.StringIO(), err).status(lambda: "x" * 100)
    assert err.getvalue().count("x") == 19


def test_the_bar_begins_anew_with_another_total(capsys: pytest.CaptureFixture[str]) -> None:
    with opening_bar("model") as progress:
        progress(10, 20)
        progress(20, 20)
        progress(5, 100)
    assert capsys.readouterr().out == ""
