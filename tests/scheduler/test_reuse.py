"""The reuse prior: decayed frequencies per token."""

from __future__ import annotations

import numpy as np
import pytest

from promoe.scheduler.reuse import HALF_LIVES_TOKENS, MAX_TOKENS_LEARNED, P_MAX, P_MIN, ReusePrior


def test_one_use_weighs_by_half_life() -> None:
    prior = ReusePrior(2, 3, initial=0.0)
    prior.observe(1, [[2]])
    gain = np.mean([0.5, 1 - 0.5 ** (1 / 7), 1 - 0.5 ** (1 / 35)])
    np.testing.assert_allclose(prior.probability(1), [P_MIN, P_MIN, gain])
    np.testing.assert_allclose(prior.probability(0), [P_MIN] * 3)


@pytest.mark.parametrize("row", range(len(HALF_LIVES_TOKENS)))
def test_a_frequency_halves_in_its_half_life(row: int) -> None:
    prior = ReusePrior(1, 2, initial=0.8)
    for _ in range((1, 7, 35)[row]):
        prior.observe(0, [[]])
    np.testing.assert_allclose(prior._frequency[0, row], 0.4)


def test_constant_use_approaches_its_frequency() -> None:
    prior = ReusePrior(1, 3)
    for token in range(400):
        prior.observe(0, [[0, 1] if token % 2 else [0]])
    p = prior.probability(0)
    assert p[0] > 0.99
    assert p[1] == pytest.approx(0.5 + (2 / 3 - 0.5) / 3, abs=0.02)  # used last, which the shortest half-life sees
    assert p[2] == P_MIN


def test_a_prompt_is_learned_as_its_tokens_one_by_one() -> None:
    rng = np.random.default_rng(0)
    tokens = [rng.permutation(8)[:2].tolist() for _ in range(50)]
    at_once, one_by_one = ReusePrior(1, 8), ReusePrior(1, 8)
    at_once.observe(0, tokens)
    for token in tokens:
        one_by_one.observe(0, [token])
    np.testing.assert_allclose(at_once.probability(0), one_by_one.probability(0))


def test_of_a_long_prompt_the_end_is_learned() -> None:
    tokens = [[0]] * 500 + [[1]] * MAX_TOKENS_LEARNED
    whole, end = ReusePrior(1, 2), ReusePrior(1, 2)
    whole.observe(0, tokens)
    end.observe(0, tokens[500:])
    np.testing.assert_array_equal(whole.probability(0), end.probability(0))


def test_a_visit_of_several_tokens_uses_an_expert_more_probably() -> None:
    prior = ReusePrior(1, 2, initial=0.1)
    np.testing.assert_allclose(prior.probability(0, 3), 1 - 0.9**3)
    assert (prior.probability(0, 10_000) == P_MAX).all()


def test_probabilities_are_clamped() -> None:
    prior = ReusePrior(1, 2, initial=0.0)
    for _ in range(2000):
        prior.observe(0, [[0]])
    np.testing.assert_array_equal(prior.probability(0), [P_MAX, P_MIN])
