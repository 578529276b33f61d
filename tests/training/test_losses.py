from __future__ import annotations

import math

import pytest
import torch

from promoe.training.losses import LOSSES

CHOSEN = torch.tensor([1.0, 1.0, 0.0, 0.0])
GATE = torch.tensor([2.0, 1.0, 0.0, -1.0]).log_softmax(-1)


@pytest.mark.parametrize("name", LOSSES)
def test_better_scores_cost_less(name: str) -> None:
    loss = LOSSES[name]
    right, even, wrong = (
        loss(torch.tensor(s), CHOSEN, GATE) for s in ([2.0, 1.0, 0.0, -1.0], [0.0] * 4, [-1.0, 0, 1, 2])
    )
    assert right < even < wrong


@pytest.mark.parametrize("name", LOSSES)
def test_one_number_per_row_and_a_finite_gradient(name: str) -> None:
    scores = (torch.randn(3, 2, 5, 4) * 50).requires_grad_()
    losses = LOSSES[name](scores, CHOSEN.expand(3, 2, 5, 4), GATE.expand(3, 2, 5, 4))
    assert losses.shape == (3, 2, 5)
    losses.sum().backward()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()


def test_values() -> None:
    zero = torch.zeros(4)
    assert LOSSES["bce"](zero, CHOSEN, GATE).item() == pytest.approx(4 * math.log(2))
    assert LOSSES["kl"](GATE + 3.0, CHOSEN, GATE).item() == pytest.approx(0, abs=1e-6)
    uniform = (GATE.exp() * (GATE + math.log(4))).sum().item()  # KL(gate || uniform)
    assert LOSSES["kl"](zero, CHOSEN, GATE).item() == pytest.approx(uniform, rel=1e-5)
    assert LOSSES["ce_kl"](zero, CHOSEN, GATE).item() == pytest.approx(math.log(4) + uniform, rel=1e-5)
    # Two chosen, two not: two pairs for each chosen one, each log 2.
    assert LOSSES["ranking"](zero, CHOSEN, GATE).item() == pytest.approx(2 * math.log(2))
    assert LOSSES["ranking"](torch.tensor([3.0, 3, 0, 0]), CHOSEN, GATE).item() == pytest.approx(
        2 * math.log1p(math.exp(-3))
    )
