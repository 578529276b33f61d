from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from tiny_checkpoint import write_checkpoint
from zoo import families

from promoe.commands.bench.messages import Answer, Prompt
from promoe.commands.bench.options import Options
from promoe.commands.bench.tasks import GENERATE, Reference, Task, TokensDifferError, make_tasks, refer
from promoe.commands.measure import Generation
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


def reference(*answers: Generation) -> Reference:
    task = Task(GENERATE, [Prompt([1], 5, 0)] * len(answers))
    return Reference(task, [Answer(answer, []) for answer in answers])


def test_verify_names_the_first_difference() -> None:
    expected = reference(*[Generation((1, 2, 3, 4), 0.0, ())] * 4)
    expected.verify("same", 0, Generation((1, 2, 3, 4), 9.0, ()))
    with pytest.raises(TokensDifferError, match=r"prompt 3, from token 2 on: \[9, 4\] instead of \[3, 4\]"):
        expected.verify("other", 3, Generation((1, 2, 9, 4), 0.0, ()))
    with pytest.raises(TokensDifferError, match="from token 2 on"):
        expected.verify("shorter", 3, Generation((1, 2), 0.0, ()))


def test_an_answer_that_was_cut_short_is_compared_as_far_as_it_goes() -> None:
    expected = reference(Generation((1, 2, 3, 4), 0.0, ()))
    expected.verify("short", 0, Generation((1, 2), 0.0, ()), partly=True)
    with pytest.raises(TokensDifferError, match="from token 1 on"):
        expected.verify("other", 0, Generation((1, 3), 0.0, ()), partly=True)
    with pytest.raises(TokensDifferError, match="from token 0 on"):
        expected.verify("nothing", 0, Generation((), 0.0, ()), partly=True)


def test_reference_answers_are_not_cut_short() -> None:
    asked: list[Prompt] = []

    class Noting:
        def answer(self, prompt: Prompt) -> Answer:
            asked.append(prompt)
            return Answer(Generation((7,), 1.0, ()), [])

    prompt = Prompt([1], 5, 0, seconds=0.5)
    found = refer(Noting(), Task(GENERATE, [prompt]), given_by="another")  # type: ignore[arg-type]
    assert [(one.record, one.seconds) for one in asked] == [(True, math.inf)]
    assert (found.task.prompts, found.given_by) == ([prompt], "another")


def test_tokens_beside_which_something_else_ran_do_not_set_the_pace() -> None:
    quick, slow = 0.010, 0.050
    answers = [Generation((1, 2), 1.0, (9.0,))]  # the warm-up does not count
    answers += [
        Generation((1, 2, 3, 4, 5), 1.0, gaps_s) for gaps_s in ((quick, slow, slow, quick), (slow, quick, slow, slow))
    ]
    assert reference(*answers).compute_s == pytest.approx(quick)
