"""What clients of OpenAI see of a tiny model: answers, streams, limits, errors; each against a real server on this machine."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from waiting import WAIT_S

from promoe.commands.serve.requests import CHAT, COMPLETION
from promoe.errors import EngineStalledError, ExpertLoadError
from promoe.model.tokenizer import load_tokenizer
from promoe.stats.totals import Stats

from .support import MESSAGES, PROMPT, Served, serving, stock_answer


def test_answers_are_the_unmodified_models_whole_and_streamed(served: Served) -> None:
    expected = stock_answer(served.folder, 12)
    assert len(expected) == 12
    whole = served.chat(12)
    assert whole.choices[0].message.content == expected
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 12
    assert whole.model == served.folder
    chunks = served.chat(12, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert len(chunks) > 3
    assert chunks[-1].choices[0].finish_reason == "length"
    assert chunks[-1].usage == whole.usage


def test_completions_have_no_chat_template(served: Served) -> None:
    expected = stock_answer(served.folder, 9, chat=False)
    asked: Any = {"model": served.folder, "prompt": PROMPT, "max_tokens": 9, "temperature": 0}
    with served.client() as client:
        assert client.completions.create(**asked).choices[0].text == expected
        chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected


def test_the_newer_name_of_the_length_and_stops_work(served: Served) -> None:
    expected = stock_answer(served.folder, 12)
    assert served.chat(12, max_tokens=None, max_completion_tokens=5).choices[0].message.content == expected[:5]
    stopped = served.chat(12, stop=expected[3:5]).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.message.content == expected[:5], "Transformers leaves the stop in the text, as documented"


def test_biases_reach_the_model(served: Served) -> None:
    tokenizer = load_tokenizer(served.folder)
    likeliest = served.chat(1).choices[0].message.content
    token = tokenizer.convert_tokens_to_ids(likeliest)
    assert served.chat(1, logit_bias={str(token): -100}).choices[0].message.content != likeliest


def test_completions_take_what_clients_send_as_prompts(served: Served) -> None:
    """One text, a list of them (LangChain), token ids, or a list of such lists, each answered as by itself."""
    tokenizer = load_tokenizer(served.folder)
    texts = [PROMPT, "Another one"]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    expected = [stock_answer(served.folder, 5, text, chat=False) for text in texts]
    assert expected[0] != expected[1]

    def complete(prompt: Any, **more: Any) -> Any:
        with served.client() as client:
            asked = {"model": served.folder, "prompt": prompt, "max_tokens": 5, "temperature": 0.0, **more}
            answer = client.completions.create(**asked)
            return list(answer) if more.get("stream") else answer

    for one in (texts[0], texts[:1], ids[0], ids[:1]):
        answer = complete(one)
        assert [choice.text for choice in answer.choices] == expected[:1]
        assert answer.usage.prompt_tokens == len(ids[0])
    streamed = complete(ids[1], stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == expected[1]
    for several in (texts, ids, [ids[0], texts[1]]):
        answer = complete(several)
        assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(expected))
        assert answer.usage.prompt_tokens == sum(map(len, ids))
        assert answer.usage.completion_tokens == 10
    with pytest.raises(openai.BadRequestError, match="this server takes"):
        complete([texts[0], [1] * 9000])


def test_settings_of_other_servers_reach_the_model(served: Served) -> None:
    """With the most likely token alone to draw from, a sample is the greedy answer; a penalty changes it."""
    greedy = served.chat(12).choices[0].message.content
    for setting in ({"top_k": 1}, {"min_p": 1.0}):
        assert served.chat(12, temperature=2.0, extra_body=setting).choices[0].message.content == greedy
    assert served.chat(12, extra_body={"repetition_penalty": 9.0}).choices[0].message.content != greedy


def test_samples_repeat_with_their_seed(served: Served) -> None:
    def sample(seed: int) -> str:
        text: str = served.chat(24, temperature=1.5, seed=seed).choices[0].message.content
        return text

    assert sample(1) == sample(1) != sample(2)


def test_what_is_asked_at_once_is_answered_in_turn(served: Served) -> None:
    prompts = [f"{PROMPT} {number}" for number in range(4)]
    expected = [stock_answer(served.folder, 6, prompt) for prompt in prompts]

    def ask(number: int) -> str:
        messages = [{"role": "user", "content": prompts[number]}]
        if number % 2:
            chunks = served.chat(6, messages=messages, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        text: str = served.chat(6, messages=messages).choices[0].message.content
        return text

    with served.gate.closed(), ThreadPoolExecutor(4) as clients:
        answers = clients.map(ask, range(4))
        served.gate.wait()
        for _ in range(4):
            served.wait_submitted()
        counts = json.loads(served.get("/promoe/stats")[1])["requests"]
        assert (counts["running"], counts["waiting"], counts["answered"]) == (1, 3, 0)
        served.gate.open()
        assert list(answers) == expected
    served.wait_over(4)
    assert served.turns.counts() == {
        "running": 0, "waiting": 0, "answered": 4, "refused": 0, "failed": 0, "cancelled": 0,
    }  # fmt: skip


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("passes", [1, 4])
def test_who_leaves_is_not_answered_any_more(served: Served, stream: bool, passes: int) -> None:
    with served.gate.closed(after_passes=passes - 1):
        connection = served.leaver(stream)
        served.gate.wait()
        answer = connection.getresponse() if stream else None
        if answer is not None:
            assert b"assistant" in answer.readline()
            answer.close()
        connection.close()
        assert served.asked[0].wait_cancelled(WAIT_S)
        served.wait_over()
    assert served.chat(4).choices[0].message.content == stock_answer(served.folder, 4)
    assert served.asked[0].passes == passes, "it ends in the pass in which its client left"
    assert served.model.promoe.stats().total.passes_aborted == 1
    assert served.turns.counts()["cancelled"] == 1


def test_who_leaves_while_waiting_is_never_begun(served: Served) -> None:
    with served.gate.closed(), ThreadPoolExecutor(1) as clients:
        first = clients.submit(served.chat, 3)
        served.gate.wait()
        served.wait_submitted()
        second = served.leaver(stream=False)
        served.wait_submitted()
        second.close()
        assert served.asked[1].wait_cancelled(WAIT_S)
        served.gate.open()
        assert first.result().choices[0].message.content == stock_answer(served.folder, 3)
    served.wait_over(2)
    assert [asked.passes for asked in served.asked] == [3, 0]


def test_models_health_and_statistics(served: Served) -> None:
    with served.client() as client:
        assert [model.id for model in client.models.list()] == [served.folder]
    served.chat(3)
    assert served.get("/health", key=None) == (200, b'{"status":"ok"}')
    status, text = served.get("/promoe/report")
    assert status == 200
    assert b"6 slots for 24 experts" in text
    told = json.loads(served.get("/promoe/stats")[1])
    assert Stats.from_json(told["stats"]) == served.model.promoe.stats()
    assert told["stats"]["decode"]["passes"] == 2


@pytest.mark.parametrize(
    "path", ["/v1/responses", "/v1/systemone", "/v1/audio/transcriptions", "/load_model", "/reset", "/docs", "/v1/none"]
)
def test_what_transformers_server_has_beside_is_not_there(served: Served, path: str) -> None:
    for method in ("GET", "POST"):
        status, body = served.send(method, path, "{}", "a key of tests", {"content-type": "application/json"})
        assert status == 404
        assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_mistakes_have_openais_form(served: Served) -> None:
    with served.client() as client:
        with pytest.raises(openai.NotFoundError, match="There is no model 'gpt'") as unknown:
            client.chat.completions.create(model="gpt", messages=MESSAGES)
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError, match="'n' is not supported") as several:
            served.chat(n=2)
        assert several.value.param == "n"
        with pytest.raises(openai.BadRequestError, match=r"no field 'top_a' for /v1/chat/completions\. Leave it out"):
            served.chat(extra_body={"top_a": 3})
        tool: Any = {"type": "function", "id": "1", "function": {"name": "f", "arguments": "no JSON"}}
        with pytest.raises(openai.BadRequestError, match="cannot be answered as it is"):
            served.chat(messages=[*MESSAGES, {"role": "assistant", "tool_calls": [tool]}])
    served.wait_over()  # the one that Transformers' handler refused
    assert served.turns.tally["refused"] == 4
    assert served.turns.tally["failed"] == 0


def test_limits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"max_prompt_tokens": 40, "max_new_tokens": 10, "max_body": "1KiB", "max_waiting": 1, "name": "tiny"}
    with serving(folder, monkeypatch, **options) as served:
        assert served.chat(model="tiny", max_tokens=None).usage.completion_tokens == 10
        with pytest.raises(openai.BadRequestError, match=r"from 1 to 10\. Got 11"):
            served.chat(11, model="tiny")
        long = [{"role": "user", "content": "x" * 39}]
        for stream in (True, False):
            with pytest.raises(openai.BadRequestError, match="41 tokens; this server takes 40") as too_long:
                served.chat(model="tiny", messages=long, stream=stream)
            assert too_long.value.code == "context_length_exceeded"
        with pytest.raises(openai.APIStatusError, match=r"longer than 1\.0 KiB") as too_large:
            served.chat(model="tiny", messages=[{"role": "user", "content": "x" * 1024}])
        assert too_large.value.status_code == 413
        with served.gate.closed(), ThreadPoolExecutor(1) as clients:
            first = clients.submit(served.chat, 2, model="tiny")
            served.gate.wait()
            with pytest.raises(openai.InternalServerError, match="1 requests are answered or wait") as overloaded:
                served.chat(model="tiny")
            assert overloaded.value.status_code == 503
            served.gate.open()
            assert first.result().usage.completion_tokens == 2


def test_the_models_context_is_a_limit(served: Served) -> None:
    context = served.model.config.max_position_embeddings
    with pytest.raises(openai.BadRequestError, match=f"context is {context} tokens"):
        served.chat(1000, messages=[{"role": "user", "content": "x" * (context - 500)}])


FAILURE = 'Expert 3 of "layer 1"\ncould not be read: /secret/file'


@pytest.mark.parametrize("stream", [True, False])
def test_a_generation_that_fails_is_told_and_the_next_is_right(
    served: Served, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**arguments: Any) -> torch.Tensor:
        raise ExpertLoadError(FAILURE)

    with monkeypatch.context() as patched:
        patched.setattr(served.model, "generate", fail)
        with pytest.raises(openai.APIError, match="could not answer: ExpertLoadError") as told:
            served.chat(stream=stream)
        assert "secret" not in str(told.value)
    assert served.get("/health")[0] == 200, "another expert may well be there"
    assert served.chat(4).choices[0].message.content == stock_answer(served.folder, 4)
    served.wait_over(2)
    assert served.turns.tally == {"failed": 1, "answered": 1}


def test_health_tells_of_an_engine_that_serves_nothing(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**arguments: Any) -> torch.Tensor:
        raise EngineStalledError("nothing moves")

    with monkeypatch.context() as patched:
        patched.setattr(served.model, "generate", fail)
        with pytest.raises(openai.InternalServerError):
            served.chat()
    assert served.get("/health") == (503, b'{"status":"failing","reason":"EngineStalledError"}')
    served.chat(1)
    assert served.get("/health")[0] == 200


@pytest.mark.parametrize("stream", [True, False])
def test_the_servers_end_is_told_to_who_waits(served: Served, stream: bool) -> None:
    with served.gate.closed(), ThreadPoolExecutor(1) as clients:
        answer = clients.submit(served.chat, 5, stream=stream)
        served.gate.wait()
        served.address.end()
        with pytest.raises(openai.APIError, match="The server is ending"):
            answer.result()
    served.wait_over()
    assert served.asked[0].passes == 1


def test_streams_end_as_openais_do(served: Served) -> None:
    for path, prompt in ((CHAT, {"messages": MESSAGES}), (COMPLETION, {"prompt": PROMPT})):
        status, body = served.post(json.dumps({**prompt, "max_tokens": 2, "stream": True}), path)
        assert status == 200
        assert body.endswith(b"data: [DONE]\n\n")
        events = body.removesuffix(b"data: [DONE]\n\n").strip().split(b"\n\n")
        assert all(json.loads(event.removeprefix(b"data: "))["id"] for event in events)
