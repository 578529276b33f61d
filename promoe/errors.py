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
    """An argument has a wrong value. The message names the argument, the value and what is allowed."""


def check_at_least(least: float, **options: float | None) -> None:
    """Raise ConfigError if an option of a command, named as in Python, is less than `least`; None: it was left out."""
    for name, value in options.items():
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}. Got {value} instead.")


class UnsupportedModelError(PromoeError):
    """The model cannot be served, or not in its present state (meta tensors, sharding, quantisation). It is unchanged."""


class PatchStateError(PromoeError):
    """The model is in the wrong state for this call, for example already patched."""


class CheckpointError(PromoeError):
    """A checkpoint's files are missing, truncated, unreadable, or do not hold the model's experts."""


class ExpertLoadError(PromoeError):
    """An expert that a forward needed could not be fetched.

    The model stays usable: the next forward tries again. Discard the KV cache of the interrupted call, which is incomplete.
    """


class EngineError(PromoeError):
    """The transfer engine cannot serve requests any more. The message says whether to open the model again."""


class EngineClosedError(EngineError):
    """The model was closed (`unpatch` or `model.promoe.close()`) before or while an expert was needed."""


class EngineStalledError(EngineError):
    """Nothing arrived for `stall_timeout_s` while a forward waited. The message holds the engine's state."""
