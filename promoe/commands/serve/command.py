"""`promoe serve`: opens a model, and answers requests until it is interrupted."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import transformers
from transformers.utils.import_utils import is_serve_available

from promoe.commands.serve.options import Options
from promoe.commands.serve.requests import Limits, is_loopback
from promoe.commands.serve.turns import Turns
from promoe.commands.terminal import opening_bar
from promoe.errors import ConfigError, UnsupportedModelError
from promoe.model.context import context_tokens
from promoe.model.tokenizer import load_tokenizer
from promoe.runtime.loading import from_pretrained
from promoe.runtime.sizes import fixed_bytes
from promoe.stats.saved_run import load_run

if TYPE_CHECKING:
    import uvicorn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

API_KEY_VARIABLE = "PROMOE_API_KEY"
# When the server ends, connections that nobody reads from are cut off after so many seconds.
SHUTDOWN_TIMEOUT_S = 5


@dataclass(frozen=True)
class Address:
    """Where a server listens, and how to end it from another thread."""

    url: str
    end: Callable[[], None]


def run_serve(options: Options, out: TextIO | None = None) -> None:
    """Open the model, serve it until Ctrl-C or SIGTERM, and print a report at the end.

    Raises:
        PromoeError: the model cannot be opened, the address is not free, or the server's libraries are not installed.
    """
    require_server()
    if options.api_key is None:
        options = replace(options, api_key=os.environ.get(API_KEY_VARIABLE))
    before = None if options.warm is None else load_run(options.warm).run.stats
    with _listening(options.host, options.port) as listener:
        transformers.logging.disable_progress_bar()  # ours shows bytes
        transformers.logging.set_verbosity_error()  # its server logs each request as a warning; ours says how it ended
        tokenizer = load_tokenizer(options.model)
        with opening_bar(Path(options.model).name) as progress:
            model = from_pretrained(options.model, progress=progress, **options.for_opening())
        handle: Any = model.promoe
        try:
            with _terminated_as_interrupted():
                if before is not None:
                    print(f"warmed: {handle.warm(before)} experts that were used before are in slots", file=sys.stderr)
                serve(model, tokenizer, options, listener, lambda address: _say(address, options, out))
        except KeyboardInterrupt:
            pass  # the way to end the command
        finally:
            handle.close()
        print(f"\n{handle.report()}", file=sys.stderr)


def require_server() -> None:
    """Raise ConfigError where the server's libraries are missing."""
    if not is_serve_available():
        raise ConfigError(
            "promoe serve needs fastapi, uvicorn, pydantic and openai (whose types Transformers' server writes). "
            "Install them: pip install 'promoe[serve]'."
        )


def serve(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    options: Options,
    listener: socket.socket,
    on_ready: Callable[[Address], None],
) -> None:
    """Answer requests for an opened model in this thread, until it is interrupted or `Address.end` is called.

    Args:
        model: patched or opened by promoe; its handle stays open.
        tokenizer: the model's.
        options: address, limits and key.
        listener: a bound socket; it is closed when this returns.
        on_ready: called once, when requests can come.

    Raises:
        UnsupportedModelError: Transformers' server cannot serve the model.
    """
    import uvicorn

    from promoe.commands.serve.app import make_app
    from promoe.commands.serve.guard import AccessRules, Guard

    _check_servable(model, tokenizer)
    limits = _limits(model, options)
    turns, ready = Turns(limits), threading.Event()
    access = AccessRules(options.api_key, local_names_only=is_loopback(options.host))
    with turns.watching(model) as served:
        app = Guard(make_app(served, tokenizer, turns, limits), turns, limits, access)
        server = uvicorn.Server(
            uvicorn.Config(
                app, log_level="warning", access_log=False, timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S, ws="none"
            )
        )
        thread = threading.Thread(
            target=_run_server, args=(server, listener, turns, ready), name="promoe-server", daemon=True
        )
        thread.start()
        try:
            ready.wait()
            if server.started:
                on_ready(Address(_url(listener), turns.end))
                turns.run()
        finally:
            turns.end()  # also of what this thread has not begun
            turns.run()
            server.should_exit = True
            thread.join()


def _check_servable(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{type(model).__name__} has an encoder and a decoder, but Transformers' server takes an answer for the "
            "continuation of its prompt. Call model.generate yourself."
        )
    if not hasattr(tokenizer, "_tokenizer"):
        raise UnsupportedModelError(
            f"{type(tokenizer).__name__} is no fast tokenizer, and Transformers' server streams with nothing else. Add a "
            "tokenizer.json to the checkpoint."
        )


def _run_server(server: uvicorn.Server, listener: socket.socket, turns: Turns, ready: threading.Event) -> None:
    """Run the server's event loop in this thread. Whatever ends it ends the turns, too."""
    started = server.startup

    async def startup(sockets: list[socket.socket] | None = None) -> None:
        await started(sockets)
        ready.set()

    server.startup = startup  # type: ignore[method-assign]
    try:
        server.run([listener])
    finally:
        turns.end()
        ready.set()


def _limits(model: PreTrainedModel, options: Options) -> Limits:
    text = model.config.get_text_config()
    return Limits(
        model=options.served_name,
        body_bytes=fixed_bytes(options.max_body),
        prompt_tokens=options.max_prompt_tokens,
        new_tokens=options.max_new_tokens,
        waiting=options.max_waiting,
        context=context_tokens(model.config),
        vocabulary=getattr(text, "vocab_size", None),
    )


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """Listen at an address; bound before the model is opened, which can take long.

    Raises:
        ConfigError: nothing can listen there.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"Cannot listen at {host}, port {port}: {reason}. Choose another --host or --port (0: any that is free)."
        ) from error
    with listener:
        yield listener


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM end the server as Ctrl-C does, while the context lasts."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _say(address: Address, options: Options, out: TextIO | None) -> None:
    key = "with the API key" if options.api_key else "no API key"
    print(f"Serving {options.served_name} at {address.url}/v1 ({key}); Ctrl-C ends it", file=out, flush=True)
    print(f"  statistics: {address.url}/promoe/report, {address.url}/promoe/stats", file=out, flush=True)
    if not is_loopback(options.host) and not options.api_key:
        print("  Everyone who reaches this address can use it: set --api-key.", file=sys.stderr, flush=True)
