from __future__ import annotations

import io
import os

import pytest

from promoe.commands.terminal import LOG_COLUMNS, LiveText, column_after, opening_bar


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
    assert err.getvalue() == "\r1 token\r\033[J\r2 tokens\r\033[J", "and the status is taken away at the end"


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
    monkeypatch.setattr("promoe.commands.terminal._size", lambda: (20, 24))
    err = Terminal()
    LiveText(io.StringIO(), err).status(lambda: "x" * 100)
    assert err.getvalue().count("x") == 19


def test_a_status_of_several_lines_makes_room_below_and_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Terminal()
    LiveText(screen, screen).status(lambda: "one\n\033[31mtwo\033[m")
    room = "\033D\033D\033M\033M\0337"
    lines = "\033[B\r\033[K\033[2mone\033[m\033[B\r\033[K\033[31mtwo\033[m"
    assert screen.getvalue() == f"{room}{lines}\0338"
    err = Terminal()
    LiveText(io.StringIO(), err).status(lambda: "one\ntwo\nthree")
    assert err.getvalue() == "\rone\r\ntwo\r\nthree\033[2A", "back to the first, to be erased from there"


def test_behind_a_full_line_nothing_is_drawn_or_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("promoe.commands.terminal._size", lambda: (10, 24))
    screen, clock = Terminal(), Clock()
    live = LiveText(screen, screen, clock)
    live.status(lambda: "working")
    before = len(screen.getvalue())
    live.text("0123456789")
    clock.now_s = 1.0
    live.status(lambda: "still")
    live.text("a")
    sent = screen.getvalue()[before:]
    assert sent.startswith("\033[J0123456789a\033D"), "the cursor cannot be brought back behind the 9"
    assert "still" in sent


@pytest.mark.parametrize(
    ("text", "column", "expected"),
    [
        ("abc", 0, 3),
        ("abc", 7, 10),
        ("abc", 8, 1),
        ("abc", 10, 3),
        ("ab\n", 5, 0),
        ("ab\nc", 5, 1),
        ("\t", 3, 8),
        ("\t", 8, 9),
        ("漢字", 0, 4),
        ("漢", 9, 2),
        ("e\u0301", 0, 1),
        ("", 10, 10),
    ],
)
def test_where_the_cursor_stands(text: str, column: int, expected: int) -> None:
    assert column_after(text, column, 10) == expected


def test_lines_for_a_log_come_at_most_so_often() -> None:
    out, err, clock = io.StringIO(), io.StringIO(), Clock()
    live = LiveText(out, err, clock, log_every_s=1.0)
    assert live.room == (LOG_COLUMNS, 1)
    live.status(lambda: "first")
    clock.now_s = 0.9
    live.status(never)
    clock.now_s = 1.1
    live.text("word ")
    live.status(lambda: "second")
    live.end()
    assert (out.getvalue(), err.getvalue()) == ("word \n", "first\nsecond\n")


def test_the_bar_begins_anew_with_another_total(capsys: pytest.CaptureFixture[str]) -> None:
    with opening_bar("model") as progress:
        progress(10, 20)
        progress(20, 20)
        progress(5, 100)
    assert capsys.readouterr().out == ""


def test_a_terminal_that_was_never_told_its_size_is_taken_for_an_ordinary_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((0, 0)))
    terminal = Terminal()
    live = LiveText(terminal, terminal, Clock())
    assert live.room == (79, 8)
    live.status(lambda: "x" * 100)
    assert f"{'x' * 79}\033" in terminal.getvalue()
