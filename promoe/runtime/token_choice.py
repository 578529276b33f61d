"""Chooses the tokens of the sequences of a batch, each by its own settings, as `generate` would for it alone.

What a prompt does not say comes from the model's `generation_config`, through Transformers' own logits processors: penalties,
suppressed and forced tokens, top_p and so on. Each sequence has processors of its own, which see its tokens without padding.
Only drawing differs from `generate`: its noise follows from the sequence's seed (`promoe.runtime.noise`).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from transformers import GenerationConfig, LogitsProcessorList

from promoe.errors import ConfigError
from promoe.runtime.noise import with_noise
from promoe.runtime.sampling import Sampling, end_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

EndsAt: TypeAlias = "Callable[[list[int]], bool]"
"""Takes the tokens of an answer so far, and returns whether it is complete."""

# Settings of `generate` that a batch does not have: they search, ask the model twice, or need a tokenizer or a clock. With the
# values that ask for nothing.
_ALONE_ONLY: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "penalty_alpha": (None, 0.0),
    "dola_layers": (None,),
    "guidance_scale": (None, 1.0),
    "stop_strings": (None,),
    "max_time": (None,),
}


class TokenChoice:
    """Chooses the tokens of one sequence.

    Attributes:
        plain: whether the most likely token is taken each time, and only the model's own tokens end the answer.
        stopped: whether `ends_at` has ended the answer.
    """

    def __init__(
        self, processors: LogitsProcessorList, seed: int | None, ends_at: EndsAt | None, start: int, end: int
    ) -> None:
        self._processors = processors
        self._seed = seed
        self._ends_at = ends_at
        self._start = start
        self._end = end
        self.plain = not processors and seed is None and ends_at is None
        self.stopped = False

    def __call__(self, ids: Sequence[int], scores: torch.Tensor) -> int:
        """Return the next token.

        Args:
            ids: the sequence so far, without padding.
            scores: logits `[vocabulary]`.
        """
        row = scores.float()
        if self._processors:
            row = self._processors(torch.tensor([list(ids)], device=row.device), row[None])[0]
        if self._seed is not None:
            row = with_noise(row, self._seed, len(ids) - self._start)
        token = int(row.argmax())
        if self._ends_at is not None:
            self.stopped = self._ends_at([*ids[self._start :], token])
        return token

    def complete(self, ids: Sequence[int]) -> bool:
        """Return whether a sequence has all its tokens, but for tokens of the model's that end it sooner."""
        return self.stopped or len(ids) >= self._end


class TokenChoices:
    """Makes the choices of sequences.

    Args:
        model: has the settings that prompts do not say.

    Raises:
        ConfigError: the model's settings cannot be used.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        self._configs: dict[tuple[tuple[str, Any], ...], GenerationConfig] = {}
        self.ends = end_ids(model)
        own = model.generation_config
        left_out = [
            f"{name}={value!r}"
            for name, neutral in _ALONE_ONLY.items()
            if (value := getattr(own, name, None)) not in neutral
        ]
        if left_out:
            logger.warning(
                "The model's generation_config has %s, which answers of a batch do not follow. model.generate does, prompt by "
                "prompt.",
                ", ".join(left_out),
            )
        self._check()

    def _check(self) -> None:
        num_ids = self._model.get_input_embeddings().num_embeddings
        try:
            for sampling in (Sampling(do_sample=False), Sampling(do_sample=True)):
                self.of([0], 2, sampling)([0], torch.zeros(num_ids, device=self._model.device))
        except Exception as error:  # of any of Transformers' processors
            raise ConfigError(
                f"The model's generation_config cannot be used: {type(error).__name__}: {str(error)[:500]} Repair "
                "generation_config.json, or change model.generation_config."
            ) from error

    def of(
        self, ids: Sequence[int], max_new_tokens: int, sampling: Sampling, ends_at: EndsAt | None = None
    ) -> TokenChoice:
        """Return what chooses the tokens of a sequence.

        Args:
            ids: the prompt's.
            max_new_tokens: longest answer, in tokens.
            sampling: what the prompt says.
            ends_at: ends the answer.
        """
        encoder = self._model.config.is_encoder_decoder
        start = 1 if encoder else len(ids)
        end = start + max_new_tokens
        config = copy.copy(self._config(sampling.settings))
        config.max_length = end
        processors = self._model._get_logits_processor(
            config,
            input_ids_seq_length=start,
            encoder_input_ids=torch.tensor([list(ids)], device=self._model.device) if encoder else None,
            device=self._model.device,
        )
        return TokenChoice(processors, sampling.seed if config.do_sample else None, ends_at, start, end)

    def _config(self, settings: dict[str, Any]) -> GenerationConfig:
        """Return settings completed by the model's own and by Transformers' defaults, as `generate` completes them."""
        key = tuple(sorted(settings.items()))
        if (known := self._configs.get(key)) is not None:
            return known
        config, _ = self._model._prepare_generation_config(GenerationConfig(**settings))
        config.num_beams, config.guidance_scale = 1, None
        self._model._prepare_special_tokens(config, device=self._model.device)
        self._configs[key] = config
        return config
