"""What a prompt says about sampling, and where answers end."""

from __future__ import annotations

from typing import Any

import pytest

from promoe.runtime.sampling import Sampling, cut


@pytest.mark.parametrize(
    ("sampling", "settings"),
    [
        (Sampling(seed=7), {}),
        (Sampling(0.0), {"do_sample": False}),
        (Sampling(1e-9, top_p=0.5), {"do_sample": False}),
        (Sampling(0.5), {"temperature": 0.5, "do_sample": True}),
        (Sampling(top_p=0.5), {"top_p": 0.5, "do_sample": True}),
        (Sampling(top_k=0), {"top_k": 0, "do_sample": True}),
        (Sampling(min_p=0.1), {"min_p": 0.1, "do_sample": True}),
        (Sampling(repetition_penalty=1.1), {"repetition_penalty": 1.1}),
        (Sampling(0.0, repetition_penalty=1.1), {"repetition_penalty": 1.1, "do_sample": False}),
        (Sampling(do_sample=True), {"do_sample": True}),
        (Sampling(0.0, do_sample=True), {"do_sample": False}),
        (Sampling(0.9, 0.9, do_sample=False), {"do_sample": False}),
    ],
)
def test_what_is_not_said_is_left_to_the_model(sampling: Sampling, settings: dict[str, Any]) -> None:
    assert sampling.settings == settings


def test_an_answer_ends_before_its_end() -> None:
    assert cut([4, 5, 6, 5], [5, 9]) == ([4], 5)
    assert cut([4, 6], [5]) == ([4, 6], None)
    assert cut([], [5]) == ([], None)
