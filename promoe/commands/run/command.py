"""`promoe run`: opens the model, streams one answer, and reports."""

from __future__ import annotations

import platform
import sys
import textwrap
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import TextStreamer

import promoe
from promoe.commands.charts.html_report import html_report
from promoe.commands.live_view import Panel, metered, no_link
from promoe.commands.measure import Generation, generate
from promoe.commands.run.options import Options
from promoe.commands.terminal import LiveText, opening_bar
from promoe.errors import ConfigError
from promoe.files import check_writable
from promoe.model.tokenizer import check_known, load_tokenizer, prompt_inputs
from promoe.runtime.loading import from_pretrained
from promoe.stats.lanes import Lanes, median_token
from promoe.stats.text_report import Run, save_run, text_report
from promoe.transfer.cpu_contention import CoreWatch, Taken, without_busy_cores
from promoe.transfer.processor import num_cores, processor_name
from promoe.units import format_number, format_seconds

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROMPT_LENGTH = 120  # characters of the prompt in a report
LOG_EVERY_S = 1.0  # seconds between lines of --live where stderr is not a terminal


@without_busy_cores()  # said in the report
def answer(options: Options) -> Generation:
    """Open the model, stream its answer to stdout, and report to stderr.

    Raises:
        PromoeError: the model cannot be opened, or an output path not be written (checked before the model is opened).
    """
    asked = (options.trace, options.report, _figures(options))
    outputs = [check_writable(path) for path in asked if path is not None]
    if len(set(outputs)) < len(outputs):
        raise ConfigError(
            f"--trace and --report would write the same file, '{outputs[0]}': a report writes its page, and its numbers "
            "beside it as .json. Give other names."
        )
    transformers.logging.disable_progress_bar()  # ours shows bytes
    tokenizer = load_tokenizer(options.model)
    with opening_bar(Path(options.model).name) as progress:
        opening = options.for_opening()
        if options.store == "host":
            opening |= {"cache": "100%", "experts": "checkpoint"}  # the stock model reads the checkpoint's own experts
        model = from_pretrained(options.model, progress=progress, **opening)
    handle: Any = model.promoe
    try:
        inputs = {name: ids.to(model.device) for name, ids in prompt_inputs(tokenizer, options.prompt).items()}
        check_known(model, inputs["input_ids"])
        token, watch = None, CoreWatch()
        with ExitStack() as stack:
            if options.trace is not None or options.report is not None:
                tracer = stack.enter_context(handle.trace(options.trace))
            torch.manual_seed(options.seed)
            generation = _stream(model, tokenizer, inputs, options)
            taken = watch.taken()
            if options.report is not None:
                token = median_token(tracer.spans())
    finally:
        handle.close()
    _report(handle.stats(), generation, options, token, taken)
    return generation


def _figures(options: Options) -> Path | None:
    """Return where the report's numbers go.

    Raises:
        ConfigError: the report itself cannot be written.
    """
    return None if options.report is None else check_writable(options.report).with_suffix(".json")


def _sampling(options: Options, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the arguments of `model.generate` that say how tokens are chosen."""
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    sampling = {"do_sample": True, "temperature": options.temperature} if options.samples else {"do_sample": False}
    return {**sampling, "pad_token_id": pad}


class WordStreamer(TextStreamer):  # type: ignore[misc]
    """Turns tokens into whole words, and gives them to a `LiveText`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, live: LiveText) -> None:
        super().__init__(tokenizer, skip_special_tokens=True)
        self._live = live

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Write words that no later token can change."""
        self._live.text(text)


def _stream(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, inputs: dict[str, torch.Tensor], options: Options
) -> Generation:
    live = LiveText(sys.stdout, sys.stderr, log_every_s=LOG_EVERY_S if options.live else None)
    words = WordStreamer(tokenizer, live)
    handle: Any = model.promoe
    with ExitStack() as stack:
        stack.callback(live.end)
        busy_s = stack.enter_context(metered(handle)) if options.live else no_link
        panel = Panel(handle.stats, busy_s)
        count = 0

        def on_token(token: int) -> None:
            nonlocal count
            count += 1
            if count == 1:
                panel.begin()
            words.put(torch.tensor([token]))
            live.status(lambda: panel.text(count, live.room if options.live else (live.room[0], 1)))

        live.status(lambda: f"reading a prompt of {inputs['input_ids'].shape[1]} tokens")
        generation = generate(model, inputs, options.max_new_tokens, on_token, **_sampling(options, tokenizer))
        words.end()
    return generation


def _times(generation: Generation) -> str:
    text = f"times     {format_seconds(generation.ttft_s)} to the first token"
    if not generation.gaps_s:
        return text
    tpot_s = generation.tpot_s
    return f"{text}, then {format_seconds(tpot_s)} per token ({format_number(1 / tpot_s)} tokens/s)"


def _conditions(stats: Any, generation: Generation, options: Options, taken: Taken | None) -> dict[str, str]:
    """Return the conditions under which the numbers were measured."""
    sampling = "greedy" if not options.samples else f"temperature {options.temperature:g}, seed {options.seed}"
    return {
        "model": options.model,
        "prompt": textwrap.shorten(options.prompt, PROMPT_LENGTH, placeholder=" ..."),
        "tokens": f"{len(generation.tokens):,} generated, {sampling}",
        "link": stats.link,
        "processor": processor_name(),
        "threads": f"{torch.get_num_threads()} on {num_cores()} cores",
        **({} if taken is None else {"cores": taken.describe()}),
    } | with_what_and_when()


def with_what_and_when() -> dict[str, str]:
    """Return the versions and the date for any report."""
    return {
        "versions": f"promoe {promoe.__version__}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}",
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
    }


def _report(stats: Any, generation: Generation, options: Options, token: Lanes | None, taken: Taken | None) -> None:
    tpot_s, ttft_s = generation.tpot_s if generation.gaps_s else None, generation.ttft_s
    print(f"\n{_times(generation)}\n{text_report(stats, tpot_s=tpot_s, ttft_s=ttft_s)}", file=sys.stderr)
    if taken is not None and taken.much_by_others:
        print(f"cores     {taken.describe()}. {taken.remedy}", file=sys.stderr)
    if (figures := _figures(options)) is not None:
        run = Run("this run", stats, tpot_s=tpot_s, ttft_s=ttft_s, token=token)
        conditions = _conditions(stats, generation, options, taken)
        page = html_report([run], str(options.report), f"promoe run: {options.model}", conditions)
        print(f"report    {page}; its numbers {save_run(run, figures, conditions)}, for promoe report", file=sys.stderr)
    if options.trace is not None:
        print(f"timeline  {options.trace} (open it at https://ui.perfetto.dev)", file=sys.stderr)
