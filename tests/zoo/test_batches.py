"""Many prompts at once, with every family: paged where continuous batching can serve it, else padded."""

from __future__ import annotations

import pytest
from transformers import GenerationMixin

from promoe.runtime import batches
from promoe.runtime.batches import BatchPrompt, generate_batch
from promoe.runtime.paged import is_paged
from zoo.families import build, names

PROMPTS = [BatchPrompt([5 + idx, 7, 9][: 1 + idx % 3], 3) for idx in range(5)]
# Families that are padded: states of linear attention, latents, heads of two sizes, encoders.
PADDED = [
    "axk1",
    "axk2",
    "bailing_hybrid",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "dots3_note",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "granitemoehybrid",
    "hy_v4",
    "inkling",
    "inkling2",
    "jamba",
    "jetmoe",
    "kimi_linear",
    "lfm2_moe",
    "llama4",
    "longcat_flash",
    "mimo_v2_flash",
    "minimax",
    "mistral4",
    "nemotron_h",
    "nllb_moe",
    "qwen3_5_moe",
    "qwen3_next",
    "qwen4_exp",
    "switch_transformers",
    "zaya",
    "glm5_next",
]


@pytest.mark.parametrize("name", names())
def test_every_family_answers_many_prompts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name)
    if not isinstance(model, GenerationMixin) or not model.can_generate():
        pytest.skip("writes no text")
    if name == "qwen3_omni_moe whole":
        pytest.skip("Transformers generates with it from text and pictures only")
    assert is_paged(model) == (name.split()[0] not in PADDED)
    found = {
        answer.number: answer for answer in generate_batch(model, PROMPTS, at_once=2, step_tokens=8, kv_tokens=128)
    }
    assert sorted(found) == list(range(5))
    assert all(answer.error is None and len(answer.tokens) <= 3 for answer in found.values())
    if is_paged(model):  # each prompt by itself, with Transformers' own cache
        monkeypatch.setattr(batches, "is_paged", lambda model: False)
        alone = {answer.number: answer for answer in generate_batch(model, PROMPTS, at_once=1)}
        assert alone == found
