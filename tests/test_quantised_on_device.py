"""Quantised experts with slots on a device that is not there: the bits of the model with expanded experts, whatever moves.

The device's copies are made as late as may be, and slots hold NaN before (`fake_device`).
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from quantised_twin import quantised, tensor_of, twin, twin_of, write
from served import PREDICTORS, PROMPTS, check_integrity, close, expected, greedy, predictor_of, record
from tiny_models import IMPLEMENTATIONS, token_ids
from torch import nn
from unread import Unread

import promoe
from promoe.errors import ConfigError
from promoe.experts.kernels import expanding, int4
from promoe.experts.kernels.expanding import expanded
from promoe.experts.kernels.formats import FORMATS
from promoe.runtime import checking
from promoe.stores.layout import ExpertLayout, TensorSpec
from promoe.transfer.device_pool import DevicePool
from promoe.transfer.rows import FormattedRows, SlotRows

FORMAT_NAMES = ("int8", "int4", "int3", "int2")
FAMILY = "qwen2_moe"
CONFIG = promoe.PromoeConfig(
    strict=True, ablation=promoe.Ablation(governor=False), min_probability=0.3, chunk_bytes=4096
)
BATCH = {"input_ids": token_ids(5, 1, seed=4), "attention_mask": torch.ones(5, 1, dtype=torch.long)}
LONG = {"input_ids": token_ids(1, 60, seed=5), "attention_mask": torch.ones(1, 60, dtype=torch.long)}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """What "cuda" opens."""
    found = FakeDevice()
    monkeypatch.setattr(checking, "open_device", lambda name: found if str(name) == "cuda" else None)
    return found


@contextmanager
def on_device(folder: Path, experts: str, implementation: str = "grouped_mm", **more: Any) -> Iterator[Any]:
    arguments = {"predictor": None, "config": CONFIG, **more}
    model = promoe.from_pretrained(folder, experts=experts, device="cuda", **arguments)
    model.set_experts_implementation(implementation)
    try:
        yield model
        check_integrity(model)
    finally:
        close(model)


def slots(folder_format: str, count: int, family: str = FAMILY) -> int:
    """Bytes of so many slots."""
    layout = layout_of(family, folder_format)
    return count * layout.slot_bytes


def layout_of(family: str, slot_format: str) -> ExpertLayout:
    from quantised_twin import open_store

    with open_store(quantised(family, slot_format), slot_format) as store:
        return store.layouts[0]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("slot_format", FORMAT_NAMES)
@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_the_bits_are_those_of_the_model_with_expanded_experts(
    family: str, slot_format: str, implementation: str, device: FakeDevice
) -> None:
    reference = twin(family, slot_format)
    reference.set_experts_implementation(implementation)
    prompts = [*PROMPTS.values(), BATCH, LONG]
    wanted = [greedy(reference, prompt) for prompt in prompts]
    for cache, predictor in (("5%", None), ("30%", "gate"), ("100%", "gate")):
        with on_device(
            quantised(family, slot_format), slot_format, implementation, cache=cache, predictor=predictor
        ) as model:
            for prompt, answer in zip(prompts, wanted, strict=True):
                greedy(model, prompt).assert_equals(answer)
