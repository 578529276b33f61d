"""Which cache sizes fit: from a model's sizes and the machine's free memory. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from promoe.commands.model_options import cache_size
from promoe.commands.plan.sizes import ModelSizes, rounded_up
from promoe.runtime.sizes import AUTO_RESERVE_BYTES, PoolPlan, plan_pools

# What promoe takes beside slots and the other weights, at most.
WORKSPACE_BYTES = 128 * 2**20


@dataclass(frozen=True, slots=True)
class Room:
    """Fast memory and what is in it before the first slot.

    Args:
        where: "RAM" or the name of a GPU.
        free_bytes: that the system has left now; None: it does not tell.
        other_bytes: of the model, without its routed experts.
        kv_bytes: of the KV cache at the wanted length; None: unknown.
    """

    where: str
    free_bytes: int | None
    other_bytes: int
    kv_bytes: int | None

    @property
    def reserve_bytes(self) -> int:
        """Left for KV cache and activations: as much as cache="auto" leaves, or more where the KV cache needs it."""
        return max(AUTO_RESERVE_BYTES, (self.kv_bytes or 0) + WORKSPACE_BYTES)

    @property
    def slots_bytes(self) -> int | None:
        """That slots may take; None: unknown; less than nothing where not even the rest of the model fits."""
        return None if self.free_bytes is None else self.free_bytes - self.other_bytes - self.reserve_bytes

    def fits(self, slots_bytes: int) -> bool:
        """Whether so many do. What is unknown is taken to fit."""
        return self.slots_bytes is None or slots_bytes <= self.slots_bytes


def pools(sizes: ModelSizes, rate: float) -> list[PoolPlan]:
    """Slots at a cache rate (0..1], as an opened model would get them.

    Raises:
        ConfigError: that is less than one slot of each shape.
    """
    layouts, counts = [layer.layout for layer in sizes.layers], [layer.num_experts for layer in sizes.layers]
    return plan_pools(cache_argument(rate), layouts, counts)


def cache_argument(rate: float) -> str:
    """A cache rate as `promoe.from_pretrained` takes it, with every digit that may make a slot more or less."""
    return f"{100 * rate:.12f}%"


def rate_name(rate: float) -> str:
    """A cache rate in four digits, as on the command line: "12.5%". Rounded up: typed, it gives no slot less."""
    return f"{100 * rounded_up(rate):.4g}%"


def rate_of(cache: str, sizes: ModelSizes, room: Room) -> float:
    """The cache rate that a user asked for, as a share, a size, or "auto".

    Raises:
        ConfigError: it is none of these, or less than one slot of each shape.
    """
    free_bytes = None if room.free_bytes is None else max(0, room.free_bytes - room.other_bytes)
    layouts, counts = [layer.layout for layer in sizes.layers], [layer.num_experts for layer in sizes.layers]
    return (
        sum(plan.spec.num_slots for plan in plan_pools(cache_size(cache), layouts, counts, free_bytes))
        / sizes.num_experts
    )


def slots_bytes(plans: list[PoolPlan]) -> int:
    """What they take."""
    return sum(plan.nbytes for plan in plans)


def largest_rate(sizes: ModelSizes, room: Room) -> float:
    """The largest cache rate that fits, in whole per cent (or what one slot of each shape is); 0: none."""
    if room.slots_bytes is None:
        return 1.0
    share = min(1.0, room.slots_bytes / sizes.slots_bytes)
    if not room.fits(slots_bytes(pools(sizes, sizes.least_rate))):
        return 0.0
    whole = int(100 * share + 1e-9) / 100
    return whole if whole >= sizes.least_rate else sizes.least_rate
