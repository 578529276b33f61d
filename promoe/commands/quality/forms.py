"""Finds the forms of a checkpoint's experts, and their sizes. Reads the headers of files only."""

from __future__ import annotations

import glob
import math
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from promoe.errors import ConfigError
from promoe.experts.kernels.formats import FORMATS
from promoe.model.opening import open_headers
from promoe.model.slot_folders import default_folder, open_experts
from promoe.model.slot_index import INDEX
from promoe.stores.base import layout_counts
from promoe.stores.layout import DEFAULT_CHUNK_BYTES

# The form of the reference.
REFERENCE = "checkpoint"
_QUANTISED = "int*"


@dataclass(frozen=True)
class Form:
    """A form of a model's experts.

    Attributes:
        experts: as `promoe.from_pretrained` takes it.
        bits_per_weight: mean over all weights of all experts, with scales and zeros.
        nbytes: of all experts in slots.
    """

    experts: str
    bits_per_weight: float
    nbytes: int

    @property
    def name(self) -> str:
        """A short name: of a folder, its last part."""
        return Path(self.experts).name or self.experts


def read_forms(model: str, asked: list[str], dtype: str | None = None, on_device: bool = False) -> list[Form]:
    """Return the reference, then the forms that were asked for.

    Args:
        model: folder or hub id.
        asked: forms as `promoe.from_pretrained` takes them. If there are none, all quantised ones beside the checkpoint's
            files, the one with the most bits first.
        dtype: of the model; None: the checkpoint's.
        on_device: whether the slots will be on a device.

    Raises:
        ConfigError: nothing was asked for and there is none, or one does not exist or does not fit the model.
        PromoeError: the checkpoint cannot be opened.
    """
    found = [read_form(model, experts, dtype, on_device) for experts in asked or _beside(model, dtype)]
    if not asked:
        found.sort(key=lambda form: -form.bits_per_weight)
    return [read_form(model, REFERENCE, dtype, on_device), *found]


def read_form(model: str, experts: str, dtype: str | None = None, on_device: bool = False) -> Form:
    """Return a form with its sizes, if the model can be opened with it."""
    opened = open_headers(model, dtype=dtype)
    try:
        store = open_experts(opened.layers, opened.store, experts, DEFAULT_CHUNK_BYTES, on_device)
    except BaseException:
        opened.store.close()
        raise
    with closing(store):
        layers = layout_counts(store)
    weights = sum(count * math.prod(spec.shape) for layout, count in layers for spec in layout.tensors)
    return Form(
        experts=experts,
        bits_per_weight=8 * sum(count * layout.payload_bytes for layout, count in layers) / weights,
        nbytes=sum(count * layout.slot_bytes for layout, count in layers),
    )


def _beside(model: str, dtype: str | None) -> list[str]:
    """Return the forms of which there is a folder beside the checkpoint's files.

    Raises:
        ConfigError: there is none.
    """
    with closing(open_headers(model, dtype=dtype).store) as store:
        beside = default_folder(store, _QUANTISED)
        names = {default_folder(store, name).name: name for name in FORMATS}
    begins = beside.name.removesuffix(_QUANTISED)
    pattern = f"{glob.escape(begins)}{_QUANTISED}"
    folders = sorted(folder for folder in beside.parent.glob(pattern) if (folder / INDEX).is_file())
    if not folders:
        raise ConfigError(
            f"There is nothing to compare: {beside.parent} has no folder {beside.name} with an {INDEX}. Write one with `promoe "
            f"quantize {model} --bits 4`, or name a folder of its --out with --experts."
        )
    return [names.get(folder.name, str(folder)) for folder in folders]
