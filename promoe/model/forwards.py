"""Which threads are in a forward of a model at this moment, as their stacks say.

Asked only when a model is patched or unpatched. Forwards keep no count for it: Ctrl-C ends one without calling any of its
hooks, upon which a count would be wrong for ever; a stack never is.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from torch import nn

from promoe.errors import PatchStateError
from promoe.experts.moe_layers import MoELayer
from promoe.transfer.threads import hold_in_forks

_CALL = nn.Module._call_impl.__code__


class _Walking:
    """Of stacks; one at a time. Nobody forks meanwhile: the new process would have no collector."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a signal handler, or what is let go, may walk them, too
        hold_in_forks(self, self.lock, lambda _: None)


_WALKING = _Walking()


def threads_in_forward(model: nn.Module, layers: Sequence[MoELayer], but: int | None = None) -> list[str]:
    """Names of the threads that are in a forward of `model`, or of a part of it that holds experts.

    A gate alone is none: predictors ask gates.

    Args:
        model: the model.
        layers: its MoE layers.
        but: the number (`threading.get_ident`) of a thread that is not looked at.
    """
    inside = _modules_around_experts(model, layers)
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    with _WALKING.lock, _nothing_collected():
        frames: dict[int, FrameType] = {}
        try:
            frames.update(sys._current_frames())
            found = [ident for ident, frame in frames.items() if ident != but and _calls_one_of(frame, inside)]
        finally:
            frames.clear()  # one of them is this call's own, which holds them all, and with them other threads' models
    return [names.get(ident, f"thread {ident}") for ident in found]


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """While other threads' stacks are walked.

    Python 3.11 makes a frame's object when it is asked for, which may begin a collection, and what that frees may let other
    threads run: the frames that are being walked then end, and the process with them.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def stack(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame, and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def check_idle(model: nn.Module, layers: Sequence[MoELayer]) -> None:
    """Raise PatchStateError if a forward of a model runs that is to be patched."""
    if names := threads_in_forward(model, layers):
        raise PatchStateError(
            f"This {type(model).__name__} cannot be patched while {in_words(names)}. Nothing was changed. Wait until the "
            "model has returned, also in its hooks."
        )


def in_words(names: Sequence[str]) -> str:
    """`1 forward of it is running (in thread MainThread)`, and the same for several."""
    many = len(names) > 1
    noun, verb, threads = ("forwards", "are", "threads") if many else ("forward", "is", "thread")
    return f"{len(names)} {noun} of it {verb} running (in {threads} {', '.join(names)})"


def _modules_around_experts(model: nn.Module, layers: Sequence[MoELayer]) -> set[int]:
    """Ids of the experts modules and of all that contain one."""
    parts = [layer.name.split(".") for layer in layers]
    names = {".".join(path[:depth]) for path in parts for depth in range(len(path))}
    return {id(model.get_submodule(name)) for name in names} | {id(layer.experts) for layer in layers}


def _calls_one_of(latest: FrameType, modules: set[int]) -> bool:
    for frame in stack(latest):
        code = frame.f_code  # that of torch.compile is another one, of the same name and file
        is_call = code.co_name == _CALL.co_name and code.co_filename == _CALL.co_filename
        if is_call and id(frame.f_locals.get("self")) in modules:
            return True
    return False
