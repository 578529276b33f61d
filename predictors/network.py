"""Networks that predict routing, for all layers of a model at once: from the gate input of one layer, scores of later ones.

For each layer i that is predicted from, and each distance k that is predicted, both kinds compute:

    residual   scores = linear[i,k] x + outer[i,k] relu(inner[i] x). `linear` starts as the target layer's own gate. All
               distances share the trunk `inner`, which adds nothing at the start.
    mlp        scores = outer[i,k] relu(inner[i,k] x): the two layers of the paper (ProMoE section 4), for each target

x is the gate input, standardised per feature. With `foresees_reuse` a residual network has one more head per layer, which
counts like a distance: the log odds that the layer's own next visits use its experts. It starts from the layer's own gate
and shares the trunk.

The nonlinearity is relu because it is one operation. Smoother ones are four, which take longer to call than to compute when
one token is predicted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn


class Network(nn.Module):
    """The base of both kinds: it standardises the input and has a bias per score.

    Args:
        num_layers: L, MoE layers.
        hidden_size: H, of the gate input.
        num_experts: E, of each layer.
        lookahead: K, for distances 1..K; layer i + k counts on into the next token.
        width: W, units of a hidden layer.
        foresees_reuse: whether the last head is for the layer's own next visits.
    """

    may_foresee_reuse = False
    """Whether a network of this kind may have that head."""

    def __init__(
        self,
        num_layers: int,
        hidden_size: int,
        num_experts: int,
        lookahead: int,
        width: int,
        foresees_reuse: bool = False,
    ) -> None:
        super().__init__()
        self.num_layers, self.num_experts, self.lookahead, self.width = num_layers, num_experts, lookahead, width
        heads = lookahead + foresees_reuse
        rows = self.num_shared_rows() + heads * self.num_step_rows()
        self.mean = nn.Buffer(torch.zeros(num_layers, hidden_size))
        self.scale = nn.Buffer(torch.ones(num_layers, hidden_size))
        self.inner = nn.Parameter(torch.randn(num_layers, rows, hidden_size) / math.sqrt(hidden_size))
        self.inner_bias = nn.Parameter(torch.zeros(num_layers, rows))
        self.outer = nn.Parameter(self.first_outer(num_layers, heads, num_experts, width))
        self.bias = nn.Parameter(torch.zeros(num_layers, heads, num_experts))

    def first_outer(self, *shape: int) -> torch.Tensor:
        """Return the first `outer` `[L, heads, E, W]`: zeros, which add nothing."""
        return torch.zeros(shape)

    def num_shared_rows(self) -> int:
        """Return how many rows of `inner` all distances share; they come first."""
        raise NotImplementedError

    def num_step_rows(self) -> int:
        """Return how many rows of `inner` each distance has for itself."""
        raise NotImplementedError

    def scores(self, inner: torch.Tensor, layers: slice = slice(None)) -> torch.Tensor:
        """Return scores `[layers, K', n, E]` of the first K' heads from `inner`'s results `[layers, n, rows]`."""
        raise NotImplementedError

    def standardise(self, mean: torch.Tensor, deviation: torch.Tensor) -> None:
        """Standardise inputs by the mean and standard deviation `[L, H]` of each feature of the training data."""
        self.mean.copy_(mean)
        self.scale.copy_(1.0 / deviation.clamp_min(1e-4))

    def forward(self, gate_inputs: torch.Tensor) -> torch.Tensor:
        """Return scores `[L, heads, n, E]` for gate inputs `[n, L, H]`.

        Entry [i, k - 1] is of layer i + k, which may be one of the next token's. The last head, if reuse is foreseen, is of
        layer i itself.
        """
        x = ((gate_inputs.float() - self.mean) * self.scale).transpose(0, 1)
        return self.scores(torch.baddbmm(self.inner_bias[:, None], x, self.inner.transpose(1, 2)))

    def folded(self, layer_idx: int, steps: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (weight `[rows, H]`, bias `[rows]`) of `inner` for raw gate inputs and some heads (distance - 1)."""
        shared, each = self.num_shared_rows(), self.num_step_rows()
        rows = [*range(shared), *(shared + step * each + row for step in steps for row in range(each))]
        weight = self.inner[layer_idx, rows].float() * self.scale[layer_idx].float()
        return weight, self.inner_bias[layer_idx, rows].float() - weight @ self.mean[layer_idx].float()


class ResidualNetwork(Network):
    """The target gate, re-normalised, plus a correction that starts at zero."""

    may_foresee_reuse = True

    def num_shared_rows(self) -> int:
        """Return the rows of the trunk."""
        return self.width

    def num_step_rows(self) -> int:
        """Return the rows of the linear part."""
        return self.num_experts

    def scores(self, inner: torch.Tensor, layers: slice = slice(None)) -> torch.Tensor:
        """Compute scores, see `Network.scores`."""
        num_layers, n = inner.shape[:2]
        trunk = torch.relu(inner[..., : self.width])
        linear = inner[..., self.width :].reshape(num_layers, n, -1, self.num_experts).transpose(1, 2)
        steps = linear.shape[1]
        outer = self.outer[layers, :steps].flatten(1, 2).transpose(1, 2)
        correction = torch.bmm(trunk, outer).view(num_layers, n, steps, -1).transpose(1, 2)
        return linear + correction + self.bias[layers, :steps, None]

    def start_from_gates(self, weights: Sequence[torch.Tensor]) -> None:
        """Start the linear part from each target's own gate `[E, H]`, re-scaled to that layer's mean and deviation.

        Call `standardise` first.
        """
        with torch.no_grad():
            for layer_idx in range(self.num_layers):
                for step in range(self.outer.shape[1]):
                    target = (layer_idx + step + 1) % self.num_layers if step < self.lookahead else layer_idx
                    gate = weights[target].float()
                    start = self.width + step * self.num_experts
                    self.inner[layer_idx, start : start + self.num_experts] = gate / self.scale[target]
                    self.bias[layer_idx, step] = gate @ self.mean[target]


class MlpNetwork(Network):
    """Two layers per target and distance."""

    def first_outer(self, *shape: int) -> torch.Tensor:
        """Return random numbers: nothing else tells experts apart at the start."""
        return nn.init.normal_(torch.empty(shape), std=1.0 / math.sqrt(self.width))

    def num_shared_rows(self) -> int:
        """Return 0: nothing is shared."""
        return 0

    def num_step_rows(self) -> int:
        """Return the rows of a hidden layer."""
        return self.width

    def scores(self, inner: torch.Tensor, layers: slice = slice(None)) -> torch.Tensor:
        """Compute scores, see `Network.scores`."""
        num_layers, n = inner.shape[:2]
        hidden = torch.relu(inner).view(num_layers, n, -1, self.width).transpose(1, 2)
        steps = hidden.shape[1]
        return hidden @ self.outer[layers, :steps].transpose(2, 3) + self.bias[layers, :steps, None]
