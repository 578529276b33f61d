from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from promoe.commands.doctor.advice import TESTED, advice
from promoe.commands.doctor.command import facts_lines
from promoe.commands.doctor.facts import Disk, Facts, Gpu
from promoe.transfer.cpu_contention import Taken

GIB = 1024**3
WELL = Facts(
    versions={"promoe": "1.0", "transformers": f"{TESTED[1]}.0"},
    system="Linux 6",
    processor="a processor",
    cores=8,
    threads=8,
    sleep_at_once=None,
    taken=Taken(8, 0.1, 0.0),
    kernels="AVX512",
    bfloat16=True,
    total_ram_bytes=64 * GIB,
    free_ram_bytes=60 * GIB,
    limited_by_group=False,
    locked_limit_bytes=None,
    huge_pages="madvise",
    copy_bytes_per_s=12e9,
    disk=Disk("/models", 100 * GIB, 3.5e9, 9e9),
    gpus=[],
)
GPU = Gpu("a GPU", 70 * GIB, 50e9)


def facts(**fields: Any) -> Facts:
    return dataclasses.replace(WELL, **fields)


def test_where_all_is_well_nothing_is_said() -> None:
    assert advice(WELL) == []
    assert advice(facts(gpus=[GPU])) == []
    assert advice(facts(taken=None)) == []  # no Linux
    assert advice(facts(locked_limit_bytes=8)) == []  # nothing is pinned without a GPU


def test_one_thread_does_not_wake_another() -> None:
    assert len(advice(facts(sleep_at_once="OMP_WAIT_POLICY=passive", threads=1))) == 1  # that one computes alone


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"disk": Disk("/models", GIB, None, 9e9)}, "/models has no O_DIRECT"),
        ({"disk": Disk("/models", GIB, 0.5e9, 9e9)}, "reads 0.500 GB/s: an expert of 10 MB takes 20.0 ms"),
        ({"disk": Disk("/models", GIB, 3e9, 2e9)}, "page cache is slower than the disk"),
        ({"limited_by_group": True, "free_ram_bytes": 4 * GIB}, "leaves this process 4.00 GiB of 64.00 GiB"),
        ({"huge_pages": "never"}, "Huge pages are switched off"),
        ({"cores": 1, "threads": 1}, "There is one core"),
        ({"threads": 4}, "torch computes with 4 of 8 cores"),
        ({"threads": 16}, "16 threads on 8 cores.*OMP_NUM_THREADS=8"),
        ({"sleep_at_once": "GOMP_SPINCOUNT=0"}, "^GOMP_SPINCOUNT=0 has torch's threads sleep .* unset it"),
        ({"taken": Taken(8, 2.25, 0.0)}, "Other processes keep 2.25 of the 8 cores busy"),
        ({"bfloat16": False}, "no bf16 products"),
        ({"gpus": [GPU], "locked_limit_bytes": 8 * 2**20}, r"may lock 8.0 MiB of memory \(ulimit -l\)"),
        ({"versions": {"transformers": "5.99.1"}}, "transformers 5.99.1 is not among"),
        ({"versions": {"transformers": "5.2.0"}}, "transformers 5.2.0 is not among"),
    ],
    ids=str,
)
def test_each_thing_is_said_once(fields: dict[str, Any], said: str) -> None:
    found = advice(facts(**fields))
    assert len(found) == 1
    assert re.search(said, found[0]), found


def test_a_version_that_is_no_number_is_not_judged() -> None:
    assert advice(facts(versions={"transformers": "none"})) == []


def test_the_facts_as_a_block() -> None:
    lines = facts_lines(facts(gpus=[GPU, GPU], locked_limit_bytes=8 * 2**20, bfloat16=True, limited_by_group=True))
    text = "\n".join(lines)
    assert "3.50 GB/s O_DIRECT, 9.00 GB/s from the page cache" in text
    assert "free to this process (control group)" in text
    assert "may lock 8.0 MiB" in text
    assert [line.split()[0] for line in lines if "a GPU" in line] == ["GPU", "GPU1"]
    assert "none that torch can use" not in text
    without = "\n".join(facts_lines(facts(disk=Disk("/models", GIB, None, 9e9), free_ram_bytes=None)))
    assert "no O_DIRECT, 9.00 GB/s from the page cache" in without
    assert "unknown of it free" in without
    assert "none that torch can use" in without
