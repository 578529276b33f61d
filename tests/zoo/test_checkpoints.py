"""A checkpoint of every family, in the layout that hub checkpoints have, opened with its experts left in the files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from served import LinkOver, close, config, plain_link
from transformers import PreTrainedModel

import promoe
from zoo.exactness import assert_equal, outputs
from zoo.families import build, family_of, inputs, names

NEW_TOKENS = 3


@pytest.mark.parametrize("name", names())
def test_opens_and_answers_as_from_pretrained_does(name: str, tmp_path: Path) -> None:
    """The same bits in a prompt and a token after it, and the same tokens where the model generates."""
    model = build(name)
    tokens = inputs(name, model)
    model.save_pretrained(tmp_path, max_shard_size="400KB")
    stock = aligned(type(model).from_pretrained(tmp_path).eval())
    expected, generated = outputs(stock, tokens), generate(name, stock, tokens)
    expected_after = outputs(stock, tokens)  # some models keep something of what they generated (`rope_deltas`)
    settings = {"cache": "40%", "link": LinkOver(plain_link), "config": config()}
    if family_of(name).whole:  # some of these could also be opened as their language model alone
        settings["auto_class"] = type(model)
    opened = promoe.from_pretrained(tmp_path, **settings)
    try:
        assert type(opened) is type(stock)
        assert_equal(outputs(opened, tokens), expected)
        assert generate(name, opened, tokens) == generated
        assert opened.promoe.stats().bytes_demand > 0
        assert not opened.promoe.runtime.predictor_failed
        promoe.unpatch(opened)  # reads all experts into memory
        assert_equal(outputs(opened, tokens), expected_after)
    finally:
        if hasattr(opened, "promoe"):
            close(opened)


def aligned(model: PreTrainedModel) -> PreTrainedModel:
    """The model with its tensors out of the mapped files, where they are not aligned as ours are."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model


@torch.inference_mode()
def generate(name: str, model: PreTrainedModel, tokens: dict[str, torch.Tensor]) -> list[list[int]] | None:
    """Greedy tokens; None where the model does not generate."""
    if not (model.can_generate() and family_of(name).generates):
        return None
    ids = tokens["input_ids"][:1]
    mask = torch.ones_like(ids)
    fields = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "decoder_start_token_id": 0}
    if not model.config.is_encoder_decoder:
        del fields["decoder_start_token_id"]
    result: list[list[int]] = model.generate(ids, attention_mask=mask, **fields).tolist()
    return result
