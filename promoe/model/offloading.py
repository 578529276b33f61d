"""Move the experts of a model in RAM to disk, for `promoe.patch(model, store="disk")`.

They are read from the checkpoint that the model was loaded from, if every byte there is what the model has now: the
weights may have been trained, merged or converted since. Otherwise they are written to new files (`spool`). Their RAM
is freed only when the model has been patched. Until then everything can be undone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from huggingface_hub import try_to_load_from_cache
from torch import nn
from transformers import PreTrainedModel

from promoe.config import PromoeConfig
from promoe.errors import CheckpointError, PatchStateError, UnsupportedModelError
from promoe.experts.adapters.base import get_tensor, owner_of, set_tensor
from promoe.experts.guard import guard_parameter, is_guard
from promoe.experts.moe_layers import MoELayer
from promoe.model.meta_model import bank_specs
from promoe.model.passes import check_idle
from promoe.model.restoring import LOADING_THREADS, read_all_experts
from promoe.model.spool import spool
from promoe.scheduler import ExpertKey
from promoe.stores import FileStore, HostStore, Store
from promoe.stores.base import read_expert
from promoe.stores.layout import ExpertLayout
from promoe.stores.tensor_files import remedy

logger = logging.getLogger(__name__)


class _ExpertParameter(NamedTuple):
    """A parameter or buffer of an experts module, and its state when this was made."""

    layer: MoELayer
    path: str
    tensor: torch.Tensor
    version: int | None
    """Torch's counter of changes in place; None: an inference tensor has none."""
    address: int
    is_inference: bool

    @classmethod
    def of(cls, layer: MoELayer, path: str) -> _ExpertParameter:
        tensor = get_tensor(layer.experts, path)
        is_inference = tensor.is_inference()
        return cls(layer, path, tensor, None if is_inference else tensor._version, tensor.data_ptr(), is_inference)

    @property
    def name(self) -> str:
        """Path of the tensor in the model."""
        return f"{self.layer.name}.{self.path}"

    def hold(self, values: torch.Tensor) -> None:
        """Give the model's own parameter object these values. Others who refer to the object see them, too."""
        with torch.inference_mode(self.is_inference):  # values of the other kind could not be used in the same places
            self.tensor.data = values.clone() if self.is_inference else values

    def guard(self) -> None:
        """Put a guard in place of the parameter."""
        with torch.inference_mode(False):
            guard = guard_parameter(self.name, self.tensor.shape, self.tensor.dtype)
            set_tensor(self.layer.experts, self.path, guard.requires_grad_(self.tensor.requires_grad))

    def put_back(self) -> None:
        """Put the parameter back in place of its guard, with the guard's present `requires_grad`.

        If somebody has put another parameter there, that one stays.
        """
        if is_guard(guard := get_tensor(self.layer.experts, self.path)):
            with torch.inference_mode(self.is_inference):
                self.tensor.requires_grad_(guard.requires_grad)
            set_tensor(self.layer.experts, self.path, self.tensor)


class Offloaded:
    """A model's experts on disk, and its parameters in RAM until they are freed.

    Args:
        model: a model in RAM. It is not changed before `guarded`.
        layers: its MoE layers.
        config: the settings.
        layouts: how an expert of each layer is to lie in its slot. If one is not plain, the experts are also written to
            files in these formats.

    Raises:
        ConfigError: the experts have to be written to files, and cannot be.
        UnsupportedModelError: they are not plain tensors in RAM, or another module shares them.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[MoELayer], config: PromoeConfig, layouts: Sequence[ExpertLayout]
    ) -> None:
        self._layers = layers
        self._experts = [_ExpertParameter.of(layer, path) for layer in layers for path in layer.paths]
        _check_nobody_else_computes_with(self._experts, model)
        self._spooled: list[TemporaryDirectory[str]] = []
        live = HostStore([layer.rows() for layer in layers], config.longest_chunk())
        self._rests = [_rests(layer) for layer in layers]
        try:
            store = _checkpoint(model, layers, live, config.longest_chunk())
            if store is None:
                store, folder = spool(layers, live, config.spool_folder, config.longest_chunk())
                self._spooled.append(folder)
            self.store: FileStore = store
            self._plain = store
            if list(layouts) != list(live.layouts):
                try:
                    self.store, folder = spool(
                        layers, live, config.spool_folder, config.longest_chunk(), layouts, source=store
                    )
                except BaseException:
                    store.close()
                    self._remove_spooled()
                    raise
                self._spooled.append(folder)
        finally:
            live.close()

    @contextmanager
    def guarded(self, model: nn.Module) -> Iterator[None]:
        """Put guards in place of the experts while the context patches the model, then free the experts' RAM.

        If the context raises, the model gets its experts back, everything that was done to it inside is undone, and the
        store is closed.

        Raises:
            PatchStateError: a forward of the model has begun, or its experts were changed, since this object was made.
            CheckpointError: a file was replaced since then.
        """
        held = [expert.tensor.detach() for expert in self._experts]
        try:
            check_idle(model, self._layers)
            _check_unchanged(self._experts)
            for expert in self._experts:
                expert.guard()
            yield
            for expert in self._experts:
                expert.hold(torch.empty(0, dtype=expert.tensor.dtype))
        except BaseException as error:
            for expert, values in zip(self._experts, held, strict=True):
                if expert.tensor.numel() != values.numel():
                    expert.hold(values)
            self._take_back(model)
            if isinstance(error, OSError):
                raise CheckpointError(
                    f"The model's experts cannot be read: {error}. Nothing was changed. {remedy(error)}"
                ) from error
            raise
        finally:
            # The readers have the files open already. Without names, nobody else can change the files.
            self._remove_spooled()

    def _remove_spooled(self) -> None:
        for folder in self._spooled:
            folder.cleanup()

    def restore(self) -> None:
        """Read all experts back into the model's own parameters, or change nothing.

        Raises:
            CheckpointError: the files cannot be read.
        """
        banks = read_all_experts(self._layers, self._plain)
        of_layer = {layer.name: bank for layer, bank in zip(self._layers, banks, strict=True)}
        for bank, rests in zip(banks, self._rests, strict=True):
            for path, rest in rests.items():
                bank[path].view(-1)[bank[path].numel() - rest.numel() :] = rest
        for expert in self._experts:
            expert.hold(of_layer[expert.layer.name][expert.path])
        self._put_back()

    def _take_back(self, model: nn.Module) -> None:
        self._put_back()
        handle: Any = getattr(model, "promoe", None)
        if handle is None:
            self.store.close()
        else:  # Ctrl-C came after the model had been patched
            handle.abandon()

    def _put_back(self) -> None:
        for expert in self._experts:
            expert.put_back()


def _rests(layer: MoELayer) -> dict[str, torch.Tensor]:
    """Return the elements of the stacks that belong to no expert. They are in no store, so they stay in RAM."""
    return {
        tensor.paths[0]: tensor.rest(
            [get_tensor(layer.experts, path) for path in tensor.paths], layer.num_experts
        ).clone()
        for tensor in layer.tensors
    }


def _check_nobody_else_computes_with(experts: Sequence[_ExpertParameter], model: nn.Module) -> None:
    """Raise UnsupportedModelError if another module shares an expert's parameter, which would be empty there."""
    tensors = {id(expert.tensor): expert.name for expert in experts}
    places = {(id(registry), name) for registry, name in (owner_of(one.layer.experts, one.path) for one in experts)}
    for name, module in model.named_modules():
        for registry in (module._parameters, module._buffers):
            for own, tensor in registry.items():
                if id(tensor) in tensors and (id(registry), own) not in places:
                    raise UnsupportedModelError(
                        f"{tensors[id(tensor)]} is also {name}.{own}, which would become empty. Nothing was changed. Leave "
                        'out store="disk", or give that module a copy.'
                    )


def _check_unchanged(experts: Sequence[_ExpertParameter]) -> None:
    for expert in experts:
        now = _ExpertParameter.of(expert.layer, expert.path)
        if now.tensor is not expert.tensor or (now.version, now.address) != (expert.version, expert.address):
            raise PatchStateError(
                f"{expert.name} was changed while the model's experts were compared or written. The model was not patched: "
                "patch it again."
            )


def _checkpoint(model: nn.Module, layers: Sequence[MoELayer], live: HostStore, chunk_bytes: int) -> FileStore | None:
    """Return a store over the checkpoint that the model was loaded from; None: there is none, or its experts differ."""
    folder = checkpoint_folder(model)
    if folder is None or not isinstance(model, PreTrainedModel):
        logger.info("No checkpoint of this model is known, so its experts are written to files.")
        return None
    try:
        store = FileStore.open(folder, model, [bank_specs(layer) for layer in layers], chunk_bytes)
    except (CheckpointError, UnsupportedModelError, OSError) as error:
        logger.info("The experts are not read from %s: %s", folder, error)
        return None
    try:
        different = first_difference(live, store)
    except BaseException as error:
        store.close()
        if not isinstance(error, OSError):
            raise
        logger.info("The experts are not read from %s: %s", folder, error)
        return None
    if different is not None:
        store.close()
        logger.info(
            "The experts are not read from %s: expert %d of MoE layer %d differs there.",
            folder,
            different.expert_idx,
            different.layer_idx,
        )
        return None
    logger.info("The experts are read from %s, where all of them are the same as in the model.", folder)
    return store


def checkpoint_folder(model: nn.Module) -> Path | None:
    """Return the folder on this machine that Transformers loaded the model from; None: there is none."""
    config = getattr(model, "config", None)
    name = getattr(config, "_name_or_path", None)
    if not isinstance(name, str) or not name:
        return None
    try:
        if Path(name).is_dir():
            return Path(name)
        found = try_to_load_from_cache(name, "config.json", revision=getattr(config, "_commit_hash", None))
    except (ValueError, OSError):  # not a valid repository name, or a path that cannot be read
        return None
    return Path(found).parent if isinstance(found, str) else None


def first_difference(live: Store, other: Store) -> ExpertKey | None:
    """Return the first expert whose bytes differ between two stores with the same layouts; None: all are equal.

    Raises:
        OSError: an expert cannot be read.
    """
    assert list(live.layouts) == list(other.layouts), "stores of two models"

    def differs(key: ExpertKey) -> bool:
        slots = []
        for store in (live, other):
            slot = bytearray(store.layouts[key.layer_idx].slot_bytes)
            read_expert(store, key, memoryview(slot))
            slots.append(slot)
        return slots[0] != slots[1]

    keys = [ExpertKey(layer_idx, idx) for layer_idx, count in enumerate(live.num_experts) for idx in range(count)]
    with ThreadPoolExecutor(LOADING_THREADS, thread_name_prefix="promoe-compare") as threads:
        found = threads.map(differs, keys)
        try:
            return next((key for key, different in zip(keys, found, strict=True) if different), None)
        finally:
            threads.shutdown(cancel_futures=True)
