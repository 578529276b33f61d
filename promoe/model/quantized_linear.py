"""Linear layers whose weights stay in fewer bits in memory, as the checkpoint has them.

These are a model's layers that are not experts: attention, shared experts, the head. For them the same holds as for
experts (`relaying`): their codes are moved, and torch's kernels multiply by them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from promoe.errors import CheckpointError, PatchStateError
from promoe.experts.kernels.quantized import OUTPUTS, Quantized, QuantizedMatrix
from promoe.experts.kernels.relaying import Relay, relay_of
from promoe.model.file_tensors import READ_BYTES, Reader
from promoe.stores.encodings.base import EncodedTensor, StoredTensor
from promoe.stores.expert_conversion import Decoding
from promoe.stores.layer_plan import DecodedRows
from promoe.stores.layout import ExpertLayout

# Which weights in fewer bits stay so in memory: none (all are decoded), those that are integers which a slot format can
# hold, or all, of which the others are quantised to 8 bits.
Keep: TypeAlias = Literal["none", "integers", "int8"]

_NO_SAVING = (
    "This model's weights cannot be saved: its linear layers have them in fewer bits, as its checkpoint has them. Of its "
    'weights, nothing was written. Open the checkpoint with experts="checkpoint", or copy its files instead.'
)


class QuantizedLinear(nn.Module):
    """A linear layer with its weight in a slot format.

    The kernels know bf16 on a CPU, and no gradients. Otherwise the weight is expanded for each call.

    Args:
        linear: the layer that it takes the place of.
        matrix_format: of the weight.
        memory: the weight, uint8 `[nbytes]`.
    """

    def __init__(self, linear: nn.Linear, matrix_format: Quantized, memory: torch.Tensor) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.memory: torch.Tensor
        self.register_buffer("memory", memory, persistent=False)
        self._format = matrix_format
        self._viewed: tuple[torch.Tensor, QuantizedMatrix] | None = None
        self.register_state_dict_pre_hook(_refuse_saving)  # type: ignore[no-untyped-call]

    @property
    def matrix(self) -> QuantizedMatrix:
        """The weight."""
        memory = self.memory
        if self._viewed is None or self._viewed[0] is not memory:  # the model was moved
            self._viewed = memory, self._format.view(memory)
        return self._viewed[1]

    @property
    def weight(self) -> torch.Tensor:
        """A copy of the weight, expanded to bf16, `[out, in]`."""
        return self.matrix.dense()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `hidden[..., in]` times the weight, plus the bias, `[..., out]`."""
        if hidden.dtype != torch.bfloat16 or hidden.device.type != "cpu" or hidden.requires_grad:
            return functional.linear(hidden, self.weight.to(hidden.dtype), self.bias)
        out = self.matrix.multiply(hidden.reshape(-1, self.in_features)).view(*hidden.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        """Return sizes and format, for `repr`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self._format.name}"

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedLinear:
        raise PatchStateError(_NO_SAVING.replace("saved", "copied").replace("written", "copied"))

    def __getstate__(self) -> dict[str, Any]:
        raise PatchStateError(_NO_SAVING.replace("saved", "pickled"))


def _refuse_saving(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if not keep_vars:
        raise PatchStateError(_NO_SAVING)


@dataclass(frozen=True, slots=True)
class KeptLinear:
    """A linear layer of a model that is to keep its weight in fewer bits.

    Attributes:
        name: of the module.
        weight: in the checkpoint.
        relay: how it comes into memory.
    """

    name: str
    weight: EncodedTensor
    relay: Relay

    def put_into(self, model: nn.Module, reader: Reader | None) -> None:
        """Put the layer into a model, with its weight read by `reader`; None: on the meta device."""
        linear: Any = model.get_submodule(self.name)
        device = "meta" if reader is None else "cpu"
        memory = torch.empty(self.relay.format.nbytes, dtype=torch.uint8, device=device)
        if reader is not None:
            try:
                with torch.inference_mode():
                    self._read(reader, memory)
            except CheckpointError as error:
                raise CheckpointError(f"{self.weight.name}: {error}") from error
        made = QuantizedLinear(linear, self.relay.format, memory).train(linear.training)
        model.set_submodule(self.name, made)

    def _read(self, reader: Reader, memory: torch.Tensor) -> None:
        """Read the weight into `memory`, some outputs at a time if rows of the parts are outputs."""
        if not self.weight.encoding.by_rows:
            self.relay([reader.read(part) for part in self.weight.parts], memory)
            return
        whole, (outputs, inputs) = self.relay.format, self.weight.shape
        step = max(1, READ_BYTES * outputs // self.weight.nbytes // OUTPUTS) * OUTPUTS
        start = 0
        for form, target in whole.split(whole.parts(memory), step):
            size = form.linear_shape[0]
            rows = DecodedRows(Decoding(self.weight.encoding, (size, inputs)), len(self.weight.parts))
            made = torch.empty(form.nbytes, dtype=torch.uint8, device="cpu")
            parts = [reader.read(part.rows(start, start + size)) for part in self.weight.parts]
            replace(self.relay, format=form, rows=(rows,))(parts, made)
            for values, found in zip(target, form.parts(made), strict=True):
                values.copy_(found)
            start += size


def keep_for(experts: str | os.PathLike[str]) -> Keep:
    """Return which weights stay in fewer bits on a CPU if experts are asked for in this form (see `from_pretrained`)."""
    return "none" if experts == "checkpoint" else "int8" if experts == "int8" else "integers"


def linears_to_keep(
    model: nn.Module, tensors: Mapping[str, StoredTensor], keep: Keep, dtype_of: Callable[[str], torch.dtype]
) -> list[KeptLinear]:
    """Return the linear layers of a model on the meta device that keep their weights in fewer bits.

    Args:
        model: the model.
        tensors: of the checkpoint, by the parameter that each becomes as it is.
        keep: which ones.
        dtype_of: returns the dtype in which a parameter would be loaded.
    """
    return [] if keep == "none" else list(_linears_to_keep(model, tensors, keep, dtype_of))


def _linears_to_keep(
    model: nn.Module, tensors: Mapping[str, StoredTensor], keep: Keep, dtype_of: Callable[[str], torch.dtype]
) -> Iterator[KeptLinear]:
    ties: Any = getattr(model, "all_tied_weights_keys", None) or {}
    tied = {*ties.keys(), *ties.values()}
    for name, module in model.named_modules():
        parameter = f"{name}.weight"
        weight = tensors.get(parameter)
        if type(module) is not nn.Linear or not isinstance(weight, EncodedTensor) or parameter in tied:
            continue
        spec = ExpertLayout.of({"weight": (module.weight.shape, dtype_of(parameter))})["weight"]
        if weight.shape == spec.shape:
            rows = DecodedRows(Decoding(weight.encoding, weight.shape), len(weight.parts))
            if (relay := relay_of(spec, False, [rows], keep == "int8")) is not None:
                yield KeptLinear(name, weight, relay)
