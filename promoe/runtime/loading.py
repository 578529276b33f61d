"""`promoe.from_pretrained`: a checkpoint opened with its experts left in its files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from promoe.config import PromoeConfig
from promoe.errors import CheckpointError, ConfigError, shown
from promoe.model.file_tensors import Progress
from promoe.model.opening import open_without_experts
from promoe.model.packed_files import PackedChoice
from promoe.runtime.checking import Arguments, LinkChoice, PredictorChoice, check
from promoe.runtime.finding import FoundInFiles
from promoe.runtime.serving import serve
from promoe.runtime.sizes import CacheSize
from promoe.runtime.slot_plan import plan_slots
from promoe.stores.safetensors_files import remedy

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def from_pretrained(
    path_or_id: str | os.PathLike[str],
    *,
    cache: CacheSize = "50%",
    predictor: PredictorChoice = "gate",
    dtype: torch.dtype | str | None = None,
    device: str | torch.device = "cpu",
    link: LinkChoice = "auto",
    config: PromoeConfig | None = None,
    packed: PackedChoice = "auto",
    progress: Progress | None = None,
    auto_class: type | None = None,
    **from_pretrained_kwargs: Any,
) -> PreTrainedModel:
    """Open a safetensors checkpoint whose experts need not fit in memory.

    It loads everything but the routed experts. It reads experts from the checkpoint's own files when they are needed or
    predicted, without a conversion step or a second copy. The output is identical to that of the model that Transformers'
    `from_pretrained` returns. (In fp32, bits depend on memory addresses: compare with a model whose weights start at
    multiples of 64 bytes, as clones do.)

    Args:
        path_or_id: folder of a checkpoint, or a hub id. For a LoRA adapter (PEFT), the base model that it names is opened too.
        cache: RAM (with `device="cuda"`, GPU memory) for experts: "6GiB", "50%" of the routed experts, bytes, or "auto" (the
            free memory minus 2 GiB).
        predictor: "gate", "previous", "popularity", "random", the folder or hub id of a trained predictor, a `Predictor`
            object, or None for no prefetch.
        dtype: dtype of the weights; None: the checkpoint's. Experts of another dtype are converted when they arrive.
        device: "cuda" puts the slots and everything but the routed experts on the GPU. Experts come from the files. What was
            read stays in pinned RAM, up to `PromoeConfig.pinned_bytes`.
        link: "auto" or "file" (read the files), or an `EmulatedLink`.
        config: all other settings.
        packed: folder of experts that `promoe pack` wrote; "auto": the one beside the checkpoint's files, if it exists and fits
            this machine; None: read the checkpoint's own files. Only on a CPU.
        progress: function called as `progress(done_bytes, total_bytes)` while weights are loaded.
        auto_class: Auto class or model class of Transformers to open the checkpoint as, for example `AutoModelForCausalLM`
            for the text model of a model of text and images. None: the class that config.json names (`architectures`).
        from_pretrained_kwargs: passed to Transformers' `from_pretrained` (attn_implementation, revision, ...).

    Returns:
        The model, in eval mode; `model.promoe` is its handle.

    Raises:
        ConfigError: an argument has a wrong value.
        CheckpointError: files are missing, truncated or do not hold the model's experts.
        UnsupportedModelError: the model has no MoE layers that promoe can serve.
    """
    if not isinstance(path_or_id, str | os.PathLike):
        raise ConfigError(f"The 'path_or_id' argument must be a folder or a hub id. Got {shown(path_or_id)} instead.")
    if packed is not None and not isinstance(packed, str | os.PathLike):
        raise ConfigError(f"The 'packed' argument must be a folder, \"auto\" or None. Got {shown(packed)} instead.")
    if progress is not None and not callable(progress):
        raise ConfigError(f"The 'progress' argument must be a function of two numbers. Got {shown(progress)} instead.")
    checked = check(Arguments(cache, predictor, link, device, config), on_disk=True)
    opened = open_without_experts(
        path_or_id,
        dtype=dtype,
        progress=progress,
        chunk_bytes=checked.config.longest_chunk(),
        auto_class=auto_class,
        **from_pretrained_kwargs,
    )
    close = opened.store.close
    try:
        found = FoundInFiles(opened, packed if checked.device is None else None, progress, checked.config)
        close = found.close
        serve(found, plan_slots(found, checked), checked)
    except BaseException as error:
        close()
        if isinstance(error, OSError):  # a file went, or was replaced, since its header was read
            raise CheckpointError(f"Cannot open {path_or_id}: {error}. {remedy(error)}") from error
        raise
    return opened.model
