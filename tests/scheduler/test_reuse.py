"""The reuse prior: decayed frequencies per token, and which expert follows which."""

from __future__ import annotations

import numpy as np
import pytest

from promoe.scheduler.reuse import (
    BATCH_VISITS,
    HALF_LIVES_TOKENS,
    HORIZON_VISITS,
    MAX_TOKENS_LEARNED,
    P_MAX,
    P_MIN,
    START_WEIGHTS,
    LearnedReuse,
    ReusePrior,
)


def by_frequency(*frequencies: float) -> float:
    """Return the probability of use at one visit of an expert with these frequencies, before anything was learned."""
    f = np.clip(frequencies, P_MIN, P_MAX)
    within = 1 / (1 + np.exp(-(START_WEIGHTS[:3] @ np.log(f / (1 - f)) + START_WEIGHTS[3])))
    return float(1 - (1 - within) ** (1 / HORIZON_VISITS))


def test_one_use_weighs_by_half_life() -> None:
    prior = ReusePrior(2, 3, initial=0.0)
    prior.observe(1, [[2]])
    gain = by_frequency(*(1 - 0.5 ** (1 / half_life) for half_life in HALF_LIVES_TOKENS))
    never = max(P_MIN, by_frequency(0, 0, 0))
    np.testing.assert_allclose(prior.probability(1), [never, never, gain], rtol=1e-5)
    np.testing.assert_allclose(prior.probability(0), [never] * 3, rtol=1e-5)


@pytest.mark.parametrize("row", range(len(HALF_LIVES_TOKENS)))
def test_a_frequency_halves_in_its_half_life(row: int) -> None:
    prior = ReusePrior(1, 2, initial=0.8)
    for _ in range((1, 8, 64)[row]):
        prior.observe(0, [[]])
    np.testing.assert_allclose(prior._frequency[0, row], 0.4)


def test_more_use_is_more_probable_use() -> None:
    """Probabilities are about those with which the experts are used."""
    prior, rng = ReusePrior(1, 4), np.random.default_rng(0)
    used, expected = np.array([0.8, 0.5, 0.1, 0.0]), np.zeros(4)
    for token in range(2000):
        prior.observe(0, [np.flatnonzero(rng.random(4) < used).tolist()])
        expected += prior.probability(0) * (token >= 1000)
    np.testing.assert_allclose(expected / 1000, used, atol=0.08)


def test_a_prompt_is_learned_as_its_tokens_one_by_one() -> None:
    rng = np.random.default_rng(0)
    tokens = [rng.permutation(8)[:2].tolist() for _ in range(50)]
    at_once, one_by_one = ReusePrior(1, 8), ReusePrior(1, 8)
    at_once.observe(0, tokens)
    for token in tokens:
        one_by_one.observe(0, [token])
    np.testing.assert_allclose(at_once._frequency, one_by_one._frequency)


def test_of_a_long_prompt_the_end_is_learned() -> None:
    tokens = [[0]] * 500 + [[1]] * MAX_TOKENS_LEARNED
    whole, end = ReusePrior(1, 2), ReusePrior(1, 2)
    whole.observe(0, tokens)
    end.observe(0, tokens[500:])
    np.testing.assert_allclose(whole.probability(0), end.probability(0), rtol=0.02)


def test_a_visit_of_several_tokens_uses_an_expert_more_probably() -> None:
    prior = ReusePrior(1, 2, initial=0.1)
    np.testing.assert_allclose(prior.probability(0, 3), 1 - (1 - by_frequency(0.1, 0.1, 0.1)) ** 3, rtol=1e-5)
    assert (prior.probability(0, 10_000) == P_MAX).all()


def test_probabilities_are_clamped() -> None:
    prior = ReusePrior(1, 2, initial=0.0)
    p = prior.probability(0)
    assert (p >= P_MIN).all()
    with pytest.raises(ValueError, match="read-only"):
        p[0] = 1.0


def announced_blocks(prior: ReusePrior, blocks: int, asked: bool = True) -> None:
    """Expert 4 is followed by two visits of 0 and 1, expert 5 by two of 2 and 3, in random order; 4 comes last."""
    rng = np.random.default_rng(0)
    for first in [*(rng.random(blocks) < 0.5), True]:
        for ids in ([4], [0, 1], [0, 1]) if first else ([5], [2, 3], [2, 3]):
            prior.observe(0, [ids])
            if asked:
                prior.probability(0)
    prior.observe(0, [[4]])


def test_what_follows_what_is_learned() -> None:
    prior = ReusePrior(1, 6)
    announced_blocks(prior, 300)
    p = prior.probability(0)
    assert p[[0, 1]].min() > 2.5 * p[[2, 3]].max()


def test_an_announced_choice_counts_before_its_visit() -> None:
    prior = ReusePrior(1, 6)
    announced_blocks(prior, 300)
    prior.announce(0, [5])
    p = prior.probability(0)
    assert p[[2, 3]].min() > 2.5 * p[[0, 1]].max()
    prior.announce(0, [0, 1, 2, 3, 4, 5])  # of a prompt: says nothing
    np.testing.assert_array_equal(prior.probability(0), p)
    prior.observe(0, [[4]])
    p = prior.probability(0)
    assert p[[0, 1]].min() > p[[2, 3]].max()


def test_asking_changes_nothing() -> None:
    asked, unasked = ReusePrior(1, 6), ReusePrior(1, 6)
    announced_blocks(asked, 100)
    announced_blocks(unasked, 100, asked=False)
    np.testing.assert_array_equal(asked.probability(0), unasked.probability(0))


def test_each_sequence_of_a_batch_is_followed_by_its_own() -> None:
    """In every visit one sequence repeats expert 0, another expert 1: neither follows the other."""
    prior = ReusePrior(1, 3)
    for _ in range(300):
        prior.observe(0, [[0], [1]])
        prior.probability(0, 2)
    weights = prior._same_layer[0]._weights
    assert weights[0, 0] > 0 > weights[0, 1]
    assert weights[1, 1] > 0 > weights[1, 0]
    # Of the visit: by either sequence.
    assert prior.probability(0, 2)[0] == pytest.approx(prior.probability(0, 2)[1], rel=0.05)


@pytest.mark.parametrize("other", [[[0], [1]], [[0]] * 40])
def test_other_sequences_are_not_taken_for_what_follows(other: list[list[int]]) -> None:
    """A prompt, or another number of sequences, between two decode steps."""
    prior = ReusePrior(1, 3)
    for _ in range(50):
        prior.observe(0, [[2]])
        prior.probability(0)
        prior.observe(0, other)
        prior.probability(0)
    assert not prior._same_layer[0]._weights.any()


def test_visits_without_experts_are_nothing_to_learn_from() -> None:
    prior = ReusePrior(1, 3)
    for _ in range(50):
        prior.observe(0, [[]])
    assert not prior._same_layer[0]._weights.any()


def test_what_waits_to_be_learned_is_bounded() -> None:
    prior = ReusePrior(1, 3)
    for _ in range(1000):
        prior.observe(0, [[1]])
    assert len(prior._visits[0]) < HORIZON_VISITS + BATCH_VISITS


def test_how_much_lately_counts_is_learned() -> None:
    """The expert that was just used is used again, or all experts are equally probable."""
    rng, found = np.random.default_rng(0), {}
    for repeats in (True, False):
        prior, latest = ReusePrior(4, 40), [0] * 4
        for _ in range(400):
            for layer_idx in range(4):
                if not repeats or rng.random() < 0.1:
                    latest[layer_idx] = int(rng.integers(40))
                prior.observe(layer_idx, [[latest[layer_idx]]])
        found[repeats] = prior._weights.values[0]
    assert found[True] > found[False] + 0.1


def test_what_was_learned_can_be_started_from() -> None:
    teacher = ReusePrior(2, 6)
    announced_blocks(teacher, 300)
    learned = teacher.learned()
    assert learned.associations.shape == (2, 6, 6)
    pupil, ignorant = ReusePrior(2, 6, learned=learned), ReusePrior(2, 6)
    for prior in (pupil, ignorant):
        prior.observe(0, [[4]])
    p = pupil.probability(0)
    assert p[[0, 1]].min() > 2.5 * p[[2, 3]].max()
    assert np.ptp(ignorant.probability(0)[:4]) == 0
    # A copy: neither learns for the other.
    before = learned.associations.copy()
    announced_blocks(pupil, 20)
    announced_blocks(teacher, 20)
    np.testing.assert_array_equal(learned.associations, before)


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_several_layers_are_answered_at_once_as_one_by_one(num_tokens: int) -> None:
    together, apart, rng = ReusePrior(3, 6), ReusePrior(3, 6), np.random.default_rng(0)
    for turn in range(100):
        tokens = [rng.permutation(6)[:2].tolist() for _ in range(num_tokens)]
        for prior in (together, apart):
            prior.observe(turn % 3, tokens)
        together.probability(1, num_tokens)  # known when all are asked for
        found = together.probabilities([2, 1, 0], num_tokens)
        one_by_one = [apart.probability(layer_idx, num_tokens) for layer_idx in (2, 1, 0)]
        np.testing.assert_allclose(found, one_by_one, rtol=1e-12)


def test_a_past_that_is_told_counts_until_a_layer_has_its_own() -> None:
    prior = ReusePrior(2, 4)
    unknown = prior.probability(0).copy()
    assert prior.start_from(0, [0.9, 0.5, 0.05, 0.0])
    told = prior.probability(0).copy()
    assert (np.diff(told) < 0).all()
    assert told[0] > unknown[0] > told[3]
    assert prior.probability(1) == pytest.approx(unknown)
    prior.observe(0, [[3]])
    seen = prior.probability(0).copy()
    assert not prior.start_from(0, [0.0, 0.0, 0.9, 0.9])
    assert prior.probability(0) == pytest.approx(seen)


def test_a_layer_with_fewer_experts_is_told_of_those_that_it_has() -> None:
    prior = ReusePrior(1, 4)
    before = prior.probability(0).copy()
    assert prior.start_from(0, [0.9, 0.0])
    assert prior.probability(0)[2:] == pytest.approx(before[2:])


def foreseeing(num_layers: int, num_experts: int, weight: float, typical: float = 0.0) -> ReusePrior:
    """Return a prior in which a predictor's forecast is a feature with this starting weight."""
    shape = (num_layers, num_experts)
    return ReusePrior(*shape, learned=LearnedReuse.foreseeing(np.full(shape, typical, dtype=np.float32), weight))


def test_what_is_foreseen_counts_beside_the_frequencies() -> None:
    prior = foreseeing(2, 3, weight=2.0)
    before = prior.probability(1).copy()
    assert np.ptp(before) == 0
    assert prior.foresee(0, [1.0, 0.0, -1.0], begun=False)
    prior.observe(0, [[]])
    f = prior._frequency[0, :, 0]
    own = START_WEIGHTS[:3] @ np.log(f / (1 - f)) + START_WEIGHTS[3]
    within = 1 / (1 + np.exp(-(own + 2.0 * np.array([1.0, 0.0, -1.0]))))
    np.testing.assert_allclose(prior.probability(0), 1 - (1 - within) ** (1 / HORIZON_VISITS), rtol=1e-5)
    np.testing.assert_array_equal(prior.probability(1), before)


def test_it_makes_no_difference_whether_it_is_foreseen_before_or_after_the_visit() -> None:
    before, after = foreseeing(1, 6, weight=0.5), foreseeing(1, 6, weight=0.5)
    rng = np.random.default_rng(0)
    for turn in range(60):
        log_odds, tokens = rng.normal(size=6), [rng.permutation(6)[:2].tolist()]
        before.foresee(0, log_odds, begun=False)
        before.observe(0, tokens)
        after.observe(0, tokens)
        after.foresee(0, log_odds, begun=True)
        if turn < BATCH_VISITS:  # later on, what is foreseen after a visit is weighed by what this one has taught
            np.testing.assert_array_equal(before.probability(0), after.probability(0))
    np.testing.assert_array_equal(before.learned().weights, after.learned().weights)
    assert not np.array_equal(before.learned().weights, foreseeing(1, 6, weight=0.5).learned().weights)


@pytest.mark.parametrize("is_right", [True, False])
def test_how_much_a_predictors_word_is_worth_is_learned(is_right: bool) -> None:
    prior, rng = foreseeing(1, 8, weight=0.3), np.random.default_rng(0)
    upcoming = [rng.permutation(8)[:2].tolist() for _ in range(400 + HORIZON_VISITS)]
    for now in range(400):
        used = {idx for ids in upcoming[now + 1 : now + 1 + HORIZON_VISITS] for idx in ids}
        truth = np.array([2.0 if idx in used else -2.0 for idx in range(8)])
        prior.foresee(0, truth if is_right else rng.permutation(truth), begun=False)
        prior.observe(0, [upcoming[now]])
    weight = float(prior.learned().weights[3])
    assert weight > 1.0 if is_right else abs(weight) < 0.1


def test_a_prior_that_nothing_is_foreseen_for_ignores_it() -> None:
    asked, unasked = ReusePrior(1, 4), ReusePrior(1, 4)
    assert not asked.foresee(0, [3.0, -3.0, 0.0, 1.0], begun=True)
    np.testing.assert_array_equal(asked.probability(0), unasked.probability(0))


def test_before_anything_is_foreseen_it_goes_by_what_is_typical() -> None:
    assert foreseeing(1, 2, 1.0, typical=2.0).probability(0)[0] > foreseeing(1, 2, 1.0, typical=-2.0).probability(0)[0]
