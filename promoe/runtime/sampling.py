"""What a prompt says about how its tokens are drawn, and where an answer ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Below this temperature the most likely token is certain, and dividing logits by it soon gives more than floats can hold.
LEAST_TEMPERATURE = 1e-5
# Settings of a `GenerationConfig` that a prompt may have for itself.
_SETTINGS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# Of these, what is of use only where tokens are drawn.
_OF_DRAWING = ("temperature", "top_p", "top_k", "min_p")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of one sequence are drawn. What is None comes from the model's `generation_config`, as in `generate`.

    Attributes:
        temperature: temperature of the softmax; 0 takes the most likely token each time.
        top_p: share of probability that is left, of the most likely tokens; 1 leaves all.
        top_k: number of most likely tokens that are left; 0 leaves all.
        seed: two sequences with the same prompt and seed are the same.
        min_p: least probability of a token, as a share of the most likely one's.
        repetition_penalty: penalty of tokens that are there already; 1 is none.
        do_sample: whether tokens are drawn. None: they are if `temperature` is above 0; without one, if `top_p`, `top_k` or
            `min_p` is given, or if the model's own settings say so.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0
    min_p: float | None = None
    repetition_penalty: float | None = None
    do_sample: bool | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """What it says, under the names of a `GenerationConfig`."""
        said = {name: value for name in _SETTINGS if (value := getattr(self, name)) is not None}
        samples = self.do_sample
        if self.temperature is not None:
            samples = samples is not False and self.temperature >= LEAST_TEMPERATURE
        elif samples is None and said.keys() & set(_OF_DRAWING):
            samples = True
        if samples is False:
            said = {name: value for name, value in said.items() if name not in _OF_DRAWING}
        return said if samples is None else {**said, "do_sample": samples}


def cut(tokens: list[int], ends: Sequence[int]) -> tuple[list[int], int | None]:
    """Return the tokens before the first one that ends an answer, and that one; None: there is none."""
    first = next((place for place, token in enumerate(tokens) if token in ends), None)
    return (tokens, None) if first is None else (tokens[:first], tokens[first])


def end_ids(model: PreTrainedModel) -> list[int]:
    """Return the tokens that end a model's answers."""
    ends = model.generation_config.eos_token_id
    return [] if ends is None else list(ends) if isinstance(ends, (list, tuple)) else [ends]
