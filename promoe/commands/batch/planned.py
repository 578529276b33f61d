"""The sizes of a batch: those that were given, and for many lines those that a plan chooses."""

from __future__ import annotations

import sys
from contextlib import closing, nullcontext
from dataclasses import dataclass

from promoe.commands.batch.options import Options
from promoe.commands.batch.prompts import PromptLengths
from promoe.commands.model_options import cache_size
from promoe.commands.plan.many_prompts import BatchPlan, memory_for, plan_batch
from promoe.commands.plan.reading import read_model
from promoe.commands.plan.show_batch import fast_advice, said
from promoe.commands.plan.sizes import Room, cache_argument
from promoe.commands.plan.throughput import Wanted
from promoe.errors import PromoeError, UnsupportedModelError
from promoe.model.context import context_tokens

# With fewer lines than this, nothing is measured: they take less time than that.
WORTH_PLANNING = 200
# Sizes where nothing is planned.
UNPLANNED = {"at_once": 64, "step_tokens": 512, "kv_tokens": 16384}


@dataclass(frozen=True)
class Sizes:
    """The sizes of a batch.

    Args:
        cache: as `from_pretrained` takes it.
        of_batch: as `generate_batch` takes them.
        plan: that they are of; None: nothing was planned.
    """

    cache: str | int
    of_batch: dict[str, int]
    plan: BatchPlan | None = None


def may_be_planned(options: Options) -> bool:
    """Return whether sizes are planned if there are many lines."""
    all_given = all(getattr(options, name) is not None for name in UNPLANNED) and options.cache != "plan"
    return not all_given and options.device == "cpu" and options.replicas is None


def sizes_for(options: Options, lengths: PromptLengths | None, num_lines: int) -> Sizes:
    """Return the sizes of a batch, and say to stderr what was planned.

    Args:
        options: the command's.
        lengths: lengths of the prompts that are to be answered; None: nothing is planned.
        num_lines: number of lines that are to be answered.

    Raises:
        PromoeError: nothing fits into the memory.
    """
    given = {name: value for name in UNPLANNED if (value := getattr(options, name)) is not None}
    cache = cache_size("auto" if options.cache == "plan" else options.cache)
    plan = None
    if lengths is not None and num_lines >= WORTH_PLANNING:
        plan = _planned(options, lengths, given)
    if plan is None:
        return Sizes(cache, UNPLANNED | given)
    print(f"planned: {said(plan)}. {plan.chosen.limit} will limit it.", file=sys.stderr)
    if plan.fast is not None and plan.fast_pays:
        print(f"{fast_advice(plan.chosen, plan.fast)}.", file=sys.stderr)
    setting = plan.chosen.setting
    if options.cache == "plan":
        cache = cache_argument(setting.rate)
    return Sizes(cache, {name: int(getattr(setting, name)) for name in UNPLANNED}, plan)


def _planned(options: Options, lengths: PromptLengths, given: dict[str, int]) -> BatchPlan | None:
    memory_bytes = memory_for(options.memory)
    try:
        read = read_model(options.model, experts=options.experts)
    except PromoeError as error:  # what is wrong with the model itself, opening it says
        _say_not_planned(error)
        return None
    with nullcontext() if read.store is None else closing(read.store):
        work = lengths.work(context_tokens(read.model.config))
        if work is None:
            return None
        rate = None
        if options.cache != "plan":
            rate = Room("RAM", memory_bytes, read.sizes.other_bytes, None).rate_of(options.cache, read.sizes)
        try:
            return plan_batch(read, work, memory_bytes, Wanted(**given, rate=rate, kernels=(options.kernels,)))
        except UnsupportedModelError as error:
            _say_not_planned(error)
            return None


def _say_not_planned(error: PromoeError) -> None:
    print(f"not planned: {error}", file=sys.stderr)
