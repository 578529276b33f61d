"""The reuse prior of a model, fitted."""

from __future__ import annotations

import numpy as np

from promoe.scheduler.reuse import ReusePrior
from promoe.training.reuse_fit import fit_reuse

from .traces import EXPERTS, LAYERS, random_trace


def test_it_is_what_a_prior_learns_from_the_same_tokens() -> None:
    trace, prior = random_trace(prompts=20), ReusePrior(LAYERS, EXPERTS)
    for _, layer_idx, ids in trace.visits():
        prior.observe(layer_idx, [ids])
    found, expected = fit_reuse(trace), prior.learned()
    np.testing.assert_array_equal(found.weights, expected.weights)
    np.testing.assert_array_equal(found.associations, expected.associations)
    assert found.associations.any()


def test_experts_that_were_not_used_have_their_place() -> None:
    assert fit_reuse(random_trace(), EXPERTS + 3).associations.shape == (LAYERS, EXPERTS + 3, EXPERTS + 3)
