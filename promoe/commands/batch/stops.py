"""Texts that end an answer: found while it is generated, also where they are, or contain, special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Tokens that are decoded before those that a stop can have: for tokens without text, and characters of several tokens.
SLACK = 8


class StopTexts:
    """The stop texts of a request. Called with the tokens of an answer so far, it returns whether the last one ends it.

    Args:
        tokenizer: the model's tokenizer.
        stops: the texts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        # A token has at least one byte of text.
        self._window = max((len(stop.encode()) for stop in stops), default=0) + SLACK

    def __call__(self, tokens: Sequence[int]) -> bool:
        """Return whether a stop is in the text of the last tokens."""
        return self._first(self._with_special(tokens[-self._window :])) is not None

    def text(self, tokens: Sequence[int], end: int | None = None) -> tuple[str, bool]:
        """Return the text of an answer up to the first stop, without special tokens, and whether there is a stop.

        Args:
            tokens: the answer's.
            end: the model's token that ended it, which may be a part of a stop.
        """
        plain: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        tokens = [*tokens] if end is None else [*tokens, end]
        whole = self._with_special(tokens)
        first = self._first(whole)
        if first is None:
            return plain, False
        if whole == plain:
            return plain[:first], True
        text = whole[:first]
        for token in set(tokens) & set(self._tokenizer.all_special_ids):
            text = text.replace(self._with_special([token]), "")
        return text, True

    def _with_special(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text

    def _first(self, text: str) -> int | None:
        """Return where the first stop begins; None: there is none."""
        return min((place for stop in self._stops if (place := text.find(stop)) >= 0), default=None)
