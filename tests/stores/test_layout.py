from __future__ import annotations

import pytest
import torch

from promoe.errors import ConfigError
from promoe.stores.layout import ExpertLayout


def test_large_tensors_start_on_pages_small_ones_on_cache_lines() -> None:
    layout = ExpertLayout.of(
        {
            "bias": ((10,), torch.bfloat16),
            "gate_up_proj": ((256, 128), torch.bfloat16),  # 64 KiB
            "scale": ((3,), torch.float32),
            "down_proj": ((128, 255), torch.bfloat16),  # just below
        }
    )
    assert [(spec.name, spec.offset_bytes, spec.nbytes) for spec in layout.tensors] == [
        ("bias", 0, 20),
        ("gate_up_proj", 4096, 65536),
        ("scale", 69632, 12),
        ("down_proj", 69696, 65280),
    ]
    assert layout.slot_bytes == 135168
    assert layout.slot_bytes % 4096 == 0
    assert layout.payload_bytes == 20 + 65536 + 12 + 65280
    assert layout["scale"].end_bytes == 69644
    with pytest.raises(KeyError):
        layout["gate"]


def test_slots_of_small_experts_are_rounded_to_cache_lines() -> None:
    assert ExpertLayout.of({"w": ((3, 3), torch.float32)}).slot_bytes == 64


def test_equal_layouts_are_equal_keys() -> None:
    tensors = {"w": ([4, 4], torch.float32)}
    assert hash(ExpertLayout.of(tensors)) == hash(ExpertLayout.of({"w": (torch.Size((4, 4)), torch.float32)}))
    assert ExpertLayout.of(tensors) != ExpertLayout.of({"w": ((4, 4), torch.bfloat16)})


def test_nothing_to_lay_out_is_an_error() -> None:
    with pytest.raises(ConfigError, match="at least one tensor"):
        ExpertLayout.of({})
    with pytest.raises(ConfigError, match=r"'w'.*\(0, 4\)"):
        ExpertLayout.of({"w": ((0, 4), torch.float32)})
