from __future__ import annotations

from pathlib import Path

import pytest
from gguf_bytes import file_bytes, key, sound

from promoe.errors import CheckpointError
from promoe.stores.gguf_parts import locate_parts, part_names, stem_of
from promoe.stores.tensor_files import TensorFiles


def write_parts(folder: Path, count: int = 3, total: int | None = None, numbers: list[int] | None = None) -> list[Path]:
    paths = []
    for idx in range(count):
        keys = [
            key("split.no", "u16", idx if numbers is None else numbers[idx]),
            key("split.count", "u16", count),
            key("split.tensors.count", "i32", count if total is None else total),
        ]
        path = folder / f"model-Q8_0-{idx + 1:05}-of-{count:05}.gguf"
        path.write_bytes(sound({f"t{idx}": ((2,), "F32", bytes(8))}, keys))
        paths.append(path)
    return paths


def test_names() -> None:
    assert part_names("a-00002-of-00003.gguf") == [f"a-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for name in ("a-2-of-3.gguf", "a-00001-of-00000.gguf"):
        assert part_names(name) == [name]
    assert (stem_of("a.b-00002-of-00003.gguf"), stem_of("a.b.gguf"), stem_of("blob")) == ("a.b", "a.b", "blob")


def test_all_parts_are_found_from_any(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    assert locate_parts(paths[1]) == paths
    files = TensorFiles.open(paths)
    assert {name: where.file_idx for name, where in files.tensors.items()} == {"t0": 0, "t1": 1, "t2": 2}
    files.close()


def test_missing_parts_are_named(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    paths[0].unlink()
    paths[2].unlink()
    with pytest.raises(CheckpointError, match=r"one of 3 parts, and 2 .*-00001-of-00003.gguf, model.*-00003-of"):
        locate_parts(paths[1])
    (tmp_path / "b-00001-of-99999.gguf").touch()
    with pytest.raises(CheckpointError, match=r"99998 of them .* and so on"):
        locate_parts(tmp_path / "b-00001-of-99999.gguf")


def open_error(paths: list[Path]) -> str:
    with pytest.raises(CheckpointError) as caught:
        TensorFiles.open(paths)
    return str(caught.value)


def test_parts_have_to_belong_together(tmp_path: Path) -> None:
    assert "part 2 of 3 by its name, and its header says part 2 (from 0 on) of 3" in open_error(
        write_parts(tmp_path, numbers=[0, 2, 1])
    )
    assert "its 3 parts have 7 tensors, and they have 3" in open_error(write_parts(tmp_path, total=7))
    one = write_parts(tmp_path)[0]
    assert "part 1 of 1 by its name, and its header says part 0 (from 0 on) of 3" in open_error([one])
    plain = tmp_path / "other.gguf"
    plain.write_bytes(file_bytes())
    assert "says part 0 (from 0 on) of 1" in open_error([plain, plain])


def test_parts_are_all_of_one_kind(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(file_bytes())
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a GGUF file"):
        TensorFiles.open([tmp_path / "model.gguf", tmp_path / "model.safetensors"])


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n")
    assert "Git LFS pointer" in open_error([path])
    path.write_bytes(b"anything else that is longer than eight bytes")
    assert "not a sound GGUF file" in open_error([path])
