"""`model.promoe`: what a user asks a patched model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from os import PathLike

from torch import nn

from promoe.config import PromoeConfig
from promoe.runtime.popularity import Popularity
from promoe.runtime.sizes import CacheSize
from promoe.stats.text_report import text_report
from promoe.stats.totals import Stats
from promoe.stats.tracing import Tracer, check_writable


class Handle(ABC):
    """The handle of a patched model: counters, reports, timelines, and its end. The same whether or not there are slots.

    Attributes:
        config: the settings it was patched with.
    """

    config: PromoeConfig

    @abstractmethod
    def stats(self) -> Stats:
        """Return everything counted since patching or `reset_stats()`."""

    @abstractmethod
    def reset_stats(self) -> None:
        """Set all counters to zero; cache contents and what was learned stay."""

    @abstractmethod
    def warm(self, popularity: Popularity) -> int:
        """Fetch the experts that are used most into slots that are still free, best first, and wait until they are there.

        A new model's first prompt then finds them. Nothing that is in a slot is evicted. Until a layer has seen for itself
        what is used, eviction goes by the same numbers (with `eviction="static"`: from now on).

        Args:
            popularity: the JSON file that `promoe run` writes beside its page (`--report`); the `stats()` of an earlier run;
                or how often each expert is used, `[num_layers][num_experts]`, in any unit.

        Returns:
            How many of the experts that are used at all are in fast memory now.

        Raises:
            ConfigError: the file cannot be read, or the numbers are not of this model.
            EngineClosedError, EngineStalledError, EngineError: nothing can be fetched any more.
        """

    @abstractmethod
    def resize(self, cache: CacheSize) -> None:
        """Give the cache more or less memory between two forwards, for example because a KV cache grows.

        The experts that are needed last leave; the others stay. On a device there is memory for the old slots and the new
        ones at once for a moment.

        Args:
            cache: "6GiB", "50%" of the routed experts, or bytes.

        Raises:
            ConfigError: it is no size, too small, or more than there is memory for.
            PatchStateError: a forward of the model is running, or it has no slots; nothing was changed.
            EngineClosedError, EngineStalledError, EngineError: nothing is served any more.
        """

    def report(self) -> str:
        """Return the counters, what they mean, and what to do about it, as text."""
        return text_report(self.stats())

    @abstractmethod
    def trace(self, path: str | PathLike[str] | None = None) -> AbstractContextManager[Tracer]:
        """Record a timeline while the context lasts and write it to `path` (Chrome-trace JSON, for ui.perfetto.dev).

        Args:
            path: None: nothing is written, and only the latest events are kept, for `lanes_of(tracer.spans())`.

        Raises:
            ConfigError: the path cannot be written; raised before anything runs.
            PatchStateError: a timeline is being recorded already.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop all threads, and let the slots go. A forward after that raises EngineClosedError; `promoe.unpatch` still works.

        While forwards run in other threads, the slots stay until the model is unpatched, or gone.
        """

    @abstractmethod
    def detach(self, model: nn.Module) -> None:
        """Undo everything: hooks, classes, threads, memory. `model`, which has this handle, is as before it was patched.

        Raises:
            PatchStateError: a forward of it is running; then nothing was changed.
            CheckpointError: its experts could not be read from their files; then it stays patched and usable.
        """


@contextmanager
def written(tracer: Tracer, path: str | PathLike[str] | None) -> Iterator[Tracer]:
    """Write what `tracer` has recorded to `path`, if there is one, when the context ends."""
    if path is not None:
        check_writable(path)
    try:
        yield tracer
    finally:
        if path is not None:
            tracer.write(path)
