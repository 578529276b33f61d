"""Arguments: sizes, configurations, and the command lines of `promoe` and `promoe-train`, as far as to the work itself."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from training.traces import random_trace, save

import promoe.cli
import promoe.training.cli
from promoe.command_line import EXIT_USER_ERROR
from promoe.commands.bench.options import Options
from promoe.config import PromoeConfig
from promoe.errors import ConfigError
from promoe.runtime.sizes import fixed_bytes, plan_pools
from promoe.stores.layout import ExpertLayout
from promoe.training.metrics import transfer_of

from .inputs import fuzzed, outcome, refused, taken
from .mutations import INTEGERS, LEAVES, TEXTS

LAYOUTS = [ExpertLayout.of({"w": ((rows, 4), torch.float32)}) for rows in (2, 2, 8)]
EXPERTS = [4, 4, 2]
TOTAL = sum(layout.slot_bytes * count for layout, count in zip(LAYOUTS, EXPERTS, strict=True))
HUGE = -(10**5000)  # more digits than Python would write

units = st.sampled_from(("%", "B", "KB", "MiB", "GiB", "TB", "gib", "X", "", " GiB", "GiB ", "GiB/s", "iB", "٪"))
numerals = st.sampled_from(
    ("0", "0.0", "1", "25", "50.", ".5", "1.5", "1e3", "1e400", "-1", "+1", "inf", "nan", "²", "١", "9" * 400, "9" * 5000,
     "0x10", "1_0",
     "100", "100.0001")
)  # fmt: skip
sizes = st.builds("{}{}".format, numerals | st.integers(0, 10**13).map(str) | st.floats(0, 200).map(str), units)


@fuzzed(160)
@given(
    cache=sizes | LEAVES | st.sampled_from(("auto", "AUTO", HUGE, 0.5, b"25%", ["25%"])),
    free=st.none() | st.integers(0, 2**40),
)
@example(cache=HUGE, free=None)
@example(cache="9" * 5000 + "GiB", free=None)
def test_cache_sizes(cache: Any, free: int | None) -> None:
    pools = outcome("cache sizes", lambda: plan_pools(cache, LAYOUTS, EXPERTS, free))
    if pools is None:
        return
    assert isinstance(cache, (str, int))
    assert all(1 <= pool.spec.num_slots <= sum(EXPERTS[layer] for layer in pool.spec.layers) for pool in pools)
    assert sum(pool.nbytes for pool in pools) <= TOTAL
    if isinstance(cache, int):
        assert sum(pool.nbytes for pool in pools) <= cache


@fuzzed(120)
@given(text=sizes | st.sampled_from(TEXTS) | st.text(max_size=8))
def test_sizes(text: str) -> None:
    found = outcome("sizes", lambda: fixed_bytes(text))
    assert found is None or found >= 0
    options = outcome("links to emulate", lambda: Options(cache=["25%"], systems=["lru"], link=f"emulated:{text}"))
    if options is not None and (link := options.emulated()) is not None:
        assert 0 < (link.bytes_per_s or link.ratio or 0) < math.inf
    transfer = outcome("links for FETCHRATE", lambda: transfer_of(text, "18.9MiB", 0.002))
    assert transfer is None or 0 < transfer.bandwidth_bytes_per_s < math.inf


FIELDS = {field.name: field.default for field in fields(PromoeConfig)}


@fuzzed(160)
@given(
    changes=st.dictionaries(
        st.sampled_from(sorted(FIELDS)),
        LEAVES | st.sampled_from((4096, 8192, "lru", "direct", HUGE, -HUGE, [], {})),
        min_size=1,
        max_size=3,
    )
)
@example(changes={"workers": -HUGE})
@example(changes={"workers": HUGE})
@example(changes={"workers": 10**9})
@example(changes={"chunk_bytes": 4096 * 10**20})
@example(changes={"eviction": []})
def test_configurations(changes: dict[str, Any]) -> None:
    config = outcome("PromoeConfig", lambda: PromoeConfig(**changes))
    if config is not None:
        assert all(
            type(getattr(config, name)) is type(default) or default is None or isinstance(default, float)
            for name, default in FIELDS.items()
        )
        assert config.workers <= 256
        assert config.chunk_bytes is None or config.chunk_bytes <= 2**30


class Command:
    """A command line of options with any values; what would open a model or train stops it."""

    def __init__(self, main: Callable[[list[str]], int], target: str) -> None:
        self.main, self.target = main, target

    def __call__(self, argv: list[str]) -> None:
        taken[self.target] += 1
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            try:
                code = self.main(argv)
            except SystemExit as exit:
                code = exit.code if isinstance(exit.code, int) else 99
        assert code in (0, 1, EXIT_USER_ERROR), (code, argv)
        if code == EXIT_USER_ERROR:
            refused[self.target] += 1
            assert err.getvalue().strip(), argv
            assert "Traceback" not in err.getvalue()


def stopped(*_: object, **__: object) -> NoReturn:
    raise ConfigError("As far as this the command line was understood.")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("fuzz")
    save(random_trace(prompts=4, length=4), folder / "trace.npz")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("promoe.commands.run.command.load_tokenizer", stopped)
        patch.setattr("promoe.commands.serve.command.load_tokenizer", stopped)
        patch.setattr("promoe.commands.demo.command.Demo", stopped)
        patch.setattr("promoe.commands.bench.command.run_bench", stopped)
        patch.setattr("promoe.training.fit.RecordedTrace", stopped)
        patch.setattr("promoe.training.collect.open_model", stopped)
        yield folder


WORDS = (
    "auto", "25%", "trace.npz", ".", "..", "/", "/dev/null", "no/such/file", "lru", "oracle", "gate", "token", "9" * 30,
    "-" + "9" * 30,
    "[1, 2]", "{a: 1}", "&a [*a]", "!!python/object:os.system x", "null", "1e400", "0x1F", "1_000", "=", "--", "-x",
)  # fmt: skip
values = st.one_of(
    st.sampled_from((*TEXTS, *WORDS)),
    st.integers(-2, 300).map(str),
    st.floats().map(str),
    sizes,
    st.text(max_size=6),
).map(lambda text: text.replace("\0", "_"))  # which no argument can have  # fmt: skip

COMMANDS: dict[str, list[str]] = {
    "simulate": [
        "cache",
        "policy",
        "max-tokens",
        "predictor",
        "lookahead",
        "batch",
        "hardware",
        "model",
        "bits",
        "fit",
    ],
    "run": ["cache", "predictor", "store", "device", "max-new-tokens", "temperature", "seed"],
    "demo": ["cache", "prompts", "max-new-tokens", "repeat", "skip-widened"],
    "bench": [
        "cache",
        "systems",
        "pairs",
        "max-new-tokens",
        "prompt-tokens",
        "prompts",
        "link",
        "workspace",
        "seconds-per-answer",
        "dtype",
    ],
    "collect": [
        "data",
        "max-tokens",
        "decode-share",
        "max-prompt-tokens",
        "batch-size",
        "temperature",
        "seed",
        "dtype",
        "cache",
        "exclude",
        "shard-index",
        "num-shards",
    ],
    "fit": [
        "kind",
        "loss",
        "lookahead",
        "width",
        "learning-rate",
        "weight-decay",
        "batch-size",
        "patience",
        "seed",
        "trainer",
        "trainer.devices",
        "trainer.max-epochs",
    ],
    "evaluate": [
        "kinds",
        "lookahead",
        "cache",
        "policy",
        "replay-tokens",
        "bandwidth",
        "expert-bytes",
        "layer-seconds",
    ],
    "export": ["run", "out", "evaluation"],
    "plan": ["cache", "context", "tokens-per-second", "prompt-tokens", "new-tokens", "device", "read-mode", "dtype"],
    "serve": [
        "cache",
        "predictor",
        "device",
        "port",
        "name",
        "api-key",
        "max-prompt-tokens",
        "max-new-tokens",
        "max-body",
        "max-waiting",
    ],
    "report": ["out", "baseline"],
    "quality": [
        "experts",
        "data",
        "tokens",
        "window",
        "prompts",
        "max-new-tokens",
        "cache",
        "predictor",
        "dtype",
        "spool",
    ],
}
NEEDED = {
    "plan": ["no-such-model"],
    "serve": ["no-such-model"],
    "quality": ["no-such-model"],
    "report": ["no-such-run.json"],
    "simulate": ["--trace", "trace.npz"],
    "run": ["no-such-model", "Why?"],
    "collect": ["--model", "no-such-model", "--out", "trace"],
    "fit": ["--trace", "trace", "--out", "run"],
    "evaluate": ["--trace", "trace.npz"],
    "export": ["--run", "no-run", "--out", "exported"],
}


@st.composite
def command_lines(draw: st.DrawFn) -> tuple[str, list[str]]:
    command = draw(st.sampled_from(sorted(COMMANDS)))
    argv = list(NEEDED.get(command, []))
    for _ in range(draw(st.integers(1, 3))):
        name, value = draw(st.sampled_from(COMMANDS[command])), draw(values)
        argv += draw(
            st.sampled_from(
                ([f"--{name}", value], [f"--{name}={value}"], [f"--{name}"], [f"--{name.replace('-', '_')}={value}"])
            )
        )
    if draw(st.integers(0, 9)) == 0:
        argv.insert(draw(st.integers(0, len(argv))), draw(values))
    return command, argv


@fuzzed(25)
@given(drawn=command_lines())
@example(drawn=("run", ["m", "Why?", "--cache", "²"]))
@example(drawn=("run", ["m", "Why?", "--cache", "9" * 5000]))
@example(drawn=("run", ["m", "Why?", "--seed", "9" * 30]))
@example(drawn=("run", ["m", "Why?", "--max-new-tokens", "9" * 5000]))
@example(drawn=("run", ["x" * 5000, "Why?"]))
@example(drawn=("simulate", ["--trace", "x" * 5000]))
@example(drawn=("simulate", ["--trace", "trace.npz", "--max-tokens", "9" * 30]))
@example(drawn=("simulate", ["--trace", "trace.npz", "--lookahead", "9" * 18, "--predictor", "oracle"]))
@example(drawn=("simulate", ["--trace", "trace.npz", "--batch", "9" * 18]))
@example(drawn=("simulate", ["--trace", "trace.npz", "--bits", "1e-300"]))
@example(drawn=("evaluate", ["--trace", "trace.npz", "--lookahead", "9" * 5000]))
@example(drawn=("evaluate", ["--trace", "trace.npz", "--lookahead", "9" * 18]))
@example(drawn=("evaluate", ["--trace", "trace.npz", "--kinds", "x" * 5000]))
@example(drawn=("evaluate", ["--trace", "trace.npz", "--cache", "1e-300%"]))
@example(drawn=("evaluate", ["--trace", "trace.npz", "--replay-tokens", "9" * 30]))
@example(drawn=("collect", ["--model", "m", "--out", "x" * 5000]))
@example(drawn=("collect", ["--model", "m", "--out", "o", "--max-prompt-tokens", "9" * 400]))
@example(drawn=("export", ["--run", "x" * 5000, "--out", "o"]))
@example(drawn=("fit", ["--trace", "t", "--out", "o", "--trainer", "[" * 5000]))
def test_command_lines(folder: Path, drawn: tuple[str, list[str]]) -> None:
    command, argv = drawn
    main = promoe.cli.main if command in promoe.cli.COMMANDS else promoe.training.cli.main
    Command(main, f"command line: {command}")([command, *argv])


@pytest.mark.parametrize("value", INTEGERS, ids=range(len(INTEGERS)))
@pytest.mark.parametrize("option", ["--max-tokens", "--lookahead", "--batch"])
def test_numbers_of_a_simulation(folder: Path, option: str, value: int) -> None:
    Command(promoe.cli.main, "command line: simulate")(
        ["simulate", "--trace", "trace.npz", "--predictor", "previous", f"{option}={value}"]
    )
