"""What was moved to a device comes back, to the model that it was moved for. (`test_on_device.py` does it for whole models.)"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tiny_models import build
from torch import nn

from promoe.model.placement import Placed


@pytest.mark.parametrize("keep", [True, False])
def test_a_copy_of_it_is_of_the_copys_tensors(keep: bool) -> None:
    model = build("qwen2_moe")
    placed = model.promoe = Placed()  # type: ignore[assignment]
    for parameter in model.parameters():
        placed.move(parameter, torch.device("cpu"), keep)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        mine = {id(parameter) for parameter in model.parameters()}
        own = {id(parameter) for parameter in other.parameters()}
        moved = {id(tensor) for tensor, _ in other.promoe._moved}
        assert moved == own
        assert not moved & mine


def test_the_memory_that_was_kept_is_there_again() -> None:
    parameter = nn.Parameter(torch.ones(3))
    address = parameter.data_ptr()
    placed = Placed()
    placed.move(parameter, torch.device("cpu"), keep=True)
    parameter.data = torch.zeros(3)
    placed.undo()
    placed.undo()
    assert parameter.data_ptr() == address


def test_it_is_taken_back_whenever_it_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter, placed = nn.Parameter(torch.ones(3)), Placed()
    address = parameter.data_ptr()

    def interrupted(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", interrupted)
        with pytest.raises(KeyboardInterrupt):
            placed.move(parameter, torch.device("cpu"), keep=True)
    placed.undo()
    assert parameter.data_ptr() == address
