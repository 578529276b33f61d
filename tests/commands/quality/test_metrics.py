from __future__ import annotations

import math

import pytest
import torch

from promoe.commands.quality.metrics import Scores, figures_of, same_tokens, score


def random_logits(rows: int = 20, vocabulary: int = 50, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, vocabulary), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def targets_of(logits: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(logits)) % logits.shape[1]


def test_each_row_is_what_the_plain_formulas_say() -> None:
    logits, reference = random_logits(seed=1), random_logits(seed=2)
    targets = targets_of(logits)
    found = score(logits, reference, targets)
    for row, target in enumerate(targets.tolist()):
        model, other = ([math.exp(value) for value in one[row].tolist()] for one in (logits, reference))
        q, p = ([value / sum(one) for value in one] for one in (model, other))
        assert float(found.nll[row]) == pytest.approx(-math.log(q[target]), rel=1e-12)
        assert float(found.kl[row]) == pytest.approx(
            sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)), rel=1e-9
        )
        assert bool(found.agrees[row]) == (q.index(max(q)) == p.index(max(p)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_model_compared_with_itself(dtype: torch.dtype) -> None:
    logits = random_logits().to(dtype)
    found = score(logits, logits, targets_of(logits))
    assert torch.equal(found.kl, torch.zeros(len(logits), dtype=torch.float64))
    assert bool(found.agrees.all())
    figures = figures_of(found, found)
    assert (figures.kl, figures.kl_error, figures.agreement) == (0, 0, 1)
    assert (figures.loss_increase, figures.loss_increase_error) == (0, 0)


def test_a_small_divergence_is_not_lost_in_rounding() -> None:
    """To second order, KL is half the variance of the change of the logits."""
    logits = random_logits(rows=1, vocabulary=100_000)
    change = 1e-4 * random_logits(rows=1, vocabulary=100_000, seed=1)
    p = logits.softmax(dim=1)
    variance = float((p * change.square()).sum() - (p * change).sum() ** 2)
    found = score(logits + change, logits, torch.tensor([0]))
    assert float(found.kl) == pytest.approx(variance / 2, rel=1e-3)


def test_what_the_reference_rules_out_adds_nothing() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf]])
    found = score(logits, logits, torch.tensor([0]))
    assert (float(found.kl), float(found.nll)) == (0, pytest.approx(math.log(2)))
    only_here = score(torch.tensor([[0.0, -math.inf, 0.0]]), logits, torch.tensor([0]))
    assert float(only_here.kl) == math.inf


def test_figures_are_means_over_all_tokens_of_all_parts() -> None:
    def scores(nll: list[float], kl: list[float], agrees: list[bool]) -> Scores:
        return Scores(torch.tensor(nll).double(), torch.tensor(kl).double(), torch.tensor(agrees))

    parts = [scores([1.0], [0.5], [True]), scores([2.0, 6.0], [0.0, 1.0], [False, True])]
    whole = Scores.empty(3)
    whole.put(1, parts[1])
    whole.put(0, parts[0])
    found = figures_of(whole, scores([1.0, 1.0, 4.0], [0.0] * 3, [True] * 3))
    assert (found.loss, found.loss_increase, found.kl) == (3, 1, 0.5)
    assert found.agreement == pytest.approx(2 / 3)
    assert found.perplexity == pytest.approx(math.exp(3))
    assert found.loss_increase_error == pytest.approx(1 / math.sqrt(3))
    assert found.kl_error == pytest.approx(0.5 / math.sqrt(3))


def test_one_token_has_no_error_and_a_large_loss_an_infinite_perplexity() -> None:
    one = Scores(torch.tensor([1000.0]).double(), torch.tensor([0.0]).double(), torch.tensor([True]))
    found = figures_of(one, one)
    assert math.isnan(found.kl_error)
    assert math.isnan(found.loss_increase_error)
    assert found.perplexity == math.inf


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], 8),
        ([], [], 8),
        ([1, 2, 3], [1, 5, 3], 1),
        ([4, 2, 3], [1, 2, 3], 0),
        ([1, 2], [1, 2, 3], 2),  # one ended, the other went on
        ([1, 2, 3], [1, 2], 2),
    ],
)
def test_tokens_before_the_first_difference(answer: list[int], reference: list[int], expected: int) -> None:
    assert same_tokens(tuple(answer), tuple(reference), 8) == expected
