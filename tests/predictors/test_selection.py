"""From a gate's output to how likely it selects each expert."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from promoe.predictors.gate import _one_token, selection_probability


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_probability_by_hand() -> None:
    """Logits 3, 1, -1, -3: deviation sqrt(5), threshold 0 between the second and the third."""
    logits = torch.tensor([[1.0, -3.0, 3.0, -1.0]])
    (found,) = selection_probability((logits, torch.tensor([[2, 0]])), torch.tensor([[2, 0]]), 4)
    slope = 2 / math.sqrt(5)
    assert found == pytest.approx([sigmoid(slope), sigmoid(-3 * slope), sigmoid(3 * slope), sigmoid(-slope)])


def test_it_does_not_depend_on_the_logits_scale_or_offset() -> None:
    logits, ids = torch.tensor([[1.0, -3.0, 3.0, -1.0]]), torch.tensor([[2, 0]])
    wanted = selection_probability((logits, ids), ids, 4)
    assert selection_probability((logits * 100 + 7, ids), ids, 4) == pytest.approx(wanted)


def test_the_selection_wins_over_the_order_of_logits() -> None:
    """A gate with groups or correction biases chose 3 and 0 although 2 and 0 have the largest logits."""
    logits, ids = torch.tensor([[1.0, -3.0, 3.0, -1.0]]), torch.tensor([[3, 0]])
    (found,) = selection_probability((logits, ids), ids, 4)
    assert found == pytest.approx([sigmoid(2 / math.sqrt(5)), sigmoid(-6 / math.sqrt(5)), 0.4, 0.6])


def test_far_logits_are_bounded() -> None:
    """Nothing is certain: the run-time calibration could not come back from it."""
    logits = torch.zeros(1, 1000)
    logits[0, 5] = 1e6
    (found,) = selection_probability((logits, torch.tensor([[5]])), torch.tensor([[5]]), 1000)
    assert found[5] == pytest.approx(sigmoid(7))
    assert found.min() > 0


def test_equal_logits_are_no_reason_to_divide_by_zero() -> None:
    (found,) = selection_probability((torch.ones(1, 4), torch.tensor([[0, 1]])), torch.tensor([[0, 1]]), 4)
    assert found == pytest.approx([0.6, 0.6, 0.4, 0.4])


def test_a_gate_that_takes_every_expert() -> None:
    logits, ids = torch.tensor([[1.0, -3.0]]), torch.tensor([[0, 1]])
    (found,) = selection_probability((logits, ids), ids, 2)
    assert (found >= 0.6).all()


def test_a_gate_that_returns_ids_only() -> None:
    ids = torch.tensor([[2, 0], [1, 2]])
    found = selection_probability((ids, torch.rand(2, 2)), ids, 4)
    assert found.tolist() == [[0.6, 0.05, 0.6, 0.05], [0.05, 0.6, 0.6, 0.05]]


def test_a_gate_that_returns_logits_only() -> None:
    """As a plain linear layer does: its first expert is taken for chosen."""
    (found,) = selection_probability(torch.tensor([[1.0, -3.0, 3.0, -1.0]]), None, 4)
    assert np.flatnonzero(found > 0.5).tolist() == [2]


def test_logits_of_any_shape_are_rows_of_experts() -> None:
    logits, ids = torch.randn(2, 3, 4), torch.randint(0, 2, (6, 1))
    assert selection_probability((logits, ids), ids, 4).shape == (6, 4)


def test_a_gate_that_returns_neither_is_named_a_bug() -> None:
    with pytest.raises(AssertionError, match="logits over its experts or the chosen indices"):
        selection_probability((torch.rand(2, 3),), None, 4)


def test_experts_at_the_threshold_are_forecast_as_selected() -> None:
    """bf16 logits are often equal: better one too many than the one that is selected left out."""
    np.testing.assert_allclose(_one_token([3.0, 2.0, 2.0, 1.0], 2)[1:3], 0.6)
    assert (_one_token([3.0, 2.0, 2.0, 1.0], 3)[1:3] > 0.5).all()
