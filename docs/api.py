"""Generate docs/api.md, the public names, from their docstrings. Read the source code without importing it.

python docs/api.py > docs/api.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from griffe import (
    Alias,
    Attribute,
    Class,
    DocstringSection,
    DocstringSectionKind,
    Expr,
    Function,
    GriffeLoader,
    Object,
    Parameter,
    ParameterKind,
)

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 120

INTRODUCTION = """\
# API reference

The names that programs need, generated from the docstrings by `python docs/api.py > docs/api.md`. `promoe.NAME` is imported
on first use, so `import promoe` is quick. Names that appear neither here nor in an example on these pages may change without
notice.
"""


class Entry(NamedTuple):
    """An object on the page.

    Args:
        name: where programs import it from.
        members: the members of a class to show, separated by spaces; None: all without a leading underscore.
        made: programs create such objects, so the page shows how.
    """

    name: str
    members: str | None = None
    made: bool = True


HANDLE = "stats reset_stats report resize warm trace close"
STATS = (
    "prefill decode total forecasts over_time num_experts expert_bytes cache_slots cache_bytes cache_rate "
    "link store policy predictor ttft_s tpot_s summary to_json from_json"
)
PHASE = (
    "passes tokens sequences duration_s pass_s stall_per_pass_s stall_share bytes_per_token predictor_s "
    "prefetch_on_share failures_demand failures_prefetch expert_counts layers"
)
COUNTS = (
    "layer_visits needed hits hit_rate ready ready_rate stall_s evictions bytes_total bytes_demand "
    "bytes_prefetched bytes_prefetch_used bytes_wasted wasted_share"
)
SECTIONS = {
    "Opening and patching": [
        Entry("promoe.from_pretrained"),
        Entry("promoe.patch"),
        Entry("promoe.unpatch"),
        Entry("promoe.find_moe_layers"),
        Entry("promoe.MoELayer", "implementation", made=False),
    ],
    "Many prompts at once": [
        Entry("promoe.generate_batch"),
        Entry("promoe.BatchPrompt", ""),
        Entry("promoe.BatchAnswer", "", made=False),
        Entry("promoe.Sampling", ""),
    ],
    "The handle, `model.promoe`": [Entry("promoe.runtime.handle.Handle", HANDLE, made=False)],
    "Settings": [
        Entry("promoe.PromoeConfig", ""),
        Entry("promoe.Ablation", ""),
        Entry("promoe.EmulatedLink", ""),
    ],
    "What was counted": [
        Entry("promoe.Stats", STATS, made=False),
        Entry("promoe.stats.counts.PhaseStats", PHASE, made=False),
        Entry("promoe.stats.counts.Counts", COUNTS, made=False),
    ],
    "Predictors": [
        Entry("promoe.predictors.Predictor"),
        Entry("promoe.predictors.Traits", ""),
        Entry("promoe.predictors.LayerVisit", "", made=False),
        Entry("promoe.predictors.Forecast"),
        Entry("promoe.predictors.ReuseForecast"),
    ],
    "Errors": [
        Entry("promoe.PromoeError"),
        Entry("promoe.ConfigError"),
        Entry("promoe.UnsupportedModelError"),
        Entry("promoe.PatchStateError"),
        Entry("promoe.CheckpointError"),
        Entry("promoe.ExpertLoadError"),
        Entry("promoe.EngineError"),
        Entry("promoe.EngineClosedError"),
        Entry("promoe.EngineStalledError"),
    ],
    "Types of arguments": [
        Entry("promoe.runtime.sizes.CacheSize"),
        Entry("promoe.runtime.assembly.PredictorChoice"),
        Entry("promoe.runtime.assembly.LinkChoice"),
        Entry("promoe.runtime.patching.StoreChoice"),
        Entry("promoe.model.slot_folders.ExpertsChoice"),
        Entry("promoe.scheduler.config.EvictionName"),
        Entry("promoe.config.ReadMode"),
        Entry("promoe.config.Verify"),
        Entry("promoe.model.opening.Progress"),
    ],
}


def api_page() -> str:
    """Return the page as Markdown."""
    loader = GriffeLoader(search_paths=[ROOT], docstring_parser="google", allow_inspection=False)
    package = loader.load("promoe")
    loader.resolve_aliases()
    lines = [INTRODUCTION]
    for title, entries in SECTIONS.items():
        lines += ["", f"## {title}", ""]
        for entry in entries:
            lines += _entry(entry, _real(package[entry.name.removeprefix("promoe.")]))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _real(found: Object | Alias) -> Any:
    return found.final_target if isinstance(found, Alias) else found


def _entry(entry: Entry, found: Object) -> Iterator[str]:
    if isinstance(found, Attribute):
        meaning = f": {_meaning(found)}" if found.docstring is not None else ""
        yield f"- **`{found.name}`** is `{_source(found.value)}`{meaning}"
        return
    yield from ("", f"### `{entry.name}`", "")
    if isinstance(found, Function):
        yield from _function(found)
    elif isinstance(found, Class):
        if entry.made and _is_dataclass(found):
            yield from _code(_dataclass(found))
        yield from _description(found)
        bases = [f"`{base}`" for base in map(str, found.bases) if base != "Protocol"]
        if bases:
            yield from ("", f"Derives from {', '.join(bases)}.")
        yield from _members(found, entry.members)


def _dataclass(found: Class) -> Iterator[str]:
    yield from (f"@{_source(decorator.value)}" for decorator in found.decorators)
    yield f"class {found.name}:"
    for field in found.parameters:
        if field.name != "self":
            default = f" = {_source(field.default)}" if field.default is not None else ""
            yield f"    {field.name}: {_source(field.annotation)}{default}"


def _members(found: Class, wanted: str | None) -> Iterator[str]:
    """Yield fields and properties with a docstring as a list, then the methods."""
    names = [name for name in found.members if not name.startswith("_")] if wanted is None else wanted.split()
    members = [_real(found.members[name]) for name in names]
    documented = [member for member in members if member.docstring is not None]
    yield ""
    for member in documented:
        if isinstance(member, Attribute):
            yield f"- **`{member.name}`** (`{_source(member.annotation)}`): {_meaning(member)}"
    for member in documented:
        if isinstance(member, Function):
            yield from ("", f"#### `{found.name}.{member.name}`", "", *_function(member))


def _function(function: Function) -> Iterator[str]:
    parameters = [parameter for parameter in function.parameters if parameter.name not in ("self", "cls")]
    returns = f" -> {_source(function.returns)}" if function.returns is not None else ""
    decorators = [f"@{_source(decorator.value)}" for decorator in function.decorators]
    yield from _code([*decorators, _call(f"def {function.name}", parameters, f"{returns}: ...")])
    yield from _description(function)


def _call(start: str, parameters: Iterable[Parameter], end: str) -> str:
    """Return a signature on one line, or if that is too long, with one parameter per line."""
    written: list[str] = []
    for parameter in parameters:
        if parameter.kind is ParameterKind.keyword_only and "*" not in written:
            written.append("*")
        stars = {ParameterKind.var_positional: "*", ParameterKind.var_keyword: "**"}.get(parameter.kind, "")
        default = f" = {_source(parameter.default)}" if parameter.default is not None and not stars else ""
        written.append(f"{stars}{parameter.name}: {_source(parameter.annotation)}{default}")
    line = f"{start}({', '.join(written)}){end}"
    return line if len(line) <= WIDTH else "\n".join([f"{start}(", *(f"    {text}," for text in written), f"){end}"])


def _description(found: Object) -> Iterator[str]:
    """Yield a docstring's text, and its sections as lists."""
    for section in found.docstring.parse("google") if found.docstring is not None else ():
        yield ""
        yield from _section(section, found)


def _section(section: DocstringSection, found: Object) -> Iterator[str]:
    kind = section.kind
    if kind is DocstringSectionKind.text:
        yield _linked(section.value)
    elif kind in (DocstringSectionKind.parameters, DocstringSectionKind.attributes):
        yield from ("Arguments:" if kind is DocstringSectionKind.parameters else "Attributes:", "")
        yield from (f"- **`{item.name}`**: {_one_line(item.description)}" for item in section.value)
    elif kind is DocstringSectionKind.returns:
        yield f"Returns: {_one_line(' '.join(item.description for item in section.value))}"
    elif kind is DocstringSectionKind.raises:
        yield from ("Raises:", "")
        yield from (f"- **`{item.annotation}`**: {_one_line(item.description)}" for item in section.value)
    else:
        raise ValueError(f"The docstring of {found.path} has a section of kind {kind.value!r}, which has no form here.")


def _is_dataclass(found: Class) -> bool:
    return any("dataclass" in _source(decorator.value) for decorator in found.decorators)


def _code(lines: Iterable[str]) -> Iterator[str]:
    yield from ("```python", *lines, "```")


def _meaning(found: Object) -> str:
    return _one_line(found.docstring.value) if found.docstring is not None else ""


def _source(expression: str | Expr | None) -> str:
    return _one_line(str(expression).replace("'", '"'))


def _one_line(text: str) -> str:
    return _linked(" ".join(text.split()))


def _linked(text: str) -> str:
    """Return the text with links to the pages of this folder."""
    return re.sub(r"\bdocs/(\w+\.md)", r"[\1](\1)", text)


if __name__ == "__main__":
    sys.stdout.write(api_page())
