"""The public surface: what it holds, what it is called with, and what importing it costs."""

from __future__ import annotations
import __future__

import ast
import dataclasses
import importlib
import importlib.metadata
import inspect
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import promoe
from promoe.runtime.handle import Handle
from promoe.runtime.resident import ResidentHandle
from promoe.runtime.slot_handle import SlotHandle

ROOT = Path(promoe.__file__).parent.parent
NEVER_IMPORTED = ("lightning", "datasets", "sklearn", "matplotlib", "tqdm", "jsonargparse")
# What a module of promoe imports of the language itself.
LANGUAGE = (__future__.annotations, TYPE_CHECKING, Any)
HANDLE = ("config", "stats", "reset_stats", "report", "trace", "close")


# -- names ------------------------------------------------------------------------------------------------------


def test_all_is_sorted_without_repeats() -> None:
    assert promoe.__all__ == sorted(set(promoe.__all__))


@pytest.mark.parametrize("name", promoe.__all__)
def test_an_exported_member_exists_and_is_documented(name: str) -> None:
    member = getattr(promoe, name)
    doc = inspect.getdoc(member)
    assert doc
    assert doc[0].isupper()
    # Not the signature that dataclasses write where there is no docstring.
    assert not doc.startswith(f"{name}(")


def test_nothing_else_looks_exported() -> None:
    public = {
        name
        for name, value in vars(promoe).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and value not in LANGUAGE
    }
    assert public <= set(promoe.__all__)
    assert set(promoe.__all__) <= set(dir(promoe))


def test_an_unknown_member_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'promoe' has no attribute 'pacth'"):
        promoe.pacth  # noqa: B018


def test_type_checkers_and_python_find_a_member_in_the_same_module() -> None:
    """The imports that only type checkers see name exactly what the interpreter imports when asked."""
    tree = ast.parse(Path(promoe.__file__).read_text())
    (unseen,) = (node for node in tree.body if isinstance(node, ast.If))
    told: dict[str, str] = {}
    for statement in unseen.body:
        assert isinstance(statement, ast.ImportFrom)
        assert statement.module is not None
        told |= {alias.name: statement.module for alias in statement.names}
    assert set(told) == set(promoe.__all__)
    for name, module in told.items():
        assert getattr(promoe, name) is getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name", [name for name in promoe.__all__ if inspect.isclass(getattr(promoe, name))])
def test_public_methods_and_properties_are_documented(name: str) -> None:
    for attribute, value in vars(getattr(promoe, name)).items():
        own = inspect.isfunction(value) or isinstance(value, (property, classmethod, staticmethod))
        if own and not attribute.startswith("_"):
            assert inspect.getdoc(value), f"{name}.{attribute}"


@pytest.mark.parametrize("handle", [SlotHandle, ResidentHandle])
def test_both_handles_answer_the_same(handle: type) -> None:
    for name in HANDLE[1:]:
        assert inspect.getdoc(getattr(handle, name)), name
        ours, reference = inspect.signature(getattr(handle, name)), inspect.signature(getattr(Handle, name))
        assert list(ours.parameters) == list(reference.parameters), name


# -- signatures -------------------------------------------------------------------------------------------------


def keywords(function: Any) -> dict[str, Any]:
    """The keyword-only arguments of a function and their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def test_patch_signature() -> None:
    assert keywords(promoe.patch) == {
        "experts": "auto",
        "cache": "50%",
        "predictor": "gate",
        "store": "auto",
        "link": "auto",
        "device": "cpu",
        "config": None,
    }
    assert next(iter(inspect.signature(promoe.patch).parameters)) == "model"


def test_from_pretrained_signature() -> None:
    found = keywords(promoe.from_pretrained)
    assert {name: found[name] for name in ("cache", "predictor", "dtype", "device", "link", "config")} == {
        "cache": "50%",
        "predictor": "gate",
        "dtype": None,
        "device": "cpu",
        "link": "auto",
        "config": None,
    }


def test_the_other_signatures() -> None:
    assert list(inspect.signature(promoe.unpatch).parameters) == ["model"]
    assert next(iter(inspect.signature(promoe.find_moe_layers).parameters)) == "model"
    fields = {field.name for field in dataclasses.fields(promoe.EmulatedLink)}
    assert {"bandwidth_bytes_per_s", "latency_s"} <= fields


@pytest.mark.parametrize("function", [promoe.patch, promoe.unpatch, promoe.from_pretrained, promoe.find_moe_layers])
def test_the_docstring_says_what_is_raised_and_explains_every_argument(function: Any) -> None:
    doc = inspect.getdoc(function)
    assert doc is not None
    assert "Raises:" in doc
    if len(keywords(function)) > 1:
        for name in keywords(function):
            assert f"\n    {name}: " in doc, name


def test_the_numbers_that_stats_promise() -> None:
    promised = "hit_rate ready_rate stall_s bytes_demand bytes_prefetched bytes_wasted evictions layer_visits"
    for name in promised.split():
        assert isinstance(inspect.getattr_static(promoe.Stats, name), property), name
    assert {"prefill", "decode"} <= {field.name for field in dataclasses.fields(promoe.Stats)}
    assert promoe.Stats.__dataclass_params__.frozen  # type: ignore[attr-defined]


# -- package ----------------------------------------------------------------------------------------------------


def test_version_is_that_of_the_distribution() -> None:
    assert promoe.__version__ == importlib.metadata.version("promoe")


def test_type_checkers_see_our_annotations() -> None:
    assert (Path(promoe.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize("name", ["predictors", "training"])
def test_two_rooms_are_reached_through_links(name: str) -> None:
    link = ROOT / "promoe" / name
    if not link.is_symlink():
        pytest.skip("not a checkout: an installed package holds the folders themselves")
    assert not link.readlink().is_absolute()
    assert link.resolve() == ROOT / name
    assert (ROOT / name).is_dir()


# -- what importing costs ---------------------------------------------------------------------------------------

# Notes every import statement that a module of promoe executes; then shows that it would have noticed one.
WATCH = """
import builtins, json, sys
plain, asked = builtins.__import__, []

def watching(name, globals=None, locals=None, fromlist=(), level=0):
    importer = (globals or {}).get("__name__", "")
    if level == 0 and importer.partition(".")[0] == "promoe":
        asked.append((importer, name.partition(".")[0]))
    return plain(name, globals, locals, fromlist, level)

builtins.__import__ = watching
import promoe
at_once = sorted({name.partition(".")[0] for name in sys.modules})
members = [getattr(promoe, name) for name in promoe.__all__]
found = list(asked)
loaded = [name for name in sys.modules if name.partition(".")[0] in ("promoe", "predictors", "training")]
exec("import tqdm.auto", {"__name__": "promoe.somewhere", "__builtins__": builtins})
print(json.dumps({"at_once": at_once, "asked": found, "seen": asked[len(found):], "loaded": loaded}))
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, Any]:
    """What a fresh interpreter does on `import promoe`."""
    done = subprocess.run([sys.executable, "-c", WATCH], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_import_promoe_waits_for_no_other_library(imported: dict[str, Any]) -> None:
    """`promoe --help` answers at once."""
    heavy = {*NEVER_IMPORTED, "torch", "transformers", "numpy", "safetensors", "huggingface_hub"}
    assert heavy.isdisjoint(imported["at_once"])
    assert "promoe" in imported["at_once"]


def test_no_member_needs_a_library_for_training_plots_or_the_command_line(imported: dict[str, Any]) -> None:
    """Of what promoe itself imports: transformers has tqdm for itself."""
    asked = {(importer, name) for importer, name in imported["asked"]}
    assert ("promoe.experts.moe_layers", "transformers") in asked
    assert {(importer, name) for importer, name in asked if name in NEVER_IMPORTED} == set()
    assert imported["seen"][0] == ["promoe.somewhere", "tqdm"]


def test_no_member_needs_the_command_line_charts_or_training(imported: dict[str, Any]) -> None:
    """To patch a model loads no HTML, CSS or chart."""
    rooms = {".".join(name.split(".")[:2]) for name in imported["loaded"]}
    assert {"promoe.transfer", "promoe.scheduler", "promoe.runtime"} <= rooms
    assert rooms.isdisjoint({"promoe.cli", "promoe.command_line", "promoe.commands", "promoe.training"})


def test_the_linked_rooms_are_imported_under_one_name(imported: dict[str, Any]) -> None:
    """A second copy under its folder's name would have classes of its own."""
    assert {"promoe.predictors.base", "promoe.predictors.gate"} <= set(imported["loaded"])
    assert {name.partition(".")[0] for name in imported["loaded"]} == {"promoe"}
