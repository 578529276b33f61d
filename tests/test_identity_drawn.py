"""Bit-identity under settings that Hypothesis draws: every setting changes when bytes move, none what is computed."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served import (
    EVICTIONS,
    LinkOver,
    PREDICTORS,
    PROMPTS,
    delayed,
    greedy,
    plain_link,
    predictor_of,
    record,
    served,
    stock,
)
from tiny_models import IMPLEMENTATIONS, MOE_FAMILIES

EXAMPLES = 260


@st.composite
def links(draw: st.DrawFn) -> LinkOver:
    workers = draw(st.integers(1, 3), label="workers")
    if draw(st.booleans(), label="delayed"):
        return delayed(draw(st.integers(0, 999), label="seed of delays"), 3e-4, workers)
    return LinkOver(lambda store: plain_link(store, workers))


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    family=st.sampled_from(MOE_FAMILIES),
    implementation=st.sampled_from(IMPLEMENTATIONS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    store=st.sampled_from(["host", "host", "file"]),
    cache=st.sampled_from([1, 2, 3, "top-k", "25%", "50%", "75%", "100%"]),
    prompts=st.lists(st.sampled_from(sorted(PROMPTS)), min_size=1, max_size=2),
    predictor=st.sampled_from(PREDICTORS),
    link=links(),
    fields=st.fixed_dictionaries(
        {
            "eviction": st.sampled_from(EVICTIONS),
            "reorder": st.booleans(),
            "early_preemption": st.booleans(),
            "lookahead": st.integers(1, 5),
            "min_probability": st.sampled_from([0.01, 0.3, 0.9]),
            "governor": st.booleans(),
            "chunk_bytes": st.sampled_from([4096, 4 * 1024 * 1024]),
        }
    ),
)
def test_no_setting_changes_a_bit(
    family: str,
    implementation: str,
    dtype: torch.dtype,
    store: str,
    cache: str | int,
    prompts: list[str],
    predictor: str | None,
    link: LinkOver,
    fields: dict[str, Any],
) -> None:
    references = [record(family, dtype, implementation, prompt) for prompt in prompts]
    visits = [visit for _, visits in references for visit in visits]
    chosen = predictor_of(predictor, stock(family, dtype), visits, fields["lookahead"])
    with served(
        family, dtype, implementation, store=store, cache=cache, predictor=chosen, link=link, **fields
    ) as model:
        for prompt, (wanted, _) in zip(prompts, references, strict=True):
            greedy(model, PROMPTS[prompt]).assert_equals(wanted)
