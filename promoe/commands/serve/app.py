"""Transformers' server with one model in it: its handlers and its application get the model, its turns and its limits."""

from __future__ import annotations

import inspect
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
# Transformers' other pages load and drop models, transcribe, or keep what was said before.
_KEPT = frozenset({CHAT, COMPLETION, MODELS})
# What Transformers' handlers and chat templates raise for a request that they cannot read.
_NOT_UNDERSTOOD = (RequestValidationError, TemplateError, KeyError, TypeError, ValueError)


class OneModel:
    """Answers what Transformers' handlers ask of its `ModelManager`, with one model that is always there."""

    def __init__(self, model: ServedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        self.force_model = name
        self._model = model
        self._tokenizer = tokenizer
        self._since = int(time.time())

    def process_model_name(self, name: str) -> str:
        """Return the name as it is: there are no revisions."""
        return name

    def load_model_and_processor(self, name: str, **ignored: Any) -> tuple[ServedModel, PreTrainedTokenizerBase]:
        """Return the model and its tokenizer."""
        return self._model, self._tokenizer

    def get_model_modality(self, model: Any, processor: Any = None) -> Modality:
        """Return that it reads text."""
        return Modality.LLM

    def get_gen_models(self) -> list[dict[str, Any]]:
        """Return the one entry of OpenAI's list of models."""
        return [{"id": self.force_model, "object": "model", "created": self._since, "owned_by": "promoe"}]

    def shutdown(self) -> None:
        """Do nothing: the model is closed by whoever opened it."""


class TurnManager(GenerateManager):  # type: ignore[misc]
    """Transformers' manager of generations, with `Turns` in place of its thread, and limits before each generation."""

    def __init__(self, turns: Turns, limits: Limits) -> None:
        self._thread = turns  # in place of a thread that would never end; so the base class's __init__ is not called
        self._limits = limits

    def generate_streaming(self, *args: Any, **kwargs: Any) -> Any:
        """Do as the base class does. Raises Refused if the request asks for too much."""
        self._admit(*args, **kwargs)
        return super().generate_streaming(*args, **kwargs)

    async def generate_non_streaming(self, *args: Any, **kwargs: Any) -> Any:
        """Do as the base class does. Raises Refused if the request asks for too much."""
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
    """Transformers' keeper of managers, with only one."""

    def __init__(self, manager: TurnManager) -> None:
        super().__init__()
        self._manager = manager

    def get_manager(self, model_id: str, use_cb: bool = False) -> TurnManager:
        """Return the one manager."""
        return self._manager


def make_app(model: ServedModel, tokenizer: PreTrainedTokenizerBase, turns: Turns, limits: Limits) -> FastAPI:
    """Make Transformers' application, without what one model cannot serve, with promoe's pages and OpenAI's form of errors."""
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
    """Return the model as handlers may see it: without its type if its chats do not look as that type's do.

    Handlers choose by the type how to find thoughts and tool calls in an answer. Where the mark with which that form begins
    an answer is missing, they would take the prompt for a part of the answer.
    """
    form = get_response_template(tokenizer, model)
    if form is None or getattr(tokenizer, "response_template", None) is not None:
        return model
    marks = form.get("start_anchor", [])
    try:
        message = [{"role": "user", "content": "?"}]
        prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    except Exception:  # a template is a program; each request will be told of its error
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


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it from JSON."""
    kind = "server_error" if status >= 500 else "authentication_error" if status == 401 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _add_errors(app: FastAPI) -> None:
    async def answer(request: Request, error: Any) -> JSONResponse:
        status, param, code = 500, None, None
        match error:
            case Refused():
                message, status, param, code = str(error), error.status, error.param, error.code
            case HTTPException():
                message, status = str(error.detail), 400 if error.status_code == 422 else error.status_code
            case AnswerError():
                message = str(error)
            case Cancelled():
                message, status, code = ENDING, 503, "overloaded"
            case _ if isinstance(error, _NOT_UNDERSTOOD):
                logger.warning("A request was not understood", exc_info=error)
                reason = f"{type(error).__name__}: {str(error)[:500]}"
                message, status = f"The request cannot be answered as it is: {reason}.", 400
            case _:
                message = f"The server failed: {type(error).__name__}. Its log says why."
        return JSONResponse(error_body(message, status, param, code), status)

    for kind in (Refused, HTTPException, AnswerError, Cancelled, *_NOT_UNDERSTOOD, Exception):
        app.add_exception_handler(kind, answer)
