"""What a round makes of what it measured; `test_run` runs whole rounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from promoe.commands.bench.messages import Answer, Facts, Prompt, Sizes
from promoe.commands.bench.process import WorkerError
from promoe.commands.bench.round import Measured, Round
from promoe.commands.bench.systems import KNOWN, System, find_systems
from promoe.commands.bench.table import Table, nothing_counted
from promoe.commands.bench.tasks import Reference, Task, TokensDifferError
from promoe.commands.contention import Contention
from promoe.commands.measure import Generation
from promoe.scheduler import PoolSpec, SchedulerConfig
from promoe.stats.counts import PhaseStats
from promoe.stats.routing import RoutedPass
from promoe.stores.layout import ExpertLayout


def generations(*ttfts_s: float, tpot_s: float = 0.1) -> list[Generation]:
    return [Generation((5, 6), ttft_s, (tpot_s,)) for ttft_s in ttfts_s]


def table(
    resident_s: list[float],
    in_place_s: list[float],
    prompt_bytes: float,
    packed: frozenset[ExpertLayout] = frozenset(),
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
    row = table(
        *times,
        packed=frozenset({ExpertLayout.of({"down_proj": ([2, 2], torch.bfloat16)})}),
        in_place_tpot_s=in_place_tpot_s,
    ).rows[1]
    assert row.tpot_bound_s == pytest.approx(bound_s)
    assert row.tpot_unmodified_s == pytest.approx(0.1)
    row = table(*times, packed=frozenset(), in_place_tpot_s=in_place_tpot_s).rows[1]
    assert row.tpot_bound_s == pytest.approx(0.1)
    assert row.tpot_unmodified_s is None


def test_a_quantised_system_is_bounded_by_its_own_bytes_and_by_computing_in_its_form() -> None:
    """Tokens of 100 ms in 16 bits and of 20 ms in 8; experts of 1 MB and of 0.5 MB, over a link of 10 MB/s."""
    systems = find_systems(["resident", "lru", "lru:int8"])
    prompt, *tokens = [RoutedPass(phase, [(0, [[expert]])]) for phase, expert in (("prefill", 0), ("decode", 1))] * 2
    answers = [Answer(one, [prompt, tokens[0]]) for one in generations(9.0, 1.0, 1.0)]
    own = [Answer(Generation((5, 7), 9.0, (0.02,)), [prompt, tokens[0]]) for _ in range(3)]
    sizes = Sizes((2,), (10**6,), (1,), 0, 1)
    configs = {
        name: SchedulerConfig([2], [(nbytes,)], [PoolSpec(1, (0,))], "lru")
        for name, nbytes in (("lru", 10**6), ("lru:int8", 500_000))
    }
    found = Measured(
        answers={
            "resident": generations(1.0, 1.0, tpot_s=0.01),
            "resident:int8": generations(0.5, 0.5, tpot_s=0.06),
            "lru": generations(9.0, 9.0),
            "lru:int8": generations(9.0, 9.0),
        },
        facts={name: Facts(nothing_counted(sizes), config, None, 0) for name, config in configs.items()},
        peaks=dict.fromkeys(configs),
    )
    task = Task("generate", [])
    comparison = Round(
        systems,
        [Reference(task, answers)],
        sizes,
        "25%",
        quantised={"int8": [Reference(task, own, unmodified=False, given_by="“resident:int8”")]},
    )
    (result,) = comparison.tables([found], 1e7, Contention(2.0, 1e6))
    rows = {row.system.name: row for row in result.rows}
    assert rows["lru"].tpot_bound_s == pytest.approx(0.1)  # 1 MB over 10 MB/s
    assert rows["lru:int8"].tpot_bound_s == pytest.approx(0.06)  # computing: 0.5 MB would take 50 ms
    assert rows["lru:int8"].ttft_bound_s == pytest.approx(0.5)
    # What computes and fetches in 55 ms computes in no more.
    found.answers["lru:int8"] = generations(9.0, 9.0, tpot_s=0.055)
    (result,) = comparison.tables([found], 1e7)
    assert [row.tpot_bound_s for row in result.rows if row.system.name == "lru:int8"] == [pytest.approx(0.055)]
    assert rows["lru:int8"].tpot_shared_s is None, "contention was measured in 16 bits"
    assert rows["lru"].tpot_shared_s is not None
    assert rows["resident:int8"].tpot_bound_s is None
    # (5, 6) and (5, 7): one token of two, in each of two prompts
    assert (rows["lru:int8"].num_same, rows["lru:int8"].num_tokens) == (2, 4)
    assert rows["lru"].num_same is None


class Fake:
    """A system that answers at once, notes that it was asked, and breaks at one prompt."""

    peak_limited_bytes = None

    def __init__(self, system: System, asked: list[tuple[str, int]], breaks_at: int | None = None) -> None:
        self.system, self._asked, self._breaks_at = system, asked, breaks_at
        self._stats = nothing_counted(SIZES)

    def answer(self, prompt: Prompt) -> Answer:
        (number,) = prompt.ids
        if number == self._breaks_at:
            raise WorkerError("injected")
        self._asked.append((self.system.name, number))
        return Answer(Generation((number, 7), 1.0, (0.5,)), [])

    def facts(self) -> Facts:
        decode = PhaseStats(tokens=2, bytes_demand=3000)
        config = SchedulerConfig([2], [(10,)], [PoolSpec(1, (0,))], "lru")
        return Facts(replace(self._stats, decode=decode), config, None, 0)

    def reset(self) -> None:
        self._asked.append((self.system.name, -1))


SIZES = Sizes((2,), (10,), (1,), 0, 1)


def fakes(asked: list[tuple[str, int]], **breaks_at: int) -> dict[str, Any]:
    systems = [replace(KNOWN["lru"], name=name) for name in ("a", "b")]
    return {system.name: Fake(system, asked, breaks_at.get(system.name)) for system in systems}


def comparison(opened: dict[str, Any]) -> Round:
    prompts = [Prompt([number], 2, 0) for number in range(3)]
    routing = [RoutedPass("prefill", [(0, [[0]])]), RoutedPass("decode", [(0, [[1]])])]
    answers = [Answer(Generation((number, 7), 1.0, (0.5,)), routing) for number in range(3)]
    return Round([one.system for one in opened.values()], [Reference(Task("generate", prompts), answers)], SIZES, "50%")


def test_systems_take_turns_at_each_prompt_and_forget_the_first() -> None:
    asked: list[tuple[str, int]] = []
    opened = fakes(asked)
    (found,) = comparison(opened).measure(opened, lambda: 1e9)
    turns = [(name, number) for name, number in asked if number >= 0]
    assert turns == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert asked[1] == ("a", -1), "what was counted at the first prompt is forgotten before the next"
    assert {row.system.name: [answer.tokens for answer in row.answers] for row in found.rows} == {
        "a": [(1, 7), (2, 7)],
        "b": [(1, 7), (2, 7)],
    }


def test_a_quantised_system_has_to_give_the_tokens_of_its_own_reference() -> None:
    reference, quantised = find_systems(["lru:int8"])
    opened: dict[str, Any] = {system.name: Fake(system, []) for system in (reference, quantised)}
    plain = comparison(opened)
    (task,) = (one.task for one in plain.references)
    other = [
        Answer(Generation((number, 8), 1.0, (0.5,)), one.routing)
        for number, one in enumerate(plain.references[0].answers)
    ]
    with pytest.raises(
        TokensDifferError, match=r"“resident:int8” generated other tokens than the 8-bit model: prompt 0"
    ):
        replace(plain, quantised={"int8": [Reference(task, other, False, "the 8-bit model")]}).measure(
            opened, lambda: 1e9
        )
    (found,) = replace(plain, quantised={"int8": plain.references}).measure(opened, lambda: 1e9)
    assert [len(row.answers) for row in found.rows] == [2, 2]


@pytest.mark.parametrize(
    ("probes", "expected"),
    [([1e6, 2e6], 2e6), ([2e6, 1e6], 2e6), ([10.0, 20.0], 3000.0)],  # 3000 bytes in two tokens of half a second
)
def test_the_links_bandwidth_is_the_best_that_was_seen(probes: list[float], expected: float) -> None:
    opened = fakes([])
    (found,) = comparison(opened).measure(opened, iter(probes).__next__)
    assert found.bandwidth_bytes_per_s == expected


def test_a_system_that_breaks_is_left_out_from_then_on() -> None:
    asked: list[tuple[str, int]] = []
    opened = fakes(asked, a=1)
    (found,) = comparison(opened).measure(opened, lambda: 1e9)
    a, b = found.rows
    assert (a.error, len(a.answers), b.error, len(b.answers)) == ("injected", 0, None, 2)
    assert ("a", 2) not in asked


class Answers:
    """A system that gives these answers, one per prompt."""

    def __init__(self, *answers: tuple[int, ...]) -> None:
        self._left = list(answers)
        self.peak_limited_bytes = None

    def answer(self, prompt: Prompt) -> Answer:
        if not self._left:
            raise WorkerError("It hung.")
        tokens = self._left.pop(0)
        return Answer(Generation(tokens, 1.0, (0.1,) * (len(tokens) - 1)))

    def facts(self) -> Facts:
        return Facts(None, None, None, 5)

    def reset(self) -> None:
        pass


def test_tokens_of_llama_cpp_are_counted_and_not_verified() -> None:
    systems = find_systems(["llama-cpp", "llama-cpp:q8_0", "llama-cpp:q4_0", "gate"])[:3]
    task = Task("generate", [Prompt([1], 4, None, seconds=5.0)] * 3)
    expected = [Answer(Generation((5, 6, 7, 8), 1.0, (0.1,) * 3)) for _ in task.prompts]
    opened: Any = {
        "llama-cpp": Answers((9,) * 4, (5, 6, 7, 8), (5, 6, 7, 9)),
        "llama-cpp:q8_0": Answers((5, 6, 7, 8), (5, 6), (1, 6, 7)),  # cut short
        "llama-cpp:q4_0": Answers((5, 6, 7, 8), (5, 7, 7, 8)),  # it fails before the last prompt
    }
    (table,) = Round(systems, [Reference(task, expected)], Sizes((2,), (8,), (1,), 0, 1), "25%").measure(
        opened, lambda: 1e9
    )
    found = {row.system.name: row for row in table.rows}
    assert [(row.num_same, row.num_tokens) for row in found.values()] == [(7, 8), (2, 5), (1, 4)]
    assert [len(row.answers) for row in found.values()] == [2, 2, 1]
    assert [row.error for row in found.values()] == [None, None, "It hung."]
    assert found["llama-cpp"].to_json()["tokens_compared_with"] is None
