"""A tiny model behind a real server on a free port of this machine, and clients that meet it at moments that tests choose."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import torch
from tiny_checkpoint import write_checkpoint
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from waiting import WAIT_S

import promoe
from promoe.commands.serve import command
from promoe.commands.serve.command import Address, serve
from promoe.commands.serve.options import Options
from promoe.commands.serve.requests import CHAT, Asked
from promoe.commands.serve.turns import Turns
from promoe.model.tokenizer import load_tokenizer, prompt_inputs

KEY = "a key of tests"
PROMPT = "What is a lighthouse?"
MESSAGES: Any = [{"role": "user", "content": PROMPT}]


def write_plain(folder: Path) -> Path:
    """A tiny checkpoint whose answers are ASCII and never end by themselves."""
    write_checkpoint(folder, max_position_embeddings=2048)
    tokenizer = load_tokenizer(str(folder))
    plain = [tokenizer.convert_tokens_to_ids(chr(code)) for code in range(ord("!"), 0x7F)]
    others = sorted(set(range(len(tokenizer))) - set(plain))
    end = tokenizer.eos_token_id
    GenerationConfig(suppress_tokens=others, eos_token_id=end, pad_token_id=end).save_pretrained(folder)
    return folder


def stock_answer(folder: str, new_tokens: int, prompt: str = PROMPT, chat: bool = True) -> str:
    """What the unmodified model says."""
    tokenizer = load_tokenizer(folder)
    inputs = prompt_inputs(tokenizer, prompt) if chat else dict(tokenizer(prompt, return_tensors="pt"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    output = model.generate(**ids, max_new_tokens=new_tokens, do_sample=False)
    text: str = tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


@dataclass
class Gate:
    """Holds the model in its second MoE layer whenever it is closed."""

    inside: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    free_passes: int = 0
    _open: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._open.set()

    def __call__(self, *args: Any) -> None:
        if not self._open.is_set() and self.free_passes:
            self.free_passes -= 1
        elif not self._open.is_set():
            self.inside.release()
            assert self._open.wait(WAIT_S)

    @contextmanager
    def closed(self, after_passes: int = 0) -> Iterator[None]:
        """While the context lasts, once so many forwards have passed."""
        self.free_passes = after_passes
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    def open(self) -> None:
        """Before the context ends."""
        self._open.set()

    def wait(self) -> None:
        """Until a forward is held."""
        assert self.inside.acquire(timeout=WAIT_S)


@dataclass
class Served:
    """A server at work."""

    folder: str
    address: Address
    model: PreTrainedModel
    gate: Gate
    turns: Turns
    asked: list[Asked]
    submitted: threading.Semaphore
    over: threading.Semaphore

    @property
    def port(self) -> int:
        return int(self.address.url.rpartition(":")[2])

    def client(self, key: str = KEY) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.address.url}/v1", api_key=key, max_retries=0, timeout=WAIT_S)

    def chat(self, new_tokens: int = 8, **more: Any) -> Any:
        """A greedy answer, whole or as a stream."""
        asked = {"model": self.folder, "messages": MESSAGES, "max_tokens": new_tokens, "temperature": 0.0, **more}
        with self.client() as client:
            answer = client.chat.completions.create(**asked)
            return list(answer) if more.get("stream") else answer

    def get(self, path: str, key: str | None = KEY, **headers: str) -> tuple[int, bytes]:
        return self.send("GET", path, None, key, headers)

    def post(self, body: bytes | str, path: str = CHAT, key: str | None = KEY, **headers: str) -> tuple[int, bytes]:
        return self.send("POST", path, body, key, {"content-type": "application/json", **headers})

    def send(
        self, method: str, path: str, body: bytes | str | None, key: str | None, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        """Status and body of a request as it is."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        try:
            authorization = {} if key is None else {"authorization": f"Bearer {key}"}
            connection.request(method, path, body, {**authorization, **headers})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def leaver(self, stream: bool, new_tokens: int = 1000) -> http.client.HTTPConnection:
        """A connection that has asked; close it to leave. A socket that is closed with all read is gone at once."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        body = {"messages": MESSAGES, "max_tokens": new_tokens, "temperature": 0, "stream": stream}
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        connection.request("POST", CHAT, json.dumps(body), headers)
        return connection

    def wait_submitted(self) -> None:
        """Until one more request is in the queue, or at work."""
        assert self.submitted.acquire(timeout=WAIT_S)

    def wait_over(self, number: int = 1) -> None:
        """Until so many more requests are over for the server."""
        for _ in range(number):
            assert self.over.acquire(timeout=WAIT_S)


@contextmanager
def serving(folder: Path, monkeypatch: Any, **options: Any) -> Iterator[Served]:
    """A server in threads of its own, which are gone afterwards."""
    asked: list[Asked] = []
    made: list[Turns] = []
    submitted, over = threading.Semaphore(0), threading.Semaphore(0)

    class Seen(Turns):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

        @contextmanager
        def taking(self, request: Asked) -> Iterator[None]:
            try:
                with super().taking(request):
                    asked.append(request)
                    yield
            finally:
                over.release()

        def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
            done = super().submit(*args, **kwargs)
            submitted.release()
            return done

    monkeypatch.setattr(command, "Turns", Seen)
    chosen = Options(str(folder), **{"port": 0, "api_key": KEY, **options})
    ready: Future[Address] = Future()
    with ExitStack() as stack:
        model = promoe.from_pretrained(folder, cache="25%")
        stack.callback(model.promoe._store.close)
        stack.callback(model.promoe.close)
        gate = Gate()
        block = promoe.find_moe_layers(model)[1].block
        stack.callback(block.register_forward_pre_hook(gate).remove)
        listener = stack.enter_context(command._listening(chosen.host, chosen.port))
        pool = stack.enter_context(ThreadPoolExecutor(1, "computing", torch.set_num_threads, (1,)))
        done = pool.submit(serve, model, load_tokenizer(str(folder)), chosen, listener, ready.set_result)
        done.add_done_callback(lambda future: ready.done() or ready.set_exception(future.exception() or RuntimeError()))
        address = ready.result(WAIT_S)
        try:
            yield Served(str(folder), address, model, gate, made[0], asked, submitted, over)
        finally:
            address.end()
            done.result(WAIT_S)
        left = [thread.name for thread in threading.enumerate() if thread.name == "promoe-server"]
        assert not left, "the server's thread is left"
