"""`promoe bench` as a whole, on a tiny checkpoint, with real processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoint import write_checkpoint

from promoe import cli
from promoe.commands import lower_bound as bound
from promoe.commands.bench import process, run, systems
from promoe.commands.bench.messages import Opening, Prompt, Sizes
from promoe.commands.bench.options import Options
from promoe.commands.bench.process import Worker, WorkerError
from promoe.commands.bench.run import Bench
from promoe.commands.bench.systems import KNOWN
from promoe.commands.bench.tasks import TokensDifferError
from promoe.errors import ConfigError
from promoe.transfer.control_groups import NoControlGroupError, memory_groups
from promoe.transfer.processor import num_cores

SYSTEMS = ["resident", "next-use", "oracle", "page-cache", "disk-offload"]
EXPERTS, EXPERT_BYTES, TOP_K, LAYERS = 24, 3 * 64 * 16 * 2, 2, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a checkpoint and prompts."""
    folder = tmp_path_factory.mktemp("bench")
    write_checkpoint(folder / "checkpoint", chat=False)
    texts = [f"Question {number}: what is {'very ' * number}good?" for number in range(4)]
    (folder / "prompts.json").write_text(json.dumps(texts))
    return folder


def command(folder: Path, *more: str) -> list[str]:
    fixed = ["bench", str(folder / "checkpoint"), "--prompts", str(folder / "prompts.json"), "--cache", "25%"]
    return [*fixed, "--pairs", "2", "--max-new-tokens", "5", "--out", str(folder / "out"), *more]


@pytest.fixture(scope="module", autouse=True)
def _quick_measurements() -> Iterator[None]:
    """Of the machine: what they find is not looked at here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bound, "PROBE_SECONDS", 0.02)
        patch.setattr(run, "CONTENTION_SECONDS", 0.2)
        yield


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    assert cli.main(command(folder, "--prompt-tokens", "20", "--systems", *SYSTEMS)) == 0
    found: dict[str, Any] = json.loads((folder / "out" / "bench.json").read_text())
    return found


def rows(report: dict[str, Any], number: int) -> dict[str, dict[str, Any]]:
    return {row["system"]: row for row in report["tables"][number]["rows"]}


def test_every_system_answers_every_prompt(report: dict[str, Any]) -> None:
    generate, read = rows(report, 0), rows(report, 1)
    assert list(generate) == list(read) == SYSTEMS
    for row in (*generate.values(), *read.values()):
        assert row["error"] is None
        assert len(row["answers"]) == 2
        assert row["ttft_s"] > 0
    assert {answer["tokens"] for row in generate.values() for answer in row["answers"]} == {5}
    assert {answer["tokens"] for row in read.values() for answer in row["answers"]} == {1}


def test_what_this_librarys_systems_counted(report: dict[str, Any]) -> None:
    generate, read = rows(report, 0), rows(report, 1)
    assert report["token_bytes"] == LAYERS * TOP_K * EXPERT_BYTES
    for name in ("next-use", "oracle"):
        decode = generate[name]["decode"]
        assert decode["passes"] == 2 * 4, "of the measured answers alone: the warm-up is forgotten"
        assert decode["layers"][0]["layer_visits"] == 8
        assert generate[name]["tpot_shared_s"] >= generate[name]["tpot_bound_s"] > 0
        assert read[name]["prefill"]["passes"] == 2
    assert generate["next-use"]["decode"]["bytes_prefetched"] == 0
    assert generate["oracle"]["decode"]["bytes_prefetched"] > 0
    for name in ("resident", "page-cache", "disk-offload"):
        assert generate[name]["decode"] is None
        assert generate[name]["tpot_bound_s"] is None


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells it")
def test_what_others_took_of_the_cores_is_told(report: dict[str, Any]) -> None:
    for table in report["tables"]:
        taken = table["cores_taken"]
        assert taken["cores"] == num_cores()
        assert 0 <= taken["by_others"] <= taken["cores"] + 0.1


def test_memory_is_limited_where_that_is_possible(folder: Path, report: dict[str, Any]) -> None:
    generate = rows(report, 0)
    if report["memory_not_limited_because"] is not None:
        assert report["tables"][0]["limit_bytes"] is None
        return
    longest = max(20, *(len(text) for text in json.loads((folder / "prompts.json").read_text())[:3]))
    activations = 2 * longest * TOP_K * (EXPERT_BYTES // 64)
    kept = 580_000 * int(2 * 4 * longest * TOP_K * LAYERS / EXPERTS)
    limit_bytes = report["other_bytes"] + EXPERTS // 4 * EXPERT_BYTES + 128 * 2**20 + activations + kept
    assert report["tables"][0]["limit_bytes"] == limit_bytes
    assert generate["resident"]["peak_limited_bytes"] is None
    for name in SYSTEMS[1:]:
        assert 0 < generate[name]["peak_limited_bytes"] <= limit_bytes


def test_prompts_are_bounded_by_what_computing_them_takes_at_least(report: dict[str, Any]) -> None:
    for number in (0, 1):
        compute_s = report["tables"][number]["prompt_compute_s"]
        assert 0 < compute_s <= rows(report, number)["resident"]["ttft_s"]
        for name in ("next-use", "oracle"):
            assert rows(report, number)[name]["ttft_bound_s"] >= compute_s


def test_what_is_written(folder: Path, report: dict[str, Any]) -> None:
    text = (folder / "out" / "bench.md").read_text()
    assert text.count("| oracle") == 2
    assert "experts over the disk" in text
    for picture in ("generate.png", "prompts-of-20-tokens.png"):
        assert (folder / "out" / picture).stat().st_size > 10_000


def options(folder: Path, **fields: Any) -> Options:
    fixed = {"cache": ["25%"], "systems": ["gate"], "model": str(folder / "checkpoint"), "pairs": 1}
    return Options(**fixed | {"prompts": str(folder / "prompts.json"), "out": str(folder / "out")} | fields)


@pytest.fixture
def other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate system's answers differ from the unmodified model's in one token."""
    real = Worker.answer

    def answer(worker: Worker, prompt: Prompt) -> Any:
        found = real(worker, prompt)
        if worker.name == "gate":
            tokens = found.generation.tokens
            object.__setattr__(found.generation, "tokens", (*tokens[:-1], tokens[-1] + 1))
        return found

    monkeypatch.setattr(Worker, "answer", answer)


@pytest.mark.slow
@pytest.mark.usefixtures("other_tokens")
def test_other_tokens_end_the_benchmark(folder: Path) -> None:
    with pytest.raises(TokensDifferError, match="“gate” generated other tokens than the unmodified model: prompt 0"):
        Bench(options(folder, max_new_tokens=3)).run()


@pytest.mark.slow
def test_an_emulated_link_and_a_system_that_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that breaks is left out from then on; the others go on."""
    real = Worker.answer

    def answer(worker: Worker, prompt: Prompt) -> Any:
        if worker.name == "lru" and len(prompt.ids) > 20:
            raise WorkerError("injected")
        return real(worker, prompt)

    monkeypatch.setattr(Worker, "answer", answer)
    bench = Bench(options(folder, systems=["lru", "next-use"], link="emulated:2", max_new_tokens=3, pairs=2))
    found = bench.run()
    assert bench.not_limited is not None
    assert "page cache" in bench.not_limited
    assert "emulated" in found.link
    lru, next_use = found.tables[0].rows
    assert (lru.error, len(lru.answers)) == ("injected", 0)
    assert (next_use.error, len(next_use.answers)) == (None, 2)
    assert "emulated" in found.to_json()["link"]
    assert found.tables[0].contention is None


@pytest.mark.slow
def test_quantised_systems_are_compared_with_their_own_reference(folder: Path, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", chat=False, hidden=64, intermediate=64)
    fields = {"model": str(checkpoint), "systems": ["lru", "lru:int4"], "max_new_tokens": 4}
    found = Bench(options(folder, **fields)).run()
    lru, reference, int4 = found.tables[0].rows
    assert [row.system.name for row in (lru, reference, int4)] == ["lru", "resident:int4", "lru:int4"]
    assert [(row.error, len(row.answers)) for row in (lru, reference, int4)] == [(None, 1)] * 3
    assert int4.answers[0].tokens == reference.answers[0].tokens
    assert lru.stats is not None
    assert int4.stats is not None
    assert int4.stats.cache_slots > lru.stats.cache_slots
    assert int4.stats.cache_bytes <= lru.stats.cache_bytes
    assert int4.stats.expert_bytes[0] < lru.stats.expert_bytes[0] / 3
    assert int4.tpot_bound_s is not None
    assert 0 <= (int4.num_same or 0) <= int4.num_tokens == 4  # type: ignore[operator]
    if found.not_limited is None:
        assert reference.peak_limited_bytes is None
        assert int4.peak_limited_bytes is not None


@pytest.mark.slow
def test_a_peer_whose_files_cannot_be_written_is_left_out(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "peers").write_text("a file where a folder should be")
    fields = {"systems": ["gate", "page-cache"], "out": str(tmp_path), "max_new_tokens": 2}
    gate, page_cache = Bench(options(folder, **fields)).run().tables[0].rows
    assert (gate.error, len(gate.answers)) == (None, 1)
    assert page_cache.error is not None
    assert "Its files could not be written" in page_cache.error
    assert not page_cache.answers


def test_peers_read_no_emulated_link(folder: Path) -> None:
    with pytest.raises(ConfigError, match="page-cache read the disk"):
        Bench(options(folder, systems=["gate", "page-cache"], link="emulated:2"))


def test_too_little_ram(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Sizes((8,) * 3, (2**30,) * 3, (2,) * 3, 2**30, 64)
    bench = Bench(options(folder))
    monkeypatch.setattr(run, "free_ram_bytes", lambda: 2**30)
    with pytest.raises(ConfigError, match=r"1 systems at once take up to .* 1.00 GiB are free"):
        bench._check_ram(2**20, sizes)
    monkeypatch.setattr(run, "prepare_forms", lambda *args: {"auto": [2**30] * 3, "int8": [2**29] * 3})
    bench = Bench(options(folder, systems=["gate:int8"]))
    # 2 GiB to spare, workspace and slots, 24 experts of 0.5 GiB and the rest of the model once more
    with pytest.raises(ConfigError, match=r"2 systems at once take up to 15\.13 GiB"):
        bench._check_ram(2**20, sizes)


def opening(folder: Path, name: str, checkpoint: str = "checkpoint") -> Opening:
    return Opening(KNOWN[name], folder / checkpoint, "bfloat16", "25%", folder=folder / "peer")


@pytest.mark.slow
def test_a_process_that_cannot_open_its_model(folder: Path) -> None:
    with pytest.raises(WorkerError, match=r"The system 'gate' failed. CheckpointError: .*absent"):
        Worker(opening(folder, "gate", "absent"), threads=1)


def test_a_process_that_needs_more_than_it_may_have(folder: Path) -> None:
    groups = memory_groups()
    try:
        groups[0].new_inside(2**20).remove()
    except (IndexError, NoControlGroupError) as error:
        pytest.skip(str(error))
    with pytest.raises(WorkerError, match=r"'resident' was killed: it needs more than the 1.0 MiB .* --workspace"):
        Worker(opening(folder, "resident"), 1, 2**20, groups[0])
    assert not list(groups[0].folder.glob(f"promoe-{os.getpid()}-*"))


def test_a_process_that_ends(folder: Path) -> None:
    worker = Worker(opening(folder, "gate"), threads=1)
    try:
        worker._process.terminate()
        with pytest.raises(WorkerError, match=r"'gate' ended with exit code -15"):
            worker.answer(Prompt([1, 2, 3], 2, 0))
    finally:
        worker.close()
        worker.close()
    assert not worker._process.is_alive()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems wait for a process in another way")
def test_a_system_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "PATIENCE_S", 0.1)
    worker = Worker.__new__(Worker)
    worker.name, worker.limit_bytes, worker._group = "llama-cpp", None, None
    worker._connection, other = multiprocessing.Pipe()
    worker._process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,), daemon=True)
    worker._process.start()
    try:
        with pytest.raises(
            WorkerError, match="'llama-cpp' gave no answer to a prompt of 3 tokens within 0 s, and was ended"
        ):
            worker.answer(Prompt([1, 2, 3], 4, None, seconds=0.1))
        worker._process.join(60)
        assert worker._process.exitcode == -9
    finally:
        worker.close()
        other.close()


def test_without_llama_cpp_its_rows_are_left_out_with_a_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = systems.find_spec
    monkeypatch.setattr(systems, "find_spec", lambda name: None if name == "llama_cpp" else real(name))
    bench = Bench(options(folder, systems=["gate", "llama-cpp", "llama-cpp:q8_0"]))
    assert list(bench.failed) == ["llama-cpp", "llama-cpp:q8_0"]
    assert "and llama-cpp-python cannot be found: pip install 'promoe[bench-llama]'" in bench.failed["llama-cpp"]
    monkeypatch.setattr(systems, "find_spec", lambda name: None if name == "gguf" else real(name))
    with pytest.raises(ConfigError, match="'resident:q8_0' needs gguf, and gguf cannot be found"):
        Bench(options(folder, systems=["gate:q8_0"]))


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
@pytest.mark.slow
def test_llama_cpp_answers_beside_the_others(folder: Path, tmp_path: Path) -> None:
    """A Qwen2-MoE whose weights of experts are not divided by their sum, as llama.cpp computes them."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", chat=False, intermediate=32, norm_topk_prob=False)
    names = ["next-use", "next-use:q8_0", "llama-cpp", "llama-cpp:q8_0", "llama-cpp-no-repack:q4_0"]
    found = Bench(options(folder, model=str(checkpoint), systems=names, max_new_tokens=4, pairs=2)).run()
    (table,) = found.tables
    assert [(row.error, len(row.answers)) for row in table.rows] == [(None, 2)] * 6
    assert [[len(answer.tokens) for answer in row.answers] for row in table.rows] == [[4, 4]] * 6
    rows = {row.system.name: row for row in table.rows}
    assert list(rows) == ["next-use", "resident:q8_0", *names[1:]]
    assert rows["next-use:q8_0"].answers[1].tokens == rows["resident:q8_0"].answers[1].tokens
    for name in names[2:]:
        row = rows[name]
        assert row.num_tokens == 8
        assert "divides" not in row.system.meaning
        assert (row.peak_limited_bytes is None) == (found.not_limited is not None)
    plain, quantised = rows["llama-cpp"], rows["llama-cpp:q8_0"]
    assert (plain.same_as, quantised.same_as) == ("the unmodified model", "“resident:q8_0”")
    assert min(plain.num_same or 0, quantised.num_same or 0) >= 4, "most tokens are the same"
