"""A linear map from an earlier gate's input to a later gate's logits, which starts as that gate and learns while running.

Between the two gates, layers add to the residual stream. Much of what they add depends linearly on what is there already,
and some tokens are enough to learn it. The affine projection algorithm (Ozeki and Umeda, 1984) does: each batch of tokens
moves the map towards the nearest one that would have given the right logits for the whole batch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

# How far each batch moves the map: with 1, until it is right for the batch.
STEP = 0.7
# Regularisation of the Gram matrix, in mean squared lengths of the batch's inputs: it stands for the part of the logits
# that does not depend on them.
NOISE = 0.5
# Squared length, in the same unit, of the constant input that the bias multiplies.
CONSTANT = 0.2
# The mean of the inputs is taken over so many batches. In trained models it is longer than the deviations from it.
MEAN_BATCHES = 16
# Numpy multiplies matrices up to this many elements by a vector. From 460,800 on its BLAS wakes threads of its own, which
# compete with the model for the cores and take many times as long. Torch multiplies larger ones, in the model's threads.
ONE_THREAD_ELEMENTS = 400_000


class LinearFit:
    """`logits = weight x + bias`, corrected as the true logits become known.

    Args:
        weight: `[num_experts, hidden_dim]` to start from; copied, in fp32.
        bias: `[num_experts]`; None: zeros.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        num_experts, hidden_dim = weight.shape
        by_numpy = weight.device.type == "cpu" and weight.numel() <= ONE_THREAD_ELEMENTS
        with torch.inference_mode(False), torch.no_grad():  # tensors made in inference mode can only be changed in it
            # For numpy, the bias is one more column, which meets an input of 1: adding it would be one more operation.
            affine = torch.zeros((num_experts, hidden_dim + by_numpy), dtype=torch.float32, device=weight.device)
            self._weight = affine[:, :hidden_dim]
            self._bias = affine[:, -1] if by_numpy else affine.new_zeros(num_experts)
            self._weight.copy_(weight)
            if bias is not None:
                self._bias.copy_(bias)
            self._mean = affine.new_zeros(hidden_dim)
            row = affine.new_ones(1, hidden_dim + 1)
            self._row = row[:, :-1]
        self._batches = 0
        self._arrays = (row.numpy(), affine.numpy().T) if by_numpy else None

    def __call__(self, hidden: torch.Tensor) -> list[list[float]]:
        """Return logits `[n][num_experts]` for gate inputs `[n, hidden_dim]`."""
        if self._arrays is not None and len(hidden) == 1:
            row, transposed = self._arrays
            self._row.copy_(hidden)
            product: npt.NDArray[np.float32] = row.dot(transposed)
            of_one: list[list[float]] = product.tolist()
            return of_one
        with self._in_fp32():
            logits: list[list[float]] = torch.addmm(self._bias, hidden.to(self._weight), self._weight.t()).tolist()
        return logits

    def learn(self, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """Learn from a batch of tokens. A batch with values that are not finite is ignored.

        Args:
            hidden: inputs of the earlier gate, `[n, hidden_dim]`.
            logits: the later gate's logits, `[n, num_experts]`.
        """
        with self._in_fp32():
            self._learn(hidden, logits)

    def _in_fp32(self) -> torch.autocast:
        """Return a context that computes in fp32, also within a forward under autocast."""
        return torch.autocast(self._weight.device.type, enabled=False)

    def _learn(self, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        x, wanted = hidden.to(self._weight), logits.to(self._weight)
        error = wanted - torch.addmm(self._bias, x, self._weight.t())
        if not (bool(x.isfinite().all()) and bool(error.isfinite().all())):
            return
        self._batches += 1
        self._mean += (x.mean(0) - self._mean) / min(self._batches, MEAN_BATCHES)
        x = x - self._mean
        gram = (x @ x.t()).cpu()
        unit = float(gram.diagonal().mean())
        if not 0.0 < unit < float("inf"):  # zero for the first token of all, which is its own mean
            return
        gram += CONSTANT * unit
        gram.diagonal().add_(NOISE * unit)
        parts = STEP * torch.linalg.solve(gram, error.cpu()).to(self._weight)  # each token's part in the correction
        self._bias += CONSTANT * unit * parts.sum(0) - parts.t() @ (x @ self._mean)
        self._weight.addmm_(parts.t(), x)
