"""Stop texts: found at the token that completes them, and cut off."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoint import byte_tokenizer

from promoe.commands.batch.stops import StopTexts

TOKENIZER = byte_tokenizer()


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER(text)["input_ids"]
    return found


@pytest.mark.parametrize(
    ("stops", "answer", "text"),
    [
        ([], "one two", None),
        (["two"], "one two three", "one "),
        (["three", "two"], "one two three", "one "),
        (["é"], "caféx", "caf"),
        (["<|human|>"], "one<|human|>two", "one"),
        (["e<|human|>"], "one<|human|>two", "on"),
        (["two"], "one<|human|>two", "one"),
        (["two"], "<|gpt|>one<|human|>", None),
        (["x" * 100], "a" + "x" * 100, "a"),
    ],
)
def test_a_stop_is_found_and_cut_off(stops: list[str], answer: str, text: str | None) -> None:
    plain = TOKENIZER.decode(ids(answer), skip_special_tokens=True)
    assert StopTexts(TOKENIZER, stops).text(ids(answer)) == ((plain, False) if text is None else (text, True))


def test_the_token_that_ends_an_answer_may_be_a_part_of_a_stop() -> None:
    end = TOKENIZER.eos_token_id
    assert StopTexts(TOKENIZER, ["o<|end|>"]).text(ids("two"), end) == ("tw", True)
    assert StopTexts(TOKENIZER, ["<|end|>"]).text(ids("two"), end) == ("two", True)
    assert StopTexts(TOKENIZER, ["x<|end|>"]).text(ids("two"), end) == ("two", False)


@given(
    st.lists(st.text("ab é<|human|>", min_size=1, max_size=6), min_size=1, max_size=4),
    st.lists(st.sampled_from(["a", "b", "é", "<|human|>", " ", "😀"]), max_size=30),
)
def test_it_stops_at_the_token_that_completes_a_stop(stops: list[str], pieces: list[str]) -> None:
    found = StopTexts(TOKENIZER, stops)
    tokens = ids("".join(pieces))
    complete = [
        any(stop in TOKENIZER.decode(tokens[:count], skip_special_tokens=False) for stop in stops)
        for count in range(1, len(tokens) + 1)
    ]
    first = complete.index(True) if True in complete else len(tokens)
    assert [found(tokens[:count]) for count in range(1, first + 2) if count <= len(tokens)] == complete[: first + 1]
