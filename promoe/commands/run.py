"""`promoe run`: one prompt, answered by a checkpoint whose experts stay on disk."""

from __future__ import annotations

import platform
import sys
import textwrap
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import transformers
from transformers import TextStreamer

import promoe
from promoe.commands.charts.html_report import html_report
from promoe.commands.live_view import Panel, metered, no_link
from promoe.commands.measure import Generation, generate
from promoe.commands.terminal import LiveText, opening_bar
from promoe.errors import ConfigError, check_at_least, shown
from promoe.files import check_writable
from promoe.model.tokenizer import check_known, load_tokenizer, prompt_inputs
from promoe.runtime.loading import from_pretrained
from promoe.runtime.sizes import CacheSize
from promoe.stats.lanes import Lanes, median_token
from promoe.stats.run import Run
from promoe.stats.saved_run import save_run
from promoe.stats.text_report import text_report
from promoe.transfer.cpu_contention import CoreWatch, Taken
from promoe.transfer.processor import num_cores, processor_name
from promoe.units import format_number, format_seconds

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Below, the most likely token is certain, and logits divided by it are soon more than floats can hold.
LEAST_TEMPERATURE = 1e-5
PROMPT_LENGTH = 120  # characters of it in a report
LOG_EVERY_S = 1.0  # of --live where stderr is no terminal


@dataclass(frozen=True)
class Request:
    """What `promoe run` was asked for; see the help of its options.

    Raises:
        ConfigError: a value is out of range.
    """

    model: str
    prompt: str
    cache: CacheSize = "50%"
    predictor: str | None = "gate"
    store: Literal["auto", "disk", "host"] = "auto"
    device: str = "cpu"
    packed: str | None = "auto"
    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    trace: str | None = None
    report: str | None = None
    live: bool = False

    def __post_init__(self) -> None:
        check_at_least(1, max_new_tokens=self.max_new_tokens)
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(f"--temperature must be 0 (greedy) or more. Got {self.temperature} instead.")
        if self.store == "host" and self.device != "cpu":
            raise ConfigError('--store host keeps all experts in RAM without slots. Leave it out with --device "cuda".')
        if self.store == "host" and self.packed not in ("auto", None):
            raise ConfigError("--store host runs the stock model, which reads no packed experts. Leave --packed out.")
        if self.store == "host" and self.cache not in (Request.cache, "100%"):
            raise ConfigError(
                f"--store host keeps all experts in RAM, without slots: --cache {self.cache} would do nothing. Leave one out."
            )
        if not self.prompt.strip():
            raise ConfigError("The prompt is empty. Give the model something to answer, in quotes.")
        try:
            self.prompt.encode()
        except UnicodeEncodeError as error:  # bytes that the command line did not have as UTF-8
            raise ConfigError(f"The prompt is no text in UTF-8: {shown(self.prompt)}. Type it anew.") from error

    @property
    def figures(self) -> Path | None:
        """Where the report's numbers go.

        Raises:
            ConfigError: the report itself cannot be written.
        """
        return None if self.report is None else check_writable(self.report).with_suffix(".json")

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn; else the most likely one is taken."""
        return self.temperature >= LEAST_TEMPERATURE

    def options(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """For `model.generate`."""
        pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        sampling = {"do_sample": True, "temperature": self.temperature} if self.samples else {"do_sample": False}
        return {**sampling, "pad_token_id": pad}


def answer(request: Request) -> Generation:
    """Open the model, stream its answer to stdout, and report to stderr.

    Raises:
        PromoeError: the model cannot be opened, or an output path not be written (checked before the model is opened).
    """
    if request.report is not None and Path(request.report).suffix == ".json":
        raise ConfigError(
            f"--report writes a page, and its numbers beside it as .json. Give it another name than '{request.report}', such "
            f"as '{Path(request.report).with_suffix('.html')}'."
        )
    asked = (request.trace, request.report, request.figures)
    outputs = [check_writable(path) for path in asked if path is not None]
    if len(set(outputs)) < len(outputs):
        raise ConfigError(
            f"--trace and --report would write the same file, '{outputs[0]}': a report writes its page, and its numbers "
            "beside it as .json. Give other names."
        )
    transformers.logging.disable_progress_bar()  # ours shows bytes
    tokenizer = load_tokenizer(request.model)
    with opening_bar(Path(request.model).name) as progress:
        model = from_pretrained(
            request.model,
            cache="100%" if request.store == "host" else request.cache,
            predictor=request.predictor,
            device=request.device,
            packed=None if request.store == "host" else request.packed,  # whose stock model reads the checkpoint
            progress=progress,
        )
    handle: Any = model.promoe
    try:
        inputs = {name: ids.to(model.device) for name, ids in prompt_inputs(tokenizer, request.prompt).items()}
        check_known(model, inputs["input_ids"])
        token, watch = None, CoreWatch()
        with ExitStack() as stack:
            if request.trace is not None or request.report is not None:
                tracer = stack.enter_context(handle.trace(request.trace))
            torch.manual_seed(request.seed)
            generation = _stream(model, tokenizer, inputs, request)
            taken = watch.taken()
            if request.report is not None:
                token = median_token(tracer.spans())
    finally:
        handle.close()
    _report(handle.stats(), generation, request, token, taken)
    return generation


class WordStreamer(TextStreamer):  # type: ignore[misc]
    """Tokens in, whole words out, to a `LiveText`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, live: LiveText) -> None:
        super().__init__(tokenizer, skip_special_tokens=True)
        self._live = live

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Words that no later token can change."""
        self._live.text(text)


def _stream(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, inputs: dict[str, torch.Tensor], request: Request
) -> Generation:
    live = LiveText(sys.stdout, sys.stderr, log_every_s=LOG_EVERY_S if request.live else None)
    words = WordStreamer(tokenizer, live)
    handle: Any = model.promoe
    with ExitStack() as stack:
        stack.callback(live.end)
        busy_s = stack.enter_context(metered(handle)) if request.live else no_link
        panel = Panel(handle.stats, busy_s)
        count = 0

        def on_token(token: int) -> None:
            nonlocal count
            count += 1
            if count == 1:
                panel.begin()
            words.put(torch.tensor([token]))
            live.status(lambda: panel.text(count, live.room if request.live else (live.room[0], 1)))

        live.status(lambda: f"reading a prompt of {inputs['input_ids'].shape[1]} tokens")
        generation = generate(model, inputs, request.max_new_tokens, on_token, **request.options(tokenizer))
        words.end()
    return generation


def _times(generation: Generation) -> str:
    text = f"times     {format_seconds(generation.ttft_s)} to the first token"
    if not generation.gaps_s:
        return text
    tpot_s = generation.tpot_s
    return f"{text}, then {format_seconds(tpot_s)} per token ({format_number(1 / tpot_s)} tokens/s)"


def _conditions(stats: Any, generation: Generation, request: Request, taken: Taken | None) -> dict[str, str]:
    """What the numbers hold for."""
    sampling = "greedy" if not request.samples else f"temperature {request.temperature:g}, seed {request.seed}"
    return {
        "model": request.model,
        "prompt": textwrap.shorten(request.prompt, PROMPT_LENGTH, placeholder=" ..."),
        "tokens": f"{len(generation.tokens):,} generated, {sampling}",
        "link": stats.link,
        "processor": processor_name(),
        "threads": f"{torch.get_num_threads()} on {num_cores()} cores",
        **({} if taken is None else {"cores": taken.describe()}),
    } | with_what_and_when()


def with_what_and_when() -> dict[str, str]:
    """What the numbers of a report hold for, of whatever was run."""
    return {
        "versions": f"promoe {promoe.__version__}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}",
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
    }


def _report(stats: Any, generation: Generation, request: Request, token: Lanes | None, taken: Taken | None) -> None:
    tpot_s, ttft_s = generation.tpot_s if generation.gaps_s else None, generation.ttft_s
    print(f"\n{_times(generation)}\n{text_report(stats, tpot_s=tpot_s, ttft_s=ttft_s)}", file=sys.stderr)
    if taken is not None and taken.much_by_others:
        print(f"cores     {taken.describe()}. {taken.remedy}", file=sys.stderr)
    if request.report is not None and request.figures is not None:
        run = Run("this run", stats, tpot_s=tpot_s, ttft_s=ttft_s, token=token)
        conditions = _conditions(stats, generation, request, taken)
        page = html_report([run], request.report, f"promoe run: {request.model}", conditions)
        figures = save_run(run, request.figures, conditions)
        print(f"report    {page}; its numbers {figures}, for promoe report", file=sys.stderr)
    if request.trace is not None:
        print(f"timeline  {request.trace} (open it at https://ui.perfetto.dev)", file=sys.stderr)
