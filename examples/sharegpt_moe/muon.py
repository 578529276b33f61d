"""Muon for matrices and for stacks of expert matrices, in fp32.

`torch.optim.Muon` takes 2-D parameters only and orthogonalises in bf16, which is slow on CPUs without bf16
instructions. Here all matrices of one shape, experts included, go through one batched Newton-Schulz iteration.
Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor


def orthogonalize(matrices: Tensor, steps: int) -> Tensor:
    """Push the singular values of `[batch, rows, columns]` towards 1 by Newton-Schulz iterations; new tensor."""
    a, b, c = 3.4445, -4.7750, 2.0315
    transposed = matrices.size(1) > matrices.size(2)
    x = matrices.mT if transposed else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if transposed else x


class Muon(torch.optim.Optimizer):
    """Momentum, then an orthogonalised step of RMS 0.2 per entry (so that AdamW's learning rates carry over).

    Args:
        parameters: Tensors `[rows, columns]` or `[experts, rows, columns]`.
        lr: Learning rate.
        momentum: Nesterov momentum.
        weight_decay: Decoupled, multiplied by the learning rate.
        steps: Newton-Schulz iterations.
        fused: Parameters that are two matrices stacked along the rows (gate and up), orthogonalised apart.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        steps: int = 5,
        fused: Iterable[Tensor] = (),
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "steps": steps})
        self._fused = {id(parameter) for parameter in fused}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; gradients are overwritten."""
        for group in self.param_groups:
            by_shape: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp_(state["momentum"], group["momentum"])
                halves = 2 if id(parameter) in self._fused else 1
                for value, change in zip(parameter.chunk(halves, -2), update.chunk(halves, -2), strict=True):
                    by_shape[(value.size(-2), value.size(-1))].append((value, change))
            for (rows, columns), pairs in by_shape.items():
                stacked = torch.cat([change.reshape(-1, rows, columns) for _, change in pairs])
                directions = orthogonalize(stacked, group["steps"])
                scale = 0.2 * max(rows, columns) ** 0.5 * group["lr"]
                done = 0
                for value, _ in pairs:
                    count = value.numel() // (rows * columns)
                    value.mul_(1 - group["lr"] * group["weight_decay"])
                    value.sub_(directions[done : done + count].view_as(value), alpha=scale)
                    done += count
