"""Whether there is a checkpoint of a name."""

from pathlib import Path
from typing import Any

import pytest
import transformers.utils
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from promoe.errors import CheckpointError
from promoe.model.hub import base_of, is_folder


def test_a_folder_with_a_configuration_is_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert is_folder(str(tmp_path))
    assert base_of(tmp_path) == str(tmp_path)


def test_a_folder_without_one_is_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json, so it is not a checkpoint"):
        base_of(tmp_path)


@pytest.mark.parametrize("name", ["", "/no/such/folder", "./none", "../none", "~none", "a/b/c"])
def test_a_path_that_leads_to_no_folder_is_not_asked_of_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(transformers.utils, "cached_file", asked)
    with pytest.raises(CheckpointError, match=f"There is no folder '{name}'. Give the folder of a checkpoint"):
        base_of(name)


def test_of_a_file_its_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=rf"config\.json' is a file\. Give the folder .*such as '{tmp_path}'"):
        base_of(tmp_path / "config.json")


def test_the_hub_is_asked_once_and_as_the_caller_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def found(name: str, file: str, **options: Any) -> str:
        asked.append((name, file, options))
        return "somewhere"

    monkeypatch.setattr(transformers.utils, "cached_file", found)
    assert not is_folder("org/name")
    assert base_of("org/name", {"revision": "v2", "dtype": "bfloat16", "token": None}) == "org/name"
    ((name, file, options),) = asked
    assert (name, file) == ("org/name", "config.json")
    assert options.items() >= {"revision": "v2", "token": None}.items()
    assert "dtype" not in options


def test_an_adapter_on_the_hub_leads_to_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')

    def found(name: str, file: str, **options: Any) -> str | None:
        if name == "org/base":
            return "somewhere" if file == "config.json" else None
        return str(tmp_path / file) if file == "adapter_config.json" else None

    monkeypatch.setattr(transformers.utils, "cached_file", found)
    assert base_of("org/adapter") == "org/base"


def test_what_the_hub_answered_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: Any, **kwargs: Any) -> None:
        raise OSError("Repository not found.")

    monkeypatch.setattr(transformers.utils, "cached_file", unknown)
    with pytest.raises(
        CheckpointError,
        match=r"no folder 'org/name', and nothing of that name could be downloaded from the hub: Repository not found\. Give",
    ) as error:
        base_of("org/name")
    assert isinstance(error.value.__cause__, OSError)


@pytest.mark.parametrize(
    ("answer", "asked"),
    [(LocalEntryNotFoundError, ["config.json"]), (EntryNotFoundError, ["config.json", "adapter_config.json"])],
)
def test_a_hub_that_does_not_answer_is_not_asked_again(
    answer: type[Exception], asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over_the_network = []

    def download(name: str, file: str, *, local_files_only: bool, **options: Any) -> str:
        if not local_files_only:
            over_the_network.append(file)
        raise answer("nothing came")

    monkeypatch.setattr(transformers.utils.hub, "hf_hub_download", download)
    monkeypatch.setattr(transformers.utils.hub, "is_offline_mode", lambda: False)
    with pytest.raises(CheckpointError, match="nothing of that name could be downloaded from the hub"):
        base_of("org/name", {"cache_dir": str(tmp_path)})
    assert over_the_network == asked


def test_without_an_answer_a_downloaded_adapter_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "models--org--adapter" / "snapshots" / "0123"
    here.mkdir(parents=True)
    (here / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    (refs := tmp_path / "models--org--adapter" / "refs").mkdir()
    (refs / "main").write_text("0123")

    def download(name: str, file: str, **options: Any) -> str:
        raise LocalEntryNotFoundError("nothing came")

    monkeypatch.setattr(transformers.utils.hub, "hf_hub_download", download)
    monkeypatch.setattr(transformers.utils.hub, "is_offline_mode", lambda: False)
    with pytest.raises(CheckpointError, match="'org/adapter' has an adapter of 'org/base' and no model of its own"):
        base_of("org/adapter", {"cache_dir": str(tmp_path)})
