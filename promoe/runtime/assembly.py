"""Build the runtime of a model (pools, scheduler, engine, predictor), then attach it to the model; or change nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from promoe import predictors
from promoe.config import PromoeConfig
from promoe.experts.kernels.fast import FastProducts
from promoe.experts.kernels.matrices import SECOND
from promoe.experts.kernels.slot_windows import is_hopper
from promoe.experts.moe_layers import MoELayer
from promoe.model import attach
from promoe.model.passes import PassObserver, at_run_time
from promoe.model.placement import place
from promoe.model.refusals import refuse_changes
from promoe.predictors import Predictor, PredictorContext, Traits
from promoe.runtime.checking import LinkChoice, PredictorChoice
from promoe.runtime.hot_path import Runtime
from promoe.runtime.prediction import Forecaster
from promoe.runtime.sizes import PoolPlan
from promoe.runtime.slot_handle import SlotHandle
from promoe.scheduler import ExpertKey, HotExperts, Scheduler, SchedulerConfig
from promoe.stats.recorder import Recorder
from promoe.stores import Store, first_chunks, kinds
from promoe.stores.layout import ExpertLayout
from promoe.transfer.device_pool import DevicePool
from promoe.transfer.devices import Device
from promoe.transfer.engine import Engine
from promoe.transfer.lifetimes import if_alive, when_gone
from promoe.transfer.links import FileLink, HostLink, Link
from promoe.transfer.links.pinned import PinnedLink
from promoe.transfer.links.pinned_cache import CachedLink, bytes_for_all_that_fits
from promoe.transfer.links.verified import VerifiedLink
from promoe.transfer.memory import Pool, SlotPool
from promoe.transfer.threads import warn_of_threads

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything that `assemble` needs to build a runtime. It is made before the model is changed."""

    layers: Sequence[MoELayer]
    store: Store
    plans: Sequence[PoolPlan]
    config: PromoeConfig
    predictor: Predictor | None
    predictor_name: str | None
    device: Device | None = None
    """The device for the slots and everything except the experts; None: the CPU."""
    freed_bytes: int = 0
    """RAM in bytes that the model frees once it is patched."""


def resolve_predictor(
    choice: PredictorChoice, layers: Sequence[MoELayer], config: PromoeConfig, model_type: str | None = None
) -> tuple[Predictor | None, str | None]:
    """Return the predictor that the user chose, and its name.

    Raises:
        ConfigError: there is none of that name; or it was trained for another model.
    """
    if choice is None:
        return None, None
    if isinstance(choice, str):
        return predictors.create(choice, predictor_context(layers, model_type), config.lookahead), choice
    return choice, type(choice).__name__


def predictor_context(layers: Sequence[MoELayer], model_type: str | None = None) -> PredictorContext:
    """Return what predictors may know of a model."""
    return PredictorContext(
        gates=[layer.gate for layer in layers],
        num_experts=[layer.num_experts for layer in layers],
        top_k=[layer.top_k or 1 for layer in layers],
        model_type=model_type,
        chosen=[layer.chosen for layer in layers],
        num_ids=[layer.num_ids for layer in layers],
    )


def open_link(choice: LinkChoice, parts: Parts) -> Link:
    """Return the link that the user chose, which `check_choices` has checked."""
    if (device := parts.device) is None:
        planned_bytes = sum(plan.nbytes for plan in parts.plans) - parts.freed_bytes
        return _link_into_ram(choice, parts.store, parts.config, planned_bytes)
    if parts.store.tensors:
        return PinnedLink(parts.store, device)
    return _link_from_files(parts, device)


def _link_from_files(parts: Parts, device: Device) -> Link:
    store, config, nbytes = parts.store, parts.config, parts.config.pinned_bytes
    if nbytes is None:
        nbytes = bytes_for_all_that_fits(store, config.workers)
    link = _link_into_ram("auto", store, config, nbytes)
    try:
        return CachedLink(link, store, device, nbytes)
    except BaseException:
        link.close()
        raise


def _link_into_ram(choice: LinkChoice, store: Store, config: PromoeConfig, planned_bytes: int) -> Link:
    link: Link = (
        FileLink(store, config.read_mode, config.workers, planned_bytes=planned_bytes)
        if store.files
        else HostLink(store, config.workers)
    )
    if not isinstance(choice, str):
        link = choice.bind(store, over=link)
    return VerifiedLink(link, store, config.verify) if config.verify else link


def scheduler_config(parts: Parts) -> SchedulerConfig:
    """Return the scheduler's settings for these parts."""
    config, layers, store = parts.config, parts.layers, parts.store
    examples = [kinds(store, layer.layer_idx) for layer in layers]
    hot = None
    if store.hot is not None:
        of_hot = [keys[1] for keys in examples]
        hot = HotExperts(
            store.hot.experts,
            [_chunk_bytes(store, key) for key in of_hot],
            [_first_chunks(parts, key) for key in of_hot],
        )
    return SchedulerConfig(
        num_experts=[layer.num_experts for layer in layers],
        chunk_bytes=[_chunk_bytes(store, keys[0]) for keys in examples],
        pools=[plan.spec for plan in parts.plans],
        eviction=config.eviction,
        reorder=config.ablation.reorder,
        hints=config.ablation.early_preemption,
        prefetch=parts.predictor is not None,
        min_probability=config.min_probability,
        waste_share=config.waste_share,
        first_chunks=[_first_chunks(parts, keys[0]) for keys in examples],
        strict=config.strict,
        hot=hot,
    )


def _chunk_bytes(store: Store, key: ExpertKey) -> tuple[int, ...]:
    return tuple(chunk.nbytes for chunk in store.chunks(key))


def _first_chunks(parts: Parts, key: ExpertKey) -> int:
    """Return how many chunks of an expert are enough to compute its first product; 0: it is not begun early."""
    # Kernels on a device wait for a whole expert.
    if not parts.config.ablation.begin_early or parts.device is not None:
        return 0
    count = first_chunks(parts.store, key, SECOND)
    return count if sum(_chunk_bytes(parts.store, key)[:count]) >= parts.config.min_group_bytes else 0


def assemble(model: nn.Module, parts: Parts, link_choice: LinkChoice, restore: Callable[[], None]) -> SlotHandle:
    """Build the runtime and attach it to the model. On any error everything is undone, and the model is as before.

    Args:
        model: the model whose layers `parts` describes.
        parts: everything that the runtime is made of.
        link_choice: see `open_link`.
        restore: called when the model is unpatched, before anything is detached. It may raise.
    """
    layers, config = parts.layers, parts.config
    with ExitStack() as undo:
        pools = []
        for plan in parts.plans:
            # Bytes in another layout, or of another format, would silently be other weights.
            assert _layouts_in(plan, parts.store) == {plan.layout}, plan
            pools.append(_pool(plan, parts))
            undo.callback(pools[-1].close)
        if parts.device is None:
            warn_of_threads()
        else:
            _warn_if_inexact(layers, parts.device)
            undo.callback(place(model, layers, parts.device).undo)
        link = open_link(link_choice, parts)
        undo.callback(link.close)
        settings = scheduler_config(parts)
        recorder = Recorder(settings.num_experts, settings.expert_bytes)
        scheduler = Scheduler(settings, recorder, Traits.of(parts.predictor).reuse)
        engine = Engine(scheduler, parts.store, link, pools, recorder, config.stall_timeout_s)
        undo.callback(engine.close)
        engine.start()
        forecaster = None
        if parts.predictor is not None:
            forecaster = Forecaster(parts.predictor, engine, parts.device)
            undo.callback(forecaster.close)
        passes = PassObserver(recorder, engine.lock)
        runtime = Runtime(
            layers,
            engine,
            forecaster,
            passes,
            config.min_group_bytes,
            config.ablation.stream,
            parts.device,
            live=bool(parts.store.tensors),
            fast=FastProducts() if config.kernels == "fast" else None,
        )
        handle = SlotHandle(model, parts.config, runtime, parts.store, pools, parts.predictor_name, restore)
        passes.on_begin = if_alive(handle, lambda handle: handle.pass_begins())
        passes.on_end = if_alive(handle, lambda handle, *ended: handle.pass_ended(*ended))
        undo.callback(when_gone(runtime, partial(_close, engine, parts.store)))
        called = _called_model(model, layers)
        # Attached before the layers, so that it is undone after them: it refuses passes until they are unpatched.
        undo.callback(passes.attach(called))
        for layer in layers:
            undo.callback(attach.attach(layer, at_run_time(runtime.run(layer)), at_run_time(runtime.tap(layer))))
        undo.callback(refuse_changes(model, layers))
        if parts.device is not None:
            undo.callback(_generate_without_graphs(called))
        for owner in dict.fromkeys((called, model)):
            owner.promoe = handle  # type: ignore[assignment]
            undo.callback(if_alive(owner, lambda owner: delattr(owner, "promoe")))
        handle.keep(undo.pop_all())
    return handle


def _layouts_in(plan: PoolPlan, store: Store) -> set[ExpertLayout]:
    """Return the layouts that the store has for the experts of a pool."""
    kind = store.hot if plan.spec.hot else store
    return set() if kind is None else {kind.layouts[layer] for layer in plan.spec.layers}


def _pool(plan: PoolPlan, parts: Parts) -> Pool:
    slots = plan.spec.num_slots
    if parts.device is not None:
        return DevicePool(plan.layout, slots, parts.device)
    return SlotPool(plan.layout, slots)


def _called_model(model: nn.Module, layers: Sequence[MoELayer]) -> nn.Module:
    """Return the model of Transformers inside `model`. PEFT's wrapper generates by calling the model inside it."""
    names = [name for name, module in model.named_modules() if isinstance(module, PreTrainedModel)]
    around = (name for name in names if all(layer.name.startswith(f"{name}." if name else "") for layer in layers))
    return model.get_submodule(next(around, ""))


def _warn_if_inexact(layers: Sequence[MoELayer], device: Device) -> None:
    """Warn if the output on `device` may differ from the unmodified model's in the last bits.

    A product with one expert has the same bits whatever runs beside it. A kernel over several experts may not. On an
    H200, grouped_mm had the same bits in every dtype (docs/benchmarks.md), and batched_mm in all cases but one.
    """
    exact = {"eager", "grouped_mm"} if is_hopper(device.torch_device) else {"eager"}
    if others := sorted({layer.implementation for layer in layers} - exact):
        logger.warning(
            "On %s the experts implementation %s may differ from the unmodified model in the last bits. For identical output "
            "call model.set_experts_implementation('%s') first.",
            device.name,
            ", ".join(others),
            max(exact),
        )


def _generate_without_graphs(model: nn.Module) -> Callable[[], None]:
    """Keep `generate` from compiling the forward into a CUDA graph, as it does with a static cache. Return the undo."""
    settings: Any = getattr(model, "generation_config", None)
    if settings is None:
        return lambda: None
    before = settings.disable_compile
    settings.disable_compile = True
    return partial(setattr, settings, "disable_compile", before)


def _close(engine: Engine, store: Store) -> None:
    """Release what a patched model leaves behind when it is freed: threads, slots and open files."""
    engine.close()
    store.close()
