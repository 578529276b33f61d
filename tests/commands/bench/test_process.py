"""A system in a process of its own ends with the bench, however that ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from waiting import until

SCRIPT = """
import multiprocessing, time
from promoe.commands.bench import process

def serve(connection):
    process._open = lambda *args: time.sleep(600)  # a system that is busy does not look at its connection
    process._serve(connection)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    worker = context.Process(target=serve, args=(there,), daemon=True)
    worker.start()
    there.close()
    here.recv()
    here.send(("open", (), {}))
    print(worker.pid, flush=True)
    time.sleep(600)
"""


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_busy_system_ends_when_the_bench_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        pid = int(bench.stdout.readline())
        assert runs(pid)
        bench.kill()
    until(lambda: not runs(pid), lambda: f"process {pid} runs on")
