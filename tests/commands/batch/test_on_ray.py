"""Several models answer one file, on a local cluster of two nodes."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoint import write_checkpoint
from waiting import WAIT_S

from commands.batch.test_command import requests, texts, write_lines
from promoe import cli

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("default"),  # Ray has many of its own
]
LINES = 200


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint"))


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head without cores of its own, and two nodes with one each."""
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    found = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    found.nodes = [found.add_node(num_cpus=1) for _ in range(2)]
    found.wait_for_nodes()
    yield found
    found.shutdown()


def answered(checkpoint: str, source: Path, out: Path, *more: str) -> dict[str, Any]:
    sizes = ["--cache", "30%", "--at-once", "4", "--step-tokens", "16", "--kv-tokens", "512", "--max-tokens", "6"]
    assert cli.main(["batch", checkpoint, str(source), "--out", str(out), *sizes, *more]) == 0
    return texts(out)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", [*requests(LINES), "no json", {"prompt": "x", "max_tokens": 10**6}])


def test_two_nodes_give_the_answers_of_one_process(
    checkpoint: str, source: Path, tmp_path: Path, cluster: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answered(checkpoint, source, tmp_path / "two.jsonl", "--replicas", "2", "--ray", cluster.address)
    assert len(found) == LINES + 2
    by_node = re.search(r"lines by node: \w{8} (\d+), \w{8} (\d+)\n", capsys.readouterr().err)
    assert by_node is not None
    counts = [int(count) for count in by_node.groups()]
    assert sum(counts) == LINES + 1  # a line that is no JSON goes to no node
    assert min(counts) >= LINES / 4
    assert_alike(found, answered(checkpoint, source, tmp_path / "one.jsonl"))


def test_an_actor_that_is_killed(checkpoint: str, source: Path, tmp_path: Path, cluster: Any) -> None:
    out, killed = tmp_path / "out.jsonl", []
    killer = threading.Thread(target=_kill_a_replica, args=(killed,), daemon=True)
    killer.start()
    found = answered(checkpoint, source, out, "--replicas", "2", "--ray", cluster.address)
    killer.join(WAIT_S)
    assert len(killed) == 1
    assert_alike(found, answered(checkpoint, source, tmp_path / "one.jsonl"))


def test_a_node_that_is_lost(checkpoint: str, source: Path, tmp_path: Path, cluster: Any) -> None:
    out = tmp_path / "out.jsonl"

    def lose() -> None:
        _wait_for_replicas()
        cluster.remove_node(cluster.nodes[0], allow_graceful=False)
        cluster.add_node(num_cpus=1)

    loser = threading.Thread(target=lose, daemon=True)
    loser.start()
    found = answered(checkpoint, source, out, "--replicas", "2", "--ray", cluster.address)
    loser.join(WAIT_S)
    assert not loser.is_alive()
    assert_alike(found, answered(checkpoint, source, tmp_path / "one.jsonl"))


def test_more_replicas_than_cores(
    checkpoint: str, source: Path, tmp_path: Path, cluster: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["batch", checkpoint, str(source), "--out", str(tmp_path / "out.jsonl"), "--cache", "30%"]
    assert cli.main([*arguments, "--replicas", "3", "--ray", cluster.address]) == 2
    assert "need a core each, and the cluster has 2" in capsys.readouterr().err


def assert_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same lines with the same texts, but for the few that a last bit decides: other sequences are in the same steps."""
    assert found.keys() == expected.keys()
    assert sum(found[name] == expected[name] for name in expected) > 0.95 * len(expected)


def _replicas() -> list[int]:
    """Processes of replicas that are answering a block."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if command.startswith(b"ray::MapWorker") and b"submit" in command:
            found.append(int(folder.name))
    return found


def _wait_for_replicas() -> list[int]:
    while not (found := _replicas()):
        time.sleep(0.02)
    return found


def _kill_a_replica(killed: list[int]) -> None:
    killed += _wait_for_replicas()[:1]
    os.kill(killed[0], signal.SIGKILL)
