"""Transformers' server with one model in it: its handlers and its application, given the model, its turns and its limits."""

from __future__ import annotations

import inspect
import json
import logging
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from jinja2 import TemplateError
from starlette.exceptions import HTTPException
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import GenerateManager, GenerationState, Modality, get_response_template

from promoe.commands.serve.requests import CHAT, COMPLETION, Cancelled, Limits, Refused
from promoe.commands.serve.turns import ASKED, ENDING, AnswerError, ServedModel, Turns

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request
    from transformers import GenerationConfig, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

MODELS, HEALTH, REPORT, STATS = "/v1/models", "/health", "/promoe/report", "/promoe/stats"
# Transformers' others load, drop and transcribe models, or keep what was said before.
_KEPT = frozenset({CHAT, COMPLETION, MODELS})


class OneModel:
    """What Transformers' handlers ask of its `ModelManager`, answered with one model that is always there."""

    def __init__(self, model: ServedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        self.force_model = name
        self._model = model
        self._tokenizer = tokenizer
        self._since = int(time.time())

    def process_model_name(self, name: str) -> str:
        """As it is: there are no revisions."""
        return name

    def load_model_and_processor(self, name: str, **ignored: Any) -> tuple[ServedModel, PreTrainedTokenizerBase]:
        """The model."""
        return self._model, self._tokenizer

    def get_model_modality(self, model: Any, processor: Any = None) -> Modality:
        """Text."""
        return Modality.LLM

    def get_gen_models(self) -> list[dict[str, Any]]:
        """One entry of OpenAI's list."""
        return [{"id": self.force_model, "object": "model", "created": self._since, "owned_by": "promoe"}]

    def shutdown(self) -> None:
        """The model is closed by whoever opened it."""


class TurnManager(GenerateManager):  # type: ignore[misc]
    """Transformers' manager of generations with `Turns` for its thread, and limits before each."""

    def __init__(self, turns: Turns, limits: Limits) -> None:
        self._thread = turns  # instead of a thread that would never end
        self._limits = limits

    def generate_streaming(self, *args: Any, **kwargs: Any) -> Any:
        """See there. Raises Refused where the request asks for too much."""
        self._admit(*args, **kwargs)
        return super().generate_streaming(*args, **kwargs)

    async def generate_non_streaming(self, *args: Any, **kwargs: Any) -> Any:
        """See there. Raises Refused where the request asks for too much."""
        self._admit(*args, **kwargs)
        return await super().generate_non_streaming(*args, **kwargs)

    def _admit(self, model: Any, processor: Any, inputs: Any, gen_config: GenerationConfig, **ignored: Any) -> None:
        asked = ASKED.get()
        if asked.prompt_ids is not None:  # in place of those of the text that stood for them
            ids = torch.tensor([asked.prompt_ids], device=inputs["input_ids"].device)
            inputs.clear()
            inputs.update({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        asked.admit(inputs["input_ids"].shape[-1], gen_config, self._limits)


class OneManager(GenerationState):  # type: ignore[misc]
    """Transformers' keeper of managers, with one."""

    def __init__(self, manager: TurnManager) -> None:
        super().__init__()
        self._manager = manager

    def get_manager(self, model_id: str, use_cb: bool = False) -> TurnManager:
        """The one."""
        return self._manager


def make_app(model: ServedModel, tokenizer: PreTrainedTokenizerBase, turns: Turns, limits: Limits) -> FastAPI:
    """Transformers' application, less what one model cannot serve, with promoe's own pages and OpenAI's form of errors."""
    models = OneModel(_parsed_by_its_own_form(model, tokenizer), tokenizer, limits.model)
    state = OneManager(TurnManager(turns, limits))
    parts: dict[str, Any] = dict.fromkeys(inspect.signature(build_server).parameters)
    parts |= {
        "model_manager": models,
        "chat_handler": ChatCompletionHandler(models, state),
        "completion_handler": CompletionHandler(models, state),
        "generation_state": state,
        "enable_cors": False,
    }
    app: FastAPI = build_server(**parts)
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) in _KEPT]
    _add_pages(app, model, turns)
    _add_errors(app)
    return app


def _parsed_by_its_own_form(model: ServedModel, tokenizer: PreTrainedTokenizerBase) -> ServedModel:
    """The model as handlers may see it: without its type where its chats do not look as that type's do.

    By its type they choose how to find thoughts and tool calls in an answer. Where the mark is missing with which that form
    begins an answer, they take the prompt for a part of it.
    """
    form = get_response_template(tokenizer, model)
    if form is None or getattr(tokenizer, "response_template", None) is not None:
        return model
    marks = form.get("start_anchor", [])
    try:
        message = [{"role": "user", "content": "?"}]
        prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    except Exception:  # a template computes; each request will be told
        prompt = ""
    if any(mark in prompt for mark in ([marks] if isinstance(marks, str) else marks)):
        return model
    return model.showing(SimpleNamespace(model_type=None))


def _add_pages(app: FastAPI, model: ServedModel, turns: Turns) -> None:
    @app.get(HEALTH)
    async def health() -> JSONResponse:
        status = {"status": "ok"} if turns.broken is None else {"status": "failing", "reason": turns.broken}
        return JSONResponse(status, 200 if turns.broken is None else 503)

    @app.get(REPORT)
    async def report() -> PlainTextResponse:
        return PlainTextResponse(model.promoe.report() + "\n")

    @app.get(STATS)
    async def stats() -> JSONResponse:
        return JSONResponse({"requests": turns.counts(), "stats": model.promoe.stats().to_json()})


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> bytes:
    """The JSON that OpenAI's clients read errors from."""
    return json.dumps(_error(message, status, param, code)).encode()


def _error(message: str, status: int, param: str | None, code: str | None) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "authentication_error" if status == 401 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _add_errors(app: FastAPI) -> None:
    def respond(message: str, status: int, param: str | None = None, code: str | None = None) -> JSONResponse:
        return JSONResponse(_error(message, status, param, code), status)

    async def refused(request: Request, error: Any) -> JSONResponse:
        return respond(str(error), error.status, error.param, error.code)

    async def http(request: Request, error: Any) -> JSONResponse:
        return respond(str(error.detail), 400 if error.status_code == 422 else error.status_code)

    async def unreadable(request: Request, error: Exception) -> JSONResponse:
        logger.warning("A request was not understood", exc_info=error)
        return respond(f"The request cannot be answered as it is: {type(error).__name__}: {str(error)[:500]}.", 400)

    async def failed(request: Request, error: Exception) -> JSONResponse:
        return respond(str(error), 500)

    async def cancelled(request: Request, error: Exception) -> JSONResponse:
        return respond(ENDING, 503, code="overloaded")

    async def broken(request: Request, error: Exception) -> JSONResponse:
        return respond(f"The server failed: {type(error).__name__}. Its log says why.", 500)

    app.add_exception_handler(Refused, refused)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(AnswerError, failed)
    app.add_exception_handler(Cancelled, cancelled)
    app.add_exception_handler(Exception, broken)
    for kind in (RequestValidationError, TemplateError, KeyError, TypeError, ValueError):
        app.add_exception_handler(kind, unreadable)
