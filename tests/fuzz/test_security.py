"""What the code never does, read from the code itself: unpickle, evaluate, trust code of a checkpoint, parse JSON anyhow."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import promoe

ROOT = Path(promoe.__file__).resolve().parent.parent
NEVER_IMPORTED = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml"}
NEVER_CALLED = {"eval", "exec", "compile", "__import__", "os.system", "np.fromregex", "torch.hub.load"}
# Where JSON of others is parsed. Streams of prompts take keys that are there twice, as public data have them.
PARSERS = {"promoe/files.py": {"json.loads"}, "training/prompts.py": {"json.loads"}}


def sources() -> list[Path]:
    return [path for name in ("promoe", "predictors", "training") for path in sorted((ROOT / name).rglob("*.py"))]


@cache
def trees() -> list[tuple[str, ast.Module]]:
    return list(_trees())


def _trees() -> Iterator[tuple[str, ast.Module]]:
    for path in dict.fromkeys(path.resolve() for path in sources()):  # two of the folders are also links
        yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


@cache
def calls() -> list[tuple[str, str, ast.Call]]:
    """(file, name of what is called, call)."""
    return [
        (name, ast.unparse(node.func), node)
        for name, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    ]


def argument(call: ast.Call, name: str) -> str | None:
    return next((ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == name), None)


def test_all_sources_are_seen() -> None:
    names = {name for name, _ in trees()}
    assert {"promoe/model/opening.py", "training/routing_traces.py", "predictors/trained.py"} <= names
    assert len(names) > 100
    assert ("promoe/model/model_class.py", "AutoConfig.from_pretrained") in {
        (name, called) for name, called, _ in calls()
    }


def test_nothing_that_unpickles_is_imported() -> None:
    for name, tree in trees():
        for node in ast.walk(tree):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {module.partition(".")[0] for module in modules} & NEVER_IMPORTED, name


def test_nothing_is_evaluated() -> None:
    assert not [(name, called) for name, called, _ in calls() if called in NEVER_CALLED]


def test_tensors_and_arrays_are_loaded_without_pickles() -> None:
    for name, called, call in calls():
        if called == "torch.load":
            assert argument(call, "weights_only") == "True", name
        if called == "trainer.fit":  # Lightning's, which goes on from a checkpoint
            assert argument(call, "weights_only") == "True", name
        assert called not in ("np.load", "numpy.load"), f"{name}: routing_traces reads arrays"
        assert argument(call, "allow_pickle") in (None, "False"), name


def test_no_code_of_a_checkpoint_is_trusted() -> None:
    for name, called, call in calls():
        assert argument(call, "trust_remote_code") in (None, "False"), name
        if (
            called.startswith("Auto")
            and called.endswith(".from_pretrained")
            and name != "promoe/commands/bench/peers.py"
        ):  # AirLLM's
            options = argument(call, "trust_remote_code") or next(
                ast.unparse(k.value) for k in call.keywords if k.arg is None
            )
            assert options in ("False", "options"), name


def test_json_is_parsed_in_one_place() -> None:
    for name, called, _ in calls():
        if called in ("json.load", "json.loads"):
            assert called in PARSERS.get(name, ()), f"{name} calls {called}: read it with promoe.files"


def test_dictionaries_of_options_do_not_trust_either() -> None:
    for name, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == "trust_remote_code":
                        assert ast.unparse(value) == "False" or name == "promoe/model/opening_checks.py", name
