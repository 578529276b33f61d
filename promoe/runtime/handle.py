"""`model.promoe`: what a user asks a patched model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from os import PathLike

from torch import nn

from promoe.config import PromoeConfig
from promoe.files import check_writable
from promoe.runtime.popularity import Popularity
from promoe.runtime.sizes import CacheSize
from promoe.stats.text_report import text_report
from promoe.stats.totals import Stats
from promoe.stats.tracing import Tracer


class Handle(ABC):
    """The handle of a patched model: counters, reports, timelines, cache size. It is the same with and without slots.

    Attributes:
        config: the settings it was patched with.
    """

    config: PromoeConfig

    @abstractmethod
    def stats(self) -> Stats:
        """Return everything counted since patching or `reset_stats()`."""

    @abstractmethod
    def reset_stats(self) -> None:
        """Set all counters to zero. Slots and what was learned stay."""

    @abstractmethod
    def warm(self, popularity: Popularity) -> int:
        """Fetch the most used experts into free slots, and wait until they are there. Nothing is evicted.

        Until a layer has counted uses itself, eviction goes by the same numbers (with `eviction="static"`, always).

        Args:
            popularity: the JSON file that `promoe run` writes with `--report`, the `stats()` of an earlier run, or how often
                each expert is used, `[num_layers][num_experts]`, in any unit.

        Returns:
            The number of used experts that are in slots now.

        Raises:
            ConfigError: the file cannot be read, or the numbers belong to another model.
            EngineClosedError, EngineStalledError, EngineError: nothing can be fetched any more.
        """

    @abstractmethod
    def resize(self, cache: CacheSize) -> None:
        """Resize the cache between two forwards, for example when the KV cache grows.

        If slots go, the experts whose next use is expected last leave. On a GPU, the old and the new slots exist together for a
        moment.

        Args:
            cache: "6GiB", "50%" of the routed experts, or bytes.

        Raises:
            ConfigError: this is not a size, or it is too small, or more than the free memory.
            PatchStateError: a forward of the model is running, or it has no slots. Nothing has changed.
            EngineClosedError, EngineStalledError, EngineError: the model cannot run any more.
        """

    def report(self) -> str:
        """Return the counters, what they mean and what to do about it, as text."""
        return text_report(self.stats())

    @abstractmethod
    def trace(self, path: str | PathLike[str] | None = None) -> AbstractContextManager[Tracer]:
        """Record a timeline while the context lasts and write it to `path` (Chrome-trace JSON, for ui.perfetto.dev).

        Args:
            path: file to write; None: write nothing, and keep only the latest events, for `lanes_of(tracer.spans())`.

        Raises:
            ConfigError: the path cannot be written. This is raised before anything runs.
            PatchStateError: another timeline is being recorded.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop all threads and free the slots. Later forwards raise EngineClosedError; `promoe.unpatch` still works.

        While other threads run forwards, the slots stay until the model is unpatched or deleted.
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
