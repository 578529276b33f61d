from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from needs import needs_packing
from peft import LoraConfig, get_peft_model
from quantised_checkpoints import write_fp8
from tiny_checkpoint import write_checkpoint
from transformers import AutoModelForCausalLM
from zoo import families

from commands.plan.planned import link, times
from promoe import cli
from promoe.commands.pack import options as pack
from promoe.commands.pack.command import run_pack
from promoe.commands.plan import command, verification
from promoe.commands.plan.command import run_plan
from promoe.commands.plan.options import Options
from promoe.commands.plan.reading import read_model
from promoe.commands.plan.sizes import Room
from promoe.errors import ConfigError
from promoe.runtime.sizes import AUTO_RESERVE_BYTES
from promoe.transfer.cpu_contention import Taken


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint", num_experts=16, layers=4)


@pytest.fixture(autouse=True)
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "measure_compute", lambda stand_in, tokens: times(1e-3, 1e-4))
    monkeypatch.setattr(command, "measure_link", lambda stand_in, store, folder, mode, workers: link(20))
    monkeypatch.setattr(command, "fit_overlap", lambda stand_in, store, mode, compute, link: link)
    monkeypatch.setattr(verification, "ANSWERS", 1)


def planned(folder: Path, **fields: Any) -> tuple[command.Result, str]:
    out = io.StringIO()
    fields = {"prompt_tokens": 12, "new_tokens": 6, **fields}
    return run_plan(Options(str(folder), **fields), out), out.getvalue()


def test_will_it_run_and_how_fast(folder: Path, tmp_path: Path) -> None:
    result, text = planned(folder, json=tmp_path / "plan.json")
    lines = text.splitlines()
    assert lines[0].startswith("model ")
    assert "qwen2_moe, bfloat16" in " ".join(text.split())
    assert "not known without a trace, so a range" in " ".join(text.split())
    assert len(re.findall(r"^[> ] [\d.]+% ", text, re.MULTILINE)) == len(result.predictions) >= 5
    assert [f"{one.rate:g}" for one in result.predictions][:3] == ["0.125", "0.25", "0.5"]
    assert result.predictions[-1].rate == 1.0
    assert f"promoe run {folder}" in text
    assert f'model = promoe.from_pretrained("{folder}", cache="' in text
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["model"]["routed_bytes"] == result.sizes.expert_bytes
    assert written["model"]["kv_bytes"] == result.sizes.kv.nbytes(4096)
    assert len(written["predictions"]) == len(result.predictions)
    assert written["predictions"][0]["speeds"][0]["tpot_s"] == result.predictions[0].slowest.tpot_s
    assert written["choice"]["prediction"]["rate"] == result.choice.prediction.rate  # type: ignore[union-attr]


def test_measured_beside_others(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Busy:
        def taken(self) -> Taken:
            return Taken(2, 1.5, 0.25)

    monkeypatch.setattr(command, "CoreWatch", Busy)
    _, text = planned(folder, json=tmp_path / "plan.json")
    assert "cores other processes took 1.50 of 2 cores, the host withheld 0.25, while" in " ".join(text.split())
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["cores_taken"] == {"cores": 2, "by_others": 1.5, "withheld": 0.25}


@needs_packing
@pytest.mark.parametrize(("packed_s", "said"), [(5e-5, True), (0.99e-4, False)])
def test_packing_is_advised_where_it_makes_tokens_quicker(
    packed_s: float, said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path / "check point", chat=False, hidden=128, intermediate=64)
    monkeypatch.setattr(command, "measure_compute", lambda found, tokens: times(0.0, packed_s if found.form else 1e-4))
    result, text = planned(folder, json=tmp_path / "plan.json")
    assert (f"`promoe pack '{folder}'` does that once" in " ".join(text.split())) == said
    assert result.packed_compute_s is not None
    assert result.packed_compute_s < 1e-4 * len(result.sizes.layers) * result.sizes.layers[0].top_k
    assert json.loads((tmp_path / "plan.json").read_text())["packed_compute_s"] == result.packed_compute_s

    run_pack(pack.Options(str(folder)), io.StringIO())
    result, text = planned(folder)
    assert "experts packed" in text
    assert "promoe pack" not in text
    assert result.packed_compute_s is None


@needs_packing
def test_the_command_to_pack_with_has_the_dtype_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", chat=False, hidden=128, intermediate=64)
    monkeypatch.setattr(command, "measure_compute", lambda found, tokens: times(0.0, 5e-5 if found.form else 1e-4))
    assert f"`promoe pack {folder} --dtype bfloat16`" in " ".join(planned(folder, dtype="bfloat16")[1].split())


@pytest.mark.parametrize(("int4_s", "said"), [(1e-4, True), (10.0, False)])
def test_fewer_bits_are_advised_where_they_make_tokens_quicker(
    int4_s: float, said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same memory: more experts are in it, and each comes in a quarter of the time."""
    folder = write_checkpoint(tmp_path / "check point", chat=False, hidden=128, intermediate=64)
    monkeypatch.setattr(
        command, "measure_compute", lambda found, tokens: times(0.0, int4_s if found.form.startswith("int4") else 1e-4)
    )
    little_ram(monkeypatch, folder)
    result, text = planned(folder, json=tmp_path / "plan.json")
    assert result.choice is not None
    assert result.fewer_bits is not None
    assert result.fewer_bits.slots_bytes <= result.choice.prediction.slots_bytes
    assert result.fewer_bits.slots > 3 * result.choice.prediction.slots
    words = " ".join(text.split())
    assert (f"write them with `promoe quantize '{folder}' --bits 4`, and let `promoe quality`" in words) == said
    assert json.loads((tmp_path / "plan.json").read_text())["fewer_bits"]["slots"] == result.fewer_bits.slots


def little_ram(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A machine that has room for a quarter of the experts."""
    sizes = read_model(str(folder)).sizes
    free_bytes = sizes.other_bytes + AUTO_RESERVE_BYTES + sizes.slots_bytes // 4
    monkeypatch.setattr(command, "free_ram_bytes", lambda: free_bytes)


def test_no_fewer_bits_are_advised_where_all_fits_or_none_can_be(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = write_checkpoint(tmp_path / "wide", chat=False, hidden=128, intermediate=64)
    assert planned(wide)[0].fewer_bits is None
    little_ram(monkeypatch, wide)
    assert planned(wide, experts="int8")[0].fewer_bits is None
    little_ram(monkeypatch, folder)
    assert planned(folder)[0].fewer_bits is None  # its matrices are too small


def test_a_form_can_be_planned_before_it_is_written(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", chat=False, hidden=128, intermediate=64)
    before, text = planned(folder, cache=["50%"], experts="int4")
    assert "with experts in int4, 4.5 bits per weight" in " ".join(text.split())
    assert f'promoe run {folder} "PROMPT" --experts int4 --cache 100%' in text
    assert f'promoe.from_pretrained("{folder}", cache="100%", experts=\'int4\')' in text
    assert cli.main(["quantize", str(folder)]) == 0
    after, text = planned(folder, cache=["50%"], experts="int4")
    assert "safetensors file, experts int4, 4.5 bits per weight" in " ".join(text.split())
    assert [layer.layout.payload_bytes for layer in before.sizes.layers] == [
        layer.layout.payload_bytes for layer in after.sizes.layers
    ]
    assert before.sizes.stored_bytes == after.sizes.stored_bytes == before.sizes.expert_bytes
    plain, _ = planned(folder, cache=["50%"])
    assert before.sizes.expert_bytes < 0.3 * plain.sizes.expert_bytes
    shutil.copytree(folder, tmp_path / "config", ignore=shutil.ignore_patterns("*.safetensors", "promoe-*"))
    config_only, _ = planned(tmp_path / "config", cache=["50%"], experts="int4")
    assert config_only.sizes.expert_bytes == before.sizes.expert_bytes


def test_no_packing_is_advised_where_none_is_possible(folder: Path, tmp_path: Path) -> None:
    for found in (folder, write_fp8(tmp_path / "fp8", hidden=64, intermediate=64)):
        result, text = planned(found)
        assert "promoe pack" not in text
        assert result.packed_compute_s is None


def test_what_to_copy_where_there_is_only_a_configuration(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    _, text = planned(tmp_path)
    last = text.rstrip().splitlines()[-3:]
    assert last[0] == "  once its weights are in that folder, beside config.json:"
    assert last[1].startswith(f'  promoe run {tmp_path} "PROMPT" --cache ')
    _, text = planned(folder)
    assert "once its weights" not in text


def test_a_folder_that_holds_only_an_adapter_is_planned_as_its_base(folder: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    base: Any = AutoModelForCausalLM.from_pretrained(folder)
    get_peft_model(base, LoraConfig(target_modules=["q_proj"])).save_pretrained(adapter)
    assert sorted(path.suffix for path in adapter.iterdir() if path.suffix != ".md") == [".json", ".safetensors"]
    result, text = planned(adapter)
    of_base, _ = planned(folder)
    assert result.sizes == of_base.sizes
    assert result.choice is not None
    assert f"promoe run {adapter}" in text, "which opens the base with the adapter"


def test_a_wanted_speed_and_caches_of_ones_own(folder: Path) -> None:
    result, text = planned(folder, cache=["25%", "64KiB"], tokens_per_second=0.001)
    chosen = int(0.05 * 64)  # nothing smaller is recommended
    assert [one.slots for one in result.predictions] == sorted({chosen, 16, 64 * 1024 // 6144, 64})
    assert result.choice is not None
    assert result.choice.reached
    assert result.choice.prediction.slots == chosen
    assert "the smallest that reaches" in " ".join(text.split())
    _, text = planned(folder, tokens_per_second=1e9)
    assert "\nat best " in text


def test_a_trace_in_place_of_assumptions(folder: Path, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    experts = np.stack([[draw.permutation(16)[:2] for _ in range(4)] for _ in range(60)])
    path = tmp_path / "trace.npz"
    np.savez(path, experts=experts, prompt_lengths=np.array([20, 20, 20]), token_index=np.arange(60))
    result, text = planned(folder, trace=str(path))
    assert all(len(one.speeds) == 1 for one in result.predictions)
    assert f"12 tokens of 2 prompts of {path}" in " ".join(text.split())


def test_it_is_run_and_compared(folder: Path) -> None:
    result, text = planned(folder, cache=["25%", "50%"], verify=True, read_mode="direct")
    assert [one.prediction.rate for one in result.verified] == [0.25, 0.5]
    for one in result.verified:
        assert one.tpot_s > 0
        assert one.ttft_s > 0
        assert 0 <= one.hit_rate <= 1
        assert one.with_this_routing.routing == "these answers"
        # The very routing that was run: what is predicted to be in a slot was there, but for what prefetch brought.
        assert one.hit_rate >= one.with_this_routing.hit_rate - 0.15
    assert "Ratios are predicted / measured" in " ".join(text.split())
    assert 'config=promoe.PromoeConfig(read_mode="direct")' in text
    assert "promoe run" not in text, "which has no such option"


def test_sizes_where_nothing_can_be_timed(tmp_path: Path) -> None:
    families.build("switch_transformers").save_pretrained(tmp_path)
    result, text = planned(tmp_path)
    assert result.choice is None
    assert "not predicted:" in text
    assert "  50%" in text
    assert " fits" in text


def test_what_does_not_fit_is_shown_and_not_predicted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        command,
        "_room",
        lambda task, sizes, device: Room(
            "RAM", AUTO_RESERVE_BYTES + sizes.other_bytes + sizes.slots_bytes // 2, sizes.other_bytes, 0
        ),
    )
    result, text = planned(folder)
    assert max(one.rate for one in result.predictions) < 1
    assert "100%" in text
    assert "does not fit" in text
    monkeypatch.setattr(command, "_room", lambda task, sizes, device: Room("RAM", 2**20, sizes.other_bytes, 0))
    with pytest.raises(ConfigError, match=r"does not run here: of 1\.0 MiB of free RAM"):
        planned(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--context", "0"], "--context must be at least 1"),
        (["--tokens-per-second", "0"], "--tokens-per-second must be more than 0"),
        (["--cache", "much"], "must be a size"),
        (["--device", "tpu"], '"cpu" or "cuda"'),
        (["--trace", "/nonexistent.npz"], "nonexistent"),
        (["--json", "/nonexistent/plan.json"], "does not exist"),
    ],
)
def test_mistakes(folder: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(folder), *options]) == 2
    assert message in capsys.readouterr().err


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "./nothing-here"]) == 2
    assert "There is no folder" in capsys.readouterr().err


def test_a_cache_just_above_the_largest_whole_per_cent_may_be_read_otherwise(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def room(options: Options, sizes: Any, device: Any) -> Room:
        slots_bytes = sizes.slots_bytes * 33 // 64
        return Room("RAM", AUTO_RESERVE_BYTES + sizes.other_bytes + slots_bytes, sizes.other_bytes, 0)

    monkeypatch.setattr(command, "_room", room)
    monkeypatch.setattr(command._Plan, "_mode", lambda self, rate: "direct" if rate > 0.512 else "page_cache")
    result, _ = planned(folder, cache=("51.6%",))
    assert 33 / 64 in [one.rate for one in result.predictions]
    assert set(result.links) == {"direct", "page_cache"}
