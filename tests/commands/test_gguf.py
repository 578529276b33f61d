"""A GGUF file is a MODEL for every command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf_checkpoints
import pytest
import torch
from gguf_checkpoints import dequantised_model, write_gguf
from training.recordings import assert_same_rows

import promoe
from promoe import cli
from promoe.commands.bench import process
from promoe.commands.bench.messages import Opening
from promoe.commands.bench.options import Options as BenchOptions
from promoe.commands.bench.stock import load_stock
from promoe.commands.bench.systems import KNOWN
from promoe.commands.bench.tasks import make_tasks
from promoe.commands.simulate.command import read_geometry
from promoe.model.tokenizer import load_tokenizer, prompt_inputs
from promoe.runtime.batches import BatchPrompt, generate_batch
from promoe.training import cli as training_cli
from promoe.training.trace_folder import model_folder

from .serve.support import PROMPT, serving


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf"), "qwen3_moe", weight_type="Q8_0")


def answer(path: Path, new_tokens: int) -> str:
    """What the model says whose weights are all decoded."""
    tokenizer = load_tokenizer(str(path))
    model: Any = dequantised_model(path, "qwen3_moe", torch.bfloat16)
    inputs = prompt_inputs(tokenizer, PROMPT)
    output = model.generate(
        **inputs, max_new_tokens=new_tokens, do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=0
    )
    text: str = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


@pytest.mark.parametrize("more", [["--cache", "25%"], ["--store", "host"]])
def test_run(path: Path, more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", str(path), PROMPT, "--max-new-tokens", "6", *more]) == 0
    assert capsys.readouterr().out.removesuffix("\n") == answer(path, 6).removesuffix("\n")


def test_serve(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(path, monkeypatch) as served:
        assert served.chat(6).choices[0].message.content == answer(path, 6)


@pytest.fixture(scope="module")
def ending(path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], list[int]]:
    """A file whose model says a token with the text "<|im_end|>", of no special type, which its header does not name.

    Returns:
        It, a prompt, and the answer to that up to this token.
    """
    prompt = prompt_inputs(load_tokenizer(str(path)), PROMPT)["input_ids"]
    model: Any = dequantised_model(path, "qwen3_moe", torch.bfloat16)
    output = model.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    answer = output[0, prompt.shape[1] :].tolist()
    known = set(prompt[0].tolist()) | set(range(3))
    place = next(place for place in range(2, 24) if answer[place] not in known | set(answer[:place]))
    texts = gguf_checkpoints._tokens()
    texts[answer[place]] = "<|im_end|>"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_checkpoints, "_tokens", lambda: texts)
        file = write_gguf(tmp_path_factory.mktemp("ending"), "qwen3_moe", weight_type="Q8_0")
    return file, prompt[0].tolist(), answer[: place + 1]


def test_answers_end_at_a_token_known_by_its_text(
    ending: tuple[Path, list[int], list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, prompt, answer = ending
    model: Any = promoe.from_pretrained(file, cache="50%")
    output = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
    assert output[0, len(prompt) :].tolist() == answer
    (found,) = generate_batch(model, [BatchPrompt(prompt, max_new_tokens=24)])
    assert (found.tokens, found.ended) == (answer[:-1], True)
    model.promoe.close()
    text = load_tokenizer(str(file)).decode(answer[:-1], skip_special_tokens=True)
    assert cli.main(["run", str(file), PROMPT, "--max-new-tokens", "24", "--cache", "50%"]) == 0
    assert capsys.readouterr().out.removesuffix("\n") == text
    with serving(file, monkeypatch) as served:
        choice = served.chat(24).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("stop", text)


def test_quantize_and_quality(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.gguf"
    file.symlink_to(path)
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"text": f"Text {number}. " * 9}) + "\n" for number in range(9))
    )
    assert cli.main(["quantize", str(file), "--bits", "8"]) == 0
    assert "model.promoe-int8" in capsys.readouterr().out
    data = ["--data", str(tmp_path / "texts.jsonl"), "--tokens", "100", "--window", "50", "--prompts", "0"]
    assert cli.main(["quality", str(file), *data]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if " KiB " in line] == [
        "checkpoint",
        "int8",
    ]


def test_pack_finds_its_folder_again(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_gguf(tmp_path, "qwen3_moe", hidden=256, intermediate=256)
    if cli.main(["pack", str(file)]) != 0:
        pytest.skip(capsys.readouterr().err)
    assert (tmp_path / f"{file.stem}.promoe-packed").is_dir()
    assert cli.main(["run", str(file), PROMPT, "--max-new-tokens", "2"]) == 0


@pytest.fixture
def traces(path: Path, tmp_path: Path) -> list[Path]:
    lines = [json.dumps({"messages": [{"role": "user", "content": f"Question {number}?"}]}) for number in range(30)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    found = []
    for name, more in (("memory", []), ("disk", ["--cache", "50%"])):
        command = [
            "collect",
            "--model",
            str(path),
            "--data",
            str(tmp_path / "data.jsonl"),
            "--out",
            str(tmp_path / name),
        ]
        limits = ["--max-tokens", "60", "--max-prompt-tokens", "24", "--batch-size", "3"]
        assert training_cli.main([*command, *limits, *more]) == 0
        found.append(tmp_path / name)
    return found


def test_collect(traces: list[Path], path: Path) -> None:
    assert_same_rows(*traces)
    assert model_folder(traces[0]) == str(path)


def test_simulate_reads_its_sizes(path: Path) -> None:
    found = read_geometry(str(path))
    assert (found.num_layers, found.num_experts) == (3, 8)


def test_bench_compares_with_the_decoded_model(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, expected = load_stock(path, torch.bfloat16), dequantised_model(path, "qwen3_moe", torch.bfloat16)
    assert not hasattr(stock, "promoe")
    for (name, found), (other, tensor) in zip(stock.named_parameters(), expected.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(found, tensor), name
        assert found.data_ptr() % 64 == 0, name
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(["one", "two", "three"]))
    (task,) = make_tasks(BenchOptions(pairs=1, max_new_tokens=2), path, prompts)
    ids = prompt_inputs(load_tokenizer(str(path)), "one")["input_ids"]
    assert task.prompts[0].ids == ids[0].tolist()
    dropped: list[Path] = []
    monkeypatch.setattr(process, "drop_files", dropped.extend)
    monkeypatch.setattr(process, "Served", lambda opening: opening)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    process._open(Opening(KNOWN["resident"], path, "bfloat16", "50%"), 1)
    assert dropped == [path]
