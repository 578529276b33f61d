from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tiny_checkpoint import write_checkpoint
from zoo import families

from promoe.commands.bench.options import Options
from promoe.commands.bench.tasks import GENERATE, make_tasks
from promoe.errors import CheckpointError, ConfigError, UnsupportedModelError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint", chat=False)


def options(prompts: Path, **fields: object) -> Options:
    return Options(**{"cache": ["25%"], "systems": ["gate"], "pairs": 2, "prompts": str(prompts)} | fields)  # type: ignore[arg-type]


def test_prompts_and_long_prompts(checkpoint: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(["abc", "defgh", "ij", "klm"]))
    generate, read = make_tasks(options(prompts, prompt_tokens=[7], max_new_tokens=9), checkpoint, prompts)
    assert generate.name == GENERATE
    assert [len(prompt.ids) for prompt in generate.prompts] == [3, 5, 2]
    assert {prompt.new_tokens for prompt in generate.prompts} == {9}
    assert read.name == "prompts of 7 tokens"
    assert [prompt.new_tokens for prompt in read.prompts] == [1, 1, 1]
    # Pieces of "abcdefghijklm", which begins anew when it ends.
    everything = [token for text in ("abc", "defgh", "ij", "klm") for token in tokens(checkpoint, text)]
    assert [token for prompt in read.prompts for token in prompt.ids] == (2 * everything)[:21]


def tokens(checkpoint: Path, text: str) -> list[int]:
    from promoe.model.tokenizer import load_tokenizer

    found: list[int] = load_tokenizer(str(checkpoint))(text)["input_ids"]
    return found


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ('["a", "b"]', "holds 2 prompts; 3 are needed"),
        ('{"a": 1}', "must hold a JSON list of texts"),
        ('["a", " ", "c"]', "that are not empty"),
        ("[", "Cannot read the prompts"),
        (None, "Cannot read the prompts"),
    ],
)
def test_prompts_that_cannot_be_used(checkpoint: Path, tmp_path: Path, content: str | None, match: str) -> None:
    if content is not None:
        (tmp_path / "prompts.json").write_text(content)
    with pytest.raises(ConfigError, match=match):
        make_tasks(options(tmp_path / "prompts.json"), checkpoint, tmp_path / "prompts.json")


def test_a_model_with_an_encoder_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(["abc", "defgh", "ij"]))
    folder = Path(shutil.copytree(checkpoint, tmp_path / "switch"))
    families.build("switch_transformers").config.save_pretrained(folder)
    with pytest.raises(UnsupportedModelError, match="switch_transformers has an encoder and a decoder"):
        make_tasks(options(prompts), folder, prompts)


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "prompts.json").write_text(json.dumps(["abc", "defgh", "ij"]))
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        make_tasks(options(tmp_path / "prompts.json"), tmp_path, tmp_path / "prompts.json")
