"""What MoE families the installed Transformers has: found in its source, so that a new family is never overlooked."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import transformers

MODELS = Path(transformers.__file__).parent / "models"
_DECORATOR = "use_experts_implementation"


@functools.cache
def experts_classes() -> dict[str, tuple[str, ...]]:
    """Family (folder of its modeling file) -> its classes of routed experts: decorated ones, and any called *Experts*."""
    found = {path.parent.name: tuple(_classes(path)) for path in sorted(MODELS.glob("*/modeling_*.py"))}
    return {family: classes for family, classes in found.items() if classes}


def _classes(path: Path) -> Iterator[str]:
    source = path.read_text(encoding="utf-8")
    if "Experts" not in source and _DECORATOR not in source:
        return
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and _is_experts(node):
            yield node.name


def _is_experts(node: ast.ClassDef) -> bool:
    decorated = any(_DECORATOR in ast.unparse(decorator) for decorator in node.decorator_list)
    has_forward = any(isinstance(member, ast.FunctionDef) and member.name == "forward" for member in node.body)
    return has_forward and (decorated or "Experts" in node.name)
