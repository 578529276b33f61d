"""`promoe batch`: opens the model, answers a file of prompts, and reports."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from tqdm import tqdm

from promoe.commands.batch.lines import CHAT, LineError, Request, read_lines, read_request
from promoe.commands.batch.options import Options
from promoe.commands.batch.planned import sizes_for
from promoe.commands.batch.prompts import count_lines, encoded
from promoe.commands.batch.results import ResultFile, answer_line, error_line
from promoe.commands.plan.many_prompts import BatchPlan
from promoe.commands.terminal import opening_bar
from promoe.errors import ConfigError
from promoe.model.tokenizer import load_tokenizer
from promoe.runtime.batches import BatchAnswer, BatchPrompt, generate_batch
from promoe.runtime.loading import from_pretrained
from promoe.stats.text_report import text_report
from promoe.units import format_number, format_seconds

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass
class Totals:
    """What a run has done so far. `limit` is what the plan expects to limit it; None: nothing was planned."""

    limit: str | None = None
    kept: int = 0
    answers: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    start_s: float = field(default_factory=time.perf_counter)

    @property
    def rate(self) -> str:
        """Generated tokens per second, and what limits them."""
        rate = format_number(self.new_tokens / max(1e-9, time.perf_counter() - self.start_s))
        return f"{rate} tokens/s" + (f", limited by {self.limit}" if self.limit else "")


@dataclass(slots=True)
class Pending:
    """A line that is being answered: its request, the tokens of its prompt, and its choices as far as they are complete."""

    request: Request
    ids: list[int]
    choices: dict[int, BatchAnswer] = field(default_factory=dict)


def run_batch(options: Options) -> Totals:
    """Answer what is missing of a file of prompts, add it to the file of answers, and report to stderr.

    Raises:
        PromoeError: the model cannot be opened or has failed, or a file cannot be read or written. Answers that were
            completed before are in the file.
    """
    source, out = Path(options.input), Path(options.out)
    if out.exists() and source.exists() and out.samefile(source):
        raise ConfigError(f"--out {out} is the file of prompts. Choose another file for the answers.")
    num_lines = count_lines(source)
    transformers.logging.disable_progress_bar()
    with ResultFile(out) as results:
        tokenizer = load_tokenizer(options.model)
        cache, sizes, plan = sizes_for(options, tokenizer, results.done, num_lines)
        with opening_bar(Path(options.model).name) as progress:
            model = from_pretrained(options.model, progress=progress, **{**options.for_opening(), "cache": cache})
        handle: Any = model.promoe
        try:
            totals = _answer_all(options, model, tokenizer, results, num_lines, sizes, plan)
        finally:
            handle.close()
        print(_summary(totals, results.path), file=sys.stderr)
        print(text_report(handle.stats()), file=sys.stderr)
    return totals


def _answer_all(
    options: Options,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    results: ResultFile,
    num_lines: int,
    sizes: Mapping[str, int],
    plan: BatchPlan | None,
) -> Totals:
    totals = Totals(limit=None if plan is None else plan.chosen.limit)
    with tqdm(total=num_lines, unit="answer", desc="answering", disable=None) as bar:
        batch = _Batch(options, tokenizer, results, totals, bar)
        for answer in generate_batch(model, batch.prompts(), **sizes):
            batch.take(answer)
    return totals


class _Batch:
    """The lines of a file on their way: to prompts, and from answers to lines of the result file."""

    def __init__(
        self,
        options: Options,
        tokenizer: PreTrainedTokenizerBase,
        results: ResultFile,
        totals: Totals,
        bar: Any,
    ) -> None:
        self._options, self._tokenizer, self._results, self._totals, self._bar = (
            options,
            tokenizer,
            results,
            totals,
            bar,
        )
        self._pending: dict[int, tuple[Pending, int]] = {}
        self._before = frozenset(results.done)
        self._seen: set[str] = set()

    def prompts(self) -> Iterator[BatchPrompt]:
        """Yield a prompt for every choice of every line that is not answered yet; lines that cannot be are answered here."""
        number = 0
        for line_number, line in read_lines(Path(self._options.input)):
            claimed = False
            try:
                request = read_request(line_number, line, self._options.seed)
                self._claim(request.custom_id, line_number)
                claimed = True
                if request.custom_id in self._before:
                    self._keep()
                    continue
                pending = Pending(request, encoded(self._tokenizer, request))
            except LineError as error:
                self._refuse(error if claimed else self._claimed(error, line_number))
                continue
            longest = self._options.max_tokens if request.max_tokens is None else request.max_tokens
            for choice in range(request.choices):
                self._pending[number] = pending, choice
                number += 1
                sampling = replace(request.sampling, seed=request.sampling.seed + choice)
                yield BatchPrompt(pending.ids, longest, sampling)

    def _claim(self, name: str, number: int) -> None:
        if name in self._seen:
            raise LineError(
                f"line-{number}", f"Another line has the 'custom_id' {name!r}, too. Give each line its own."
            )
        self._seen.add(name)

    def _claimed(self, error: LineError, number: int) -> LineError:
        """Return the error under a name that no other line has."""
        try:
            self._claim(error.custom_id, number)
        except LineError as twice:
            return twice
        return error

    def _keep(self) -> None:
        self._totals.kept += 1
        self._bar.update()

    def _refuse(self, error: LineError) -> None:
        if error.custom_id in self._before:
            self._keep()
            return
        self._results.add(error_line(error.custom_id, str(error)))
        self._totals.errors += 1
        self._bar.update()

    def take(self, answer: BatchAnswer) -> None:
        """Note an answer, and write its line once all choices are there."""
        pending, choice = self._pending.pop(answer.number)
        pending.choices[choice] = answer
        request = pending.request
        if len(pending.choices) < request.choices:
            return
        if answer.error is not None:
            self._refuse(LineError(request.custom_id, answer.error))
            return
        self._totals.answers += 1
        self._totals.prompt_tokens += len(pending.ids)
        self._totals.new_tokens += sum(len(one.tokens) for one in pending.choices.values())
        self._results.add(answer_line(request.custom_id, self._body(pending)))
        self._bar.update()
        self._bar.set_postfix_str(self._totals.rate, refresh=False)

    def _body(self, pending: Pending) -> dict[str, Any]:
        request, count = pending.request, sum(len(one.tokens) for one in pending.choices.values())
        is_chat = request.url == CHAT
        return {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{request.custom_id}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": self._options.model,
            "choices": [self._choice(request, idx, pending.choices[idx]) for idx in range(request.choices)],
            "usage": {
                "prompt_tokens": len(pending.ids),
                "completion_tokens": count,
                "total_tokens": len(pending.ids) + count,
            },
        }

    def _choice(self, request: Request, idx: int, answer: BatchAnswer) -> dict[str, Any]:
        text = self._tokenizer.decode(answer.tokens, skip_special_tokens=True)
        places = [place for stop in request.stops if (place := text.find(stop)) >= 0]
        text = text[: min(places)] if places else text
        reason = "stop" if places or answer.ended else "length"
        content = {"message": {"role": "assistant", "content": text}} if request.url == CHAT else {"text": text}
        return {"index": idx, **content, "logprobs": None, "finish_reason": reason}


def _summary(totals: Totals, path: Path) -> str:
    took_s = time.perf_counter() - totals.start_s
    text = (
        f"\n{totals.answers:,} answers and {totals.errors:,} errors written into {path} in {format_seconds(took_s)}: "
        f"{totals.prompt_tokens:,} tokens read, {totals.new_tokens:,} generated, {totals.rate}"
    )
    return text + (f". {totals.kept:,} were there before." if totals.kept else ".")
