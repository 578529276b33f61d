"""Every family whose checkpoints have a tensor for each expert, in 4 bits: its linear layers, and its experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from packed_weights import FORMS
from quantised_checkpoints import write_packed
from served import LinkOver, close, config, plain_link

import promoe
from zoo.exactness import assert_equal, outputs
from zoo.families import build, family_of, inputs, names
from zoo.support import checkpoint_form
from zoo.test_checkpoints import aligned

PER_EXPERT = [name for name in names() if family_of(name).runs_in_bf16]


@pytest.mark.parametrize("name", PER_EXPERT)
def test_answers_as_the_model_of_decoded_weights(name: str, tmp_path: Path) -> None:
    model = build(name, torch.bfloat16)
    if checkpoint_form(model) != "per expert":
        pytest.skip("its checkpoints have stacked experts, of which there are none in this form")
    tokens = inputs(name, model)
    quantised, plain = write_packed(tmp_path, FORMS["W4A16 by channel"], name)
    expected = outputs(aligned(type(model).from_pretrained(plain).eval()), tokens)
    settings = {"auto_class": type(model)} if family_of(name).whole else {}
    opened = promoe.from_pretrained(
        quantised, experts="checkpoint", cache="40%", link=LinkOver(plain_link), config=config(), **settings
    )
    try:
        assert_equal(outputs(opened, tokens), expected)
        assert opened.promoe.stats().bytes_demand > 0
    finally:
        close(opened)
