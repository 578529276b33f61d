"""Whether there is a checkpoint of a name."""

from pathlib import Path
from typing import Any

import pytest
import transformers.utils

from promoe.errors import CheckpointError
from promoe.hub import check_found, is_folder


def test_a_folder_with_a_configuration_is_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert is_folder(str(tmp_path))
    check_found(tmp_path)


def test_a_folder_without_one_is_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json: it is no checkpoint"):
        check_found(tmp_path)


@pytest.mark.parametrize("name", ["", "/no/such/folder", "./none", "../none", "~none", "a/b/c", "FILE"])
def test_a_path_that_leads_to_no_folder_is_not_asked_of_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(transformers.utils, "cached_file", asked)
    if name == "FILE":
        (tmp_path / "file").write_text("")
        name = str(tmp_path / "file")
    with pytest.raises(CheckpointError, match=f"There is no folder '{name}'. Give the folder of a checkpoint"):
        check_found(name)


def test_the_hub_is_asked_once_and_as_the_caller_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def found(name: str, file: str, **options: Any) -> str:
        asked.append((name, file, options))
        return "somewhere"

    monkeypatch.setattr(transformers.utils, "cached_file", found)
    assert not is_folder("org/name")
    check_found("org/name", {"revision": "v2", "dtype": "bfloat16", "token": None})
    assert asked == [("org/name", "config.json", {"revision": "v2", "token": None})]


def test_what_the_hub_answered_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: Any, **kwargs: Any) -> None:
        raise OSError("Repository not found.")

    monkeypatch.setattr(transformers.utils, "cached_file", unknown)
    with pytest.raises(
        CheckpointError,
        match=r"no folder 'org/name', and nothing of that name could be had from the hub: Repository not found\. Give the",
    ) as error:
        check_found("org/name")
    assert isinstance(error.value.__cause__, OSError)
