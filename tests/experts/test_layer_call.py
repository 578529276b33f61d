from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import IMPLEMENTATIONS, MOE_FAMILIES, build, left_padded, make_config, token_ids
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.openai_privacy_filter.modeling_openai_privacy_filter import OpenAIPrivacyFilterExperts

from promoe.errors import UnsupportedModelError
from promoe.experts import combine
from promoe.experts.kernels import bank, choosing, row_kernel
from promoe.experts.kernels.bank import SlotBank
from promoe.experts.kernels.choosing import Kernels
from promoe.experts.kernels.matrices import SECOND
from promoe.experts.kernels.row_kernel import RowKernel
from promoe.experts.layer_call import LayerCall, check_no_grad
from promoe.experts.moe_layers import MoELayer, find_moe_layers
from promoe.experts.pairs import Selection
from promoe.transfer.rows import ExpertRows, FirstRows

DTYPES = (torch.float32, torch.bfloat16)
INPUTS: dict[str, dict[str, torch.Tensor]] = {
    "1 token": {"input_ids": token_ids(1, 1)},
    "3 tokens": {"input_ids": token_ids(1, 3, seed=1)},
    "17 tokens": {"input_ids": token_ids(1, 17, seed=2)},
    "left padding": left_padded((12, 7, 3), seed=3),
}
Groups = list[list[int]]


class Slots:
    """Slots of one layout in bytes that are NaN in every dtype, except where an expert lies; 64-byte aligned."""

    def __init__(self, layer: MoELayer, num_slots: int, seed: int = 0) -> None:
        self._weights = {name: getattr(layer.experts, name).detach().clone() for name in layer.paths}
        self._layout = layer.layout
        size = layer.layout.slot_bytes
        memory = torch.full((num_slots * size + 64,), 0xFF, dtype=torch.uint8)
        start = -memory.data_ptr() % 64
        self._slots = list(memory[start : start + num_slots * size].split(size))
        self._used: list[torch.Tensor] = []
        self._random = random.Random(seed)

    def load(self, experts: list[int]) -> dict[int, dict[str, torch.Tensor]]:
        """Put `experts` into random slots; every other slot is poisoned."""
        rows: dict[int, dict[str, torch.Tensor]] = {}
        for slot in self._used:
            slot.fill_(0xFF)
        self._used = self._random.sample(self._slots, len(experts))
        for expert, slot in zip(experts, self._used, strict=True):
            rows[expert] = {}
            for spec in self._layout.tensors:
                row = slot[spec.offset_bytes : spec.end_bytes].view(spec.dtype).view(spec.shape)
                assert row.view(-1)[::61].isnan().all()
                assert row.data_ptr() % 64 == 0
                rows[expert][spec.name] = row.copy_(self._weights[spec.name][expert])
        return rows

    def waves(self, groups: Groups) -> Iterator[ExpertRows]:
        """Each group in turn, in slots that the groups before it have used."""
        for group in groups:
            yield self.load(group)
        self.load([])


@dataclass
class Call:
    """One call of an experts module, with what the unmodified module returned."""

    layer: MoELayer
    hidden: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor
    expected: torch.Tensor

    @property
    def needed(self) -> list[int]:
        return sorted(set(self.index.flatten().tolist()))

    def resident(self, slots: Slots, *, with_ids: bool) -> torch.Tensor:
        rows = slots.load(self.needed)
        ids = self.index.tolist() if with_ids else None
        return LayerCall(self.layer, self.hidden, self.index, self.weights, ids).run_resident(rows)

    def begun(self, slots: Slots, ahead: list[int]) -> torch.Tensor:
        """With the first tensors of some experts, and of one that nobody needs, before each of them comes whole."""
        others = [expert for expert in range(self.layer.num_experts) if expert not in self.needed][:1]

        def groups() -> Iterator[ExpertRows]:
            for expert in self.needed:
                if expert in ahead:
                    rows = slots.load([expert, *others])
                    first = {e: {n: t for n, t in rows[e].items() if not n.startswith(SECOND)} for e in rows}
                    assert all(len(tensors) < len(rows[e]) for e, tensors in first.items())
                    yield FirstRows(first)
            yield from slots.waves([[expert] for expert in reversed(self.needed)])

        return LayerCall(self.layer, self.hidden, self.index, self.weights, self.index.tolist()).run_groups(groups())

    def grouped(self, slots: Slots, groups: Groups, *, with_ids: bool) -> torch.Tensor:
        ids = self.index.tolist() if with_ids else None
        return LayerCall(self.layer, self.hidden, self.index, self.weights, ids).run_groups(slots.waves(groups))


def record_calls(model: nn.Module, inputs: list[dict[str, torch.Tensor]]) -> list[Call]:
    """The calls that the unmodified model makes of its experts."""
    calls: list[Call] = []
    handles = [
        layer.experts.register_forward_hook(
            lambda _, args, output, layer=layer: calls.append(Call(layer, *(a.clone() for a in args), output.clone()))
        )
        for layer in find_moe_layers(model)
    ]
    with torch.no_grad():
        for each in inputs:
            model(**each)
    for handle in handles:
        handle.remove()
    return calls


def poison(layer: MoELayer) -> None:
    """From now on a kernel that reads the module's own weights returns NaN."""
    for name in layer.paths:
        getattr(layer.experts, name).data.fill_(float("nan"))


def partition(experts: list[int], seed: int) -> Groups:
    """Random groups in random order, not sorted inside."""
    generator = random.Random(seed)
    shuffled = generator.sample(experts, len(experts))
    groups: Groups = [[]]
    for expert in shuffled:
        groups[-1].append(expert)
        if generator.random() < 0.5:
            groups.append([])
    return groups


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    difference = (actual.float() - expected.float()).abs().max().item() if actual.numel() else 0.0
    assert torch.equal(actual, expected), f"largest difference {difference:.3g}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_every_way_of_running_equals_the_unmodified_module(
    family: str, implementation: str, dtype: torch.dtype
) -> None:
    model = build(family, dtype=dtype, experts_implementation=implementation, num_experts=8, top_k=4)
    calls = record_calls(model, list(INPUTS.values()))
    layers = find_moe_layers(model)
    assert len(calls) == len(layers) * len(INPUTS)
    slots = [Slots(layer, num_slots=11) for layer in layers]
    for layer in layers:
        poison(layer)
    with torch.no_grad():
        for i, call in enumerate(calls):
            own = slots[call.layer.layer_idx]
            for with_ids in (False, True):
                assert_same(call.resident(own, with_ids=with_ids), call.expected)
            one_by_one = [[expert] for expert in reversed(call.needed)]
            for groups in (one_by_one, partition(call.needed, 2 * i), partition(call.needed, 2 * i + 1)):
                assert_same(call.grouped(own, groups, with_ids=bool(i % 2)), call.expected)


@cache
def _small_experts(kind: str, implementation: str, dtype: torch.dtype) -> tuple[MoELayer, Slots]:
    """A lone experts module with its weights poisoned, and slots that hold copies of them."""
    layer = experts_layer(kind, implementation, dtype, hidden=64, intermediate=32, num_experts=6)
    return layer, Slots(layer, num_slots=8)


def experts_layer(
    kind: str, implementation: str, dtype: torch.dtype, *, hidden: int, intermediate: int, num_experts: int
) -> MoELayer:
    """A lone experts module beside a stand-in gate, as a layer."""
    classes: dict[str, tuple[type[nn.Module], str]] = {
        "deepseek_v3": (DeepseekV3Experts, "deepseek_v3"),
        "gpt_oss": (GptOssExperts, "gpt_oss"),
        "nemotron_h": (NemotronHExperts, "nemotron_h"),
    }
    cls, family = classes[kind]
    config = make_config(family, hidden=hidden, intermediate=intermediate, num_experts=num_experts, top_k=2, layers=2)
    return lone_layer(cls(config), config, implementation, dtype)


def lone_layer(experts: nn.Module, config: Any, implementation: str, dtype: torch.dtype) -> MoELayer:
    config._experts_implementation = implementation
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in experts.parameters():
            scale = 1.0 if parameter.ndim == 2 else parameter.shape[-1] ** -0.5
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    block = nn.Module()
    block.experts = experts.to(dtype).eval()
    block.gate = nn.Linear(2, 2)
    return find_moe_layers(block)[0]


def random_call(
    layer: MoELayer, tokens: int, top_k: int, dtype: torch.dtype, weights_dtype: torch.dtype, seed: int = 0
) -> Call:
    generator = torch.Generator().manual_seed(seed)
    width = layer.experts.down_proj.shape[1 if not layer.experts.is_transposed else 2]
    hidden = torch.randn((tokens, width), generator=generator).to(dtype)
    chances = torch.rand((tokens, layer.num_experts), generator=generator)
    index = chances.topk(top_k, dim=-1).indices if tokens else torch.empty((0, top_k), dtype=torch.int64)
    weights = torch.rand((tokens, top_k), generator=generator).to(weights_dtype)
    with torch.no_grad():
        expected = layer.experts(hidden, index, weights)
    return Call(layer, hidden, index, weights, expected)


@settings(max_examples=150)
@given(data=st.data())
def test_any_routing_in_any_groups(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    layer, slots = _small_experts(
        data.draw(st.sampled_from(("deepseek_v3", "gpt_oss"))), data.draw(st.sampled_from(IMPLEMENTATIONS)), dtype
    )
    tokens, top_k = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 5))
    # Without `unique`: the same expert twice for one token is odd, but the stock kernels compute it.
    expert = st.integers(0, layer.num_experts - 1)
    row = st.lists(expert, min_size=top_k, max_size=top_k)
    index = torch.tensor(data.draw(st.lists(row, min_size=tokens, max_size=tokens)))
    call = random_call(layer, tokens, top_k, dtype, data.draw(st.sampled_from((dtype, torch.float32))))
    call.index = index
    with torch.no_grad():
        call.expected = layer.experts(call.hidden, index, call.weights)
        assert not call.expected.isnan().any()
        order = data.draw(st.permutations(range(layer.num_experts)))  # experts that nobody chose come too
        cuts = sorted(data.draw(st.sets(st.integers(0, len(order)))))
        groups = [order[a:b] for a, b in itertools.pairwise([0, *cuts, len(order)])]
        assert_same(call.grouped(slots, groups, with_ids=data.draw(st.booleans())), call.expected)
        assert_same(call.resident(slots, with_ids=data.draw(st.booleans())), call.expected)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("deepseek_v3", torch.float32), ("deepseek_v3", torch.bfloat16), ("gpt_oss", torch.float32)]
)
def test_experts_of_real_size_with_one_and_two_threads(kind: str, dtype: torch.dtype) -> None:
    layer = experts_layer(kind, "eager", dtype, hidden=2048, intermediate=1408, num_experts=3)
    weights_dtype = torch.float32 if kind == "deepseek_v3" else dtype
    # 18 pairs: from 17 on torch.sort moves equal keys. batched_mm copies the weights of every pair; bf16 products are
    # slow where the CPU has no instruction for them.
    lengths = {"batched_mm": (1, 2), "eager": (1, 6), "grouped_mm": (1, 6)} if dtype == torch.float32 else {}
    calls: list[tuple[int, str, Call]] = []
    for threads, implementation in itertools.product((1, 2), IMPLEMENTATIONS):
        torch.set_num_threads(threads)  # conftest sets it back
        layer.experts.config._experts_implementation = implementation
        for tokens in lengths.get(implementation, (1, 2)):
            call = random_call(layer, tokens, 3, dtype, weights_dtype, seed=tokens)
            calls.append((threads, implementation, call))
    slots = Slots(layer, num_slots=4)
    poison(layer)
    with torch.no_grad():
        for i, (threads, implementation, call) in enumerate(calls):
            torch.set_num_threads(threads)
            layer.experts.config._experts_implementation = implementation
            assert_same(call.resident(slots, with_ids=True), call.expected)
            assert_same(call.grouped(slots, partition(call.needed, i), with_ids=True), call.expected)


class _LinearInputs(TorchFunctionMode):
    """The rows of every F.linear, in the order of the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            self.rows.append(args[0].clone())
        return func(*args, **(kwargs or {}))


def grouped_mm_inputs(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[torch.Tensor]]:
    """From now on collects, per expert, the rows that grouped_mm multiplies."""
    found: dict[int, list[torch.Tensor]] = {}
    original = bank._grouped_mm

    def spy(x: torch.Tensor, weight: SlotBank, offs: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        experts, sizes = weight._call.segments(offs)
        for expert, rows in zip(experts, x.split(sizes), strict=True):
            found.setdefault(expert, []).append(rows.clone())
        return original(x, weight, offs, **kwargs)

    linear, each = RowKernel._linear, RowKernel._each

    def keep(selection: Selection, rows: Sequence[torch.Tensor]) -> None:
        for expert, of_expert in zip(selection.experts, rows, strict=True):
            found.setdefault(expert, []).append(of_expert.clone())

    def spy_on_many(
        kernel: RowKernel, x: torch.Tensor, name: str, selection: Selection, rows: ExpertRows, out: torch.Tensor
    ) -> None:
        keep(selection, x.split(selection.sizes))
        linear(kernel, x, name, selection, rows, out)

    def spy_on_few(
        kernel: RowKernel, x: Sequence[torch.Tensor], name: str, selection: Selection, rows: ExpertRows
    ) -> list[torch.Tensor]:
        keep(selection, x)
        return each(kernel, x, name, selection, rows)

    monkeypatch.setattr(bank, "_grouped_mm", spy)
    monkeypatch.setattr(RowKernel, "_linear", spy_on_many)
    monkeypatch.setattr(RowKernel, "_each", spy_on_few)
    return found


@pytest.mark.parametrize("tokens", [5, 20, 50])
def test_grouped_mm_multiplies_an_experts_rows_in_the_order_of_the_whole_call(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of a row may depend on its place among the rows; and torch.sort moves equal keys about."""
    layer, slots = _small_experts("deepseek_v3", "grouped_mm", torch.float32)
    call = random_call(layer, tokens, 3, torch.float32, torch.float32)
    with torch.no_grad():
        call.grouped(slots, [call.needed[:1], call.needed[1:]], with_ids=False)  # proves its rows: computes some twice
    found = grouped_mm_inputs(monkeypatch)
    with torch.no_grad():
        call.resident(slots, with_ids=False)
        whole = {expert: list(rows) for expert, rows in found.items()}
        found.clear()
        call.grouped(slots, [[5, 3], [0], [4, 1, 2]], with_ids=False)
    assert whole.keys() == found.keys() == set(call.needed)
    for expert, rows in whole.items():
        assert len(rows) == len(found[expert]) == 2  # two projections
        assert all(torch.equal(a, b) for a, b in zip(rows, found[expert], strict=True))


@pytest.mark.parametrize("tokens", [5, 20, 50])
def test_eager_multiplies_an_experts_rows_in_the_order_of_the_whole_call(tokens: int) -> None:
    layer, slots = _small_experts("deepseek_v3", "eager", torch.float32)
    call = random_call(layer, tokens, 3, torch.float32, torch.float32)
    with torch.no_grad(), _LinearInputs() as whole:
        call.resident(slots, with_ids=False)
    with torch.no_grad(), _LinearInputs() as grouped:
        call.grouped(slots, [[3, 4, 5], [0, 1, 2]], with_ids=False)
    half = len(whole.rows) // 2
    in_id_order = grouped.rows[half:] + grouped.rows[:half]
    assert len(whole.rows) == len(in_id_order) == 2 * len(call.needed) == 12
    assert all(torch.equal(a, b) for a, b in zip(whole.rows, in_id_order, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["nemotron_h", "inkling2", "openai_privacy_filter"])
def test_eager_families_that_accumulate_in_another_dtype(family: str, dtype: torch.dtype) -> None:
    """They round once, at the end: their groups' own results would have lost what the sum needs."""
    layer = lone_layer(*odd_experts(family), "eager", dtype)
    slots = Slots(layer, num_slots=9)
    calls = [random_call(layer, tokens, 4, dtype, torch.float32, seed=tokens) for tokens in (1, 5, 30)]
    poison(layer)
    with torch.no_grad():
        for call, seed in itertools.product(calls, range(4)):
            assert_same(call.grouped(slots, partition(call.needed, seed), with_ids=True), call.expected)
            assert_same(call.resident(slots, with_ids=True), call.expected)


def odd_experts(family: str) -> tuple[nn.Module, Any]:
    cls: type[nn.Module] = NemotronHExperts if family == "nemotron_h" else OpenAIPrivacyFilterExperts
    if family == "inkling2":
        modeling = "transformers.models.inkling2.modeling_inkling2"
        cls = pytest.importorskip(modeling, reason="inkling2 came with transformers 5.23").Inkling2Experts
    # Not the family's own config class: only the fields that the experts read.
    config = PreTrainedConfig()
    fields = {
        "hidden_size": 64,
        "intermediate_size": 32,
        "moe_intermediate_size": 32,
        "moe_latent_size": None,
        "n_routed_experts": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
        "mlp_hidden_act": "relu2",
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "mlp_gate_softcap": 10.0,
        "mlp_up_softcap": 10.0,
    }
    for name, value in fields.items():
        setattr(config, name, value)
    return cls(config), config


@pytest.mark.parametrize("hidden_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", ["deepseek_v3", "gpt_oss"])
def test_under_autocast(
    kind: str, implementation: str, hidden_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = experts_layer(kind, implementation, torch.float32, hidden=64, intermediate=32, num_experts=6)
    slots = Slots(layer, num_slots=8)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for tokens in (1, 4, 20, 50):
            if tokens == 50:
                monkeypatch.setattr(choosing, "PART_BYTES", 20_000)  # 1.5 experts
            call = random_call(layer, tokens, 3, hidden_dtype, torch.float32, seed=tokens)
            assert_same(call.resident(slots, with_ids=True), call.expected)
            assert_same(call.grouped(slots, partition(call.needed, tokens), with_ids=True), call.expected)


def test_grouped_mm_casts_its_input_to_the_dtype_of_the_weights() -> None:
    layer = experts_layer("deepseek_v3", "grouped_mm", torch.bfloat16, hidden=64, intermediate=32, num_experts=6)
    slots = Slots(layer, num_slots=8)
    with torch.no_grad():
        for weights_dtype in DTYPES:
            call = random_call(layer, 5, 3, torch.float32, weights_dtype)
            assert_same(call.grouped(slots, partition(call.needed, 1), with_ids=True), call.expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batches_from_the_fewest_rows_on_take_one_path(dtype: torch.dtype) -> None:
    """Smaller ones may add in another order; in bf16 one in some ten thousand results shows it, on some processors."""
    layer = experts_layer("deepseek_v3", "batched_mm", dtype, hidden=100, intermediate=10, num_experts=2)
    fewest = Kernels(layer, "batched_mm", torch.zeros(1, 100, dtype=dtype), 1, on_device=False).fewest_rows
    assert fewest * layer.layout["down_proj"].nbytes // dtype.itemsize > choosing.BMM_ONEDNN_ELEMENTS
    generator = torch.Generator().manual_seed(0)
    for spec in layer.layout.tensors:
        for _ in range(1000):
            matrices = torch.randn((2 * fewest, *spec.shape), generator=generator).to(dtype)
            vectors = torch.randn((2 * fewest, spec.shape[1], 1), generator=generator).to(dtype)
            part = torch.bmm(matrices[:fewest], vectors[:fewest])
            assert torch.equal(part, torch.bmm(matrices, vectors)[:fewest])


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_a_long_prompt_is_combined_in_tiles(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, slots = _small_experts("deepseek_v3", implementation, torch.bfloat16)
    call = random_call(layer, 45, 4, torch.bfloat16, torch.float32)
    one_token_bytes = 4 * 64 * 2
    for tile_tokens in (1, 7, 45):
        monkeypatch.setattr(combine, "_TILE_BYTES", tile_tokens * one_token_bytes)
        with torch.no_grad():
            assert_same(call.grouped(slots, partition(call.needed, 3), with_ids=False), call.expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_tokens(implementation: str) -> None:
    layer, slots = _small_experts("deepseek_v3", implementation, torch.float32)
    call = random_call(layer, 0, 2, torch.float32, torch.float32)
    assert call.expected.shape == (0, 64)
    assert_same(call.resident(slots, with_ids=True), call.expected)
    assert_same(call.grouped(slots, [], with_ids=True), call.expected)
    assert_same(call.grouped(slots, [[1], [2]], with_ids=False), call.expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_expert_without_rows_raises_and_is_never_a_silent_wrong_weight(implementation: str) -> None:
    layer, slots = _small_experts("gpt_oss", implementation, torch.float32)
    call = random_call(layer, 4, 3, torch.float32, torch.float32)
    present = call.needed[:-1]
    with torch.no_grad():
        for ids in (None, call.index.tolist()):
            missing = call.needed[-1]
            with pytest.raises(AssertionError, match=rf"expert {missing} has no|no group had experts \[{missing}\]"):
                LayerCall(layer, call.hidden, call.index, call.weights, ids).run_resident(slots.load(present))
        with pytest.raises(AssertionError, match=rf"no group had experts \[{call.needed[-1]}\]"):
            call.grouped(slots, [[expert] for expert in present], with_ids=True)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_groups_are_run_to_their_end_also_when_the_first_has_everything(implementation: str) -> None:
    layer, slots = _small_experts("deepseek_v3", implementation, torch.float32)
    call = random_call(layer, 2, 2, torch.float32, torch.float32)
    ended = []

    def groups() -> Iterator[ExpertRows]:
        yield slots.load(call.needed)
        yield slots.load([0])
        ended.append(True)

    with torch.no_grad():
        assert_same(LayerCall(layer, call.hidden, call.index, call.weights).run_groups(groups()), call.expected)
    assert ended


def test_an_error_of_the_iterator_comes_through() -> None:
    layer, slots = _small_experts("deepseek_v3", "grouped_mm", torch.float32)
    call = random_call(layer, 2, 2, torch.float32, torch.float32)

    def groups() -> Iterator[ExpertRows]:
        yield slots.load(call.needed[:1])
        raise OSError("disk gone")

    with torch.no_grad(), pytest.raises(OSError, match="disk gone"):
        LayerCall(layer, call.hidden, call.index, call.weights).run_groups(groups())


def test_an_implementation_switched_in_between_is_followed() -> None:
    layer = experts_layer("deepseek_v3", "eager", torch.bfloat16, hidden=64, intermediate=32, num_experts=6)
    slots = Slots(layer, num_slots=8)
    results = []
    for implementation in IMPLEMENTATIONS:
        layer.experts.config._experts_implementation = implementation
        call = random_call(layer, 20, 4, torch.bfloat16, torch.bfloat16)
        with torch.no_grad():
            assert_same(call.resident(slots, with_ids=True), call.expected)
            assert_same(call.grouped(slots, partition(call.needed, 5), with_ids=True), call.expected)
        results.append(call.expected)
    assert not torch.equal(results[0], results[2]), (
        "eager and grouped_mm round differently, else this test shows nothing"
    )


def test_gradients_are_refused_with_a_remedy() -> None:
    layer, slots = _small_experts("deepseek_v3", "grouped_mm", torch.float32)
    call = random_call(layer, 2, 2, torch.float32, torch.float32)
    call.hidden.requires_grad_(True)
    for run in (
        lambda: check_no_grad(call.hidden),
        lambda: check_no_grad(torch.zeros(1), call.hidden),
        lambda: call.resident(slots, with_ids=True),
        lambda: call.grouped(slots, [call.needed], with_ids=True),
    ):
        with pytest.raises(UnsupportedModelError, match=r"torch\.no_grad"):
            run()
    with torch.no_grad():
        assert_same(call.resident(slots, with_ids=True), call.expected)
    check_no_grad(torch.zeros(1))


def test_inference_mode() -> None:
    for implementation in IMPLEMENTATIONS:
        layer, slots = _small_experts("gpt_oss", implementation, torch.bfloat16)
        call = random_call(layer, 3, 3, torch.bfloat16, torch.bfloat16)
        with torch.inference_mode():
            assert_same(call.resident(slots, with_ids=True), call.expected)
            assert_same(call.grouped(slots, partition(call.needed, 0), with_ids=True), call.expected)


def test_an_eager_loop_that_does_not_add_per_expert_is_refused() -> None:
    layer, slots = _small_experts("deepseek_v3", "eager", torch.float32)
    call = random_call(layer, 4, 2, torch.float32, torch.float32)

    def forward(self: nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return hidden + self.down_proj[0].sum()

    odd = replace(layer, eager_forward=forward)
    with torch.no_grad(), pytest.raises(UnsupportedModelError, match="grouped_mm"):
        LayerCall(odd, call.hidden, call.index, call.weights).run_groups(slots.waves([[0], call.needed]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize(
    ("kind", "activation", "intermediate"),
    [
        ("deepseek_v3", "silu", 1408),
        ("deepseek_v3", "gelu_pytorch_tanh", 1408),
        ("deepseek_v3", "gelu", 1000),
        ("deepseek_v3", "gelu", 1408),
        ("gpt_oss", "sigmoid within", 1000),
        ("nemotron_h", "gelu", 1000),
        ("nemotron_h", "silu", 1408),
    ],
)
def test_threads_cut_activations_where_they_would_without_groups(
    kind: str,
    activation: str,
    intermediate: int,
    implementation: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choosing, "PART_BYTES", 30 * intermediate * 2 * dtype.itemsize)  # two experts
    monkeypatch.setattr(row_kernel, "ACTIVATED_BYTES", 5 * intermediate * 2 * dtype.itemsize)
    layer = experts_layer(kind, implementation, dtype, hidden=64, intermediate=intermediate, num_experts=6)
    if kind != "gpt_oss":
        layer.experts.act_fn = ACT2FN[activation]
    calls: list[tuple[int, Call]] = []
    lengths = (1, 13) if implementation == "batched_mm" else (1, 13, 29)  # few pairs, and many
    for threads, tokens in itertools.product((1, 2, 3, 4), lengths):
        torch.set_num_threads(threads)  # conftest sets it back
        calls.append((threads, random_call(layer, tokens, 3, dtype, dtype, seed=tokens)))
    slots = Slots(layer, num_slots=8)
    poison(layer)
    with torch.no_grad():
        for i, (threads, call) in enumerate(calls):
            torch.set_num_threads(threads)
            assert_same(call.resident(slots, with_ids=True), call.expected)
            for groups in ([[expert] for expert in call.needed], partition(call.needed, i)):
                assert_same(call.grouped(slots, groups, with_ids=bool(i % 2)), call.expected)
            assert_same(call.begun(slots, call.needed), call.expected)


@pytest.mark.parametrize(
    ("threads", "dtype", "implementation", "intermediate", "num_pairs", "expected"),
    [
        (3, torch.float32, "grouped_mm", 64, 257, True),
        (3, torch.float32, "batched_mm", 64, 257, True),
        (3, torch.float32, "grouped_mm", 64, 256, False),  # one thread's share
        (2, torch.float32, "grouped_mm", 64, 99999, False),
        (2, torch.float32, "grouped_mm", 96, 99999, True),  # halves of 48
        (1, torch.float32, "grouped_mm", 96, 99999, False),
        (1, torch.float32, "grouped_mm", 100, 1, True),
        (3, torch.float32, "eager", 64, 99999, False),
    ],
)
def test_what_depends_on_groups(
    threads: int, dtype: torch.dtype, implementation: str, intermediate: int, num_pairs: int, expected: bool
) -> None:
    layer = experts_layer("deepseek_v3", implementation, dtype, hidden=64, intermediate=intermediate, num_experts=6)
    torch.set_num_threads(threads)  # conftest sets it back
    hidden = torch.zeros(1, 64, dtype=dtype)
    assert Kernels(layer, implementation, hidden, num_pairs, on_device=False).depends_on_groups == expected
