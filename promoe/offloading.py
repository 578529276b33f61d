"""The experts of a model in RAM, left on disk: `promoe.patch(model, store="disk")`.

They are read from the checkpoint that the model came from, if every byte that it would give is what the model has: weights
may have been trained, merged or converted since. Otherwise they are written to files of their own (`spool`). Their RAM is given
back when the model is patched, and not before; until then everything can be taken back.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from torch import nn
from transformers import PreTrainedModel

from promoe.adapters.base import get_tensor, set_tensor
from promoe.config import PromoeConfig
from promoe.errors import CheckpointError, UnsupportedModelError
from promoe.forwards import check_idle
from promoe.guard import guard_parameter
from promoe.moe_layers import MoELayer
from promoe.opening import bank_specs
from promoe.packed_files import open_packed
from promoe.restoring import LOADING_THREADS, read_all_experts
from promoe.scheduler import ExpertKey
from promoe.spool import spool
from promoe.stores import HostStore, SafetensorsStore, Store
from promoe.stores.base import read_expert

logger = logging.getLogger(__name__)


class Offloaded:
    """A model's experts on disk, beside those that it has.

    Args:
        model: in RAM; nothing of it is changed before `guarded`.
        layers: its MoE layers.
        config: its settings.
        packed: whether experts that `promoe pack` packed may be read, where they lie beside the checkpoint.

    Raises:
        ConfigError: they have to be written, and cannot be.
        UnsupportedModelError: they are no plain tensors in RAM.
    """

    def __init__(self, model: nn.Module, layers: Sequence[MoELayer], config: PromoeConfig, packed: bool) -> None:
        self._layers = layers
        self._tensors = [{path: get_tensor(layer.experts, path) for path in layer.paths} for layer in layers]
        self._spooled: Path | None = None
        live = HostStore([layer.rows() for layer in layers], config.chunk_bytes)
        # What a stack has besides experts is in no store. It stays in RAM.
        self._rests = [
            {
                tensor.paths[0]: tensor.rest([of_layer[path] for path in tensor.paths], layer.num_experts).clone()
                for tensor in layer.tensors
            }
            for layer, of_layer in zip(layers, self._tensors, strict=True)
        ]
        try:
            store = _checkpoint(model, layers, live, config.chunk_bytes)
            if store is None:
                store, self._spooled = spool(layers, live, config.spool_folder, config.chunk_bytes)
        finally:
            live.close()
        self._plain: SafetensorsStore = store
        try:
            self.store = open_packed(
                layers, store, "auto" if packed and self._spooled is None else None, config.chunk_bytes
            )
        except BaseException:
            store.close()
            raise

    @contextmanager
    def guarded(self, model: nn.Module) -> Iterator[None]:
        """Guards in place of the experts. If what happens inside succeeds, that stays, and their RAM is given back; else the
        model gets them back, and the store is closed.

        Raises:
            PatchStateError: a forward of the model began meanwhile.
        """
        try:
            check_idle(model, self._layers)
            for layer, tensors in zip(self._layers, self._tensors, strict=True):
                for path, tensor in tensors.items():
                    set_tensor(layer.experts, path, guard_parameter(f"{layer.name}.{path}", tensor.shape, tensor.dtype))
            yield
        except BaseException:
            self._put_back()
            self.store.close()
            raise
        finally:
            if self._spooled is not None:  # who reads the files has them open; what nobody finds, nobody changes
                shutil.rmtree(self._spooled, ignore_errors=True)
        self._fill([{path: torch.empty(0, dtype=t.dtype) for path, t in tensors.items()} for tensors in self._tensors])

    def restore(self) -> None:
        """Read everything back into the model's own parameters; all or nothing.

        Raises:
            CheckpointError: the files cannot be read.
        """
        banks = read_all_experts(self._layers, self._plain)
        for bank, rests in zip(banks, self._rests, strict=True):
            for path, rest in rests.items():
                bank[path].view(-1)[bank[path].numel() - rest.numel() :] = rest
        self._fill(banks)
        self._put_back()

    def _put_back(self) -> None:
        for layer, tensors in zip(self._layers, self._tensors, strict=True):
            for path, tensor in tensors.items():
                set_tensor(layer.experts, path, tensor)

    def _fill(self, banks: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Let the model's own parameters, wherever else they are held, have these values."""
        for tensors, bank in zip(self._tensors, banks, strict=True):
            for path, tensor in tensors.items():
                with torch.inference_mode(tensor.is_inference()):  # or its values could not be used
                    tensor.data = bank[path].clone() if tensor.is_inference() else bank[path]


def _checkpoint(
    model: nn.Module, layers: Sequence[MoELayer], live: HostStore, chunk_bytes: int
) -> SafetensorsStore | None:
    """The checkpoint that the model was loaded from, if it is there and has the same experts."""
    folder = checkpoint_folder(model)
    if folder is None or not isinstance(model, PreTrainedModel):
        logger.info("The model was not loaded from a checkpoint that is on this disk: its experts are written to one.")
        return None
    try:
        store = SafetensorsStore.open(folder, model, [bank_specs(layer) for layer in layers], chunk_bytes)
    except (CheckpointError, UnsupportedModelError) as error:
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
            "The experts are not read from %s: expert %d of MoE layer %d is another there.",
            folder,
            different.expert_idx,
            different.layer_idx,
        )
        return None
    logger.info("The experts are read from %s, where all are as in the model.", folder)
    return store


def checkpoint_folder(model: nn.Module) -> Path | None:
    """The folder on this machine that Transformers loaded the model from; None: it was made, or is from elsewhere."""
    config = getattr(model, "config", None)
    name = getattr(config, "_name_or_path", None)
    if not isinstance(name, str) or not name:
        return None
    if Path(name).is_dir():
        return Path(name)
    try:
        found = try_to_load_from_cache(name, "config.json", revision=getattr(config, "_commit_hash", None))
    except ValueError:  # no name of a repository
        return None
    return Path(found).parent if isinstance(found, str) else None


def first_difference(live: Store, other: Store) -> ExpertKey | None:
    """An expert whose bytes in a slot are not the same from both stores, which have the same layouts; None: there is none.

    Raises:
        OSError: one cannot be read.
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
