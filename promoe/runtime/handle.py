"""`model.promoe`: the interface of a patched model."""

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
    """The handle of a patched model: counters, reports, timelines, resizing and closing.

    A model whose experts need no slots has a handle with the same methods.

    Attributes:
        config: the settings that the model was patched with.
    """

    config: PromoeConfig

    @abstractmethod
    def stats(self) -> Stats:
        """Return everything counted since patching or `reset_stats()`."""

    @abstractmethod
    def reset_stats(self) -> None:
        """Set all counters to zero. The cache keeps its contents, and what was learned from earlier passes stays."""

    @abstractmethod
    def warm(self, popularity: Popularity) -> int:
        """Fetch the most used experts into the free slots, the most popular ones first, and wait until they have arrived.

        The first prompt of a new model then finds them there. No expert is evicted. Eviction uses the same numbers
        until a layer has measured its own (with `eviction="static"`, from now on).

        Args:
            popularity: the JSON file that `promoe run` writes beside its page (`--report`); the `stats()` of an earlier
                run; or how often each expert is used, `[num_layers][num_experts]`, in any unit.

        Returns:
            How many of the experts with a popularity above zero are in fast memory now.

        Raises:
            ConfigError: the file cannot be read, or its numbers belong to another model.
            EngineClosedError, EngineStalledError, EngineError: the engine cannot fetch any more.
        """

    @abstractmethod
    def resize(self, cache: CacheSize) -> None:
        """Resize the cache between two forwards, for example when the KV cache grows.

        If there are fewer slots than before, the experts whose next use is expected last are evicted. On a device, the
        old and the new slots take memory at the same time for a moment.

        Args:
            cache: "6GiB", "50%" of the routed experts, or a number of bytes. If each layer has slots of its own:
                "2 per layer".

        Raises:
            ConfigError: `cache` is not such a size, is too small, or is more than the free memory.
            PatchStateError: a forward of the model is running, or the model has no slots. Nothing was changed.
            EngineClosedError, EngineStalledError, EngineError: the engine has stopped.
        """

    def report(self) -> str:
        """Return the counters as text, with what they mean and advice on what to change."""
        return text_report(self.stats())

    @abstractmethod
    def trace(self, path: str | PathLike[str] | None = None) -> AbstractContextManager[Tracer]:
        """Record a timeline while the context lasts and write it to `path` (Chrome-trace JSON, for ui.perfetto.dev).

        Args:
            path: the file to write. None: write nothing and keep only the latest events, for
                `lanes_of(tracer.spans())`.

        Raises:
            ConfigError: the path cannot be written. This is raised before anything runs.
            PatchStateError: a timeline is being recorded already.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop all threads and free the slots. Later forwards raise EngineClosedError; `promoe.unpatch` still works.

        If forwards are running in other threads, the slots are freed when the model is unpatched or garbage collected.
        """

    @abstractmethod
    def detach(self, model: nn.Module) -> None:
        """Undo everything (hooks, classes, threads, memory), so that `model` is as it was before it was patched.

        Args:
            model: the model that has this handle.

        Raises:
            PatchStateError: a forward of the model is running. Nothing was changed.
            CheckpointError: the experts could not be read from their files. The model stays patched and usable.
        """


@contextmanager
def written(tracer: Tracer, path: str | PathLike[str] | None) -> Iterator[Tracer]:
    """Write the events of `tracer` to `path` when the context ends, unless `path` is None."""
    if path is not None:
        check_writable(path)
    try:
        yield tracer
    finally:
        if path is not None:
            tracer.write(path)
