"""Puts a runtime under a model: pools, scheduler, engine and predictor first, then hooks and classes, or nothing at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from torch import nn
from transformers import PreTrainedModel

from promoe import predictors, seam
from promoe.config import PromoeConfig
from promoe.engine import Engine
from promoe.errors import ConfigError
from promoe.handle import Handle
from promoe.links import EmulatedLink, FileLink, FileStore, HostLink, Link
from promoe.memory import SlotPool
from promoe.moe_layers import MoELayer
from promoe.passes import PassObserver, at_run_time
from promoe.prediction import Forecaster
from promoe.predictors import Predictor, PredictorContext
from promoe.predictors.reference import OraclePredictor
from promoe.recorder import Recorder
from promoe.refusals import refuse_changes
from promoe.runtime import Runtime
from promoe.scheduler import Scheduler, SchedulerConfig
from promoe.sizes import PoolPlan
from promoe.stores import Store
from promoe.threads import when_gone

PredictorChoice = str | Predictor | None
LinkChoice = str | EmulatedLink
LINK_NAMES = ("auto", "file", "host")


@dataclass(frozen=True, slots=True)
class Parts:
    """What a patched model is made of, before any of the model was touched."""

    layers: Sequence[MoELayer]
    store: Store
    plans: Sequence[PoolPlan]
    config: PromoeConfig
    predictor: Predictor | None
    predictor_name: str | None


def resolve_predictor(
    choice: PredictorChoice, layers: Sequence[MoELayer], config: PromoeConfig, model_type: str | None = None
) -> tuple[Predictor | None, str | None]:
    """The predictor that a user asked for, and its name.

    Raises:
        ConfigError: there is none of that name; or it was trained for another model.
    """
    if choice is None:
        return None, None
    if isinstance(choice, str):
        return predictors.create(choice, predictor_context(layers, model_type), config.lookahead), choice
    return choice, type(choice).__name__


def check_choices(predictor: PredictorChoice, link: LinkChoice, on_disk: bool) -> None:
    """What can be said about these arguments without a model, before anything slow begins.

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
            f'The \'link\' argument must be "auto", "file", "host" or an EmulatedLink. Got {link!r} instead.'
        )
    if link == "file" and not on_disk:
        raise ConfigError(
            'link="file" reads experts from files, but this model\'s are in RAM. Open it with '
            'promoe.from_pretrained(path), or use link="host" or an EmulatedLink.'
        )
    if link == "host" and on_disk:
        raise ConfigError(
            'link="host" copies experts from RAM, but this model\'s are in files. Use link="file", or load the model with '
            "transformers and call promoe.patch."
        )


def predictor_context(layers: Sequence[MoELayer], model_type: str | None = None) -> PredictorContext:
    """What predictors know of a model."""
    return PredictorContext(
        gates=[layer.gate for layer in layers],
        num_experts=[layer.num_experts for layer in layers],
        top_k=[layer.top_k or 1 for layer in layers],
        model_type=model_type,
        chosen=[layer.chosen for layer in layers],
        num_ids=[layer.num_ids for layer in layers],
    )


def open_link(choice: LinkChoice, store: Store, config: PromoeConfig, planned_bytes: int) -> Link:
    """The link that a user asked for, which `check_choices` let pass, over `store`."""
    link: Link = (
        FileLink(store, config.read_mode, config.workers, planned_bytes=planned_bytes)
        if isinstance(store, FileStore)
        else HostLink(store, config.workers)
    )
    return choice.bind(store, over=link) if isinstance(choice, EmulatedLink) else link


def scheduler_config(parts: Parts) -> SchedulerConfig:
    """Sizes and switches for the scheduler."""
    config, layers = parts.config, parts.layers
    return SchedulerConfig(
        num_experts=[layer.num_experts for layer in layers],
        chunk_bytes=[parts.store.chunk_bytes(layer.layer_idx) for layer in layers],
        pools=[plan.spec for plan in parts.plans],
        eviction=config.eviction,
        reorder=config.reorder,
        hints=config.early_preemption,
        prefetch=parts.predictor is not None,
        min_probability=config.min_probability,
        strict=config.strict,
    )


def attach(model: nn.Module, parts: Parts, link_choice: LinkChoice, restore: Callable[[], None]) -> Handle:
    """Build the runtime and hook it into the model; on any error everything is taken back and the model is as before.

    Args:
        model: whose layers `parts` describes.
        parts: validated.
        link_choice: see `open_link`.
        restore: called when the model is unpatched, before anything is detached; may fail.
    """
    layers, config = parts.layers, parts.config
    with ExitStack() as undo:
        planned_bytes = sum(plan.nbytes for plan in parts.plans)
        link = open_link(link_choice, parts.store, config, planned_bytes)
        undo.callback(link.close)
        pools = [SlotPool(plan.layout, plan.spec.num_slots) for plan in parts.plans]
        settings = scheduler_config(parts)
        recorder = Recorder(settings.num_experts, settings.expert_bytes)
        scheduler = Scheduler(settings, recorder, getattr(parts.predictor, "reuse", None))
        engine = Engine(scheduler, parts.store, link, pools, recorder, config.stall_timeout_s)
        undo.callback(engine.close)
        engine.start()
        forecaster = None
        if parts.predictor is not None:
            forecaster = Forecaster(parts.predictor, engine, in_order=isinstance(parts.predictor, OraclePredictor))
            undo.callback(forecaster.close)
        passes = PassObserver(recorder, engine.lock, lambda state, duration_s: handle.pass_ended(state, duration_s))
        runtime = Runtime(layers, engine, forecaster, passes, config.min_group_bytes, config.stream)
        handle = Handle(model, parts.config, runtime, parts.store, pools, parts.predictor_name, undo, restore)
        undo.callback(when_gone(handle, partial(_close, engine, parts.store)))
        for layer in layers:
            undo.callback(seam.attach(layer, at_run_time(runtime.run(layer)), at_run_time(runtime.tap(layer))))
        called = _called_model(model, layers)
        undo.callback(passes.attach(called))
        undo.callback(refuse_changes(model, layers))
        for owner in dict.fromkeys((called, model)):
            owner.promoe = handle  # type: ignore[assignment]
            undo.callback(delattr, owner, "promoe")
        handle.keep(undo.pop_all())
    return handle


def _called_model(model: nn.Module, layers: Sequence[MoELayer]) -> nn.Module:
    """The model of Transformers in `model`: with an adapter it has a wrapper, but generates without it."""
    names = [name for name, module in model.named_modules() if isinstance(module, PreTrainedModel)]
    around = (name for name in names if all(layer.name.startswith(f"{name}." if name else "") for layer in layers))
    return model.get_submodule(next(around, ""))


def _close(engine: Engine, store: Store) -> None:
    """What is left of a model that was let go while it was patched: its threads, the slots and open files."""
    engine.close()
    store.close()
