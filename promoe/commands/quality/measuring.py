"""Opens a model in one form after the other, and measures each against the first.

Memory: one model as `promoe.from_pretrained` opens it, the logits of one window, and blocks of `BLOCK_ELEMENTS` logits in
fp64. Disk: the reference's logits of all windows (see `LogitsSpool`).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from promoe.commands.measure import generate
from promoe.commands.quality.forms import REFERENCE, Form
from promoe.commands.quality.metrics import Figures, Scores, figures_of, same_tokens, score
from promoe.commands.quality.options import Options
from promoe.commands.quality.sample import Sample
from promoe.commands.quality.spool import LogitsSpool
from promoe.commands.terminal import opening_bar
from promoe.errors import CheckpointError, ConfigError
from promoe.model.context import context_tokens
from promoe.model.tokenizer import check_known
from promoe.runtime.loading import from_pretrained

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Logits that are compared at a time: 32 MiB in fp64.
BLOCK_ELEMENTS = 2**22


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
        reference, *others = (_read(options, form, sample, spool) for form in forms)
    return [_result(form, one, reference, options) for form, one in zip(forms, (reference, *others), strict=True)]


def _read(options: Options, form: Form, sample: Sample, spool: LogitsSpool) -> _Read:
    """Open the model in a form, and let it read the windows and answer the prompts. The first one fills the spool."""
    # Allocated at once: small tensors that stay, between large ones that go, would keep the large ones' memory in pieces.
    scores = Scores.empty(sample.num_predicted)
    with _opened(options, form) as model, torch.inference_mode():
        _check_window(model, options.window)
        start = 0
        for window in tqdm(sample.windows, desc=form.name, unit="window", disable=None, leave=False):
            check_known(model, window)
            ids = window.unsqueeze(0).to(model.device)
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].cpu()
            if len(spool) == start:
                spool.append(logits)
            _compare(logits, spool, start, window[1:], scores)
            start += len(logits)
        answers = tuple(_answer(model, prompt, options.max_new_tokens) for prompt in sample.prompts)
    if bool(scores.nll.isnan().any()):
        raise CheckpointError(
            f"The model computes NaN with its experts as {form.name}. Check the checkpoint (promoe run {options.model} ... "
            f"--experts {form.experts}), and quantise it again."
        )
    return _Read(scores, answers)


def _compare(logits: torch.Tensor, spool: LogitsSpool, start: int, targets: torch.Tensor, scores: Scores) -> None:
    """Compare a window with the reference, whose rows begin at `start`, in blocks, because fp64 takes four times as much."""
    rows = max(1, BLOCK_ELEMENTS // logits.shape[1])
    for i in range(0, len(logits), rows):
        block = logits[i : i + rows]
        reference = spool.read(start + i, start + i + len(block))
        scores.put(start + i, score(block, reference, targets[i : i + rows]))


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
    most = context_tokens(model.config)
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
