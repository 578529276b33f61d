from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import pytest
import torch
from tiny_checkpoint import write_checkpoint
from transformers import AutoModelForCausalLM
from waiting import until

from promoe.commands import contention as module
from promoe.commands.contention import Contention, measure_contention
from promoe.model.opening import open_without_experts


@pytest.mark.parametrize(
    ("contention", "compute_s", "nbytes", "expected_s"),
    [
        (Contention(1.0, math.inf), 0.3, 400.0, 0.4),  # nothing is lost: max(C, B / W)
        (Contention(1.0, math.inf), 0.5, 400.0, 0.5),
        (Contention(2.0, 1000.0), 0.3, 0.0, 0.3),  # nothing is read
        # Reads take 0.4 s, in which a half of 0.4 s is computed; 0.1 s of computing are left.
        (Contention(2.0, 1000.0), 0.3, 400.0, 0.5),
        # At half the speed: 0.6 s at once, in which 300 bytes arrive; 100 are left, at full speed.
        (Contention(2.0, 500.0), 0.3, 400.0, 0.7),
        # A probe beside computing that was faster than the best alone is no faster than that.
        (Contention(1.0, 2000.0), 0.1, 400.0, 0.4),
    ],
)
def test_the_least_time_of_a_token(contention: Contention, compute_s: float, nbytes: float, expected_s: float) -> None:
    assert contention.token_s(compute_s, nbytes, 1000.0) == pytest.approx(expected_s)


def test_it_is_measured_while_both_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes run before, during and after the reads; a pass that runs during them is never taken for one of the others."""
    folder = write_checkpoint(tmp_path / "checkpoint")
    model = AutoModelForCausalLM.from_pretrained(folder)
    events: list[str] = []
    real = module.probe_read_bandwidth

    def probe(*args: object, **kwargs: object) -> object:
        events.append("reads begin")
        found = real(*args, **kwargs)  # type: ignore[arg-type]
        until(lambda: events[-1] == "pass")  # on a busy machine, the reads may be over before the first
        events.append("reads end")
        return found

    monkeypatch.setattr(module, "probe_read_bandwidth", probe)
    model.register_forward_pre_hook(lambda module, args: events.append("pass"))
    with closing(open_without_experts(folder, dtype=torch.bfloat16).store) as store:
        found = measure_contention(model, [5, 6, 7], store, "page_cache", 2, seconds=0.05)
    assert found.slowdown >= 1.0
    assert found.bandwidth_bytes_per_s > 0
    begin, end = events.index("reads begin"), events.index("reads end")
    for part in (events[:begin], events[begin:end], events[end:]):
        assert part.count("pass") >= 1
