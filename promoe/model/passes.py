"""Forward passes of the whole model: their phase, which of their tokens are padding, and which threads are in one.

Threads that are in a forward are found by walking their stacks, only when a model is patched, unpatched or resized. A
counter of running forwards would not do: Ctrl-C ends a forward without calling its hooks, and the counter would be
wrong from then on.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from promoe.errors import PatchStateError, UnsupportedModelError
from promoe.experts.moe_layers import MoELayer
from promoe.scheduler.reuse import MAX_TOKENS_LEARNED
from promoe.stats.counts import Phase
from promoe.stats.recorder import Recorder
from promoe.transfer.threads import hold_in_forks

if TYPE_CHECKING:
    from promoe.predictors import LayerVisit

_CALL = nn.Module._call_impl.__code__

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(slots=True)
class PassState:
    """One forward pass, of one thread."""

    pass_idx: int = 0
    phase: Phase = "prefill"
    num_sequences: int = 1
    real: torch.Tensor | None = None
    """`[num_tokens]` bool in host memory, False for padding; None: no padding."""
    start_s: float = 0.0
    num_tokens: int = 0
    """Tokens without padding."""
    gated: set[int] = field(default_factory=set)
    """Layers whose gate has chosen."""
    entered: set[int] = field(default_factory=set)
    """Layers whose experts have been called."""
    hint: tuple[int, list[int], int] | None = None
    """The latest gate's choice: its layer, the experts, and how many of them were resident at that time."""
    to_predict: tuple[int, LayerVisit] | None = None
    """Input for the predictor's thread: the scheduler's step of a layer visit, and the visit."""

    def hits_at_gate(self, layer_idx: int, ids: list[int]) -> int | None:
        """Return how many of the experts were resident when the layer's gate chose them; None: it chose other experts."""
        hint, self.hint = self.hint, None
        return hint[2] if hint is not None and hint[0] == layer_idx and hint[1] == ids else None

    def real_tokens(self, index: torch.Tensor, tokens: list[list[int]] | None) -> list[list[int]]:
        """Return the experts `[T][K]` of the last tokens that are not padding, oldest token first.

        Args:
            index: `[T, K]` in host memory, the ids of each token's experts.
            tokens: `index` as a list, if the caller has it.
        """
        real = self.real if self.real is not None and len(self.real) == len(index) else None
        if len(index) > self.num_sequences > 1 and len(index) % self.num_sequences == 0:
            # Tokens at the same position are equally old in all sequences.
            index = _by_position(index, self.num_sequences)
            real = None if real is None else _by_position(real, self.num_sequences)
        elif real is None and tokens is not None:
            return tokens
        if real is not None:
            index = index[real]
        latest: list[list[int]] = index[-MAX_TOKENS_LEARNED:].tolist()
        return latest


class PassObserver:
    """Watches a model's forward passes through hooks, per thread.

    Args:
        recorder: counts the passes. It is called with `lock` held.
        lock: guards the recorder.
        on_end: see the attribute.

    Attributes:
        on_begin: called before each pass.
        on_end: called after each pass that ended without an error, with the pass and its duration in seconds.
    """

    def __init__(
        self,
        recorder: Recorder,
        lock: AbstractContextManager[object],
        on_end: Callable[[PassState, float], None] = lambda state, duration_s: None,
    ) -> None:
        self._recorder = recorder
        self._lock = lock
        self.on_begin: Callable[[], None] = lambda: None
        self.on_end = on_end
        self._local = threading.local()
        self._ending = False  # guarded by the lock

    @property
    def _open(self) -> PassState | None:
        state: PassState | None = getattr(self._local, "state", None)
        return state

    def current(self) -> PassState:
        """Return this thread's pass. Outside of a pass (if a block is called directly), make one without a number."""
        state = self._open
        if state is None:
            state = self._local.state = PassState()
            with self._lock:
                self._recorder.outside()
        return state

    @contextmanager
    def ending(self, check: Callable[[], None]) -> Iterator[None]:
        """Refuse new passes from here on. If the context ends with an error, they are allowed again.

        Args:
            check: raises if a pass is running. It is called while no pass can begin or end.

        Raises:
            PatchStateError: another thread has called this before.
        """
        with self._lock:
            if self._ending:
                raise PatchStateError(
                    "Another thread is unpatching the model, or has unpatched it. There is nothing to undo."
                )
            check()
            self._ending = True
        try:
            yield
        except BaseException:
            self._ending = False
            raise

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse, so that the model cannot be copied or pickled: its hooks are methods of this object."""
        raise PatchStateError("A patched model cannot be copied or pickled. Unpatch it first (promoe.unpatch).")

    def attach(self, model: nn.Module) -> Callable[[], None]:
        """Attach the hooks to a model, and return the undo."""
        self._begin_live, self._end_live = _begin_pass(), _end_pass()
        with ExitStack() as undo:
            undo.callback(model.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
            # Called after an exception as well, because the next pass would inherit this one's state otherwise.
            undo.callback(model.register_forward_hook(self._end, always_call=True).remove)
            return undo.pop_all().close

    # The hooks must be methods of this object, which refuses to be copied. Plain functions would be copied with the
    # model.
    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._begin_live(self, args, kwargs)

    def _end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._end_live(self, output)

    def _begin_pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.on_begin()
        batch, length = _shape(args, kwargs)
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        real = _real_tokens(mask, batch, length)
        num_tokens = batch * length if real is None else int(real.sum())
        phase: Phase = "decode" if length == 1 or _checks_proposals(kwargs, length) else "prefill"
        left = self._open
        # After Ctrl-C no hook ran, so the interrupted pass is still open here.
        interrupted = 0 if left is None else left.pass_idx
        self._local.state = None  # reset first, so that a second Ctrl-C cannot make us close that pass twice
        with self._lock:
            if self._ending:
                raise PatchStateError(
                    "Another thread was unpatching the model when this forward began. Call it again after "
                    "promoe.unpatch has returned."
                )
            if interrupted:
                self._recorder.end_pass(0.0, interrupted, aborted=True)
            pass_idx = self._recorder.begin_pass(phase, num_tokens, batch)
        self._local.state = PassState(pass_idx, phase, batch, real, time.perf_counter(), num_tokens)

    def _end_pass(self, output: Any) -> None:
        state = self.current()
        duration_s = time.perf_counter() - state.start_s
        self._local.state = None
        if not state.pass_idx:
            return  # another hook raised before ours began the pass
        aborted = output is None
        with self._lock:
            self._recorder.end_pass(duration_s, state.pass_idx, aborted=aborted)
        if not aborted:
            self.on_end(state, duration_s)


def uncompiled(function: Function) -> Function:
    """Return `function` marked so that torch.compile does not trace it or what it calls, but breaks the graph there.

    Locks, threads and experts that come and go cannot be part of a graph. The compiler would trace into the scheduler.
    """
    marked: Function = torch.compiler.disable(
        function,
        reason="promoe serves this model's experts between the graphs of torch.compile: compile it without fullgraph=True",
    )
    return marked


def at_run_time(function: Function) -> Function:
    """Return `function` marked as `uncompiled`, with an error if it is traced or exported.

    A traced forward would keep the experts that were in the slots at that time.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.jit.is_tracing() or torch.compiler.is_exporting():  # type: ignore[attr-defined, no-untyped-call]
            raise UnsupportedModelError(
                "A patched model cannot be traced or exported: the record would keep the experts that happened to be in "
                "the slots. Unpatch it first (promoe.unpatch), or use torch.compile without fullgraph=True."
            )
        return function(*args, **kwargs)

    return uncompiled(run)  # type: ignore[return-value]


@functools.cache  # not done at import time, because importing torch's compiler takes long
def _begin_pass() -> Callable[..., None]:
    return at_run_time(PassObserver._begin_pass)


@functools.cache
def _end_pass() -> Callable[..., None]:
    return uncompiled(PassObserver._end_pass)


def _by_position(tokens: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """Reorder `[sequences * length, ...]` from sequence by sequence to position by position."""
    by_sequence = tokens.reshape(num_sequences, -1, *tokens.shape[1:])
    return by_sequence.transpose(0, 1).flatten(0, 1)


def _shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Return the number of sequences, and of tokens per sequence, of a forward's inputs."""
    for value in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), kwargs.get("decoder_input_ids"), *args):
        if isinstance(value, torch.Tensor) and value.dim() >= 2:
            batch, length = value.shape[:2]
            # Continuous batching joins its sequences end to end. `bounds` has the start of each and the end of the
            # last.
            bounds = kwargs.get("cu_seq_lens_q")
            one_token_each = isinstance(bounds, torch.Tensor) and len(bounds) - 1 == batch * length
            return (batch * length, 1) if one_token_each else (batch, length)
    return 1, 1


def _checks_proposals(kwargs: dict[str, Any], length: int) -> bool:
    """Return whether a pass checks several proposed tokens (of a draft model or prompt lookup) during decoding.

    `generate` then asks for the logits of exactly these tokens, and the KV cache is not empty.
    """
    wanted = kwargs.get("logits_to_keep")
    if not isinstance(wanted, int) or wanted != length:
        return False
    num_cached = getattr(kwargs.get("past_key_values"), "get_seq_length", None)
    return num_cached is not None and bool(num_cached() > 0)


def _real_tokens(mask: Any, batch: int, length: int) -> torch.Tensor | None:
    """Return `[batch * length]` bool in host memory from a 2-d attention mask; None: no padding, or no usable mask."""
    if length == 1 or not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.shape[0] != batch:
        return None
    if mask.shape[1] < length:
        return None
    real = mask[:, -length:].reshape(-1).bool().cpu()
    return None if bool(real.all()) else real


class _StackLock:
    """The lock under which one thread at a time walks stacks.

    No thread forks while it is held, because the new process would have its garbage collector switched off.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # reentrant, because a signal handler or a finaliser may walk stacks as well
        hold_in_forks(self, self.lock, lambda _: None)


_STACK_LOCK = _StackLock()


def threads_in_forward(model: nn.Module, layers: Sequence[MoELayer], but: int | None = None) -> list[str]:
    """Return the names of the threads that are in a forward of `model`, or of a part of it that contains experts.

    The forward of a gate alone does not count, because predictors call gates.

    Args:
        model: the model.
        layers: its MoE layers.
        but: the number (`threading.get_ident`) of a thread to leave out.
    """
    inside = _modules_around_experts(model, layers)
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    with _STACK_LOCK.lock, _nothing_collected():
        frames: dict[int, FrameType] = {}
        try:
            frames.update(sys._current_frames())
            found = [ident for ident, frame in frames.items() if ident != but and _calls_one_of(frame, inside)]
        finally:
            # This call's own frame is among them and refers to them all. Without this, the cycle would keep the frames
            # and models of other threads alive.
            frames.clear()
    return [names.get(ident, f"thread {ident}") for ident in found]


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Switch the garbage collector off while the stacks of other threads are walked.

    Python 3.11 creates a frame's object when it is first asked for. That may start a garbage collection, whose
    finalisers may let other threads run. The frames that are being walked could then end, and the process would crash.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def stack(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame, and then each frame that called the one before."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def check_idle(model: nn.Module, layers: Sequence[MoELayer]) -> None:
    """Raise PatchStateError if a forward of `model` is running, so that it cannot be patched now."""
    if names := threads_in_forward(model, layers):
        raise PatchStateError(
            f"This {type(model).__name__} cannot be patched while {describe_forwards(names)}. Nothing was changed. Wait until "
            "the model has returned, also in its hooks."
        )


def describe_forwards(names: Sequence[str]) -> str:
    """Return, for example, `1 forward of it is running (in thread MainThread)`."""
    many = len(names) > 1
    noun, verb, threads = ("forwards", "are", "threads") if many else ("forward", "is", "thread")
    return f"{len(names)} {noun} of it {verb} running (in {threads} {', '.join(names)})"


def _modules_around_experts(model: nn.Module, layers: Sequence[MoELayer]) -> set[int]:
    """Return the Python ids of the experts modules and of all modules that contain one."""
    parts = [layer.name.split(".") for layer in layers]
    names = {".".join(path[:depth]) for path in parts for depth in range(len(path))}
    return {id(model.get_submodule(name)) for name in names} | {id(layer.experts) for layer in layers}


def _calls_one_of(latest: FrameType, modules: set[int]) -> bool:
    for frame in stack(latest):
        code = frame.f_code  # torch.compile makes another code object with the same name and file
        is_call = code.co_name == _CALL.co_name and code.co_filename == _CALL.co_filename
        if is_call and id(frame.f_locals.get("self")) in modules:
            return True
    return False
