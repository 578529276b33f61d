from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import IMPLEMENTATIONS, MOE_FAMILIES, build, make_config, token_ids
from torch import nn
from transformers import AutoModelForCausalLM, VitPoseBackbone, VitPoseBackboneConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from promoe.errors import UnsupportedModelError
from promoe.experts.gate_output import gate_indices
from promoe.experts.moe_layers import MoELayer, find_moe_layers


def experts_of(model: nn.Module) -> nn.Module:
    return find_moe_layers(model)[0].experts


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_layers_of_every_tested_family(family: str) -> None:
    model = build(family, dtype=torch.bfloat16, num_experts=8, top_k=2, layers=3)
    layers = find_moe_layers(model)
    dense = 1 if family.startswith("deepseek") else 0
    gate_name = "router" if family == "gpt_oss" else "gate"
    assert [layer.layer_idx for layer in layers] == list(range(3 - dense))
    for layer in layers:
        block = f"model.layers.{layer.layer_idx + dense}.mlp"
        assert (layer.block_name, layer.name) == (block, f"{block}.experts")
        assert layer.gate_name == f"{block}.{gate_name}"
        assert model.get_submodule(layer.name) is layer.experts
        assert model.get_submodule(layer.gate_name) is layer.gate
        assert (layer.num_experts, layer.top_k) == (8, 2)
        names = [name for name, _ in layer.experts.named_parameters()]
        assert list(layer.paths) == names
        for spec, (name, shape, dtype) in zip(layer.layout.tensors, layer.stacked_shapes, strict=True):
            stack = getattr(layer.experts, name)
            assert (spec.name, spec.shape, spec.dtype) == (name, tuple(stack.shape[1:]), torch.bfloat16)
            assert (shape, dtype) == (stack.shape, stack.dtype)
    assert len({layer.layout for layer in layers}) == 1
    assert len(set(layers)) == len(layers)


def test_biases_are_part_of_an_expert() -> None:
    layer = find_moe_layers(build("gpt_oss"))[0]
    assert layer.paths == ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")


def test_finding_changes_nothing() -> None:
    model = build("qwen2_moe")
    before = {name: (id(tensor), tensor._version) for name, tensor in model.named_parameters()}
    classes = {name: (type(module), dict(module.__dict__).keys()) for name, module in model.named_modules()}
    find_moe_layers(model)
    assert before == {name: (id(tensor), tensor._version) for name, tensor in model.named_parameters()}
    assert classes == {name: (type(module), dict(module.__dict__).keys()) for name, module in model.named_modules()}


def test_experts_and_gates_below_a_wrapper_are_found_by_their_path() -> None:
    wrapper = nn.Sequential(nn.Linear(2, 2), build("mixtral", layers=2))
    assert [layer.name for layer in find_moe_layers(wrapper)] == [f"1.model.layers.{i}.mlp.experts" for i in (0, 1)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_implementation_and_its_function_are_read_when_asked(implementation: str) -> None:
    model = build("qwen3_moe", experts_implementation="eager" if implementation != "eager" else "grouped_mm")
    layer = find_moe_layers(model)[0]
    model.set_experts_implementation(implementation)
    assert layer.implementation == implementation
    if implementation == "eager":
        assert not hasattr(layer.stock_forward, "__wrapped__")
        assert layer.stock_forward is type(layer.experts).forward.__wrapped__
    else:
        assert layer.stock_forward is ALL_EXPERTS_FUNCTIONS[implementation]
    x, index, weights = torch.randn(3, 64), torch.tensor([[1, 2]] * 3), torch.rand(3, 2)
    with torch.no_grad():
        assert torch.equal(layer.stock_forward(layer.experts, x, index, weights), layer.experts(x, index, weights))


def test_no_implementation_in_the_config_means_eager() -> None:
    layer = find_moe_layers(build("qwen3_moe"))[0]
    layer.experts.config._experts_implementation = None
    assert layer.implementation == "eager"


def test_a_class_swapped_module_keeps_its_stock_forward() -> None:
    """What patching does to an instance must not hide what it was."""
    model = build("olmoe", layers=2)
    before = find_moe_layers(model)
    experts = before[0].experts
    swapped = type("OlmoeExperts", (type(experts),), {"forward": lambda self, h, i, w: h})
    experts.__class__ = swapped
    after = find_moe_layers(model)
    assert [layer.name for layer in after] == [layer.name for layer in before]
    assert after[0].eager_forward is before[0].eager_forward


def test_a_forward_decorated_more_than_once_is_unwrapped_to_the_core() -> None:
    model = build("qwen3_moe", layers=2, experts_implementation="eager")
    layer = find_moe_layers(model)[0]

    def again(self: nn.Module, *args: Any) -> Any:
        raise AssertionError("not the core")

    again.__wrapped__ = type(layer.experts).forward
    layer.experts.__class__ = type("Again", (type(layer.experts),), {"forward": again})
    assert find_moe_layers(model)[0].eager_forward is layer.eager_forward


# Refusals


def test_a_dense_model_is_refused_with_its_family() -> None:
    with pytest.raises(UnsupportedModelError, match="has no MoE layers") as error:
        find_moe_layers(build("llama"))
    for part in ("LlamaForCausalLM", "'llama'", "docs/support.md"):
        assert part in str(error.value)


def test_a_plain_module_is_refused_too() -> None:
    with pytest.raises(UnsupportedModelError, match="Linear has no MoE layers"):
        find_moe_layers(nn.Linear(2, 2))


def test_meta_experts_are_refused_unless_allowed() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            make_config("qwen2_moe", hidden=64, intermediate=32, num_experts=8, top_k=2, layers=2)
        )
    with pytest.raises(UnsupportedModelError, match=r"gate_up_proj' is on the meta device.*promoe\.from_pretrained"):
        find_moe_layers(model)
    layers = find_moe_layers(model, allow_meta=True)
    assert [layer.num_experts for layer in layers] == [8, 8]
    assert layers[0].layout == find_moe_layers(build("qwen2_moe"))[0].layout


class SomeQuantisedTensor(torch.Tensor):
    pass


def test_a_tensor_subclass_is_refused_and_named() -> None:
    model = build("qwen2_moe")
    experts = experts_of(model)
    experts.down_proj = nn.Parameter(experts.down_proj.data.as_subclass(SomeQuantisedTensor), requires_grad=False)
    with pytest.raises(UnsupportedModelError, match=r"experts\.down_proj' is a .*SomeQuantisedTensor"):
        find_moe_layers(model)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_quantised_bytes_are_refused(dtype: torch.dtype) -> None:
    model = build("gpt_oss")
    experts = experts_of(model)
    experts.gate_up_proj = nn.Parameter(experts.gate_up_proj.data.to(dtype), requires_grad=False)
    with pytest.raises(UnsupportedModelError, match=rf"is {dtype}: quantised experts"):
        find_moe_layers(model)


def test_expert_parallelism_is_refused() -> None:
    model = build("mixtral")
    experts_of(model)._is_expert_parallel = True
    with pytest.raises(UnsupportedModelError, match="expert parallel"):
        find_moe_layers(model)


def test_an_expert_parallel_plan_is_refused() -> None:
    model = build("mixtral")
    model.config.distributed_config = SimpleNamespace(enable_expert_parallel=True)
    with pytest.raises(UnsupportedModelError, match="expert parallel"):
        find_moe_layers(model)


def test_a_wrapped_instance_is_refused() -> None:
    """As accelerate's hooks and the parallel plans do: a class swap would not be reached."""
    model = build("mixtral")
    experts = experts_of(model)
    experts.forward = partial(experts.forward)
    with pytest.raises(UnsupportedModelError, match="device_map"):
        find_moe_layers(model)


@pytest.mark.parametrize("implementation", ["deepgemm", "sonicmoe", "something"])
def test_other_implementations_are_refused_naming_the_supported(implementation: str) -> None:
    model = build("mixtral")
    layer = find_moe_layers(model)[0]
    layer.experts.config._experts_implementation = implementation
    for ask in (lambda: find_moe_layers(model), lambda: layer.implementation, lambda: layer.stock_forward):
        with pytest.raises(UnsupportedModelError, match=f"'{implementation}'") as error:
            ask()
        assert all(name in str(error.value) for name in IMPLEMENTATIONS)


def test_experts_without_a_gate_beside_them_are_refused() -> None:
    model = build("mixtral")
    layer = find_moe_layers(model)[1]
    del model.get_submodule(layer.block_name).gate
    with pytest.raises(UnsupportedModelError, match=f"'{layer.name}' has no gate beside it"):
        find_moe_layers(model)


def test_stacks_of_unequal_length_are_refused() -> None:
    model = build("mixtral")
    experts = experts_of(model)
    experts.gate_up_proj = nn.Parameter(torch.zeros(9, 64, 64))
    with pytest.raises(UnsupportedModelError, match=r"gate_up_proj has shape \(9, 64, 64\)"):
        find_moe_layers(model)


def test_a_parameter_that_is_not_per_expert_is_refused() -> None:
    model = build("mixtral")
    experts_of(model).register_parameter("scale", nn.Parameter(torch.zeros(3)))
    with pytest.raises(UnsupportedModelError, match=r"scale has shape \(3,\)"):
        find_moe_layers(model)


def test_one_partial_match_beside_good_layers_is_refused() -> None:
    class LonelyExperts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 2, 2))

        def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return hidden

    model = build("mixtral")
    model.extra = LonelyExperts()
    with pytest.raises(UnsupportedModelError, match=r"'extra' \(LonelyExperts\) looks like a module of routed experts"):
        find_moe_layers(model)


def test_a_list_of_expert_modules_is_refused() -> None:
    model = build("llama", layers=2)
    model.model.layers[1].mlp.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
    with pytest.raises(UnsupportedModelError, match=r"mlp\.experts' \(ModuleList\)"):
        find_moe_layers(model)


def test_experts_that_are_parts_of_a_vision_backbone_are_refused() -> None:
    """They are chosen by a data set's number, not by a gate."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "part_features": 8, "num_experts": 3}
    with torch.device("meta"):
        model = VitPoseBackbone(VitPoseBackboneConfig(**sizes))
    with pytest.raises(
        UnsupportedModelError, match=r"experts' \(VitPoseNaiveMoe\) looks like a module of routed experts"
    ):
        find_moe_layers(model, allow_meta=True)


def test_shared_experts_that_always_run_are_left_alone() -> None:
    class InklingSharedExperts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, 4, 4))

        def forward(self, hidden: torch.Tensor, gammas: torch.Tensor) -> torch.Tensor:
            return hidden

    model = build("mixtral", layers=2)
    model.model.layers[0].mlp.shared_experts = InklingSharedExperts()
    assert len(find_moe_layers(model)) == 2
    model.model.shared_experts = InklingSharedExperts()  # not beside routed experts: unknown
    with pytest.raises(UnsupportedModelError, match="InklingSharedExperts"):
        find_moe_layers(model)


# The gate's output


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_gate_indices_are_what_the_experts_get(family: str) -> None:
    model = build(family)
    layers = find_moe_layers(model)
    found: dict[int, torch.Tensor | None] = {}
    given: dict[int, torch.Tensor] = {}
    for layer in layers:
        layer.gate.register_forward_hook(
            lambda _, args, output, idx=layer.layer_idx: found.update({idx: gate_indices(output)})
        )
        layer.experts.register_forward_pre_hook(lambda _, args, idx=layer.layer_idx: given.update({idx: args[1]}))
    with torch.no_grad():
        model(token_ids(2, 5))
    assert len(found) == len(layers)
    for idx, index in given.items():
        ids = found[idx]
        assert ids is not None
        assert torch.equal(ids, index)
        assert ids.data_ptr() == index.data_ptr()


def test_gate_indices_by_dtype_whatever_the_position() -> None:
    ids, scores = torch.tensor([[1, 0], [2, 3]]), torch.rand(2, 2)
    assert gate_indices((ids, scores)) is ids
    assert gate_indices([scores, scores, ids, None]) is ids
    assert gate_indices(ids) is ids


def test_gate_indices_are_two_dimensional() -> None:
    found = gate_indices((torch.rand(2, 3, 8), torch.zeros(2, 3, 4, dtype=torch.int64)))
    assert found is not None
    assert found.shape == (6, 4)


def test_gate_indices_absent_or_ambiguous() -> None:
    ids = torch.tensor([[1, 0]])
    assert gate_indices((torch.rand(1, 8), torch.rand(1, 2))) is None
    assert gate_indices(None) is None
    assert gate_indices((ids, ids.clone())) is None


def test_a_layer_is_immutable() -> None:
    layer = find_moe_layers(build("mixtral", layers=2))[0]
    with pytest.raises(AttributeError):
        layer.num_experts = 3  # type: ignore[misc]
    assert isinstance(copy.copy(layer), MoELayer)
