from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from promoe.experts.pairs import Pairs, Selection


def pairs_of(selection: Selection, top_k: int) -> dict[int, list[tuple[int, int]]]:
    """Per expert its (token, choice) pairs, in order."""
    found: dict[int, list[tuple[int, int]]] = {}
    for expert, position in zip(selection.index.flatten().tolist(), selection.position_tensor.tolist(), strict=True):
        found.setdefault(expert, []).append(divmod(position, top_k))
    return found


@pytest.mark.parametrize("by_choice", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 5, 40])  # 40: more pairs than lists are used for
def test_every_pair_is_selected_once_with_its_token(tokens: int, by_choice: bool) -> None:
    index = torch.rand((tokens, 8)).topk(3).indices
    for ids in (None, index.tolist()):
        pairs = Pairs(index, 8, by_choice, ids)
        experts = sorted(set(index.flatten().tolist()))
        assert pairs.experts == experts
        seen = []
        for some in (experts[1:], experts[:1]):
            selection = pairs.select(some)
            assert selection.experts == some
            assert selection.index.flatten().tolist() == [
                e for e, n in zip(some, selection.sizes, strict=True) for _ in range(n)
            ]
            hidden = torch.arange(tokens).float().unsqueeze(1).expand(-1, 4)
            of_expert = pairs_of(selection, 3)
            tokens_of_pairs = [token for expert in some for token, _ in of_expert[expert]]
            assert selection.gather(hidden)[:, 0].tolist() == tokens_of_pairs
            for expert, own in zip(some, selection.tokens_by_expert(), strict=True):
                assert all(index[token, choice] == expert for token, choice in of_expert[expert])
                if own is None:
                    assert tokens == 1
                else:
                    assert own.tolist() == [token for token, _ in of_expert[expert]]
            seen += selection.position_tensor.tolist()
        assert sorted(seen) == list(range(tokens * 3))


@pytest.mark.parametrize("tokens", [4, 30])
def test_eager_order_is_by_choice_then_token(tokens: int) -> None:
    index = torch.rand((tokens, 5)).topk(4).indices
    pairs = Pairs(index, 5, by_choice=True)
    for expert, found in pairs_of(pairs.select(pairs.experts), 4).items():
        choices, of_tokens = torch.where(index.t() == expert)
        assert found == list(zip(of_tokens.tolist(), choices.tolist(), strict=True))


@pytest.mark.parametrize("tokens", [4, 15, 30])
def test_the_other_order_is_the_one_of_torch_sort(tokens: int) -> None:
    index = torch.rand((tokens, 5)).topk(4).indices
    pairs = Pairs(index, 5, by_choice=False)
    ids, order = torch.sort(index.reshape(-1))
    for expert in pairs.experts:
        assert pairs.select([expert]).position_tensor.tolist() == order[ids == expert].tolist()


def test_take_gives_each_needed_expert_once_and_ignores_the_others() -> None:
    pairs = Pairs(torch.tensor([[5, 2], [2, 7]]), 9, by_choice=False)
    assert pairs.missing == [2, 5, 7]
    assert pairs.take({7: ..., 0: ..., 5: ...}) == [5, 7]
    assert pairs.missing == [2]
    assert pairs.take([5, 8]) == []
    assert pairs.take([5, 2]) == [2]
    assert pairs.missing == []


@pytest.mark.parametrize("tokens", [1, 100])
def test_an_id_out_of_range_is_our_bug(tokens: int) -> None:
    with pytest.raises(AssertionError, match=r"0\.\.8 for 8 experts"):
        Pairs(torch.tensor([[0, 8]] * tokens), 8, by_choice=False)


def test_no_tokens() -> None:
    pairs = Pairs(torch.empty((0, 2), dtype=torch.int64), 8, by_choice=True)
    assert pairs.experts == []
    assert pairs.take([1, 2]) == []


@pytest.mark.parametrize("tokens", [8, 100])
def test_parts_are_all_experts_in_order_and_no_larger_than_asked_for(tokens: int) -> None:
    index = torch.randint(0, 6, (tokens, 4), generator=torch.Generator().manual_seed(0))
    pairs, counts = Pairs(index, 8, by_choice=False), torch.bincount(index.flatten(), minlength=8).tolist()
    for experts in (pairs.experts, pairs.experts[1:4]):
        in_all = sum(counts[expert] for expert in experts)
        for most in range(1, in_all + 1):
            parts = list(pairs.parts(experts, most))
            assert [expert for part in parts for expert in part] == experts
            assert (len(parts) == 1) == (in_all <= most)
            for part in parts:
                assert part
                assert len(part) == 1 or sum(counts[expert] for expert in part) <= most
            for part, following in pairwise(parts):  # none could have been joined to the part before it
                assert sum(counts[expert] for expert in (*part, following[0])) > most
