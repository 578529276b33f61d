"""The gate recorder, against what the experts of a model are really given."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from served import LinkOver, config, plain_link
from tiny_models import MOE_FAMILIES, build, left_padded, token_ids
from torch import nn
from torch.nn import functional

import promoe
from promoe.errors import UnsupportedModelError
from promoe.experts.gate_output import gate_logits
from promoe.experts.moe_layers import MoELayer, find_moe_layers
from promoe.training.gate_recorder import GateRecord, GateRecorder

BATCH = left_padded((6, 4, 2))
SHAPE = tuple(BATCH["input_ids"].shape)


@torch.inference_mode()
def run(model: nn.Module, new_tokens: int = 0) -> None:
    if new_tokens:
        model.generate(**BATCH, max_new_tokens=new_tokens + 1, do_sample=False)  # type: ignore[operator]
    else:
        model(**BATCH)


def recorded(model: nn.Module, new_tokens: int = 0) -> list[GateRecord]:
    with GateRecorder(model, find_moe_layers(model)) as recorder:
        run(model, new_tokens)
        return recorder.take()


@contextlib.contextmanager
def experts_watched(model: nn.Module) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Hidden states `[T, H]` and ids `[T, K]` that each layer's experts are given, layer after layer, pass after pass."""
    given: list[tuple[torch.Tensor, torch.Tensor]] = []

    def watch(experts: nn.Module, args: tuple[Any, ...]) -> None:
        given.append((args[0].clone(), args[1].clone()))

    hooks = [layer.experts.register_forward_pre_hook(watch) for layer in find_moe_layers(model)]
    yield given
    for hook in hooks:
        hook.remove()


@torch.inference_mode()
def logits_of(layer: MoELayer, hidden: torch.Tensor) -> torch.Tensor:
    gate = layer.gate
    return functional.linear(hidden.float(), gate.weight.float(), getattr(gate, "bias", None))  # type: ignore[arg-type]


# -- what is recorded -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_it_records_what_the_experts_are_given(family: str) -> None:
    model = build(family)
    layers = find_moe_layers(model)
    with experts_watched(model) as given:
        records = recorded(model, new_tokens=2)
    assert len(records) == 3
    assert len(given) == 3 * len(layers)
    for number, record in enumerate(records):
        shape = SHAPE if number == 0 else (SHAPE[0], 1)
        assert record.token_ids.shape == shape
        assert record.gate_inputs.shape == (*shape, len(layers), 64)
        assert record.gate_inputs.dtype == torch.bfloat16
        assert record.gate_logits.shape == (*shape, 8 * len(layers))
        assert record.experts.shape == (*shape, 2 * len(layers))
        dtypes = [array.dtype.name for array in (record.token_ids, record.gate_logits, record.experts)]
        assert dtypes == ["int32", "float32", "int16"]
        for layer in layers:
            hidden, ids = given[number * len(layers) + layer.layer_idx]
            idx = layer.layer_idx
            assert torch.equal(record.gate_inputs[:, :, idx].reshape(-1, 64), hidden.reshape(-1, 64).bfloat16())
            np.testing.assert_array_equal(record.experts[..., 2 * idx : 2 * idx + 2].reshape(-1, 2), ids)
            logits = record.gate_logits[..., 8 * idx : 8 * idx + 8].reshape(-1, 8)
            np.testing.assert_allclose(logits, logits_of(layer, hidden).reshape(-1, 8), atol=1e-5)
    np.testing.assert_array_equal(records[0].token_ids, BATCH["input_ids"])


def test_a_bfloat16_model_is_recorded_bit_for_bit() -> None:
    model = build("qwen2_moe", dtype=torch.bfloat16)
    with experts_watched(model) as given:
        (record,) = recorded(model)
    for layer_idx, (hidden, _) in enumerate(given):
        assert torch.equal(record.gate_inputs[:, :, layer_idx].reshape(-1, 64), hidden)


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3", "gpt_oss"])
def test_a_patched_model_is_recorded_like_any_other(family: str) -> None:
    wanted = recorded(build(family), new_tokens=2)
    model = promoe.patch(build(family), cache="25%", link=LinkOver(plain_link), config=config())
    try:
        found = recorded(model, new_tokens=2)
    finally:
        promoe.unpatch(model)
    for left, right in zip(found, wanted, strict=True):
        assert torch.equal(left.gate_inputs, right.gate_inputs)
        for name in ("token_ids", "gate_logits", "experts"):
            np.testing.assert_array_equal(getattr(left, name), getattr(right, name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_over_later_was_recorded_before(dtype: torch.dtype) -> None:
    model = build("qwen2_moe", dtype=dtype)
    last = find_moe_layers(model)[-1]
    (wanted,) = recorded(model)

    def overwrite(gate: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for tensor in (*args, *output):
            tensor.zero_()

    with GateRecorder(model, find_moe_layers(model)) as recorder:
        hook = last.gate.register_forward_hook(overwrite)  # after the recorder's
        run(model)
        hook.remove()
        (found,) = recorder.take()
    assert torch.equal(found.gate_inputs, wanted.gate_inputs)
    np.testing.assert_array_equal(found.gate_logits, wanted.gate_logits)
    np.testing.assert_array_equal(found.experts, wanted.experts)


def test_ids_given_by_position_are_recorded_too() -> None:
    model = build("qwen2_moe")
    with GateRecorder(model, find_moe_layers(model)) as recorder:
        with torch.inference_mode():
            model(token_ids(1, 3))
        assert recorder.take()[0].token_ids.tolist() == token_ids(1, 3).tolist()


def test_take_gives_each_pass_once() -> None:
    model = build("qwen2_moe")
    with GateRecorder(model, find_moe_layers(model)) as recorder:
        assert recorder.take() == []
        run(model)
        run(model)
        assert len(recorder.take()) == 2
        assert recorder.take() == []


# -- its hooks --------------------------------------------------------------------------------------------------


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_nothing_is_left_on_the_model(error: type[BaseException] | None) -> None:
    model = build("qwen2_moe")
    with contextlib.suppress(RuntimeError, KeyboardInterrupt), GateRecorder(model, find_moe_layers(model)):
        assert hooks(model) == 2 + 3
        run(model)
        if error is not None:
            raise error
    assert hooks(model) == 0


def test_a_pass_that_fails_leaves_no_record() -> None:
    model = build("qwen2_moe")
    (wanted,) = recorded(model)

    def fail(experts: nn.Module, args: tuple[Any, ...]) -> None:
        raise KeyboardInterrupt

    with GateRecorder(model, find_moe_layers(model)) as recorder:
        hook = find_moe_layers(model)[1].experts.register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            run(model)
        hook.remove()
        assert recorder.take() == []
        run(model)
        (found,) = recorder.take()
    np.testing.assert_array_equal(found.gate_logits, wanted.gate_logits)


def test_a_pass_that_fails_leaves_nothing_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen2_moe")
    first, second, _ = find_moe_layers(model)
    with GateRecorder(model, find_moe_layers(model)):
        hook = second.experts.register_forward_pre_hook(lambda *args: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            run(model)
        hook.remove()
        monkeypatch.setattr(model.get_submodule(first.block_name), "forward", lambda hidden: hidden)
        with pytest.raises(UnsupportedModelError, match="did not run"):
            run(model)


# -- models that cannot be recorded -----------------------------------------------------------------------------


def test_a_model_that_is_not_given_ids() -> None:
    model = build("qwen2_moe")
    with GateRecorder(model, find_moe_layers(model)), pytest.raises(UnsupportedModelError, match="without input_ids"):
        model(inputs_embeds=torch.zeros(1, 2, 64))


def test_a_gate_that_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen2_moe")
    layer = find_moe_layers(model)[1]
    monkeypatch.setattr(model.get_submodule(layer.block_name), "forward", lambda hidden: hidden)
    with pytest.raises(UnsupportedModelError, match=rf"\['{layer.gate_name}'\] of Qwen2Moe.* did not run.*Undo what"):
        recorded(model)


@pytest.mark.parametrize("kept", ["logits only", "ids only", "ids only and scores", "other ids"])
def test_a_gate_that_does_not_say_what_it_chose(kept: str) -> None:
    model = build("qwen2_moe")
    layer = find_moe_layers(model)[0]
    outputs = {
        "logits only": lambda logits, scores, ids: logits,
        "ids only": lambda logits, scores, ids: ids,
        "ids only and scores": lambda logits, scores, ids: (scores, ids),
        "other ids": lambda logits, scores, ids: (logits, scores, torch.cat([ids, ids], dim=1)),
    }
    hook = layer.gate.register_forward_hook(lambda gate, args, output: outputs[kept](*output))
    with pytest.raises(UnsupportedModelError, match=r"over its 8 experts and the ids of 2 chosen ones.*Choose a model"):
        recorded(model)
    hook.remove()


def test_logits_are_found_by_their_shape() -> None:
    logits, scores, ids = torch.zeros(3, 8), torch.zeros(3, 2), torch.zeros(3, 8, dtype=torch.int64)
    assert gate_logits((scores, ids, logits), 8) is logits
    assert gate_logits([None, logits, logits + 1], 8) is logits
    assert gate_logits(logits, 8) is logits
    assert gate_logits((scores, ids), 8) is None
    assert gate_logits(None, 8) is None
