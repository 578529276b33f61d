from __future__ import annotations

import inspect
import pickle
import re

import pytest

import promoe
from promoe import errors

TREE = {
    "PromoeError": (Exception,),
    "ConfigError": (errors.PromoeError, ValueError),
    "UnsupportedModelError": (errors.PromoeError,),
    "PatchStateError": (errors.PromoeError,),
    "CheckpointError": (errors.PromoeError,),
    "ExpertLoadError": (errors.PromoeError,),
    "EngineError": (errors.PromoeError,),
    "EngineClosedError": (errors.EngineError,),
    "EngineStalledError": (errors.EngineError,),
}


def defined() -> dict[str, type]:
    return {name: value for name, value in vars(errors).items() if inspect.isclass(value)}


def test_options_that_are_too_little_are_named_as_they_are_typed() -> None:
    with pytest.raises(errors.ConfigError, match=r"^--new-tokens must be at least 2\. Got 1 instead\.$"):
        errors.check_at_least(2, batch=2, left_out=None, new_tokens=1)
    errors.check_at_least(2, batch=2, left_out=None)


@pytest.mark.parametrize("name", TREE)
def test_bases(name: str) -> None:
    assert getattr(errors, name).__bases__ == TREE[name]


def test_there_is_no_other_error() -> None:
    assert set(defined()) == set(TREE)


def test_every_error_is_exported() -> None:
    for name, error in defined().items():
        assert getattr(promoe, name) is error
        assert name in promoe.__all__


def test_the_tree_at_the_top_of_the_module_is_the_tree() -> None:
    """Depth by indentation: a line's parent is the nearest line above that is less indented."""
    assert errors.__doc__ is not None
    drawn: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in errors.__doc__.splitlines():
        found = re.match(r"[│├└─ ]*(\w+Error)\b", line)
        if found is None:
            continue
        depth, name = found.start(1), found[1]
        above = [(d, n) for d, n in above if d < depth]
        if above:
            drawn[name] = above[-1][1]
        above.append((depth, name))
    wanted = {name: bases[0].__name__ for name, bases in TREE.items() if name != "PromoeError"}
    assert drawn == wanted


@pytest.mark.parametrize("name", TREE)
def test_an_error_says_in_its_docstring_when_it_is_raised(name: str) -> None:
    doc = vars(getattr(errors, name)).get("__doc__")
    assert doc
    assert doc.strip().endswith((".", ")"))


@pytest.mark.parametrize("name", TREE)
def test_an_error_keeps_its_message_and_survives_a_process_boundary(name: str) -> None:
    error = getattr(errors, name)("what was asked, what was found, what to do")
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is type(error)
    assert str(copied) == str(error) == "what was asked, what was found, what to do"
    with pytest.raises(promoe.PromoeError):
        raise error
