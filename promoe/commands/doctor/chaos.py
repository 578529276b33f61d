"""Tests whether promoe answers right on this machine, also where reads fail: a tiny model's answers are compared bit by bit."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, Qwen2MoeConfig, Qwen2MoeForCausalLM

from promoe.config import PromoeConfig
from promoe.errors import EngineClosedError, EngineError, PromoeError
from promoe.runtime.patching import patch, unpatch
from promoe.stores import Chunk
from promoe.transfer.links.faults import Fault, FaultKind, FaultyLink, seeded

NEW_TOKENS = 8
MOST_TRIES = 100
ANSWERS = 5
FAULT_SHARE = 0.01
WRONG, NEVER = "an answer was WRONG", "no more answers, and no reason"
# A read that never returns is noticed after so many seconds.
STALL_TIMEOUT_S = 1.0
# Errors after which the model is closed.
FOR_GOOD = (EngineError, EngineClosedError)
KINDS: dict[FaultKind, str] = {
    "slow": "a read takes longer",
    "failed": "a read fails",
    "short": "a read gives half",
    "torn": "a read gives garbage, then fails",
    "no_memory": "no memory for a read",
    "bug": "a read raises what nobody expects",
    "exit": "the thread that reads ends",
    "stuck": "a read never returns",
}
"""Faults, in words."""


class Outcome(NamedTuple):
    """What one kind of fault did to the answers."""

    kind: str
    injected: int
    errors: dict[str, int]
    """How many answers ended in each class of error."""
    right: int
    """Answers whose logits were bit by bit those of the unpatched model."""
    end: str
    """Why there were no more answers; empty: there were enough."""

    @property
    def survived(self) -> bool:
        """Return whether all answers were right, and the model said why if there were no more."""
        return self.end not in (WRONG, NEVER)


def chaos(seed: int = 0) -> list[Outcome]:
    """Test without faults first, then with each kind of them."""
    torch.manual_seed(seed)
    model: Any = Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            hidden_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=64,
            moe_intermediate_size=256,  # more than a forward copies by itself
            shared_expert_intermediate_size=64,
            num_experts=16,
            num_experts_per_tok=4,
            vocab_size=200,
        )
    ).eval()
    prompt = torch.arange(3, 20).reshape(1, -1)
    expected = _logits(model, prompt)
    with _quiet():
        return [_test_fault(model, prompt, expected, kind, seed) for kind in (None, *KINDS)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Log no warning for each fault while the context lasts."""
    logger = logging.getLogger("promoe")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _test_fault(
    model: PreTrainedModel, prompt: torch.Tensor, expected: list[torch.Tensor], kind: FaultKind | None, seed: int
) -> Outcome:
    drawn = seeded(seed, {} if kind is None else {kind: FAULT_SHARE})
    config = PromoeConfig(workers=2)
    engine = patch(model, cache="25%", predictor="gate", link="host", config=config).promoe.runtime.engine

    def plan(number: int, chunk: Chunk) -> Fault | None:
        fault = drawn(number, chunk)
        if fault is not None and fault.kind == "stuck":  # before that, a read that is only slow is waited for
            engine.stall_timeout_s = STALL_TIMEOUT_S
        return fault

    def mend() -> None:
        link.mend()
        engine.stall_timeout_s = config.stall_timeout_s

    engine.link = link = FaultyLink(engine.link, plan)
    try:
        return _count_answers(model, prompt, expected, kind, link, mend)
    finally:
        mend()
        unpatch(model)


def _count_answers(
    model: PreTrainedModel,
    prompt: torch.Tensor,
    expected: list[torch.Tensor],
    kind: FaultKind | None,
    link: FaultyLink,
    mend: Callable[[], None],
) -> Outcome:
    errors: Counter[str] = Counter()
    right, end = 0, NEVER
    for _ in range(MOST_TRIES):
        try:
            found = _logits(model, prompt)
        except PromoeError as error:
            errors[type(error).__name__] += 1
            if type(error) in FOR_GOOD:
                end = f"closed: {error}"
                break
            if kind == "stuck":
                mend()
            continue
        if not all(map(torch.equal, found, expected)):
            end = WRONG
            break
        right += 1
        if right >= ANSWERS:
            end = ""
            if link.injected or kind is None:
                break
    return Outcome(kind or "no fault", link.injected.total(), dict(errors), right, end)


def _logits(model: Any, prompt: torch.Tensor) -> list[torch.Tensor]:
    with torch.inference_mode():
        out = model.generate(
            prompt,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    return list(out.logits)
