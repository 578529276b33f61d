"""How many tokens a model was made for, and which answers fit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import build
from transformers import PretrainedConfig

from promoe.errors import ConfigError
from promoe.model.context import context_tokens, longest_answer


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, None),
        ({"max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": None}, None),
        ({"max_position_embeddings": "many"}, None),
        # Qwen3: the plain model's positions, and a file that says how to read four times as many.
        (
            {
                "max_position_embeddings": 40960,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        # DeepSeek-V3: its positions are what the scaling reaches.
        (
            {
                "max_position_embeddings": 163840,
                "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
            },
            163840,
        ),
        ({"max_position_embeddings": 1024, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 2048),
        # Llama 4: the factor is within the positions.
        ({"max_position_embeddings": 10_000, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 10_000),
        ({"max_position_embeddings": 1024, "rope_scaling": {"rope_type": "linear", "factor": "two"}}, 1024),
    ],
)
def test_the_context_of_a_configuration(fields: dict[str, Any], tokens: int | None) -> None:
    config = PretrainedConfig()
    for name, value in fields.items():
        setattr(config, name, value)
    assert context_tokens(config) == tokens


def test_the_context_of_a_model() -> None:
    assert context_tokens(build("qwen3_moe", max_position_embeddings=77).config) == 77


@given(
    st.none() | st.integers(1, 50),
    st.integers(1, 60),
    st.none() | st.integers(1, 60),
    st.integers(1, 20),
    st.booleans(),
)
def test_an_answer_is_as_long_as_asked_or_as_fits(
    context: int | None, prompt: int, asked: int | None, default: int, apart: bool
) -> None:
    needed = max(prompt, asked or 1) if apart else prompt + (asked or 1)
    if context is not None and needed > context:
        with pytest.raises(ConfigError, match=f"context is {context} tokens. The prompt has {prompt}"):
            longest_answer(context, prompt, asked, default, apart=apart)
        return
    found = longest_answer(context, prompt, asked, default, apart=apart)
    assert 1 <= found <= (asked or default)
    assert found == asked or asked is None
    assert context is None or (max(prompt, found) if apart else prompt + found) <= context
