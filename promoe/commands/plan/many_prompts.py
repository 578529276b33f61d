"""Plans how a file of prompts is answered: measures the machine, and chooses sizes for the best throughput."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace

from promoe.commands.plan.batch_measuring import measure_experts, measure_steps
from promoe.commands.plan.measuring import group_cost_s, measure_link
from promoe.commands.plan.reading import ReadModel
from promoe.commands.plan.routing import SELDOM, Routing, made_up, usage
from promoe.commands.plan.sizes import ModelSizes
from promoe.commands.plan.stand_in import EXPERTS_BYTES, StandIn
from promoe.commands.plan.throughput import (
    STEP_TOKENS,
    BatchMachine,
    BatchModel,
    BatchWork,
    Expected,
    Wanted,
    workspace_bytes,
)
from promoe.commands.plan.time_model import into_slots
from promoe.config import PromoeConfig
from promoe.errors import ConfigError, PromoeError, UnsupportedModelError
from promoe.experts.kernels.formats import formats_in
from promoe.runtime.sizes import fixed_bytes
from promoe.transfer.links.disk import choose_mode
from promoe.transfer.links.free_ram import free_ram_bytes
from promoe.units import format_memory

# Free memory that is left to the system.
SPARE_BYTES = 2**30
# "fast" is proposed if it gives so many times the tokens per second.
WORTH_FAST = 1.15
# Tokens of made-up routing, from which the experts that are used often follow.
ROUTED_TOKENS = 256


@dataclass(frozen=True)
class BatchPlan:
    """How a file of prompts is best answered.

    Args:
        model: predicts other settings, too.
        memory_bytes: that may be used; None: unknown.
        chosen: the best setting that fits among those that were wanted.
        fast: the best setting with fast products; None: they were not asked about.
    """

    model: BatchModel
    memory_bytes: int | None
    chosen: Expected
    fast: Expected | None

    @property
    def fast_pays(self) -> bool:
        """Whether fast products are worth proposing."""
        return (
            self.fast is not None
            and self.chosen.setting.kernels == "exact"
            and self.fast.tokens_per_s >= WORTH_FAST * self.chosen.tokens_per_s
        )


def memory_for(memory: str | None) -> int | None:
    """Return the bytes that a batch may take: as asked, or what is free now but for a GiB; None: unknown.

    Raises:
        ConfigError: `memory` is not a size.
    """
    if memory is not None:
        return fixed_bytes(memory)
    free_bytes = free_ram_bytes()
    return None if free_bytes is None else max(0, free_bytes - SPARE_BYTES)


def plan_batch(
    read: ReadModel, work: BatchWork, memory_bytes: int | None, wanted: Wanted, routing: Routing | None = None
) -> BatchPlan:
    """Measure the machine, and choose.

    Args:
        read: the model. Its blocks are used up.
        work: the file's.
        memory_bytes: for everything that the process holds; None: unknown.
        wanted: what is fixed.
        routing: of the model; None: made up, of a model that repeats little.

    Raises:
        ConfigError: no setting fits into the memory.
        UnsupportedModelError: steps of the model cannot be measured.
    """
    sizes = read.sizes
    model = BatchModel(sizes, measure_machine(read, memory_bytes, routing), work)
    chosen = model.best(memory_bytes, wanted)
    if chosen is None:
        raise ConfigError(_nothing_fits(model, memory_bytes or 0))
    fast = model.best(memory_bytes, replace(wanted, kernels=("fast",)))
    return BatchPlan(model, memory_bytes, chosen, fast)


def measure_machine(read: ReadModel, memory_bytes: int | None, routing: Routing | None = None) -> BatchMachine:
    """Measure what steps, experts and the link take.

    Args:
        read: the model. Its blocks are used up.
        memory_bytes: for everything that the process holds; None: unknown. Where all files fit beside it, they are read
            through the page cache.
        routing: of the model; None: made up, of a model that repeats little.

    Raises:
        UnsupportedModelError: steps of the model cannot be measured.
    """
    sizes, formats = read.sizes, formats_in(layer.layout for layer in read.sizes.layers)
    if not sizes.kv.layers:
        raise UnsupportedModelError(f"The KV cache of {sizes.name} is of an unknown size ({sizes.kv.assumed}).")
    routing = made_up(sizes, SELDOM, ROUTED_TOKENS, 1, 1) if routing is None else routing
    experts_bytes = EXPERTS_BYTES if memory_bytes is None else min(EXPERTS_BYTES, memory_bytes // 4)
    left_bytes = None if memory_bytes is None else memory_bytes - sizes.other_bytes - sizes.slots_bytes
    mode = choose_mode("auto", sizes.expert_bytes, left_bytes)[0]
    try:
        with closing(StandIn(read.model, read.layers, experts_bytes, formats)) as stand_in:
            others = measure_steps(stand_in)
            curves = {kernels: measure_experts(stand_in, kernels) for kernels in ("exact", "fast")}
            group_s = group_cost_s(stand_in)
            link = measure_link(stand_in, read.store, read.folder, mode, PromoeConfig().workers)
    except PromoeError:
        raise
    except Exception as error:  # of a family's own forward
        raise UnsupportedModelError(
            f"The blocks of {sizes.name} cannot be run alone ({type(error).__name__}: {error})."
        ) from error
    return BatchMachine(
        others=others,
        experts={kernels: curve for kernels, (curve, _) in curves.items()},
        expert_bytes=curves["exact"][1],
        bytes_per_s=into_slots(sizes, link, link.bytes_per_s),
        slowdown=link.slowdown,
        group_s=group_s,
        usage=usage(routing, sizes),
    )


def _nothing_fits(model: BatchModel, memory_bytes: int) -> str:
    sizes: ModelSizes = model.sizes
    least = sizes.slots(sizes.least_rate).nbytes
    kv_tokens = model.kv_tokens(1)
    kv_bytes, beside = model.kv_bytes(kv_tokens), workspace_bytes(STEP_TOKENS[0], kv_tokens)
    return (
        f"No batch of {sizes.name} fits into {format_memory(memory_bytes)}: the model without its routed experts takes "
        f"{format_memory(sizes.other_bytes)}, the smallest cache {format_memory(least)}, the KV cache of the longest prompt "
        f"and its answer {format_memory(kv_bytes)}, and what is computed with {format_memory(beside)}. Give more --memory, "
        "shorter answers (--max-tokens), or a smaller --cache."
    )
