"""What a predictor would have forecast for every token of a trace, asked at each layer of the simulated pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from promoe.errors import ConfigError
from promoe.training.baselines import KINDS, Kind, used
from promoe.training.kinds import NAMES_OF_HIDDEN_KINDS
from promoe.training.routing_traces import RoutingTrace

Probabilities = npt.NDArray[np.float32]
ORACLE = "oracle"
NAMES = (*KINDS, ORACLE)
# Forecast at once, and kept until the next ones are.
BLOCK_TOKENS = 1024


class TraceForecasts:
    """Forecasts for the tokens of one trace; at most so many of them are held at a time.

    Args:
        name: a kind that needs expert ids only, or "oracle", which is always right.
        fit: what the kind is fitted on.
        trace: what it forecasts.
        lookahead: layers ahead; of each layer, the next 1..lookahead of the same token are forecast.

    Raises:
        ConfigError: no such kind.
    """

    def __init__(self, name: str, fit: RoutingTrace | None, trace: RoutingTrace, lookahead: int) -> None:
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
        # Per block, by (layer, layers ahead); the block that was used last comes last.
        self._blocks: dict[int, dict[tuple[int, int], Probabilities]] = {}
        self._most_blocks = 1

    def of(self, tokens: Sequence[int], layer_idx: int) -> Sequence[tuple[int, int, Probabilities]]:
        """For tokens that are decoded together: how probable it is that any of them uses an expert.

        Returns:
            `(steps_ahead, layer_idx, probabilities [num_experts])`, nearest layer first.
        """
        if len(tokens) == 1:
            return self.of_token(tokens[0], layer_idx)
        self._most_blocks = max(self._most_blocks, len(tokens))  # each sequence is at another place of the trace
        found = [self.of_token(token_idx, layer_idx) for token_idx in tokens]
        return [
            (ahead, target_idx, 1.0 - np.prod([1.0 - one[number][2] for one in found], axis=0))
            for number, (ahead, target_idx, _) in enumerate(found[0])
        ]

    def of_token(self, token_idx: int, layer_idx: int) -> Sequence[tuple[int, int, Probabilities]]:
        """`(steps_ahead, layer_idx, probabilities [num_experts])`, nearest layer first."""
        block, row = divmod(token_idx, BLOCK_TOKENS)
        known = self._blocks[block] = self._blocks.pop(block, {})
        if len(self._blocks) > self._most_blocks:
            del self._blocks[next(iter(self._blocks))]
        found = []
        for steps_ahead in range(1, min(self._lookahead, self._trace.num_layers - 1 - layer_idx) + 1):
            target_idx = layer_idx + steps_ahead
            rows = known.get((target_idx, steps_ahead))
            if rows is None:
                rows = known[target_idx, steps_ahead] = self._probabilities(block, target_idx, steps_ahead)
            found.append((steps_ahead, target_idx, rows[row]))
        return found

    def _probabilities(self, block: int, layer_idx: int, steps_ahead: int) -> Probabilities:
        start = block * BLOCK_TOKENS
        # The token before is asked for too, for kinds that look back.
        before = min(start, 1)
        rows = self._trace.tokens(slice(start - before, start + BLOCK_TOKENS))
        if self._kind is None:
            return used(rows, layer_idx)[before:]
        scores = self._kind.scores(rows, layer_idx, steps_ahead)
        assert scores is not None, (layer_idx, steps_ahead)
        # Counts or shares of uses: as many experts are used as there are choices.
        total = np.maximum(scores.sum(axis=1, keepdims=True), 1e-9)
        shares: Probabilities = np.minimum(scores * (self._trace.top_k / total), 1.0)[before:]
        return shares
