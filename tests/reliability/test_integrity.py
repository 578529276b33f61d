"""Bytes that differ from the checkpoint's are noticed and named, and never computed with."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from served import PROMPTS, LinkOver, checkpoint, close, config, greedy, plain_link, resident
from stores.checkpoints import shards
from tiny_models import build, token_ids
from transformers import PreTrainedModel
from waiting import settle

import promoe
from promoe.errors import CheckpointError, ConfigError, ExpertLoadError, PatchStateError
from promoe.stores.open_files import OPEN_FILES
from promoe.transfer.links import Fault, FaultyLink
from promoe.transfer.links.direct import DirectFiles

from .support import (
    FAMILY,
    WAYS,
    always,
    assert_right,
    assert_told,
    faulty,
    leaving_nothing,
    never,
    slot_memory,
)

VERIFY: tuple[Any, ...] = ("first", "always")
CHANGED = r"Expert \d of MoE layer \d could not be fetched \(tensor model\..*, file model-.*, offset \d+\): .*"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a checkpoint of several shards, which tests may damage."""
    return Path(shutil.copytree(checkpoint(FAMILY), tmp_path / "checkpoint"))


@contextmanager
def opened(folder: Path, **fields: Any) -> Iterator[PreTrainedModel]:
    """Serve a checkpoint from its files as for a user. Check that nothing is left afterwards."""
    with leaving_nothing() as slots:
        model = promoe.from_pretrained(folder, cache="25%", config=config(**fields))
        slots += slot_memory(model)
        try:
            yield model
        finally:
            if hasattr(model, "promoe"):
                promoe.unpatch(model)


# -- files ------------------------------------------------------------------------------------------------------


def rewrite(shard: Path) -> None:
    """Return a file's bytes with other weights of the same length."""
    content = bytearray(shard.read_bytes())
    content[-1000:] = os.urandom(1000)
    with shard.open("r+b") as file:
        file.write(content)


def truncate(shard: Path) -> None:
    os.truncate(shard, shard.stat().st_size - 64)


def lengthen(shard: Path) -> None:
    with shard.open("ab") as file:
        file.write(b"more")


def touch(shard: Path) -> None:
    os.utime(shard, ns=(0, 0))


def write_the_same(shard: Path) -> None:
    """Write as a tool does that restores a backup in place."""
    with shard.open("r+b") as file:
        file.write(shard.read_bytes())


def replace_by_a_copy(shard: Path) -> None:
    """Give the name to another file with the same bytes, date and size."""
    other = shard.with_name("other")
    shutil.copy2(shard, other)
    other.replace(shard)


@pytest.mark.parametrize("read_mode", ["page_cache", "direct"])
@pytest.mark.parametrize("change", [rewrite, truncate, lengthen])
def test_file_changed_in_place(folder: Path, change: Callable[[Path], None], read_mode: Any) -> None:
    """The next read says what changed, and unpatching is refused, until the file is as it was."""
    kept = {shard: (shard.read_bytes(), shard.stat().st_mtime_ns) for shard in shards(folder)}
    with opened(folder, read_mode=read_mode) as model:
        assert_right(model)
        for shard in kept:
            change(shard)
        what = "size .* bytes" if change in (truncate, lengthen) else r"modified .* -> .*, same header, other bytes\)"
        assert_told(model, ExpertLoadError, CHANGED + f"({what}|File ends early)", "padded")
        with pytest.raises(CheckpointError, match=r"changed since the model was opened|File ends early"):
            promoe.unpatch(model)
        for shard, (content, modified_ns) in kept.items():
            with shard.open("r+b") as file:
                file.write(content)
            os.truncate(shard, len(content))
            os.utime(shard, ns=(modified_ns, modified_ns))
        assert_right(model, "padded")


@pytest.mark.parametrize("read_mode", ["page_cache", "direct"])
@pytest.mark.parametrize("change", [touch, write_the_same])
def test_file_whose_time_alone_changed(folder: Path, change: Callable[[Path], None], read_mode: Any) -> None:
    """The file is served on, and what is written to it later is noticed."""
    with opened(folder, read_mode=read_mode) as model:
        assert_right(model)
        kept = {shard: (shard.read_bytes(), shard.stat().st_mtime_ns) for shard in shards(folder)}
        for _ in range(2):
            for shard in kept:
                change(shard)
            assert_right(model, "padded")
            assert_right(model)
        for shard in kept:
            rewrite(shard)
        assert_told(model, ExpertLoadError, CHANGED + "modified .*, other bytes", "padded")
        for shard, (content, _) in kept.items():
            with shard.open("r+b") as file:
                file.write(content)
        assert_right(model, "padded")


@pytest.mark.parametrize("read_mode", ["page_cache", "direct"])
def test_file_dated_anew_somewhere_else(folder: Path, read_mode: Any, tmp_path: Path) -> None:
    """The folder was moved, or the program changed its directory, before a backup changed the date."""
    with opened(folder, read_mode=read_mode) as model:
        assert_right(model)
        elsewhere = folder.rename(tmp_path / "elsewhere")
        for shard in shards(elsewhere):
            touch(shard)
        assert_right(model, "padded")


@pytest.mark.parametrize("read_mode", ["page_cache", "direct"])
def test_file_replaced_or_removed(folder: Path, read_mode: Any) -> None:
    """Good tools put another file in its place. The open file is still there and goes on being served."""
    with opened(folder, read_mode=read_mode) as model:
        assert_right(model)
        for number, shard in enumerate(shards(folder)):
            other = shard.with_name("other")
            other.write_bytes(os.urandom(shard.stat().st_size))
            other.replace(shard)
            if number % 2:
                shard.unlink()
        assert_right(model, "padded")
        promoe.unpatch(model)
        model.set_experts_implementation("grouped_mm")
        assert_right(model)


@pytest.mark.parametrize("read_mode", ["page_cache", "direct"])
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (rewrite, "modified .*, same header, other bytes"),
        (replace_by_a_copy, "another file in its place.*same header"),
        (Path.unlink, "Cannot open the file again: No such file"),
        (touch, None),
        (lambda shard: None, None),
    ],
)
def test_file_changed_while_it_was_closed(
    folder: Path,
    tmp_path: Path,
    read_mode: Any,
    change: Callable[[Path], None],
    what: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A checkpoint has more files than may be open at once: here, one. It is served again when it is as it was."""
    monkeypatch.setattr(OPEN_FILES, "_limit", 1)
    with opened(folder, read_mode=read_mode) as model:
        assert_right(model)
        kept = {shard: (shard.read_bytes(), shard.stat().st_mtime_ns) for shard in shards(folder)}
        for number, shard in enumerate(kept):
            os.link(shard, tmp_path / str(number))
            change(shard)
        if what is not None:
            assert_told(model, ExpertLoadError, CHANGED + what, "padded")
            for number, (shard, (content, modified_ns)) in enumerate(kept.items()):
                (tmp_path / str(number)).replace(shard)
                with shard.open("r+b") as file:
                    file.write(content)
                os.utime(shard, ns=(modified_ns, modified_ns))
        assert_right(model, "padded")


def test_file_replaced_while_it_is_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """O_DIRECT opens a file by name, after its header was read."""
    plain = DirectFiles.__init__

    def replacing(self: DirectFiles, paths: Any, *rest: Any) -> None:
        replaced = next(iter(paths.values()))
        other = replaced.with_name("other")
        other.write_bytes(os.urandom(replaced.stat().st_size))
        other.replace(replaced)
        plain(self, paths, *rest)

    monkeypatch.setattr(DirectFiles, "__init__", replacing)
    with (
        leaving_nothing(),
        pytest.raises(CheckpointError, match=r"another file in its place.*another header.*model-0000\d"),
    ):
        promoe.from_pretrained(folder, cache="25%", config=config(read_mode="direct"))


# -- checksums --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_wrong_bytes_without_verify(way: str) -> None:
    """Without `verify`, nobody notices. That is why it exists."""
    with faulty(way, always("wrong"), predictor=None) as (model, _):
        wrong = greedy(model, PROMPTS["one"], new_tokens=1).logits
    with faulty(way, never, predictor=None) as (model, _):
        right = greedy(model, PROMPTS["one"], new_tokens=1).logits
    assert not torch.equal(wrong[0], right[0])


@pytest.mark.parametrize("verify", VERIFY)
@pytest.mark.parametrize("way", WAYS)
def test_wrong_bytes_the_first_time(way: str, verify: Any) -> None:
    with faulty(way, always("wrong"), predictor=None, verify=verify) as (model, link):
        for _ in range(2):
            source = r"\(tensor .*offset \d+\): .*bytes that came differ from a second read of them \(CRC-32 "
            assert_told(model, ExpertLoadError, source)
        settle(model.promoe.runtime.engine)  # what is read half before it is mended and half after differs too
        link.mend()
        assert_right(model)
        assert ", verified" in model.promoe.stats().link


@pytest.mark.parametrize("way", WAYS)
def test_wrong_bytes_later(way: str) -> None:
    with faulty(way, never, predictor=None, verify="always", cache=2) as (model, link):
        assert_right(model)
        link._plan = always("wrong")
        assert_told(model, ExpertLoadError, "bytes that came differ from those that came first", "one")
        settle(model.promoe.runtime.engine)
        link.mend()
        assert_right(model, "padded")


@pytest.mark.parametrize("way", WAYS)
def test_verified_answers_are_right(way: str) -> None:
    with faulty(way, never, verify="always") as (model, _):
        for prompt in ("one", "padded", "one"):
            assert_right(model, prompt)


def test_weights_in_ram_that_somebody_writes() -> None:
    with faulty("RAM, workers", never, predictor=None, verify="always", cache=2) as (model, _):
        assert_right(model)
        layers = promoe.find_moe_layers(model)
        kept = [layer.experts.down_proj.detach().clone() for layer in layers]
        with torch.no_grad():
            for layer in layers:
                layer.experts.down_proj.data += 1.0  # which torch does not count, and nothing else notices
        assert_told(model, ExpertLoadError, "tensor down_proj of MoE layer .*differ from those that came first")
        settle(model.promoe.runtime.engine)  # what is read half before and half after differs too
        with torch.no_grad():
            for layer, values in zip(layers, kept, strict=True):
                layer.experts.down_proj.data.copy_(values)
        assert_right(model)


def multiply(experts: torch.nn.Module) -> None:
    experts.down_proj.mul_(-1)


def copy(experts: torch.nn.Module) -> None:
    experts.gate_up_proj[3].copy_(torch.zeros_like(experts.gate_up_proj[3]))


def give_data(experts: torch.nn.Module) -> None:
    experts.down_proj.data = experts.down_proj.data * 0.5


def replace(experts: torch.nn.Module) -> None:
    experts.down_proj = torch.nn.Parameter(experts.down_proj.detach() * 0.5)


@pytest.mark.parametrize("predictor", [None, "gate"])
@pytest.mark.parametrize(
    ("change", "words"),
    [(multiply, "wrote to"), (copy, "wrote to"), (give_data, "gave other data to"), (replace, "replaced")],
)
def test_weights_in_ram_that_are_changed_after_patching(
    change: Callable[[torch.nn.Module], None], words: str, predictor: str | None
) -> None:
    """Otherwise slots would hold some experts from before the change and some from after it."""
    model, reference = build("qwen2_moe"), build("qwen2_moe")
    promoe.patch(model, cache="30%", predictor=predictor, link=promoe.EmulatedLink(1e9), config=config())
    ids = token_ids(1, 5, seed=1)
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, reference(ids).logits)
    with torch.no_grad():
        for each in (model, reference):
            change(promoe.find_moe_layers(each)[1].experts)
    for _ in range(2):
        with (
            torch.inference_mode(),
            pytest.raises(PatchStateError, match=rf"something {words} '\w+' of 'model.layers.1.mlp"),
        ):
            model(ids)
    promoe.unpatch(model)
    promoe.patch(model, cache="30%", predictor=predictor, link=promoe.EmulatedLink(1e9), config=config())
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, reference(ids).logits)
    promoe.unpatch(model)


def test_verify_needs_slots_in_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("promoe.runtime.checking.open_device", lambda name: FakeDevice())
    with pytest.raises(
        ConfigError, match=r"verify='always' compares experts that the CPU copies.*promoe\.from_pretrained"
    ):
        promoe.patch(resident(FAMILY), device="cuda", config=config(verify="always"))
    assert not hasattr(resident(FAMILY), "promoe")


def test_verified_links_are_over_what_was_chosen() -> None:
    """The check sees what a user's link does to bytes."""
    links: list[FaultyLink] = []

    def bind(store: Any) -> FaultyLink:
        links.append(FaultyLink(plain_link(store), lambda number, chunk: Fault("wrong")))
        return links[-1]

    with leaving_nothing():
        model = promoe.from_pretrained(
            checkpoint(FAMILY), cache="25%", link=LinkOver(bind), config=config(verify="first")
        )
        assert_told(model, ExpertLoadError, "differ from a second read")
        close(model)
