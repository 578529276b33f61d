"""The virtual clock: cases worked by hand, in seconds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from promoe.commands.simulate.simulator import Simulator
from promoe.scheduler import PoolSpec, SchedulerConfig
from promoe.transfer.link_timetable import Wire

LAYER_S, EXPERT_S = 10.0, 1.0


def simulator(
    num_slots: int = 4,
    num_layers: int = 2,
    chunks: tuple[int, ...] = (3,),
    latency_s: float = 0.0,
    slowdown: float = 1.0,
    group_s: float = 0.0,
    **switches: object,
) -> Simulator:
    """Experts of `sum(chunks)` bytes over a wire of a byte per second."""
    config = SchedulerConfig(
        num_experts=[8] * num_layers,
        chunk_bytes=[chunks] * num_layers,
        pools=[PoolSpec(num_slots, tuple(range(num_layers)))],
        strict=True,
        **switches,  # type: ignore[arg-type]
    )
    found = Simulator(config, Wire(1.0, latency_s), slowdown=slowdown, group_s=group_s)
    found.recorder.begin_pass("decode", 1, 1)
    return found


def visit(sim: Simulator, layer_idx: int, ids: Sequence[int], **more: object) -> float:
    """Seconds that it took."""
    start_s = sim.now_s
    sim.visit(layer_idx, [ids], LAYER_S, EXPERT_S, **more)  # type: ignore[arg-type]
    return sim.now_s - start_s


def test_what_is_missing_is_waited_for_and_computed_as_it_comes() -> None:
    sim = simulator()
    # Gate at 10; expert 0 there at 13, computed until 14; expert 1 there at 16, until 17.
    assert visit(sim, 0, [0, 1]) == 17.0
    stats = sim.recorder.phase_stats("decode")
    assert (stats.needed, stats.hits, stats.ready, stats.stall_s) == (2, 0, 0, 3.0 + 2.0)
    assert (stats.bytes_demand, stats.bytes_prefetched) == (6, 0)


def test_a_group_that_is_not_the_whole_layer_costs_more_than_its_experts() -> None:
    sim = simulator(group_s=0.25)
    # As above, but each of the two that are waited for costs a quarter more.
    assert visit(sim, 0, [0, 1]) == 17.25
    assert visit(sim, 0, [0, 1]) == 10.0 + 2.0, "all there: one group, and no waiting"
    # Experts 0 and 1 until 12, expert 2 there at 13.
    assert visit(sim, 0, [0, 1, 2]) == 14.25


def test_what_is_there_runs_first_while_the_rest_arrives() -> None:
    sim = simulator()
    visit(sim, 0, [0, 1])
    # Gate at 10; experts 0 and 1 until 12; expert 2, sent at 10, is there at 13.
    assert visit(sim, 0, [0, 1, 2]) == 14.0
    stats = sim.recorder.phase_stats("decode")
    assert (stats.hits, stats.ready) == (2, 2)
    assert stats.stall_s == 5.0 + 1.0
    assert visit(sim, 0, [0, 1, 2]) == 13.0  # nothing is missing


def test_cores_that_move_bytes_compute_more_slowly() -> None:
    sim = simulator(slowdown=2.0)
    # Gate at 10; expert 0 at 13; until 16, when expert 1 arrives, 3 s hold 1.5 s of work: expert 0 is done at 15, waits.
    assert visit(sim, 0, [0, 1]) == 17.0
    # Nothing on its way up to the gate at 10; expert 2 until 13: experts 0 and 1 have 1.5 s of their 2 s, then full speed.
    assert visit(sim, 0, [0, 1, 2]) == 10 + 3 + 0.5 + 1


def test_in_id_order_each_missing_expert_is_fetched_when_its_turn_comes() -> None:
    sim = simulator(reorder=False, hints=False)
    visit(sim, 0, [1, 2])
    # Expert 0 first: there at 13, computed with 1 and 2, which wait for it, until 16.
    assert visit(sim, 0, [0, 1, 2]) == 16.0


@pytest.mark.parametrize(("latency_s", "expected_s"), [(0.0, 14.0), (0.5, 14.5), (2.0, 17.0)])
def test_latency_passes_while_another_chunk_is_on_the_wire(latency_s: float, expected_s: float) -> None:
    """Three chunks of a second: the first has its latency before it, later ones what the wire leaves of theirs."""
    assert visit(simulator(chunks=(1, 1, 1), latency_s=latency_s), 0, [0]) == expected_s


def test_a_right_forecast_hides_the_transfer_behind_the_layer() -> None:
    sim = simulator(calibrate=False)

    def of_next(layer_idx: int) -> list[tuple[int, int, np.ndarray]]:
        p = np.zeros(8)
        p[3] = 0.9
        return [(1, 1, p)] if layer_idx == 0 else []

    visit(sim, 0, [0], forecasts=of_next)
    assert visit(sim, 1, [3]) == LAYER_S + EXPERT_S
    stats = sim.recorder.phase_stats("decode")
    assert (stats.bytes_prefetched, stats.bytes_prefetch_used, stats.bytes_wasted) == (3, 3, 0)


def test_a_demand_waits_for_the_chunks_in_flight_and_no_longer() -> None:
    """Four chunks of a second are prefetched in vain; when the gate has chosen, two are in flight."""
    found = {}
    for prefetch in (True, False):
        sim = simulator(chunks=(6, 6, 6, 6), calibrate=False, prefetch=prefetch)
        visit(sim, 0, [0], forecasts=lambda _: [(1, 1, np.eye(8)[5])])
        found[prefetch] = visit(sim, 1, [3])
    # The visit of layer 0 ends 1 s after its last chunk; of the 11 s until then 10 were layer 1's: the first chunk is
    # through, the second has 1 s to go, the third has the wire after it.
    assert found == {False: 10 + 24 + 1, True: 10 + 1 + 6 + 24 + 1}


def test_a_long_prompt_streams_the_next_layer() -> None:
    took = {}
    for stream in (True, False):
        sim = simulator(num_slots=16)
        prompt = [[n % 8, (n + 1) % 8] for n in range(16)]
        for layer_idx in (0, 1):
            sim.visit(layer_idx, prompt, LAYER_S, 5.0, stream_next=stream)
        took[stream] = sim.now_s
        assert sim.recorder.phase_stats("decode").bytes_wasted == 0
    assert took == {False: 2 * (LAYER_S + 3.0 + 8 * 5.0), True: 2 * LAYER_S + 3.0 + 16 * 5.0}  # no waiting in layer 1


def test_more_experts_than_slots_run_in_waves() -> None:
    sim = simulator(num_slots=1)
    assert visit(sim, 0, [0, 1, 2]) == LAYER_S + 3 * (3 + EXPERT_S)


def test_the_same_input_gives_the_same_run() -> None:
    def run() -> tuple[float, object]:
        rng, sim = np.random.default_rng(0), simulator(num_slots=6)
        for _ in range(200):
            for layer_idx in (0, 1):
                visit(sim, layer_idx, rng.permutation(8)[:2].tolist())
        return sim.now_s, sim.recorder.phase_stats("decode")

    assert run() == run()


def test_popularity_is_for_policies_that_go_by_it() -> None:
    popular = simulator(num_slots=2, eviction="static")
    popular.fix_popularity(np.array([[9.0, 8, 1, 1, 1, 1, 1, 1]] * 2))
    for ids in ([0, 1], [2], [3], [0]):
        visit(popular, 0, ids)
    assert popular.recorder.phase_stats("decode").hits == 1  # expert 0 stayed
    with pytest.raises(AssertionError, match="next_use learns by itself"):
        simulator().fix_popularity(np.zeros((2, 8)))
