"""The first step of `patch` and `from_pretrained`: check the arguments, before anything slow begins."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from promoe import predictors
from promoe.config import PromoeConfig, checked_config
from promoe.errors import ConfigError
from promoe.predictors import Predictor
from promoe.runtime.sizes import CacheSize, check_cache
from promoe.transfer.devices import Device, open_device
from promoe.transfer.links import EmulatedLink
from promoe.transfer.threads import check_interpreter

PredictorChoice = str | Predictor | None
LinkChoice = str | EmulatedLink
LINK_NAMES = ("auto", "file", "host")


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments that `patch` and `from_pretrained` have in common."""

    cache: CacheSize
    predictor: PredictorChoice
    link: LinkChoice
    device: str | torch.device
    config: PromoeConfig | None


@dataclass(frozen=True, slots=True)
class Checked:
    """Arguments that were checked as far as that is possible without a model."""

    asked: Arguments
    device: Device | None
    """The device for the slots and everything except the experts; None: the CPU."""
    config: PromoeConfig


def check(arguments: Arguments, on_disk: bool) -> Checked:
    """Check the arguments of `patch` or `from_pretrained`.

    Args:
        arguments: the arguments as the caller gave them.
        on_disk: whether the experts are read from files.

    Raises:
        ConfigError: one of them is invalid, alone or together with others.
    """
    config = checked_config(arguments.config)
    check_interpreter()
    device = open_device(arguments.device)
    check_cache(arguments.cache)
    check_choices(arguments.predictor, arguments.link, on_disk, on_device=device is not None)
    if device is not None and config.verify and not on_disk:
        raise ConfigError(
            f"verify={config.verify!r} compares experts that the CPU copies, but here the device copies them from RAM by "
            "itself. Leave it out, or open the model with promoe.from_pretrained."
        )
    if config.kernels == "fast" and (device is not None or (not on_disk and arguments.link == "auto")):
        raise ConfigError(
            'kernels="fast" is for experts that a CPU computes from slots. '
            + ("Here a device computes them." if device is not None else "Here they stay in the model's own tensors.")
            + " Leave it out, or open the model with promoe.from_pretrained on the CPU."
        )
    return Checked(arguments, device, config)


def check_choices(predictor: PredictorChoice, link: LinkChoice, on_disk: bool, on_device: bool = False) -> None:
    """Check the predictor and the link without a model, before anything slow begins.

    Raises:
        ConfigError: no such predictor or link, or a link that cannot reach experts `on_disk` (or those in RAM).
    """
    if isinstance(predictor, str):
        predictors.check_kind(predictor)
    elif predictor is not None and (isinstance(predictor, type) or not callable(getattr(predictor, "predict", None))):
        found = f"the class {predictor.__name__}" if isinstance(predictor, type) else type(predictor).__name__
        raise ConfigError(
            "The 'predictor' argument must be None, a name, or an object with a method predict(visit). "
            f"Got {found} instead."
        )
    if not isinstance(link, EmulatedLink) and link not in LINK_NAMES:
        raise ConfigError(
            f'The \'link\' argument must be "auto", "{"file" if on_disk else "host"}" or an EmulatedLink. Got {link!r} instead.'
        )
    if on_device and not isinstance(link, str):
        raise ConfigError("An EmulatedLink ends in RAM. Leave 'device' out, or use link=\"auto\".")
    if link == "file" and not on_disk:
        raise ConfigError(
            'link="file" reads experts from files, but this model\'s are in RAM. Patch it with store="disk", open it with '
            'promoe.from_pretrained(path), or use link="host" or an EmulatedLink.'
        )
    if link == "host" and on_disk:
        raise ConfigError(
            'link="host" copies experts from RAM, but this model\'s are to be in files. Use link="file"; or load the model '
            'with transformers and call promoe.patch without store="disk".'
        )
