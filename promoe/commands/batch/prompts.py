"""The prompts of a batch as tokens, and how much work they are."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

from promoe.commands.batch.lines import CHAT, LineError, Request
from promoe.commands.plan.throughput import BatchWork
from promoe.errors import ConfigError
from promoe.model.context import longest_answer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encoded(tokenizer: PreTrainedTokenizerBase, request: Request) -> list[int]:
    """Return the tokens of a prompt.

    Raises:
        LineError: the tokenizer or its chat template cannot encode it.
    """
    try:
        if request.url == CHAT:
            ids: Any = tokenizer.apply_chat_template(
                request.content, add_generation_prompt=True, tokenize=True, return_dict=True
            )["input_ids"]
        elif isinstance(request.content, str):
            ids = tokenizer(request.content)["input_ids"]
        else:
            ids = request.content
    except Exception as error:  # a template is a program, and may raise anything
        raise LineError(
            request.custom_id,
            f"The tokenizer or its chat template cannot encode this: {type(error).__name__}: {error}.",
        ) from error
    return list(ids)


class PromptLengths:
    """The lengths of all prompts of a batch and of the answers that they ask for, a few bytes each.

    Args:
        tokenizer: the model's tokenizer.
        max_tokens: longest answer, in tokens, of requests that do not say it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        # Tokens of the prompt, tokens of the answer that was asked for (0: not said), and answers.
        self._lengths = array("q")

    def add(self, request: Request) -> None:
        """Add a request. One that cannot be encoded will be refused, and takes no time."""
        try:
            prompt = len(encoded(self._tokenizer, request))
        except LineError:
            return
        self._lengths.extend((prompt, request.max_tokens or 0, request.choices))

    def work(self, context: int | None) -> BatchWork | None:
        """Return how much work there is; None: no line can be answered. All answers are taken to be as long as they may be.

        Args:
            context: tokens of the model's context; None: unknown. Lines that ask for more are left out.
        """
        answers = prompts = new_tokens = longest = 0
        for start in range(0, len(self._lengths), 3):
            prompt, asked, choices = self._lengths[start : start + 3]
            try:
                answer = longest_answer(context, prompt, asked or None, self._max_tokens)
            except ConfigError:
                continue
            answers += choices
            prompts += choices * prompt
            new_tokens += choices * answer
            longest = max(longest, prompt + answer)
        return BatchWork(answers, prompts / answers, new_tokens / answers, longest) if answers else None
