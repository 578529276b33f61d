"""Open a Transformers model without its experts: all other weights are loaded, the experts stay in the checkpoint's files.

Transformers' own `from_pretrained` loads the model, as an instance of a temporary subclass of its class. The subclass
steps in when the files have been found and the model is on the meta device. It plans where each expert lies in the
files, hides the experts from the rest of the load, and hands over the other tensors one by one. Afterwards the model
gets its original class back. Nothing global is patched.

GGUF files are found and read here (`promoe.model.gguf`): Transformers gets the configuration that they describe, no
name, and the conversions from their names of tensors to its own.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from promoe.errors import CheckpointError, PromoeError, UnsupportedModelError
from promoe.experts.adapters.base import set_tensor
from promoe.experts.guard import guard_parameter, is_guard
from promoe.experts.moe_layers import MoELayer, find_moe_layers
from promoe.experts.requirements import is_peft_module
from promoe.model.file_tensors import Counted, EncodedInFile, Progress, Reader, TensorInFile
from promoe.model.gguf.checkpoint import GgufCheckpoint
from promoe.model.gguf.finding import find_gguf, is_gguf
from promoe.model.meta_model import as_loaded, bank_specs, dtype_of, find_layers
from promoe.model.model_class import class_to_open, model_class_of, read_config
from promoe.model.opening_checks import (
    check_adapter,
    check_arguments,
    check_checkpoint,
    check_decoded,
    check_missing,
    check_shapes,
    opening_error,
    take_quantization,
)
from promoe.model.quantized_linear import Keep, KeptLinear, linears_to_keep
from promoe.stores.checkpoint_plan import plan_experts
from promoe.stores.encodings.base import EncodedTensor
from promoe.stores.encodings.schemes import find_weights
from promoe.stores.file_store import FileStore
from promoe.stores.layout import CACHE_LINE_BYTES, DEFAULT_CHUNK_BYTES
from promoe.stores.tensor_files import TensorFiles, check_inside

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# While Transformers loads, it replaces some of its own functions (those that tie and initialise weights), and restores
# them afterwards. Two loads at once could restore each other's replacements, and models loaded later would not be tied.
_ONE_AT_A_TIME = threading.RLock()


@dataclass(frozen=True)
class OpenedModel:
    """A model on the CPU, in eval mode, with guards (`promoe.experts.guard`) in place of its experts."""

    model: PreTrainedModel
    layers: list[MoELayer]
    store: FileStore


def open_without_experts(
    path_or_id: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    progress: Progress | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    auto_class: type | None = None,
    keep: Keep = "none",
    **from_pretrained_kwargs: Any,
) -> OpenedModel:
    """Open a checkpoint, and plan where its experts lie in the files, without reading them.

    All other weights are read into memory that is private and aligned to 64 bytes, because the bits of a product can
    depend on the alignment of its operands. Time and memory depend on the number of experts, but not on their size.

    Args:
        path_or_id: folder of a safetensors checkpoint, or a hub id (Transformers downloads all its files). If it has
            only an adapter, its base model is opened with it. Or GGUF files: see `promoe.model.gguf.finding`.
        dtype: as in `from_pretrained`. Experts stored in another dtype are converted when they are read. None: the
            checkpoint's; bfloat16 for GGUF files with weights in blocks.
        progress: called as `progress(done_bytes, total_bytes)` while the other weights are read, from several threads
            but never from two at a time. In the last call both numbers are equal.
        chunk_bytes: longest transfer, a multiple of 4096.
        auto_class: a Transformers Auto class or model class. None: the class that config.json names (`architectures`),
            or `AutoModelForCausalLM` if it names none.
        keep: which linear layers other than experts keep their weights in fewer bits, if the checkpoint has them so.
        **from_pretrained_kwargs: passed to Transformers: `revision`, `token`, `cache_dir`, `attn_implementation`, ...

    Raises:
        ConfigError: an argument does not work with experts in files (`device_map`, `quantization_config`, ...).
        UnsupportedModelError: the model has no MoE layers, or quantised or otherwise unsupported ones.
        CheckpointError: files are missing, truncated or in another format, or do not match the model.
    """
    opening = _Opening(progress or _no_progress, chunk_bytes, keep)
    return _open(opening, path_or_id, dtype, auto_class, from_pretrained_kwargs)


def open_headers(
    path_or_id: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    auto_class: type | None = None,
    keep: Keep = "none",
    **from_pretrained_kwargs: Any,
) -> OpenedModel:
    """Open a checkpoint by reading only the headers of its files. The model stays on the meta device.

    Its parameters have the shapes and dtypes that `open_without_experts` would give them. Arguments and errors are the
    same, except that missing weights other than experts are not noticed.
    """
    opening = _Opening(_no_progress, chunk_bytes, keep, headers_only=True)
    return _open(opening, path_or_id, dtype, auto_class, from_pretrained_kwargs)


class _HeadersReadError(BaseException):
    """Ends a load that needed only the headers. It is not an Exception, so that nobody handles it as a failure."""


def _open(
    opening: _Opening,
    path_or_id: str | os.PathLike[str],
    dtype: torch.dtype | str | None,
    auto_class: type | None,
    kwargs: Mapping[str, Any],
) -> OpenedModel:
    # Never ask on the terminal whether a checkpoint's own code may run.
    options = {**kwargs, "trust_remote_code": False, "use_safetensors": True}
    check_arguments(opening.chunk_bytes, dtype, auto_class, kwargs)
    name: str | os.PathLike[str] | None = path_or_id
    if is_gguf(path_or_id, kwargs):
        opening.gguf = GgufCheckpoint.open(find_gguf(path_or_id, kwargs))
        name = base = None
    else:
        base = opening.base = check_checkpoint(path_or_id, kwargs)
        if base != os.fspath(path_or_id):
            opening.keep = "none"  # adapters change ordinary linear layers only
    dtype = "auto" if dtype is None else dtype
    try:
        if opening.gguf is not None:
            options = opening.gguf.options(options)
            dtype = opening.gguf.dtype if dtype == "auto" else dtype
        auto_class = auto_class or class_to_open(base, options)
        if opening.gguf is not None:  # without a name, Auto classes open nothing
            auto_class = model_class_of(auto_class, options["config"])
            options["config"] = copy.deepcopy(options["config"])
            options["config"].architectures = [auto_class.__name__]
        auto = opening.auto_class(auto_class)
        with _ONE_AT_A_TIME, suppress(_HeadersReadError):
            model = auto.from_pretrained(name, dtype=dtype, **options)
            return opening.finish(model)
        return opening.finish(opening.model)
    except BaseException as error:
        opening.close()
        is_callers_own = any(error is one for one in opening.progress.raised)
        if is_callers_own or isinstance(error, (PromoeError, MemoryError)) or not isinstance(error, Exception):
            raise
        raise opening_error(error, path_or_id, kwargs, auto_class, opening.model_class, opening.is_loaded) from error


class _Opening:
    """One load in progress. It steps in when the model is on the meta device and its files are known."""

    def __init__(self, progress: Progress, chunk_bytes: int, keep: Keep, headers_only: bool = False) -> None:
        self.progress = Counted(progress)
        self.chunk_bytes = chunk_bytes
        self.keep = keep
        self.base: str | None = None  # where the weights are; None: it is a GGUF file
        self.headers_only = headers_only
        self.model: Any = None  # the model on the meta device, if only headers are read
        self.store: FileStore | None = None
        self.layers: list[MoELayer] = []
        self.linears: list[KeptLinear] = []
        self.reader: Reader | None = None
        self.quantization: Mapping[str, Any] | None = None  # the checkpoint's
        self.gguf: GgufCheckpoint | None = None  # if the checkpoint is one
        self.model_class: type[PreTrainedModel] | None = None  # known once its from_pretrained is entered
        self.is_loaded = False

    def auto_class(self, base: Any) -> Any:
        """Return a class like `base`, an Auto class or a model class, that loads through this object."""
        if not hasattr(base, "_model_mapping"):
            return self.subclass(base)
        return type(base.__name__, (base,), {"_model_mapping": _SubclassedMapping(base._model_mapping, self)})

    def subclass(self, base: type[PreTrainedModel]) -> type[PreTrainedModel]:
        """Return a class that loads like `base`, but through this object.

        It has the name and module of `base`, because Transformers finds the conversions of a checkpoint by these.
        """
        opening = self

        class Opening(base):  # type: ignore[misc]
            __module__, __qualname__, __doc__ = base.__module__, base.__qualname__, base.__doc__

            @classmethod
            def from_pretrained(
                cls, pretrained_model_name_or_path: Any, *args: Any, config: Any = None, **kwargs: Any
            ) -> Any:
                opening.model_class = base
                name = pretrained_model_name_or_path if opening.gguf is None else opening.gguf.path
                if isinstance(config, PreTrainedConfig):
                    config = copy.deepcopy(config)  # it may be the caller's own
                    opening.quantization = take_quantization(name, config)
                else:
                    read, rest = read_config(base, config or opening.base or name, kwargs)
                    opening.quantization = take_quantization(name, read)
                    if opening.quantization is not None:  # otherwise Transformers is to read it itself
                        config, kwargs = read, rest
                return super().from_pretrained(pretrained_model_name_or_path, *args, config=config, **kwargs)

            # All arguments are passed on to the original method, whether Transformers passes them by position or by
            # name.
            @staticmethod
            def _load_pretrained_model(*args: Any, **kwargs: Any) -> Any:
                if opening.store is not None:  # the second call loads an adapter's weights into the loaded model
                    loading, offloaded = base._load_pretrained_model(*args, **kwargs)
                    check_adapter(loading, kwargs["model"] if "model" in kwargs else args[0])
                    return loading, offloaded
                call = inspect.signature(base._load_pretrained_model).bind(*args, **kwargs)
                model, load_config = call.arguments["model"], call.arguments["load_config"]
                if opening.gguf is not None:
                    load_config = call.arguments["load_config"] = opening.gguf.load_config(load_config, model)
                call.arguments["state_dict"] = opening.plan(model, call.arguments["checkpoint_files"], load_config)
                if opening.headers_only:
                    as_loaded(model, load_config.dtype_plan)
                    opening.model = model
                    raise _HeadersReadError
                with _hidden(model, opening.layers, opening.linears):
                    loading, offloaded = base._load_pretrained_model(*call.args, **call.kwargs)
                check_shapes(loading, load_config.ignore_mismatched_sizes)
                return loading, offloaded

            @staticmethod
            def _finalize_model_loading(model: Any, load_config: Any, *args: Any, **kwargs: Any) -> Any:
                if opening.gguf is not None:
                    load_config = opening.gguf.load_config(load_config, model)
                with _hidden(model, opening.layers, opening.linears):
                    loading = base._finalize_model_loading(model, load_config, *args, **kwargs)
                check_missing(loading, base, model.config)
                opening.is_loaded = True
                return loading

        Opening.__name__ = base.__name__
        return Opening

    def plan(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] | None, load_config: Any
    ) -> dict[str, TensorInFile | EncodedInFile]:
        """Find the layers and plan where their experts lie; return the tensors that Transformers is to load, by name."""
        self.layers = find_layers(model, load_config)
        banks = [bank_specs(layer) for layer in self.layers]
        names = set(model.state_dict()) | {name for layer in banks for bank in layer for name in bank.full_names}
        check_inside((load_config.sharded_metadata or {}).get("weight_map", {}).values(), "index")
        files = self.gguf.files if self.gguf is not None else _open_safetensors(checkpoint_files or ())
        try:
            conversions = copy.deepcopy(load_config.weight_mapping or [])
            tensors = find_weights(files.tensors, self.quantization) if self.gguf is None else self.gguf.weights()
            plan = plan_experts(banks, tensors, conversions, names, model.base_model_prefix, self.chunk_bytes)
            check_decoded(model, plan, tensors)
            if self.gguf is not None:
                self.gguf.check_used(plan.unused_tensors, model.config)
        except BaseException:
            files.close()
            raise
        self.store = FileStore(files, plan)
        # Transformers keeps the conversions that were used, to be able to save in the checkpoint's own layout.
        for conversion, planned in zip(load_config.weight_mapping or [], conversions, strict=True):
            conversion._was_used = conversion.was_used() or planned.was_used()
        self.linears = linears_to_keep(
            model, plan.as_they_are, self.keep, functools.partial(dtype_of, load_config=load_config)
        )
        hidden = plan.expert_tensors | {linear.weight.name for linear in self.linears}
        rest = [tensor for name, tensor in tensors.items() if name not in hidden]
        read = [tensor for tensor in rest if tensor.name not in plan.unused_tensors]
        self.progress.total_bytes = sum(tensor.nbytes for tensor in (*read, *(one.weight for one in self.linears)))
        num_elements = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
        self.reader = reader = Reader(files, self.progress.count, num_elements)
        return {
            tensor.name: EncodedInFile(tensor, dtype_of(tensor.name, load_config), reader)
            if isinstance(tensor, EncodedTensor)
            else TensorInFile(tensor, reader)
            for tensor in rest
        }

    def finish(self, model: PreTrainedModel) -> OpenedModel:
        """Give the model its original class back, and put guards in place of the experts."""
        if self.store is None or self.model_class is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} was not loaded from safetensors files in the usual way, so its experts could "
                "not be left in them. Only checkpoints in Transformers' own safetensors layout are supported."
            )
        for linear in self.linears:
            linear.put_into(model, None if self.headers_only else self.reader)
        if not self.headers_only:
            self.progress.end()
        self.store.close_others()
        model.__class__ = self.model_class
        if self.gguf is not None:
            self.gguf.describe(model)
            self.gguf.forget_metadata()
        for layer in self.layers:
            for tensor in layer.tensors:
                for path in tensor.paths:
                    guard = guard_parameter(f"{layer.name}.{path}", tensor.stack_shape, tensor.dtype)
                    set_tensor(layer.experts, path, guard)
        if any(map(is_peft_module, model.modules())):
            find_moe_layers(model)  # raises if an adapter is on experts
            _align(model)
        opened = OpenedModel(model, self.layers, self.store)
        # The classes made here refer to this object, and only a garbage collection frees a class. Until then this
        # object must not keep the model alive.
        self.model, self.layers, self.store, self.gguf = None, [], None, None
        return opened

    def close(self) -> None:
        """Close the files, after a failure."""
        if self.store is not None:
            self.store.close()
        if self.gguf is not None:
            self.gguf.files.close()


def _open_safetensors(paths: Sequence[str]) -> TensorFiles:
    if not paths or any(Path(path).suffix != ".safetensors" for path in paths):
        raise CheckpointError(
            "Experts are read from safetensors and GGUF files only. Found "
            f"{', '.join(Path(path).name for path in paths) or 'no files'}: convert the checkpoint with "
            "model.save_pretrained(...) first."
        )
    return TensorFiles.open(paths)


class _SubclassedMapping:
    """An Auto class's mapping from configuration to model class, with subclasses that load through an `_Opening`."""

    def __init__(self, mapping: Any, opening: _Opening) -> None:
        self._mapping = mapping
        self._opening = opening

    def __getitem__(self, config_class: type) -> Any:
        classes = self._mapping[config_class]
        if isinstance(classes, (list, tuple)):
            return tuple(self._opening.subclass(one) for one in classes)
        return self._opening.subclass(classes)

    def __contains__(self, config_class: object) -> bool:
        return config_class in self._mapping

    def __iter__(self) -> Iterator[Any]:
        return iter(self._mapping)


@contextmanager
def _hidden(model: nn.Module, layers: Sequence[MoELayer], linears: Sequence[KeptLinear]) -> Iterator[None]:
    """Keep weights that promoe reads out of `state_dict()`, so that Transformers does not expect, miss or initialise them."""
    owners = [(layer.experts, layer.paths) for layer in layers]
    owners += [(model.get_submodule(linear.name), ("weight",)) for linear in linears]
    handles = []
    for owner, paths in owners:
        for module in owner.modules():
            # Transformers sets it on loaded modules, to skip _init_weights
            module.__dict__["_is_hf_initialized"] = True
        handles.append(owner.register_state_dict_post_hook(_dropping(paths)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _dropping(names: tuple[str, ...]) -> Callable[..., None]:
    def drop(module: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        for name in names:
            state_dict.pop(prefix + name, None)

    return drop


def _align(model: PreTrainedModel) -> None:
    """Move tensors that do not begin at a multiple of 64 bytes. Transformers maps an adapter's tensors from its file."""
    for parameter in model.parameters():
        if not is_guard(parameter) and parameter.data_ptr() % CACHE_LINE_BYTES:
            parameter.data = parameter.data.clone()


def _no_progress(done_bytes: int, total_bytes: int) -> None:
    pass
