"""`promoe batch`: opens the model, answers a file of prompts, and reports."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from tqdm import tqdm

from promoe.commands.batch.answering import Answering, Done, refused
from promoe.commands.batch.lines import Request
from promoe.commands.batch.options import Options
from promoe.commands.batch.planned import Sizes, may_be_planned, sizes_for
from promoe.commands.batch.prompts import PromptLengths
from promoe.commands.batch.reading import read_batch
from promoe.commands.batch.results import ResultFile
from promoe.commands.terminal import opening_bar
from promoe.errors import ConfigError
from promoe.model.identity import identity_of
from promoe.model.tokenizer import load_tokenizer
from promoe.runtime.loading import from_pretrained
from promoe.stats.text_report import text_report
from promoe.units import format_number, format_percent, format_seconds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Seconds between two looks at how long the model has waited.
LOOK_EVERY_S = 1.0
Answer = Callable[[Iterable[Request]], Iterator[Done]]
"""Answers requests, and yields each once it is done with."""


@dataclass
class Totals:
    """What a run has done so far. `waiting` is the share of the time in which the model waited for experts; None: unknown."""

    waiting: float | None = None
    kept: int = 0
    answers: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    start_s: float = field(default_factory=time.perf_counter)

    @property
    def rate(self) -> str:
        """Generated tokens per second, and how much of the time passes in waiting for experts."""
        rate = format_number(self.new_tokens / max(1e-9, time.perf_counter() - self.start_s))
        waiting = "" if self.waiting is None else f", {format_percent(self.waiting)}% of the time waiting for experts"
        return f"{rate} tokens/s{waiting}"


def run_batch(options: Options) -> Totals:
    """Answer what is missing of a file of prompts, add it to the file of answers, and report to stderr.

    Raises:
        PromoeError: the model cannot be opened or has failed, or a file cannot be read or written. Answers that were
            completed before are in the file.
    """
    source, out = options.source, Path(options.out)
    if source.column is None and out.exists() and os.path.exists(source.name) and os.path.samefile(out, source.name):
        raise ConfigError(f"--out {out} is the file of prompts. Choose another file for the answers.")
    transformers.logging.disable_progress_bar()
    with ResultFile(out) as results:
        tokenizer = load_tokenizer(options.model)
        results.belong_to(identity_of(options.model, options.experts, options.kernels), options.model)
        num_lines, missing, lengths = _survey(options, tokenizer, results)
        sizes = sizes_for(options, lengths, missing)
        with _Batch(options, results, num_lines) as batch:
            if options.replicas is None:
                report = _here(options, tokenizer, sizes, batch)
            else:
                from promoe.commands.batch.on_ray import answer_on_ray  # Ray is an extra

                batch.run(lambda requests: answer_on_ray(options, sizes, requests))
                report = None
        print(_summary(batch.totals, results.path), file=sys.stderr)
        if report is not None:
            print(report, file=sys.stderr)
    return batch.totals


def _survey(
    options: Options, tokenizer: PreTrainedTokenizerBase, results: ResultFile
) -> tuple[int, int, PromptLengths | None]:
    """Read all lines once, before anything is computed.

    Returns:
        The number of lines, the number of those that are not answered, and the lengths of their prompts; None: no plan needs
        these.

    Raises:
        ConfigError: the source cannot be read, or a line was changed since it was answered.
    """
    lengths = PromptLengths(tokenizer, options.max_tokens) if may_be_planned(options) else None
    num_lines = missing = 0
    answered: dict[str, str] = {}
    lines = read_batch(options.source, options.seed, options.max_tokens)
    for line in tqdm(lines, unit="line", desc="reading prompts", disable=None, delay=2.0, leave=False):
        num_lines += 1
        if line.name in results.done:
            answered[line.name] = line.digest
            continue
        missing += 1
        if lengths is not None and line.request is not None:
            lengths.add(line.request)
    results.check_unchanged(answered)
    return num_lines, missing, lengths


def _here(options: Options, tokenizer: PreTrainedTokenizerBase, sizes: Sizes, batch: _Batch) -> str:
    """Answer with a model in this process, and return its report."""
    with opening_bar(Path(options.model).name) as progress:
        model = from_pretrained(options.model, progress=progress, **{**options.for_opening(), "cache": sizes.cache})
    handle: Any = model.promoe
    with closing(handle):
        answering = Answering(model, tokenizer, options.model, options.max_tokens, sizes.of_batch)
        batch.run(answering.run, lambda: handle.stats().total.stall_s)
        return text_report(handle.stats())


class _Batch:
    """The lines of a file: which are still to be answered, and what has become of the others."""

    def __init__(self, options: Options, results: ResultFile, num_lines: int) -> None:
        self._options, self._results = options, results
        self.totals = Totals()
        self._stall_s: Callable[[], float] | None = None
        self._looked_s = 0.0
        self._bar = tqdm(total=num_lines, unit="answer", desc="answering", disable=None, delay=1e-3)
        self._before = frozenset(results.done)
        self._digests: dict[str, str] = {}

    def __enter__(self) -> _Batch:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def run(self, answer: Answer, stall_s: Callable[[], float] | None = None) -> None:
        """Answer what is missing, and write it.

        Args:
            answer: answers requests.
            stall_s: returns the seconds in which the model has waited for experts.
        """
        self.totals.start_s = time.perf_counter()
        self._stall_s = stall_s
        self._bar.reset(self._bar.total)
        for done in answer(self._requests()):
            self._write(done)
        self._look()

    def _look(self) -> None:
        """Note how long the model has waited."""
        self._looked_s = time.perf_counter()
        if self._stall_s is not None:
            self.totals.waiting = self._stall_s() / (self._looked_s - self.totals.start_s)

    def _requests(self) -> Iterator[Request]:
        """Yield the requests that are not answered yet. Lines that cannot be are refused here."""
        for line in read_batch(self._options.source, self._options.seed, self._options.max_tokens):
            if line.name in self._before:
                self._keep()
                continue
            self._digests[line.name] = line.digest
            if line.request is not None:
                yield line.request
            else:
                assert line.error is not None, "a line is answered or refused"
                self._write(refused(line.error))

    def _keep(self) -> None:
        self.totals.kept += 1
        self._bar.update()

    def _write(self, done: Done) -> None:
        self._results.add(done.line, self._digests.pop(done.line["custom_id"]))
        totals = self.totals
        if done.answered:
            totals.answers += 1
            totals.prompt_tokens += done.prompt_tokens
            totals.new_tokens += done.new_tokens
            if time.perf_counter() - self._looked_s > LOOK_EVERY_S:
                self._look()
            self._bar.set_postfix_str(totals.rate, refresh=False)
        else:
            totals.errors += 1
        self._bar.update()


def _summary(totals: Totals, path: Path) -> str:
    took_s = time.perf_counter() - totals.start_s
    text = (
        f"\n{totals.answers:,} answers and {totals.errors:,} errors written into {path} in {format_seconds(took_s)}: "
        f"{totals.prompt_tokens:,} tokens read, {totals.new_tokens:,} generated, {totals.rate}"
    )
    return text + (f". {totals.kept:,} were there before." if totals.kept else ".")
