"""Ids of a device's tensors on the host: read once, never before they are there, and never taken for others."""

from __future__ import annotations

import pytest
import torch
from fake_device import FakeDevice, FakeEvent

from promoe.errors import PromoeError
from promoe.experts.routed_ids import MAX_LISTED_IDS, Chosen, DeviceIds, HostIds, chosen_experts


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


def index_of(tokens: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 64, (tokens, 2), generator=torch.Generator().manual_seed(seed))


def assert_says(chosen: Chosen, index: torch.Tensor) -> None:
    on_host, *lists = chosen
    assert torch.equal(on_host, index)
    assert tuple(lists) == chosen_experts(index)


@pytest.mark.parametrize("tokens", [1, 2, MAX_LISTED_IDS // 2, MAX_LISTED_IDS // 2 + 1])
def test_chosen_experts_as_lists_and_as_tensors(tokens: int) -> None:
    index = index_of(tokens)
    listed, ids = chosen_experts(index)
    counts = torch.bincount(index.flatten(), minlength=64).tolist()
    assert ids == sorted(set(index.flatten().tolist()), key=lambda expert_idx: (-counts[expert_idx], expert_idx))
    assert listed == (index.tolist() if index.numel() <= MAX_LISTED_IDS else None)


def test_chosen_experts_of_no_tokens() -> None:
    assert chosen_experts(torch.empty(0, 2, dtype=torch.long)) == ([], [])


def test_in_host_memory_they_are_read_where_they_lie() -> None:
    index = index_of()
    for chosen in (HostIds().at_gate("a", index), HostIds().at_experts("a", index)):
        assert_says(chosen, index)
        assert chosen[0] is index


@pytest.mark.parametrize("tokens", [0, 1, 3, 200])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_the_host_waits_once_per_layer_and_once_at_the_end(tokens: int, dtype: torch.dtype, device: FakeDevice) -> None:
    ids = DeviceIds(device)
    for number, layer in enumerate("abc"):
        index = index_of(tokens, number).to(dtype)
        assert_says(ids.at_gate(layer, index), index)
        assert_says(ids.at_experts(layer, index.view(index.shape)), index)
        assert device.host_waits == number + 1
    ids.check()
    ids.check()
    assert device.host_waits == 4


def test_who_does_not_wait_reads_garbage(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEvent, "wait_on_host", lambda event: None)
    assert DeviceIds(device).at_gate("a", index_of())[2] == [-1]


def test_another_tensor_is_read_again(device: FakeDevice) -> None:
    ids, index = DeviceIds(device), index_of(4)
    for other in (index + 1, index[:2], index.clone(), index.t().contiguous().t()):
        ids.at_gate("a", index)
        assert_says(ids.at_experts("a", other), other)
    assert device.host_waits == 8
    assert_says(ids.at_experts("b", index), index)
    assert device.host_waits == 9, "the latest gate was another layer's"


def test_without_a_gate_they_are_read_at_the_experts(device: FakeDevice) -> None:
    assert_says(DeviceIds(device).at_experts("a", index_of()), index_of())


def test_a_change_in_place_that_torch_counts_is_read_again(device: FakeDevice) -> None:
    ids, index = DeviceIds(device), index_of()
    ids.at_gate("a", index)
    index.add_(1)
    assert_says(ids.at_experts("a", index), index)
    ids.check()


@pytest.mark.parametrize("seen_by", ["gate", "experts", "check"])
def test_a_change_in_place_that_nobody_counts_is_an_error_naming_the_layer(seen_by: str, device: FakeDevice) -> None:
    ids = DeviceIds(device)
    with torch.inference_mode():
        index = index_of()
        ids.at_gate("model.layers.3.experts", index)
        index[1, 1] += 1
        ids.at_experts("model.layers.3.experts", index)
        then = {
            "gate": lambda: ids.at_gate("b", index_of()),
            "experts": lambda: ids.at_experts("b", index_of()),
            "check": ids.check,
        }[seen_by]
        with pytest.raises(PromoeError, match=r"'model\.layers\.3\.experts' was called with were changed in place"):
            then()
        ids.check()  # said once
        assert_says(ids.at_gate("b", index_of()), index_of())


def test_what_changes_after_the_experts_were_launched_is_no_change(device: FakeDevice) -> None:
    ids = DeviceIds(device)
    with torch.inference_mode():
        index = index_of()
        ids.at_gate("a", index)
        ids.at_experts("a", index)
        index.zero_()
        ids.check()
