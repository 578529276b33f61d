"""Opening a Transformers model without its experts: everything else is loaded, the experts stay in the checkpoint's
files.

The model is loaded by Transformers' own `from_pretrained`, as an instance of a temporary subclass of its class that
steps in where the files have been found and the model stands on the meta device: it plans where each expert lies, hides
the experts from the rest of the load, and hands over the other tensors one by one. Afterwards the class is the original
one. Nothing global is patched.
"""

from __future__ import annotations

import copy
import inspect
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from promoe.errors import CheckpointError, ConfigError, PromoeError, UnsupportedModelError, shown
from promoe.experts.adapters.base import set_tensor
from promoe.experts.guard import guard_parameter, is_guard
from promoe.experts.moe_layers import MoELayer, find_moe_layers, is_adapter
from promoe.model.file_tensors import Counted, Progress, TensorInFile
from promoe.model.model_class import class_to_open
from promoe.model.opening_checks import (
    check_adapter,
    check_arguments,
    check_checkpoint,
    check_missing,
    check_shapes,
    prepare_config,
)
from promoe.stores.checkpoint_names import BankSpec
from promoe.stores.checkpoint_plan import plan_experts
from promoe.stores.layout import CACHE_LINE_BYTES, DEFAULT_CHUNK_BYTES
from promoe.stores.safetensors_files import SafetensorsFiles, check_inside, remedy
from promoe.stores.safetensors_store import SafetensorsStore

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Transformers replaces functions of its own while it loads (those that tie and initialise weights). Two loads at once can
# put each other's replacements back for good, and later models would come out untied.
_ONE_AT_A_TIME = threading.RLock()


@dataclass(frozen=True)
class OpenedModel:
    """A model whose experts are in files: on the CPU, in eval mode, its experts guarded (`promoe.experts.guard`)."""

    model: PreTrainedModel
    layers: list[MoELayer]
    store: SafetensorsStore


def open_without_experts(
    path_or_id: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    progress: Progress | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    auto_class: type | None = None,
    **from_pretrained_kwargs: Any,
) -> OpenedModel:
    """Open a checkpoint; its experts' bytes are planned, but not read.

    All other weights are read into private, 64-byte aligned memory (a product's bits can depend on its operands'
    alignment). Time and memory do not depend on the experts' bytes, only on their number.

    Args:
        path_or_id: folder of a safetensors checkpoint, or a hub id (all its files are downloaded, as Transformers
            does). Of an adapter alone, the base model that it names is opened with it.
        dtype: as in `from_pretrained`; experts of another dtype in the files are converted when they are read.
        progress: called as `progress(done_bytes, total_bytes)` while the other weights are read, from several threads,
            one at a time; in the end with both the same.
        chunk_bytes: longest transfer, a multiple of 4096.
        auto_class: a Transformers Auto class or model class. None: the class that config.json names (`architectures`), or
            `AutoModelForCausalLM` where it names none.
        **from_pretrained_kwargs: passed on: `revision`, `token`, `cache_dir`, `attn_implementation`, ...

    Raises:
        ConfigError: an argument that does not work with experts in files (`device_map`, `quantization_config`, ...).
        UnsupportedModelError: the model has no MoE layers, or quantised or otherwise unsupported ones.
        CheckpointError: files are missing, truncated, in another format, or do not match the model.
    """
    return _open(_Opening(progress or _no_progress, chunk_bytes), path_or_id, dtype, auto_class, from_pretrained_kwargs)


def open_headers(
    path_or_id: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    auto_class: type | None = None,
    **from_pretrained_kwargs: Any,
) -> OpenedModel:
    """The same from the headers of the files alone: no weight is read, and the model stays on the meta device.

    Its parameters have the shapes and dtypes that `open_without_experts` would give them. Arguments and errors are as
    there; weights that the files lack are not noticed, other than experts.
    """
    opening = _Opening(_no_progress, chunk_bytes, headers_only=True)
    return _open(opening, path_or_id, dtype, auto_class, from_pretrained_kwargs)


def _of_arguments(
    error: Exception, path_or_id: str | os.PathLike[str], kwargs: Mapping[str, Any]
) -> ConfigError | None:
    """What to raise where it was an argument that Transformers did not take; None: it was not, as far as can be told."""
    text = str(error)[:2000].rstrip(". ")
    unknown = re.search(r"unexpected keyword argument '(\w+)'", text)
    if isinstance(error, TypeError) and unknown and unknown[1] in kwargs:
        return ConfigError(
            f"Cannot open {path_or_id}: {text}. It is an argument of neither promoe.from_pretrained nor Transformers' own: "
            "check its spelling."
        )
    given = ", ".join(f"{name}={shown(value)}" for name, value in kwargs.items())
    if isinstance(error, ImportError) and given:
        return ConfigError(
            f"Cannot open {path_or_id} with {given}: {text}. Install what it names, or ask for something else."
        )
    named = [name for name in kwargs if any(form in text for form in (f"{name}=", f"`{name}`", f"'{name}'"))]
    if isinstance(error, (TypeError, ValueError)) and named:
        arguments = ", ".join(f"{name}={shown(kwargs[name])}" for name in named)
        return ConfigError(f"Cannot open {path_or_id} with {arguments}: {text}. Change it, or leave it out.")
    return None


class _HeadersReadError(BaseException):
    """Ends a load where nothing but headers was wanted. No Exception: nobody is to take it for a failure."""


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
    base = check_checkpoint(path_or_id, kwargs)
    try:
        auto_class = auto_class or class_to_open(base, options)
        auto = opening.auto_class(auto_class)
        with _ONE_AT_A_TIME, suppress(_HeadersReadError):
            model = auto.from_pretrained(path_or_id, dtype="auto" if dtype is None else dtype, **options)
            return opening.finish(model)
        return opening.finish(opening.model)
    except BaseException as error:
        opening.close()
        is_callers_own = any(error is one for one in opening.progress.raised)
        if is_callers_own or isinstance(error, (PromoeError, MemoryError)) or not isinstance(error, Exception):
            raise
        if isinstance(error, OSError):
            said = str(error)[:2000].rstrip(". ")
            raise CheckpointError(
                f"Cannot open {path_or_id}: {said}. {remedy(error) if error.errno else ''}".rstrip()
            ) from error
        if (ours := _of_arguments(error, path_or_id, kwargs)) is not None:
            raise ours from error
        if isinstance(error, ValueError) and opening.model_class is None:
            name = auto_class.__name__ if auto_class else "a model"
            raise UnsupportedModelError(f"Cannot open {path_or_id} as {name}: {error}") from error
        if opening.is_loaded:
            raise CheckpointError(
                f"Cannot open {path_or_id}: its weights were loaded, but not what Transformers loads after them (an adapter, "
                f"generation_config.json): {type(error).__name__}: {str(error)[:2000].rstrip('. ')}. Mend it, or take it out "
                "of the folder."
            ) from error
        # Transformers computes with what config.json says before it is compared with anything, and so do models.
        named = getattr(opening.model_class or auto_class, "__name__", "a model")
        raise CheckpointError(
            f"Cannot open {path_or_id} as {named}: {type(error).__name__}: {str(error)[:2000].rstrip('. ')}. If "
            f"{named}.from_pretrained of Transformers says the same, something is wrong with config.json or the arguments; "
            "else please report it as a fault of promoe."
        ) from error


class _Opening:
    """One load in progress: steps into it when the model stands on meta and its files are known."""

    def __init__(self, progress: Progress, chunk_bytes: int, headers_only: bool = False) -> None:
        self.progress = Counted(progress)
        self.chunk_bytes = chunk_bytes
        self.headers_only = headers_only
        self.model: Any = None  # on meta, once nothing more than headers is to be read
        self.store: SafetensorsStore | None = None
        self.layers: list[MoELayer] = []
        self.model_class: type[PreTrainedModel] | None = None  # known once its from_pretrained is entered
        self.is_loaded = False

    def auto_class(self, base: Any) -> Any:
        """An Auto class, or a model class, like `base` that loads through this object."""
        if not hasattr(base, "_model_mapping"):
            return self.subclass(base)
        return type(base.__name__, (base,), {"_model_mapping": _SubclassedMapping(base._model_mapping, self)})

    def subclass(self, base: type[PreTrainedModel]) -> type[PreTrainedModel]:
        """A class that loads like `base`, but through this object; conversions go by its name and module."""
        opening = self

        class Opening(base):  # type: ignore[misc]
            __module__, __qualname__, __doc__ = base.__module__, base.__qualname__, base.__doc__

            @classmethod
            def from_pretrained(
                cls, pretrained_model_name_or_path: Any, *args: Any, config: Any = None, **kwargs: Any
            ) -> Any:
                opening.model_class = base
                prepare_config(pretrained_model_name_or_path, config)
                return super().from_pretrained(pretrained_model_name_or_path, *args, config=config, **kwargs)

            # Whatever Transformers passes, by position or by name, goes on to the class's own.
            @staticmethod
            def _load_pretrained_model(*args: Any, **kwargs: Any) -> Any:
                if opening.store is not None:  # an adapter's weights, which go into the model that was loaded
                    loading, offloaded = base._load_pretrained_model(*args, **kwargs)
                    check_adapter(loading, kwargs["model"] if "model" in kwargs else args[0])
                    return loading, offloaded
                call = inspect.signature(base._load_pretrained_model).bind(*args, **kwargs)
                model, load_config = call.arguments["model"], call.arguments["load_config"]
                call.arguments["state_dict"] = opening.plan(model, call.arguments["checkpoint_files"], load_config)
                if opening.headers_only:
                    as_loaded(model, load_config.dtype_plan)
                    opening.model = model
                    raise _HeadersReadError
                with _hidden_experts(opening.layers):
                    loading, offloaded = base._load_pretrained_model(*call.args, **call.kwargs)
                opening.progress.end()
                check_shapes(loading, load_config.ignore_mismatched_sizes)
                return loading, offloaded

            @staticmethod
            def _finalize_model_loading(model: Any, *args: Any, **kwargs: Any) -> Any:
                with _hidden_experts(opening.layers):
                    loading = base._finalize_model_loading(model, *args, **kwargs)
                check_missing(loading, base, model.config)
                opening.is_loaded = True
                return loading

        Opening.__name__ = base.__name__
        return Opening

    def plan(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] | None, load_config: Any
    ) -> dict[str, TensorInFile]:
        """Find layers and experts' bytes; what is left for Transformers to load is returned, by name in the files."""
        paths = [Path(path) for path in checkpoint_files or ()]
        if not paths or any(path.suffix != ".safetensors" for path in paths):
            raise CheckpointError(
                "Experts are read from safetensors files only. Found "
                f"{', '.join(path.name for path in paths) or 'no files'}: convert the checkpoint with "
                "model.save_pretrained(...) first."
            )
        self.layers = _find_layers(model, load_config)
        banks = [bank_specs(layer) for layer in self.layers]
        names = set(model.state_dict()) | {name for layer in banks for bank in layer for name in bank.full_names}
        check_inside((load_config.sharded_metadata or {}).get("weight_map", {}).values(), "index")
        files = SafetensorsFiles.open(paths)
        try:
            conversions = copy.deepcopy(load_config.weight_mapping or [])
            plan = plan_experts(banks, files.tensors, conversions, names, model.base_model_prefix, self.chunk_bytes)
        except BaseException:
            files.close()
            raise
        self.store = SafetensorsStore(files, plan)
        # Transformers keeps the conversions that were used, to be able to save in the checkpoint's own layout.
        for conversion, planned in zip(load_config.weight_mapping or [], conversions, strict=True):
            conversion._was_used = conversion.was_used() or planned.was_used()
        rest = [tensor for name, tensor in files.tensors.items() if name not in plan.expert_tensors]
        self.progress.total_bytes = sum(tensor.nbytes for tensor in rest if tensor.name not in plan.unused_tensors)
        num_elements = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
        return {tensor.name: TensorInFile(files, tensor, self.progress.count, num_elements) for tensor in rest}

    def finish(self, model: PreTrainedModel) -> OpenedModel:
        """Give the model its class back, guard the experts."""
        if self.store is None or self.model_class is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} was not loaded from safetensors files in the usual way, so its experts could "
                "not be left there. Only checkpoints in Transformers' own safetensors layout are supported."
            )
        self.store.close_others()
        model.__class__ = self.model_class
        for layer in self.layers:
            for tensor in layer.tensors:
                for path in tensor.paths:
                    guard = guard_parameter(f"{layer.name}.{path}", tensor.stack_shape, tensor.dtype)
                    set_tensor(layer.experts, path, guard)
        if any(map(is_adapter, model.modules())):
            find_moe_layers(model)  # raises where it is on experts
            _align(model)
        opened = OpenedModel(model, self.layers, self.store)
        # A class is only freed by a garbage collection, and those made here hold this object: let it hold nothing.
        self.model, self.layers, self.store = None, [], None
        return opened

    def close(self) -> None:
        """After a failure: close the files."""
        if self.store is not None:
            self.store.close()


class _SubclassedMapping:
    """An Auto class's mapping from configuration to model class, each class replaced by its opening subclass."""

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
def _hidden_experts(layers: Sequence[MoELayer]) -> Iterator[None]:
    """Keep the experts out of `state_dict()`, so that they are neither expected, nor missing, nor initialised."""
    handles = []
    for layer in layers:
        for module in layer.experts.modules():
            module.__dict__["_is_hf_initialized"] = True  # as any loaded module has it; skips _init_weights
        handles.append(layer.experts.register_state_dict_post_hook(_dropping(layer.paths)))
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


def _find_layers(model: PreTrainedModel, load_config: Any) -> list[MoELayer]:
    """The MoE layers of a model on meta, their experts in the dtype that loading would give them."""
    layers = find_moe_layers(model, allow_meta=True)
    kept = _patterns(load_config.dtype_plan)
    changed = False
    for layer in layers:
        for bank in layer.tensors:
            for path in bank.paths:
                full_name = f"{layer.name}.{path}"
                dtype = next((dtype for pattern, dtype in kept.items() if pattern.search(full_name)), bank.dtype)
                if dtype != bank.dtype:
                    empty = torch.empty(bank.stack_shape, dtype=dtype, device="meta")
                    set_tensor(layer.experts, path, torch.nn.Parameter(empty, requires_grad=False))
                    changed = True
    return find_moe_layers(model, allow_meta=True) if changed else layers


def as_loaded(model: PreTrainedModel, dtype_plan: Mapping[str, torch.dtype] | None) -> None:
    """Make a model on meta what loading would: tied weights, and the dtypes of what stays in another than the model's."""
    model.tie_weights()
    patterns, kept = _patterns(dtype_plan), set(model.state_dict())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        dtype = next((dtype for pattern, dtype in patterns.items() if pattern.search(name)), tensor.dtype)
        if dtype != tensor.dtype and tensor.is_floating_point() and name in kept:
            tensor.data = tensor.data.to(dtype)


def _patterns(dtype_plan: Mapping[str, torch.dtype] | None) -> dict[re.Pattern[str], torch.dtype]:
    """What Transformers' `dtype_plan` means by its names."""
    return {re.compile(glob.replace("*", ".*")): dtype for glob, dtype in (dtype_plan or {}).items()}


def bank_specs(layer: MoELayer) -> list[BankSpec]:
    """The tensors of a layer's experts, as the stores' plan wants them."""
    return [
        BankSpec(
            tensor.name,
            tuple(f"{layer.name}.{path}" for path in tensor.paths),
            layer.num_experts,
            tensor.shape,
            tensor.dtype,
            tensor.stack_shape,
        )
        for tensor in layer.tensors
    ]


def _align(model: PreTrainedModel) -> None:
    """Have an adapter's tensors, which Transformers maps from its file, where all others are: at multiples of 64 bytes."""
    for parameter in model.parameters():
        if not is_guard(parameter) and parameter.data_ptr() % CACHE_LINE_BYTES:
            parameter.data = parameter.data.clone()


def _no_progress(done_bytes: int, total_bytes: int) -> None:
    pass
