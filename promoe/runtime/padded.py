"""Answers prompts in padded batches, by `generate`: for models that continuous batching cannot serve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

from promoe.runtime.admission import Admitted
from promoe.runtime.sampling import cut, end_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def padded_batch(
    model: PreTrainedModel, batch: Sequence[Admitted]
) -> Iterator[tuple[int, list[int], bool, int | None]]:
    """Answer some prompts together, padded to the longest.

    Yields:
        For each prompt its number, the tokens of its answer, whether it ended, and the model's token that ended it.
    """
    longest = max(len(one.ids) for one in batch)
    own = model.generation_config
    ends, pad = end_ids(model), own.pad_token_id
    if pad is None:
        pad = ends[0] if ends else 0
    ids = torch.tensor([[pad] * (longest - len(one.ids)) + list(one.ids) for one in batch])
    mask = torch.tensor([[0] * (longest - len(one.ids)) + [1] * len(one.ids) for one in batch])
    rows = _Rows(batch, 1 if model.config.is_encoder_decoder else longest, model.config.is_encoder_decoder)
    # Nothing of the model's own settings but these: the rest is in each sequence's `TokenChoice`.
    settings = GenerationConfig(
        eos_token_id=own.eos_token_id,
        pad_token_id=pad,
        bos_token_id=own.bos_token_id,
        decoder_start_token_id=own.decoder_start_token_id,
    )
    with torch.inference_mode(), _generating_by(model, settings):
        output: Any = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=max(one.max_new_tokens for one in batch),
            logits_processor=[_ChosenRows(rows)],
            stopping_criteria=[_CompleteRows(rows)],
        )
    for one, tokens in zip(batch, output[:, rows.start :].tolist(), strict=True):
        tokens, end = cut(tokens[: rows.lengths.get(one.number, one.max_new_tokens)], ends)
        yield one.number, tokens, end is not None or one.choice.stopped, end


@contextmanager
def _generating_by(model: PreTrainedModel, settings: GenerationConfig) -> Iterator[None]:
    """Give a model other settings while the context lasts: `generate` takes what is not said from the model's own."""
    before = model.generation_config
    model.generation_config = settings
    try:
        yield
    finally:
        model.generation_config = before


class _Rows:
    """The sequences of a padded batch.

    Args:
        batch: in the order of rows.
        start: column of the first token of the answers.
        apart: whether the answers' rows do not begin with the prompts.

    Attributes:
        lengths: tokens of the answers that are complete, by number.
    """

    def __init__(self, batch: Sequence[Admitted], start: int, apart: bool) -> None:
        self.start = start
        self.lengths: dict[int, int] = {}
        self._batch = batch
        self._begins = [0 if apart else start - len(one.ids) for one in batch]

    def choose(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores `[sequences, vocabulary]` whose largest ones are the tokens."""
        for row, (one, begin) in enumerate(zip(self._batch, self._begins, strict=True)):
            if one.number in self.lengths or one.choice.plain:
                continue
            token = one.choice(ids[row, begin:].tolist(), scores[row])
            scores[row] = -torch.inf
            scores[row, token] = 0
        return scores

    def complete(self, ids: torch.Tensor) -> torch.Tensor:
        """Return which sequences `[sequences]` have all their tokens."""
        for one, begin in zip(self._batch, self._begins, strict=True):
            if one.number not in self.lengths and one.choice.complete(range(ids.shape[1] - begin)):
                self.lengths[one.number] = ids.shape[1] - self.start
        return torch.tensor([one.number in self.lengths for one in self._batch], device=ids.device)


class _ChosenRows(LogitsProcessor):  # type: ignore[misc]
    """Chooses the tokens of a padded batch."""

    def __init__(self, rows: _Rows) -> None:
        self._rows = rows

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores whose largest ones are the tokens."""
        return self._rows.choose(input_ids, scores)


class _CompleteRows(StoppingCriteria):  # type: ignore[misc]
    """Ends the sequences of a padded batch, each at its own length or stop."""

    def __init__(self, rows: _Rows) -> None:
        self._rows = rows

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return which sequences are complete."""
        return self._rows.complete(input_ids)
