"""Models at work the way that programs use them: batches that requests join and leave, pipelines, streams."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from served import PROMPTS, LinkOver, load_stock, served
from tiny_checkpoint import write_checkpoint
from transformers import (
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextIteratorStreamer,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer

from generation.compared import (
    FAMILY,
    SLOTS,
    assert_same,
    assert_same_patched,
    unmodified,
)
from promoe.stores import Chunk
from promoe.transfer.links import HostLink

PADDED = PROMPTS["padded"]
ONE = PROMPTS["one"]
GREEDY: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}


# -- continuous batching ----------------------------------------------------------------------------------------

REQUESTS = [[3, 4, 5, 6], [7, 8, 9], list(range(10, 22))]


@pytest.fixture
def _few_objects_to_collect() -> Iterator[None]:
    """Ending a batch collects garbage twice, which takes longer than all of its tokens."""
    gc.freeze()
    yield
    gc.unfreeze()


def batch_results(model: PreTrainedModel, max_batch_tokens: int = 64, **kwargs: Any) -> dict[str, Any]:
    """Generated in transformers' own thread, which takes requests in as there is room."""
    # A small cache said outright: by default it takes most of the machine's memory.
    batching = ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=max_batch_tokens, return_logprobs=True)
    generation = GenerationConfig(max_new_tokens=5, eos_token_id=-1, **kwargs)
    results: dict[str, Any] = model.generate_batch(
        REQUESTS, generation_config=generation, continuous_batching_config=batching
    )
    return results


@pytest.mark.usefixtures("_few_objects_to_collect")
@pytest.mark.parametrize("store", ["host", "file"])
@pytest.mark.parametrize(
    ("max_batch_tokens", "sampled", "passes"),
    [
        (64, False, (1, 4)),
        (64, True, (1, 4)),
        # Prompts go in piece by piece, beside requests that are being answered already.
        (5, False, (4, 5)),
    ],
    ids=["greedy", "sampled", "in pieces"],
)
def test_continuous_batching(max_batch_tokens: int, sampled: bool, passes: tuple[int, int], store: str) -> None:
    def call(model: PreTrainedModel) -> Any:
        results = batch_results(model, max_batch_tokens, do_sample=sampled)
        assert [(len(result.generated_tokens), result.error) for result in results.values()] == [(5, None)] * 3
        return [(torch.tensor(result.generated_tokens), torch.tensor(result.logprobs)) for result in results.values()]

    stats = assert_same(call, store=store)
    assert (stats.prefill.passes, stats.decode.passes) == passes
    assert stats.decode.sequences == stats.decode.tokens > stats.decode.passes


@pytest.mark.usefixtures("_few_objects_to_collect")
def test_requests_whose_experts_cannot_be_read_say_why() -> None:
    """The error of the other thread reaches the caller; the model is whole afterwards."""

    class Failing(HostLink):
        broken = True

        def transfer(self, chunk: Chunk, destination: memoryview, address: int) -> None:
            if Failing.broken:
                raise OSError("unplugged")
            super().transfer(chunk, destination, address)

    def call(model: PreTrainedModel) -> torch.Tensor:
        tokens: torch.Tensor = model.generate(**ONE, **GREEDY)
        return tokens

    wanted = call(unmodified())
    with served(FAMILY, cache=SLOTS, link=LinkOver(Failing)) as model:
        for result in batch_results(model).values():
            assert "could not be fetched" in result.error
            assert "unplugged" in result.error
        Failing.broken = False
        assert torch.equal(call(model), wanted)


# -- text in, text out ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), top_k=3)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    return tokenizer


CHAT = [{"role": "user", "content": "Which experts?"}]


@pytest.mark.parametrize(
    "asked",
    [["One prompt", "and a longer one"], [CHAT, [*CHAT, {"role": "user", "content": "All?"}]]],
    ids=["text", "chat"],
)
def test_a_pipeline(asked: Sequence[Any], checkpoint: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    def call(model: PreTrainedModel) -> Any:
        generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
        assert generate.model is model
        kwargs = {"max_new_tokens": 6, "max_length": None, "do_sample": False}
        texts = generate(asked, batch_size=2, **kwargs)
        ids = generate(asked, batch_size=2, return_tensors=True, **kwargs)
        return texts, [torch.tensor(answers[0]["generated_token_ids"]) for answers in ids]

    assert_same_patched(call, load_stock(checkpoint))


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_an_answer_streamed_from_another_thread(
    sampled: bool, checkpoint: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    inputs = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True)

    def call(model: PreTrainedModel) -> Any:
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
        kwargs = {**inputs, "streamer": streamer, "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": sampled}
        with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as threads:
            answer = threads.submit(model.generate, **kwargs)
            pieces = list(streamer)
            return pieces, answer.result(60)

    stats = assert_same_patched(call, load_stock(checkpoint))
    assert stats.decode.passes == 11


def test_a_stream_that_breaks_between_two_passes() -> None:
    """An exception of the caller's own ends one answer, not the model."""

    class Full(BaseStreamer):
        def __init__(self) -> None:
            self.room = 3

        def put(self, value: torch.Tensor) -> None:
            self.room -= 1
            if not self.room:
                raise BufferError("no room")

        def end(self) -> None:
            pass

    def call(model: PreTrainedModel) -> torch.Tensor:
        with pytest.raises(BufferError, match="no room"):
            model.generate(**ONE, **GREEDY, streamer=Full())
        tokens: torch.Tensor = model.generate(**ONE, **GREEDY)
        return tokens

    stats = assert_same(call)
    assert stats.prefill.passes == 2
