"""Which GGUF files a name stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers.utils
from gguf_bytes import file_bytes

from promoe.errors import CheckpointError, ConfigError
from promoe.model.gguf.finding import find_gguf, is_gguf


def touch(folder: Path, *names: str) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(file_bytes())
    return [folder / name for name in names]


PARTS = ("m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf")


def test_a_file_and_any_of_its_parts(tmp_path: Path) -> None:
    (path,) = touch(tmp_path / "one", "m-Q8_0.gguf")
    parts = touch(tmp_path / "two", *PARTS)
    (blob,) = touch(tmp_path, "blob")
    assert is_gguf(path)
    assert find_gguf(path) == [path]
    assert find_gguf(str(parts[1])) == parts
    assert is_gguf(blob)  # by its first bytes
    assert find_gguf(blob) == [blob]


def test_a_folder_with_one_model(tmp_path: Path) -> None:
    parts = touch(tmp_path, *PARTS)
    touch(tmp_path, "mmproj-m-F16.gguf")
    (tmp_path / "config.json").write_text("{}")  # some repositories have one
    assert is_gguf(tmp_path)
    assert find_gguf(tmp_path) == parts
    assert is_gguf(tmp_path.parent, {"subfolder": tmp_path.name})
    assert find_gguf(tmp_path.parent, {"subfolder": tmp_path.name}) == parts


def test_a_folder_with_several_models_names_them(tmp_path: Path) -> None:
    touch(tmp_path, *PARTS, "m-Q4_K_M.gguf")
    with pytest.raises(CheckpointError, match=r"2 models: m-Q4_K_M\.gguf, m-Q8_0-00001-of-00002\.gguf\. Give the path"):
        find_gguf(tmp_path)
    with pytest.raises(CheckpointError, match="only GGUF files of other parts"):
        find_gguf(touch(tmp_path / "vision", "mmproj.gguf")[0].parent)


def test_safetensors_come_first(tmp_path: Path) -> None:
    touch(tmp_path, "m.gguf", "model.safetensors")
    assert not is_gguf(tmp_path)
    assert is_gguf(tmp_path, {"gguf_file": "m.gguf"})
    assert find_gguf(tmp_path, {"gguf_file": "m.gguf"}) == [tmp_path / "m.gguf"]


def test_other_names_are_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "folder.gguf").mkdir()
    for name in (tmp_path, tmp_path / "config.json", tmp_path / "none", tmp_path / "folder.gguf", "org/name", ""):
        assert not is_gguf(name)


def test_the_argument_names_a_file(tmp_path: Path) -> None:
    (path,) = touch(tmp_path, "m.gguf")
    with pytest.raises(CheckpointError, match=r"There is no file 'n\.gguf' in the folder"):
        find_gguf(tmp_path, {"gguf_file": "n.gguf"})
    with pytest.raises(CheckpointError, match="outside the checkpoint's folder"):
        find_gguf(tmp_path, {"gguf_file": "../m.gguf"})
    for name, file in ((tmp_path, 3), (path, "m.gguf")):
        with pytest.raises(ConfigError, match=r"The 'gguf_file' argument must be the name of a file .* Got "):
            find_gguf(name, {"gguf_file": file})


@pytest.mark.parametrize("name", ["none.gguf", "/no/such/file.gguf", "./a/b/c.gguf", "~a/b/c.gguf", "a/b.gguf"])
def test_a_path_that_leads_to_no_file_is_not_asked_of_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(transformers.utils, "cached_file", asked)
    assert is_gguf(name)
    with pytest.raises(CheckpointError, match=f"There is no file '{name}'. Give the path of a GGUF file"):
        find_gguf(name)


def test_a_file_on_the_hub_comes_with_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def found(repository: str, file: str, **options: Any) -> str:
        asked.append((repository, file, options))
        return f"/cache/{file}"

    monkeypatch.setattr(transformers.utils, "cached_file", found)
    expected = [Path("/cache/Q8") / name for name in PARTS]
    assert find_gguf(f"org/name/Q8/{PARTS[1]}", {"revision": "v2", "dtype": "auto"}) == expected
    assert find_gguf("org/name", {"revision": "v2", "gguf_file": f"Q8/{PARTS[0]}"}) == expected
    assert asked == 2 * [("org/name", f"Q8/{name}", {"revision": "v2"}) for name in PARTS]


def test_what_the_hub_answered_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: Any, **kwargs: Any) -> None:
        raise OSError("Entry not found.")

    monkeypatch.setattr(transformers.utils, "cached_file", unknown)
    with pytest.raises(
        CheckpointError, match=r"no file 'org/name/m\.gguf' on this machine, .* hub: Entry not found\. G"
    ):
        find_gguf("org/name/m.gguf")
