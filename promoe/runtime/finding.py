"""The second step of `patch` and `from_pretrained`: find the experts, and know how to serve them.

The experts are in a model's own tensors and stay there, are to be moved to files, or are in the files of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from typing import NamedTuple

from torch import nn

from promoe.config import PromoeConfig
from promoe.errors import PatchStateError, UnsupportedModelError
from promoe.experts.kernels.formats import SlotFormat, formats_in
from promoe.experts.moe_layers import MoELayer, check_module, find_moe_layers
from promoe.model import attach
from promoe.model.file_tensors import Progress
from promoe.model.offloading import Offloaded
from promoe.model.opening import OpenedModel
from promoe.model.passes import check_idle
from promoe.model.quantizing import quantizable
from promoe.model.restoring import load_all_experts
from promoe.model.slot_folders import ExpertsChoice, open_experts
from promoe.runtime.checking import Checked
from promoe.stores import HostStore, HotLayouts, Store
from promoe.stores.layout import ExpertLayout
from promoe.transfer.links.free_ram import own_ram_bytes


class Served(NamedTuple):
    """Experts that are ready to be served from a store."""

    store: Store
    restore: Callable[[], None]
    """Gives the experts back to the model. The model will own this, so it must not keep the model alive."""


class Found:
    """A model whose experts are in its own tensors, and stay there.

    Args:
        model: the model.
        layers: its MoE layers, released (`MoELayer.released`).
    """

    hot: HotLayouts | None = None
    """Experts that have other layouts than `layouts` says."""
    home = "host"
    """Where the report says that the experts are, if they need no slots."""

    def __init__(self, model: nn.Module, layers: Sequence[MoELayer]) -> None:
        self.model, self.layers = model, layers
        self.layouts: Sequence[ExpertLayout] = [layer.layout for layer in layers]
        self.num_experts: Sequence[int] = [layer.num_experts for layer in layers]

    @cached_property
    def freed_bytes(self) -> int:
        """RAM in bytes that the model frees once its experts are served."""
        return 0

    def need_no_slots(self, checked: Checked, all_fit: bool) -> bool:
        """Return whether all experts are used in place, so that nothing is fetched.

        Args:
            checked: the arguments.
            all_fit: whether the cache has slots for all experts.
        """
        return (all_fit and checked.config.bypass) or (checked.device is None and checked.asked.link == "auto")

    def keep_all(self) -> None:
        """Put all experts into the model's own tensors. Does nothing here, because they are in them already."""

    def serving(self, config: PromoeConfig, on_device: bool) -> AbstractContextManager[Served]:
        """Return a context in which the experts can be served. If it raises, the model has its experts as before."""
        store = HostStore([layer.rows() for layer in self.layers], config.longest_chunk(onto_device=on_device))
        return nullcontext(Served(store, _nothing))


class FoundForDisk(Found):
    """A model whose experts are to be moved from its tensors to files.

    Args:
        model: the model.
        layers: its MoE layers, released.
        slot_format: the slot format to write them in; None: plain.

    Raises:
        UnsupportedModelError: none of its experts can be in this format.
    """

    def __init__(self, model: nn.Module, layers: Sequence[MoELayer], slot_format: SlotFormat | None) -> None:
        super().__init__(model, layers)
        if slot_format is not None:
            formats = quantizable(layers, slot_format)
            self.layouts = [layer.layout.in_formats(formats[layer.layout]) for layer in layers]

    @cached_property
    def freed_bytes(self) -> int:
        """RAM in bytes that the experts take, measured while they are in RAM. A memory-mapped checkpoint takes none."""
        total_bytes = sum(layer.num_experts * layer.layout.payload_bytes for layer in self.layers)
        return min(total_bytes, own_ram_bytes() or 0)

    def need_no_slots(self, checked: Checked, all_fit: bool) -> bool:
        """Return whether the experts stay in RAM, because the cache has room for all of them."""
        plain = checked.config.kernels == "exact" and not formats_in(self.layouts)
        return all_fit and checked.config.bypass and checked.device is None and plain

    @contextmanager
    def serving(self, config: PromoeConfig, on_device: bool) -> Iterator[Served]:
        """Compare the experts with the checkpoint, or write them to files, and free their RAM (see `Offloaded`)."""
        offloaded = Offloaded(self.model, self.layers, config, self.layouts)
        with offloaded.guarded(self.model):
            yield Served(offloaded.store, offloaded.restore)


class FoundInFiles(Found):
    """A model that was opened without its experts.

    Args:
        opened: the model.
        experts: see `from_pretrained`.
        progress: called while experts are read.
        config: the settings.
        on_device: whether the slots will be on a device.
    """

    home = "memory"

    def __init__(
        self,
        opened: OpenedModel,
        experts: ExpertsChoice,
        progress: Progress | None,
        config: PromoeConfig,
        on_device: bool = False,
    ) -> None:
        super().__init__(opened.model, [layer.released() for layer in opened.layers])
        self._plain = self._store = opened.store
        self._progress = progress
        self._store = open_experts(self.layers, opened.store, experts, config.longest_chunk(), on_device)
        self.layouts, self.num_experts = self._store.layouts, self._store.num_experts
        self.hot = self._store.hot

    def need_no_slots(self, checked: Checked, all_fit: bool) -> bool:
        """Return whether all experts are loaded, because the cache has room for them.

        Experts in a slot format are always served from slots: the model has no place for them.
        """
        plain = checked.config.kernels == "exact" and self._store is self._plain
        return all_fit and checked.config.bypass and checked.device is None and plain

    def keep_all(self) -> None:
        """Load all experts into the model."""
        load_all_experts(self.layers, self._plain, self._progress)
        self._plain.close()

    def serving(self, config: PromoeConfig, on_device: bool) -> AbstractContextManager[Served]:
        """Return a context in which the experts are served from the open files."""
        return nullcontext(Served(self._store, partial(load_all_experts, self.layers, self._plain)))

    def close(self) -> None:
        """Close the files, if serving the model failed."""
        self._store.close()


def find_in_ram(model: nn.Module, on_disk: bool, slot_format: SlotFormat | None = None) -> Found:
    """Find the experts of a model in RAM. Changes nothing.

    Args:
        model: a model in eval mode, on the CPU.
        on_disk: whether its experts are to be moved to files.
        slot_format: the slot format of these; None: plain.

    Raises:
        ConfigError: `model` is not a torch module.
        UnsupportedModelError: it has no MoE layers that can be served, is in training mode or is not on the CPU.
        PatchStateError: it is patched already, or a forward of it is running.
    """
    check_module(model)
    check_unpatched(model)
    layers = [layer.released() for layer in find_moe_layers(model)]
    check_state(model, layers)
    check_idle(model, layers)
    return FoundForDisk(model, layers, slot_format) if on_disk else Found(model, layers)


def check_unpatched(model: nn.Module) -> None:
    """Raise PatchStateError if the model, or a part of it, is patched."""
    if hasattr(model, "promoe") or any(attach.is_patched(module) for module in model.modules()):
        raise PatchStateError(
            f"This {type(model).__name__} is patched already. Call promoe.unpatch(model) first to change its settings."
        )


def check_state(model: nn.Module, layers: Sequence[MoELayer]) -> None:
    """Raise UnsupportedModelError unless the model is on the CPU and in eval mode."""
    if model.training:
        raise UnsupportedModelError(
            "The model is in training mode, but promoe supports inference only: slots are overwritten while a "
            "backward pass would still need them. Call model.eval() first."
        )
    devices = sorted({str(tensor.device) for layer in layers for tensor in layer.parameters()})
    if devices != ["cpu"]:
        raise UnsupportedModelError(
            f'The model\'s experts are on {", ".join(devices)}; this version serves models on the CPU. Call model.to("cpu").'
        )


def _nothing() -> None:
    """Do nothing: the experts are still in the model's tensors."""
