"""Runs Transformers' continuous batching: sequences share a paged KV cache and each step, without padding.

It runs in a thread of its own. An error there ends it, and is raised here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakSet

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor

from promoe.errors import PatchStateError, PromoeError, UnsupportedModelError
from promoe.runtime.sampling import cut, end_ids
from promoe.runtime.token_choice import TokenChoice

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Tokens of a page of the KV cache.
PAGE_TOKENS = 32
# Kinds of layers whose cache has pages.
PAGED_LAYERS = {"full_attention", "sliding_attention"}
# Families whose attention keeps something else than a key and a value per head.
NOT_PAGED = {"jetmoe", "mimo_v2_flash"}
# Seconds after which the thread is looked at, if no answer comes.
LOOK_EVERY_S = 1.0
# Models that are answering a batch.
_RUNNING: WeakSet[Any] = WeakSet()


def is_paged(model: PreTrainedModel) -> bool:
    """Return whether continuous batching can serve a model: a decoder in which every layer has attention over whole heads.

    It has no pages for states of linear attention, nor for the latents of multi-head latent attention.
    """
    config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    head_sizes = {getattr(config, name, None) for name in ("head_dim", "v_head_dim")} - {None}
    return (
        not model.config.is_encoder_decoder
        and config.model_type not in NOT_PAGED
        and kinds <= PAGED_LAYERS
        and len(head_sizes) < 2
        and getattr(config, "kv_lora_rank", None) is None
        and not getattr(model, "_is_stateful", False)
        and bool(getattr(model, "_supports_attention_backend", False))
    )


def kv_token_bytes(model: PreTrainedModel) -> int:
    """Return the bytes that a token takes in the paged KV cache of all layers."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * width * model.dtype.itemsize)


class PagedRunner:
    """Continuous batching of one model, while the context is open.

    Args:
        model: `is_paged`.
        at_once: the most sequences of a step.
        step_tokens: the most tokens of a step.
        kv_tokens: of the KV cache, rounded up to whole pages.
    """

    def __init__(self, model: PreTrainedModel, at_once: int, step_tokens: int, kv_tokens: int) -> None:
        pages = -(-kv_tokens // PAGE_TOKENS)
        self.kv_tokens = pages * PAGE_TOKENS
        # The model's other settings are in each sequence's `TokenChoice`: some would be left out here, and others fail.
        self._ends = end_ids(model) or [-1]  # -1 is no token
        self._generation = GenerationConfig(
            eos_token_id=self._ends, pad_token_id=model.generation_config.pad_token_id, do_sample=False
        )
        self._model: Any = model
        self._choices: dict[str, TokenChoice] = {}
        self._settings = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=pages,
            max_batch_tokens=max(step_tokens, at_once),
            max_requests_per_batch=at_once,
            use_async_batching=False,
            # Otherwise Transformers decides: with flash attention on a GPU, it captures the forward, which waits for experts.
            use_cuda_graph=False,
            auto_switch_to_flash=False,
        )

    def __enter__(self) -> PagedRunner:
        """Start the thread.

        Raises:
            PatchStateError: another batch of the model is running.
            UnsupportedModelError: Transformers cannot serve the model in this way.
        """
        if self._model in _RUNNING:
            raise PatchStateError("This model is answering another batch. Wait for its end, or close its generator.")
        try:
            self._manager = self._model.init_continuous_batching(self._generation, self._settings)
        except (ValueError, AttributeError) as error:
            raise UnsupportedModelError(
                f"Transformers' continuous batching cannot serve this {type(self._model).__name__}: {error}. Open it with "
                'attn_implementation="sdpa".'
            ) from error
        processors = self._manager.logit_processor
        processors.logits_processor.append(_Choosing(self._choices))
        processors.tensors_required += 1
        processors.do_processing = True
        self._manager.start()
        _RUNNING.add(self._model)
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the thread; what is not answered is dropped."""
        try:
            self._manager.stop(block=True, hard_stop=True)
        finally:
            _RUNNING.discard(self._model)
            self._manager.destroy()

    def add(self, number: int, ids: Sequence[int], max_new_tokens: int, choice: TokenChoice | None = None) -> None:
        """Queue a sequence.

        Args:
            number: its number.
            ids: the prompt's tokens.
            max_new_tokens: longest answer, in tokens.
            choice: chooses its tokens; None: the most likely ones.
        """
        name = str(number)
        if choice is not None and not choice.plain:
            self._choices[name] = choice
        self._manager.add_request(list(ids), request_id=name, max_new_tokens=max_new_tokens, eos_token_id=self._ends)

    def next(self) -> tuple[int, list[int], bool, int | None]:
        """Wait for the next answer: its number, its tokens, whether it ended, and the model's token that ended it.

        Raises:
            PromoeError: the thread has failed.
        """
        while True:
            output = self._manager.get_result(timeout=LOOK_EVERY_S)
            fatal = self._manager.background_thread_status.fatal_error
            if fatal is not None or (output is None and not self._manager.is_running()):
                raise self._failed(fatal)
            if output is None or not output.is_finished():
                continue
            if output.error is not None:
                raise self._failed(output.error)
            tokens, end = cut(list(output.generated_tokens), self._ends)
            choice = self._choices.pop(output.request_id, None)
            return int(output.request_id), tokens, end is not None or (choice is not None and choice.stopped), end

    def _failed(self, error: object) -> BaseException:
        if isinstance(error, PromoeError):
            return error
        failure = PromoeError(
            f"Continuous batching has failed: {error or 'its thread has ended'}. The answers before "
            "this error are good. Ask for the others again; `promoe batch` does so when it is started again."
        )
        failure.__cause__ = error if isinstance(error, BaseException) else None
        return failure


class _Choosing(ContinuousBatchingLogitsProcessor):  # type: ignore[misc]
    """Chooses the token of each sequence of a step.

    Args:
        choices: by the name of a sequence; all others take the most likely token.
    """

    supported_kwargs: ClassVar[dict[str, type]] = {}
    ignored_kwargs: ClassVar = ()

    def __init__(self, choices: Mapping[str, TokenChoice]) -> None:
        self._choices = choices
        self._rows: list[tuple[int, Any, TokenChoice]] = []

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Do nothing: what is needed is kept here."""

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        """Note the sequences of a step, before it."""
        states = [request.state for request in requests_with_new_token]
        self._rows = [
            (row, state, choice)
            for row, state in enumerate(states)
            if (choice := self._choices.get(state.request_id)) is not None
        ]
        return torch.zeros(len(states), dtype=torch.int32, device="cpu")

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """Return scores `[rows, vocabulary]` whose largest ones are the tokens; rows after the sequences' are padding."""
        for row, state, choice in self._rows:
            # A sequence that had to leave the KV cache comes back with what there is of its answer as a part of its prompt.
            token = choice([*state.initial_tokens, *state.generated_tokens], scores[row])
            scores[row] = -torch.inf
            scores[row, token] = 0
            if choice.stopped:
                state._eos_token_ids.add(token)  # so that it leaves with this step
        return scores
