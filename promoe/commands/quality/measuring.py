"""Opens a model in one form after the other, and measures each against the first.

Memory: one model as `promoe.from_pretrained` opens it, the logits of one window, and blocks of `BLOCK_ELEMENTS` logits in
fp64. Disk: the reference's logits of all windows (see `LogitsSpool`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from promoe.commands.measure import generate
from promoe.commands.quality.forms import REFERENCE, Form
from promoe.commands.quality.metrics import Figures, Scores, figures_of, joined, same_tokens, score
from promoe.commands.quality.options import Options
from promoe.commands.quality.sample import Sample
from promoe.commands.quality.spool import LogitsSpool
from promoe.commands.terminal import opening_bar
from promoe.errors import CheckpointError, ConfigError
from promoe.model.tokenizer import check_known
from promoe.runtime.loading import from_pretrained

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Logits that are compared at a time: 32 MiB in fp64.
BLOCK_ELEMENTS = 2**22
# Takes a window's logits `[n, vocabulary]`, the number of its first row among all rows, and its targets `[n]`.
ScoreWindow = Callable[[torch.Tensor, int, torch.Tensor], Scores]


@dataclass(frozen=True)
class Result:
    """What was measured of a form.

    Attributes:
        form: the form.
        figures: means over all predicted tokens.
        same_tokens: of greedy answers, the mean number of tokens before the first one that differs from the reference's;
            None without prompts.
    """

    form: Form
    figures: Figures
    same_tokens: float | None


@dataclass(frozen=True)
class _Read:
    """What one model made of the sample: scores of all predicted tokens, and the tokens of its answers."""

    scores: Scores
    answers: tuple[tuple[int, ...], ...]


def measure(options: Options, forms: Sequence[Form], sample: Sample) -> list[Result]:
    """Measure each form against the first one.

    Args:
        options: how models are opened.
        forms: the reference, then the others.
        sample: what they read.

    Raises:
        PromoeError: a model cannot be opened, computes NaN, or the disk has no room for the reference's logits.
    """
    assert forms[0].experts == REFERENCE, forms
    with LogitsSpool(options.spool, sample.num_predicted) as spool:

        def keep(logits: torch.Tensor, start: int, targets: torch.Tensor) -> Scores:
            spool.append(logits)
            return compare(logits, start, targets)

        def compare(logits: torch.Tensor, start: int, targets: torch.Tensor) -> Scores:
            return _in_blocks(logits, spool, start, targets)

        reference = _read(options, forms[0], sample, keep)
        read = [reference, *(_read(options, form, sample, compare) for form in forms[1:])]
    return [_result(form, one, reference, options) for form, one in zip(forms, read, strict=True)]


def _in_blocks(logits: torch.Tensor, spool: LogitsSpool, start: int, targets: torch.Tensor) -> Scores:
    """Compare a window with the reference, whose rows begin at `start`, in blocks, because fp64 takes four times as much."""
    rows = max(1, BLOCK_ELEMENTS // logits.shape[1])
    return joined(
        [
            score(
                logits[i : i + rows], spool.read(start + i, start + min(i + rows, len(logits))), targets[i : i + rows]
            )
            for i in range(0, len(logits), rows)
        ]
    )


def _read(options: Options, form: Form, sample: Sample, score_window: ScoreWindow) -> _Read:
    """Open the model in a form, and let it read the windows and answer the prompts."""
    with _opened(options, form) as model, torch.inference_mode():
        _check_window(model, options.window)
        bar = tqdm(sample.windows, desc=form.name, unit="window", disable=None, leave=False)
        scores, start = [], 0
        for window in bar:
            check_known(model, window)
            ids = window.unsqueeze(0).to(model.device)
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].cpu()
            scores.append(score_window(logits, start, window[1:]))
            start += len(logits)
        read = _Read(joined(scores), tuple(_answer(model, prompt, options.max_new_tokens) for prompt in sample.prompts))
    if bool(read.scores.nll.isnan().any()):
        raise CheckpointError(
            f"The model computes NaN with its experts as {form.name}. Check the checkpoint (promoe run {options.model} ... "
            f"--experts {form.experts}), and quantise it again."
        )
    return read


@contextmanager
def _opened(options: Options, form: Form) -> Iterator[PreTrainedModel]:
    gc.collect()  # frees the model before, whose modules refer to each other: there are never two at once
    with opening_bar(f"{Path(options.model).name}, {form.name}") as progress:
        model = from_pretrained(options.model, progress=progress, **options.for_opening(form.experts))
    handle: Any = model.promoe
    try:
        yield model
    finally:
        handle.close()


def _check_window(model: PreTrainedModel, window: int) -> None:
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most is not None and window > most:
        raise ConfigError(f"--window {window} is longer than the {most} positions of this model. Give at most {most}.")


def _answer(model: PreTrainedModel, prompt: torch.Tensor, max_new_tokens: int) -> tuple[int, ...]:
    """Return the tokens of a greedy answer to `prompt[n]`."""
    ids = prompt.unsqueeze(0).to(model.device)
    # The padding is never used, but without a token for it there would be a warning.
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return generate(model, inputs, max_new_tokens, pad_token_id=0).tokens


def _result(form: Form, read: _Read, reference: _Read, options: Options) -> Result:
    pairs = zip(read.answers, reference.answers, strict=True)
    counts = [same_tokens(answer, expected, options.max_new_tokens) for answer, expected in pairs]
    return Result(form, figures_of(read.scores, reference.scores), mean(counts) if counts else None)
