"""Checkpoints of more files than a process may have open."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file
from served import checkpoint
from stores.checkpoints import shards
from waiting import WAIT_S

from .support import FAMILY

PROGRAM = """
    import resource, sys
    soft, hard = (int(limit) for limit in sys.argv[2:4])
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    import os, torch, promoe
    from pathlib import Path
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    folder, ids = Path(sys.argv[1]), torch.arange(2, 26).reshape(2, 12)

    def ask(model):
        with torch.inference_mode():
            return [model(some).logits for some in (ids, ids + 24)]

    def files_open():
        links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        return sum(os.path.realpath(link).startswith(str(folder)) for link in links)

    expected = ask(AutoModelForCausalLM.from_pretrained(folder).eval())
    for read_mode in ("page_cache", "direct"):
        config = promoe.PromoeConfig(bypass=False, strict=True, workers=4, read_mode=read_mode)
        model = promoe.from_pretrained(folder, cache="25%", config=config)
        model.set_experts_implementation("grouped_mm")
        engine = model.promoe.runtime.engine
        engine.forwards_copy = False  # the workers move chunks as short as these, too
        for _ in range(2):
            assert all(map(torch.equal, ask(model), expected))
        print(read_mode, files_open(), *resource.getrlimit(resource.RLIMIT_NOFILE))
        promoe.unpatch(model)
        assert all(map(torch.equal, ask(model), expected))
        assert files_open() == 0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a checkpoint that has a file for each tensor."""
    source, folder = checkpoint(FAMILY), tmp_path_factory.mktemp("files") / "model"
    folder.mkdir()
    places = {}
    for shard in shards(source):
        with safe_open(shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # it has no __iter__
                places[name] = f"model-{len(places):05}.safetensors"
                save_file({name: file.get_tensor(name)}, folder / places[name], {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="open files are listed in /proc")
@pytest.mark.parametrize(
    ("limits", "most_open", "raised"), [((64, 64), 32 + 4, 64), ((64, 4096), 2048, 4096), ((64, 160), 80 + 4, 160)]
)
def test_answers_are_right(folder: Path, limits: tuple[int, int], most_open: int, raised: int) -> None:
    """The limit is raised as far as the system allows. What is still too many is closed and opened again."""
    num_files = len(shards(folder))
    assert num_files > 100
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(folder), *map(str, limits)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ended = subprocess.run(program, capture_output=True, text=True, env=environment, timeout=WAIT_S)
    assert ended.returncode == 0, ended.stderr
    for line, read_mode in zip(ended.stdout.splitlines(), ("page_cache", "direct"), strict=True):
        mode, count, soft, hard = line.split()
        assert (mode, int(soft), int(hard)) == (read_mode, raised, limits[1])
        assert 10 < int(count) <= min(most_open, 2 * num_files)
