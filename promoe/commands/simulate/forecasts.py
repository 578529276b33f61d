"""Says what a predictor would have forecast for every token of a trace, at each layer of the simulated pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from promoe.errors import ConfigError
from promoe.scheduler.many_tokens import of_all, shown
from promoe.training.baselines import KINDS, Kind, used
from promoe.training.kinds import NAMES_OF_HIDDEN_KINDS
from promoe.training.routing_traces import RoutingTrace

Probabilities = npt.NDArray[np.float32]
ORACLE = "oracle"
NAMES = (*KINDS, ORACLE)
# This many tokens are forecast at once, and kept until the next ones are.
BLOCK_TOKENS = 1024


class TraceForecasts:
    """Forecasts for the tokens of one trace. Some blocks of them are held at a time.

    Args:
        name: a kind that needs expert ids only, or "oracle", which is always right.
        fit: the trace that the kind is fitted on.
        trace: the trace that it forecasts.
        lookahead: layers ahead: at each layer, the next 1..lookahead of the same token are forecast.
        batch: tokens that are decoded together; a block is held for each.

    Raises:
        ConfigError: there is no such kind.
    """

    def __init__(
        self, name: str, fit: RoutingTrace | None, trace: RoutingTrace, lookahead: int, batch: int = 1
    ) -> None:
        if name not in NAMES:
            hidden = (
                f" ({name!r} needs hidden states, which no simulation has)" if name in NAMES_OF_HIDDEN_KINDS else ""
            )
            raise ConfigError(
                f"There is no predictor {name!r} for a simulation{hidden}. Choose from {', '.join(NAMES)}."
            )
        self._kind: Kind | None = None
        if name != ORACLE:
            assert fit is not None, f"{name} must be fitted on something"
            self._kind = KINDS[name](fit)
        self._trace = trace
        self._lookahead = lookahead
        # Each sequence is at another place of the trace, and so in another block.
        most = min(batch, trace.num_tokens) * trace.num_layers * min(lookahead, trace.num_layers)
        self._block = lru_cache(most)(self._probabilities)

    def of(self, tokens: Sequence[int], layer_idx: int) -> Sequence[tuple[int, int, Probabilities]]:
        """Forecast for tokens that are decoded together how probable it is that any of them uses an expert.

        Returns:
            `(steps_ahead, layer_idx, probabilities [num_experts])`, nearest layer first.
        """
        if len(tokens) == 1:
            return self.of_token(tokens[0], layer_idx)
        some = tokens if self._kind is None else tokens[shown(len(tokens))]  # the oracle is always right
        found = [self.of_token(token_idx, layer_idx) for token_idx in some]
        joined = []
        for number, (ahead, target_idx, _) in enumerate(found[0]):
            any_shown = 1.0 - np.prod([1.0 - one[number][2] for one in found], axis=0)
            joined.append((ahead, target_idx, of_all(any_shown, len(found), len(tokens))))
        return joined

    def of_token(self, token_idx: int, layer_idx: int) -> Sequence[tuple[int, int, Probabilities]]:
        """Forecast for one token: `(steps_ahead, layer_idx, probabilities [num_experts])`, nearest layer first."""
        block, row = divmod(token_idx, BLOCK_TOKENS)
        return [
            (ahead, layer_idx + ahead, self._block(block, layer_idx + ahead, ahead)[row])
            for ahead in range(1, min(self._lookahead, self._trace.num_layers - 1 - layer_idx) + 1)
        ]

    def _probabilities(self, block: int, layer_idx: int, steps_ahead: int) -> Probabilities:
        """Forecast a block of tokens, `[num_tokens, num_experts]`."""
        start = block * BLOCK_TOKENS
        # Kinds that look back need the token before, too.
        before = min(start, 1)
        rows = self._trace.tokens(slice(start - before, start + BLOCK_TOKENS))
        if self._kind is None:
            return used(rows, layer_idx)[before:]
        scores = self._kind.scores(rows, layer_idx, steps_ahead)
        assert scores is not None, (layer_idx, steps_ahead)
        # Scores are counts or shares of uses; scaled, they add up to the number of experts that a token uses.
        total = np.maximum(scores.sum(axis=1, keepdims=True), 1e-9)
        shares: Probabilities = np.minimum(scores * (self._trace.top_k / total), 1.0)[before:]
        return shares
