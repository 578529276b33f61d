"""What some tests need of the machine."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from promoe.experts.kernels.packed import Packing
from promoe.model.opening import open_headers
from promoe.model.packing import packable

needs_packing = pytest.mark.skipif(
    Packing.of((128, 64), False, torch.bfloat16) is None, reason="no layout of its own here"
)


def packs(folder: Path) -> bool:
    """Whether some of a checkpoint's experts can be packed on this machine."""
    opened = open_headers(folder)
    with closing(opened.store) as store:
        return bool(packable(opened.layers, store))
