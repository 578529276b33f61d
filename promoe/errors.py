"""Every error that promoe raises on purpose.

PromoeError
├── ConfigError             an argument has a wrong value (also a ValueError)
├── UnsupportedModelError   the model, or its present state, cannot be patched
├── PatchStateError         patch/unpatch/close called on a model in the wrong state
├── CheckpointError         files of a checkpoint are missing, truncated or do not match
├── ExpertLoadError         an expert that a forward needed could not be fetched
└── EngineError             the transfer engine cannot serve any more
    ├── EngineClosedError   it was closed
    └── EngineStalledError  nothing moved for `stall_timeout_s`

Each message says what was asked, what was found (numbers with units) and what to do.
"""

from __future__ import annotations

MOST_SHOWN = 200


def shown(value: object) -> str:
    """Return a value as a message quotes it: the beginning of a long one; the type of one that cannot be written."""
    try:
        text = repr(value)
    except Exception:  # whole numbers of more than 4300 digits, and other people's objects
        return f"{type(value).__name__} that cannot be written"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


class PromoeError(Exception):
    """Base class of all errors raised by promoe."""


class ConfigError(PromoeError, ValueError):
    """An argument has a value that cannot work; the message names it, the value and what is allowed."""


def check_at_least(least: float, **options: float | None) -> None:
    """Raise ConfigError if an option of a command, named as in Python, is less than `least`; None: it was left out."""
    for name, value in options.items():
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}. Got {value} instead.")


class UnsupportedModelError(PromoeError):
    """The model (or its present state: meta tensors, sharding, quantisation) cannot be patched. Nothing was changed."""


class PatchStateError(PromoeError):
    """An operation does not fit the model's patch state, for example patching twice."""


class CheckpointError(PromoeError):
    """A checkpoint's files are missing, truncated, unreadable or do not describe the model's experts."""


class ExpertLoadError(PromoeError):
    """An expert needed by a forward could not be fetched.

    The engine stays usable: a later forward tries the fetch again. The KV cache of the interrupted call is incomplete
    and must be discarded.
    """


class EngineError(PromoeError):
    """The transfer engine cannot serve requests."""


class EngineClosedError(EngineError):
    """The engine was closed (unpatch, `model.promoe.close()`) while or before an expert was needed."""


class EngineStalledError(EngineError):
    """No chunk completed for `stall_timeout_s` while a forward waited; the message holds a state dump."""
