"""`promoe.from_pretrained` opens a checkpoint and leaves its experts in its files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from promoe.config import PromoeConfig
from promoe.errors import CheckpointError, ConfigError, shown
from promoe.experts.kernels.formats import FORMATS
from promoe.model.file_tensors import Progress
from promoe.model.opening import open_without_experts
from promoe.model.quantized_linear import keep_for
from promoe.model.slot_folders import ExpertsChoice
from promoe.runtime.checking import Arguments, LinkChoice, PredictorChoice, check
from promoe.runtime.finding import FoundInFiles
from promoe.runtime.serving import serve
from promoe.runtime.sizes import CacheSize
from promoe.runtime.slot_plan import plan_slots
from promoe.stores.tensor_files import remedy
from promoe.transfer.devices import Device

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def from_pretrained(
    path_or_id: str | os.PathLike[str],
    *,
    experts: ExpertsChoice = "auto",
    cache: CacheSize = "50%",
    predictor: PredictorChoice = "gate",
    dtype: torch.dtype | str | None = None,
    device: str | torch.device = "cpu",
    link: LinkChoice = "auto",
    config: PromoeConfig | None = None,
    progress: Progress | None = None,
    auto_class: type | None = None,
    **from_pretrained_kwargs: Any,
) -> PreTrainedModel:
    """Open a checkpoint (safetensors or GGUF) whose experts do not have to fit in memory.

    All weights except the routed experts are loaded. Experts are read from the checkpoint's own files, chunk by chunk,
    when they are needed or predicted. Nothing is converted or copied beforehand. The output is identical to that of the
    model that Transformers' `from_pretrained` returns. In fp32, bits depend on where weights begin in memory: there,
    the output is that of a model whose weights begin at multiples of 64 bytes, as clones of tensors do.

    Args:
        path_or_id: folder of a checkpoint, or a hub id. If it has only an adapter (PEFT), its base model is opened with
            it. For GGUF: the file, any of its parts, a folder with one model, or "org/name/file.gguf" on the hub.
        experts: the form of the experts. "auto": as the checkpoint has them, or packed (`promoe pack`) if they are so
            beside the checkpoint and fit this model and machine; the output is the same. "int8", "int4", "int3", "int2":
            quantised (`promoe quantize`), which changes the output: it is that of the same model with all experts in
            this form in memory. "int4-hot8": the most used experts in 8 bits, the others in 4 (`promoe quantize MODEL
            --hot 8 --counts FILE`; on a CPU only). A folder that one of the two commands wrote with `--out`.
            "checkpoint": never packed.
            If the checkpoint is in fewer bits itself: "auto" leaves what is in integers of 4 or 8 bits so in memory, if a
            slot format can hold it, and decodes the rest. "int8" quantises that rest to 8 bits as it is read. Both hold
            for all linear layers. "checkpoint" decodes everything: the output is that of the model whose weights are
            decoded when it is loaded.
            On a CPU, torch's kernels multiply by the quantised weights. On a device, quantised experts are moved and kept
            as they are and expanded to bf16 for each call: the output is that of the model with these expanded weights,
            computed by its own kernels. Packed experts are for a CPU only.
        cache: RAM (with `device="cuda"`, GPU memory) for experts: "6GiB", "50%" of the routed experts, a number of
            bytes, "auto" (all free memory except 2 GiB), or "2 per layer" (slots that belong to one layer each).
        predictor: "gate", "correlation", "previous", "popularity", "random", a trained one's folder or hub id, a
            `Predictor` object, or None for no prefetching.
        dtype: dtype of the weights; None: that of the checkpoint, and bfloat16 for a GGUF file with weights in blocks.
            Experts stored in another dtype are converted when they arrive.
        device: "cuda" puts the slots and everything except the routed experts on the GPU. Experts are read from the
            files, and pinned RAM keeps as many of them as `PromoeConfig.pinned_bytes` allows.
        link: "auto" or "file" (read the files), or an `EmulatedLink`.
        config: all other settings, see `PromoeConfig`.
        progress: called as `progress(done_bytes, total_bytes)` while weights are loaded.
        auto_class: the Auto class or model class of Transformers to open the checkpoint with. For example,
            `AutoModelForCausalLM` opens only the text part of a vision-language model. None: the class that config.json
            names (`architectures`).
        from_pretrained_kwargs: passed to Transformers' `from_pretrained` (attn_implementation, revision, ...); `gguf_file`
            is the name of a GGUF file in the folder or hub id.

    Returns:
        The model, in eval mode; `model.promoe` is its handle.

    Raises:
        ConfigError: an argument is invalid, alone or together with others.
        CheckpointError: files are missing or truncated, or do not contain the model's experts.
        UnsupportedModelError: the model has no MoE layers that promoe can serve.
    """
    if not isinstance(path_or_id, str | os.PathLike):
        raise ConfigError(
            f"The 'path_or_id' argument must be a folder, a GGUF file or a hub id. Got {shown(path_or_id)} instead."
        )
    if not isinstance(experts, str | os.PathLike):
        raise ConfigError(
            f'The \'experts\' argument must be "auto", "checkpoint", a slot format such as "int4", or a folder. Got '
            f"{shown(experts)} instead."
        )
    if progress is not None and not callable(progress):
        raise ConfigError(f"The 'progress' argument must be a function of two numbers. Got {shown(progress)} instead.")
    checked = check(Arguments(cache, predictor, link, device, config), on_disk=True)
    opened = open_without_experts(
        path_or_id,
        dtype=dtype,
        progress=progress,
        chunk_bytes=checked.config.longest_chunk(),
        auto_class=auto_class,
        keep=keep_for(experts) if checked.device is None else "none",  # on a device, stock kernels multiply,
        **from_pretrained_kwargs,
    )
    close = opened.store.close
    try:
        on_device = checked.device is not None
        found = FoundInFiles(opened, _on(checked.device, experts), progress, checked.config, on_device)
        close = found.close
        serve(found, plan_slots(found, checked), checked)
    except BaseException as error:
        close()
        if isinstance(error, OSError):  # a file was removed or replaced after its header was read
            raise CheckpointError(f"Cannot open {path_or_id}: {error}. {remedy(error)}") from error
        raise
    return opened.model


def _on(device: Device | None, experts: ExpertsChoice) -> ExpertsChoice:
    """Return the form of the experts that the slots of `device` (None: the CPU) can hold.

    Raises:
        ConfigError: they cannot hold the one that was asked for.
    """
    if device is None:
        return experts
    if experts in FORMATS and FORMATS[str(experts)].exact:
        raise ConfigError(
            f"experts={shown(str(experts))} is for slots in RAM, but device={str(device.torch_device)!r} was asked for. "
            'Leave one of the two out, or use experts that `promoe quantize` wrote (experts="int8" or "int4").'
        )
    return experts
