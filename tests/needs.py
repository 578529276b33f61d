"""What some tests need of the machine."""

from __future__ import annotations

import pytest
import torch

from promoe.packed import Packing

needs_packing = pytest.mark.skipif(
    Packing.of((128, 64), False, torch.bfloat16) is None, reason="no layout of its own here"
)
