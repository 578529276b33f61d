"""What a round makes of what it measured; `test_run` runs whole rounds."""

from __future__ import annotations

import pytest

from promoe.commands.bench.messages import Answer, Facts, Sizes
from promoe.commands.bench.results import Table, nothing_counted
from promoe.commands.bench.round import Measured, Round
from promoe.commands.bench.systems import KNOWN
from promoe.commands.bench.tasks import Reference, Task
from promoe.commands.lower_bound import RoutedPass
from promoe.commands.measure import Generation
from promoe.scheduler import PoolSpec, SchedulerConfig


def generations(*ttfts_s: float, tpot_s: float = 0.1) -> list[Generation]:
    return [Generation((5, 6), ttft_s, (tpot_s,)) for ttft_s in ttfts_s]


def table(
    resident_s: list[float],
    in_place_s: list[float],
    prompt_bytes: float,
    packed: frozenset[str] = frozenset(),
    in_place_tpot_s: float = 0.05,
) -> Table:
    """Of a round that measured three prompts, over a link of 1 GB/s, with tokens of 100 ms in the unmodified model."""
    systems = [KNOWN["resident"], KNOWN["next-use"]]
    decode = [RoutedPass("decode", [(0, [[expert]])]) for expert in (0, 1)]  # 1 MB each
    prompts = [RoutedPass("prefill", [(1, [[expert]])]) for expert in range(4)]
    answers = [
        Answer(generation, [prompt, *decode])
        for generation, prompt in zip(generations(99.0, *resident_s), prompts, strict=True)
    ]
    sizes = Sizes((2, 4), (10**6, int(prompt_bytes)), (1, 1), 0, 1)
    config = SchedulerConfig([2, 4], [(10**6,), (int(prompt_bytes),)], [PoolSpec(1, (0,)), PoolSpec(1, (1,))], "lru")
    found = Measured(
        answers={"resident": generations(*resident_s), "next-use": generations(9.0, 9.0, 9.0)},
        facts={"next-use": Facts(nothing_counted(sizes), config, None, 0)},
        peaks={"next-use": None},
        in_place=generations(*in_place_s, tpot_s=in_place_tpot_s),
        packed=packed,
    )
    (result,) = Round(systems, [Reference(Task("generate", []), answers)], sizes, "25%").tables([found], 1e9)
    return result


@pytest.mark.parametrize(
    ("resident_s", "in_place_s", "compute_s"),
    [
        ([2.0, 3.0, 4.0], [1.0, 1.5, 1.25], 1.25),
        ([2.0, 3.0, 4.0], [5.0, 5.0, 5.0], 3.0),
        ([2.0, 3.0, 4.0], [5.0, 1.0, 3.5], 2.0),  # prompt by prompt: 2, 1 and 3.5
    ],
)
def test_computing_a_prompt_takes_the_least_that_was_measured(
    resident_s: list[float], in_place_s: list[float], compute_s: float
) -> None:
    found = table(resident_s, in_place_s, prompt_bytes=0.5e9)
    assert found.prompt_compute_s == pytest.approx(compute_s)
    assert found.rows[1].ttft_bound_s == pytest.approx(compute_s)


def test_a_prompt_takes_no_less_than_what_it_misses_takes_over_the_link() -> None:
    found = table([2.0, 3.0, 4.0], [1.0, 1.5, 1.25], prompt_bytes=7e9)
    assert found.rows[1].ttft_bound_s == pytest.approx(7.0)
    assert found.rows[0].ttft_bound_s is None


@pytest.mark.parametrize(("in_place_tpot_s", "bound_s"), [(0.05, 0.05), (0.2, 0.1)])
def test_a_token_takes_no_less_than_computing_it_with_packed_experts(in_place_tpot_s: float, bound_s: float) -> None:
    times = ([2.0, 3.0, 4.0], [1.0, 1.5, 1.25], 0.5e9)
    row = table(*times, packed=frozenset({"down_proj"}), in_place_tpot_s=in_place_tpot_s).rows[1]
    assert row.tpot_bound_s == pytest.approx(bound_s)
    assert row.tpot_unmodified_s == pytest.approx(0.1)
    row = table(*times, packed=frozenset(), in_place_tpot_s=in_place_tpot_s).rows[1]
    assert row.tpot_bound_s == pytest.approx(0.1)
    assert row.tpot_unmodified_s is None
