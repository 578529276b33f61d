"""What config.json says of a checkpoint in compressed-tensors: which modules are quantised in which way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from promoe.errors import CheckpointError, shown
from promoe.stores.encodings.base import Integers
from promoe.stores.encodings.packed_integers import BITS, as_integers, bits_per_weight
from promoe.stores.encodings.patterns import check, matches

# The formats that can be read, of a checkpoint or a group of modules.
FORMATS = (
    *("pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "mixed-precision", "dense"),
    *("mxfp4-pack-quantized", "mxfp8-quantized"),
)


@dataclass(frozen=True)
class Scheme:
    """How config.json says that the weights of some modules are quantised.

    Attributes:
        targets: names of modules, regular expressions for them ("re:..."), or classes.
        bits: of a weight.
        group: inputs that share a scale; None: all.
        is_integer: whether they are integers.
        is_symmetric: whether zero is always in the middle.
        block: rows and columns that share a scale; None: it is not by blocks.
        strategy: what shares a scale: "tensor", "channel", "group" or "block"; others and "" say nothing about it.
        is_ordered: whether inputs are grouped in the order of activations, so that a tensor says each input's group.
    """

    targets: tuple[str, ...]
    bits: int
    group: int | None
    is_integer: bool
    is_symmetric: bool
    block: tuple[int, int] | None
    strategy: str
    is_ordered: bool

    def has_scales(self, scales: tuple[int, ...], outputs: int, inputs: int) -> bool:
        """Return whether scales of a weight may have this shape."""
        rows, columns = self.block or (1, self.group or inputs)
        shapes: dict[str, tuple[tuple[int, ...], ...]] = {
            "tensor": ((), (1,), (1, 1)),
            "channel": ((outputs, 1), (outputs,)),
            "group": ((outputs, -(-inputs // columns)),),
            "block": ((-(-outputs // rows), -(-inputs // columns)),),
        }
        return scales in shapes.get(self.strategy, (scales,))

    def shape(self, words: int, groups: int) -> tuple[int, int] | None:
        """Return the bits and inputs of a packed weight with so many words and groups; None: it is not of this scheme."""
        if not self.is_integer or self.bits not in BITS or (self.group is None and groups > 1):
            return None
        inputs = words * 32 // self.bits if self.group is None else groups * self.group
        return (self.bits, inputs) if -(-inputs * self.bits // 32) == words else None

    @property
    def has_classes(self) -> bool:
        """Whether one of the targets is a class, such as "Linear"."""
        return any(target.isidentifier() for target in self.targets)

    def names(self, module: str) -> bool:
        """Return whether one of the targets is the module's name."""
        return any(_is_one(target, module) for target in self.targets)


def of_module(schemes: Sequence[Scheme], module: str) -> list[Scheme]:
    """Return those of some schemes that are a module's: by its name, or else by its class, which is not known here."""
    by_name = [scheme for scheme in schemes if scheme.names(module)]
    return by_name or [scheme for scheme in schemes if scheme.has_classes]


def schemes_of(quantization: Mapping[str, Any]) -> list[Scheme]:
    """Return how weights are quantised, by the groups of modules in a `quantization_config`.

    Raises:
        CheckpointError: they are in a format that cannot be read.
    """
    groups = quantization.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, dict) else []
    formats = [quantization.get("format"), *(group.get("format") for group in groups if isinstance(group, dict))]
    sparsity, transforms = quantization.get("sparsity_config"), quantization.get("transform_config")
    if isinstance(sparsity, dict):
        formats.append(sparsity.get("format"))
    if isinstance(transforms, dict) and transforms.get("config_groups"):
        formats.append("rotated (transform_config)")
    for found in formats:
        if found is not None and found not in FORMATS:
            raise unreadable(str(found))
    try:
        return [_scheme(group) for group in groups if group["weights"] is not None]
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(
            f"The config.json has config_groups {shown(groups)}, which do not say how weights are quantised "
            f"({type(error).__name__}: {error}). Compare it with the original one."
        ) from error


def module_bits(quantization: Mapping[str, Any], modules: Sequence[str]) -> float | None:
    """Return the bits of a weight by a `quantization_config`, with scale and zero; None: it is not quantised.

    Args:
        quantization: the configuration.
        modules: names that the module of the weight may have in the files.

    Raises:
        CheckpointError: weights are in a format that cannot be read.
    """
    scheme = _scheme_of(quantization, modules)
    return None if scheme is None else bits_per_weight(scheme.bits, scheme.group, not scheme.is_symmetric)


def module_integers(quantization: Mapping[str, Any], modules: Sequence[str]) -> Integers | None:
    """Return what `Encoding.integers` are for a weight by a `quantization_config`.

    Args:
        quantization: the configuration.
        modules: names that the module of the weight may have in the files.

    Raises:
        CheckpointError: weights are in a format that cannot be read.
    """
    scheme = _scheme_of(quantization, modules)
    if scheme is None or not scheme.is_integer:
        return None
    return as_integers(scheme.bits, scheme.group, scheme.is_symmetric, not scheme.is_ordered)


def _scheme_of(quantization: Mapping[str, Any], modules: Sequence[str]) -> Scheme | None:
    """Return the scheme of a module: the one that names it, or else one for its class; None: it is not quantised."""
    schemes = schemes_of(quantization)
    ignored = quantization.get("ignore")
    if isinstance(ignored, list) and any(_is_one(str(target), module) for target in ignored for module in modules):
        return None
    by_name = [scheme for scheme in schemes if any(map(scheme.names, modules))]
    by_class = [scheme for scheme in schemes if scheme.has_classes]
    # Families may have other names in their files than in Transformers.
    of_experts = [scheme for scheme in schemes if any("expert" in target for target in scheme.targets)]
    return next(iter(by_name or by_class or of_experts), None)


def _is_one(target: str, module: str) -> bool:
    """Return whether a target is a module's name, or an expression for it."""
    if not target.startswith("re:"):
        return target == module
    return matches(target.removeprefix("re:"), module)


def _scheme(group: Mapping[str, Any]) -> Scheme:
    weights = group["weights"]
    size, targets = weights.get("group_size"), tuple(map(str, group["targets"]))
    group_size, block = size if isinstance(size, int) and size > 0 else None, _block(weights.get("block_structure"))
    # As the package does if the strategy is not stated. Without a size of groups, older files have one scale or several.
    strategy = weights.get("strategy") or (block and "block") or (group_size and "group") or (size == -1 and "channel")
    for target in targets:
        if target.startswith("re:"):
            check(target.removeprefix("re:"))
    return Scheme(
        targets,
        int(weights.get("num_bits", 8)),
        group_size,
        str(weights.get("type", "int")).lower() == "int",
        bool(weights.get("symmetric", True)),
        block,
        str(strategy or "").lower(),
        str(weights.get("actorder")).lower() in ("group", "dynamic", "true"),
    )


def _block(size: Any) -> tuple[int, int] | None:
    """Return the rows and columns of a block, stated as [2, 3] or "2x3"; None: it is not stated."""
    sizes = [int(one) for one in (size.split("x") if isinstance(size, str) else size or ())]
    return (sizes[0], sizes[1]) if len(sizes) == 2 and min(sizes) > 0 else None


def unreadable(found: str) -> CheckpointError:
    """Return the error to raise if a checkpoint is in another format."""
    what = "Transformers 5.23 dequantises it wrongly, too. " if "nvfp4" in found else ""
    return CheckpointError(
        f"The checkpoint is in the format {found[:60]!r} of compressed-tensors, which cannot be read. {what}Open a checkpoint "
        f'of the model in {", ".join(FORMATS[:4])} or {FORMATS[-2]}, or the original one in 16 bits, with experts="int4" '
        "(`promoe quantize`)."
    )
