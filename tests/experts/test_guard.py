from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from promoe.errors import PromoeError
from promoe.experts.guard import guard_parameter, is_guard

NAME = "model.layers.3.mlp.experts.gate_up_proj"
X = torch.randn(3, 4, dtype=torch.bfloat16)


@pytest.fixture
def guard() -> torch.nn.Parameter:
    return guard_parameter(NAME, (8, 4, 4), torch.bfloat16)


def test_questions_about_the_form_are_answered(guard: torch.nn.Parameter) -> None:
    assert isinstance(guard, torch.nn.Parameter)
    assert is_guard(guard)
    assert not is_guard(torch.nn.Parameter(torch.zeros(1)))
    assert guard.shape == (8, 4, 4)
    assert (guard.dtype, guard.device.type, guard.is_meta) == (torch.bfloat16, "meta", True)
    assert (guard.size(0), guard.dim(), guard.ndim, guard.numel(), len(guard)) == (8, 3, 3, 128, 8)
    assert (guard.nbytes, guard.itemsize, guard.element_size()) == (256, 2, 2)
    assert (guard.requires_grad, guard.grad, guard.grad_fn, guard.is_leaf) == (False, None, None, True)
    assert guard.is_floating_point()
    assert torch.is_floating_point(guard)
    assert guard in {guard}
    assert guard.requires_grad_(False) is guard
    assert repr(guard) == f"GuardedParameter({NAME}, shape=(8, 4, 4), dtype=torch.bfloat16)"


@pytest.mark.parametrize(
    "use",
    [
        lambda p: p[0],
        lambda p: p[torch.tensor([0, 1])],
        list,
        lambda p: F.linear(X, p),
        lambda p: X @ p,
        lambda p: torch.mm(X, X.t(), out=p),
        lambda p: torch.bmm(X.expand(8, 3, 4), p),
        lambda p: torch.einsum("ab,ebc->eac", X, p),
        lambda p: F.grouped_mm(X, p, offs=torch.full((8,), 3, dtype=torch.int32)),
        lambda p: torch.ops.aten.mm.default(X, p),
        lambda p: torch.cat([X.expand(8, 3, 4), p], dim=1),
        lambda p: torch.stack((p, p)),
        lambda p: p.transpose(1, 2),
        lambda p: p.mT,
        lambda p: p + 1,
        lambda p: p == p,
        bool,
        lambda p: p.data,
        lambda p: setattr(p, "data", torch.zeros(8, 4, 4)),
        lambda p: p.copy_(torch.zeros(8, 4, 4)),
        lambda p: X.copy_(p),
        lambda p: p.to("cpu"),
        lambda p: p.to(torch.float32),
        lambda p: p.float(),
        lambda p: p.cpu(),
        lambda p: p.contiguous(),
        lambda p: p.view(torch.uint8),
        lambda p: p.untyped_storage(),
        lambda p: p.data_ptr(),
        lambda p: p.tolist(),
        lambda p: p.numpy(),
        np.asarray,
        torch.empty_like,
        torch.nn.init.normal_,
        copy.copy,
        copy.deepcopy,
        pickle.dumps,
    ],
)
def test_everything_else_raises_and_names_the_parameter(
    guard: torch.nn.Parameter, use: Callable[[Any], object]
) -> None:
    with pytest.raises(PromoeError, match=rf"experts of '{NAME}' are in files"):
        use(guard)


def test_what_is_detached_is_guarded_too(guard: torch.nn.Parameter) -> None:
    """As state_dict() does it, also for those who want to know names and shapes only."""
    detached = guard.detach()
    assert (detached.shape, detached.dtype) == (guard.shape, guard.dtype)
    with pytest.raises(PromoeError, match=rf"experts of '{NAME}' are in files"):
        _ = detached + 1


def test_the_message_names_the_function(guard: torch.nn.Parameter) -> None:
    with pytest.raises(PromoeError, match="linear cannot use them"):
        F.linear(X, guard)
    with pytest.raises(PromoeError, match=r"Tensor\.data cannot use them"):
        _ = guard.data
