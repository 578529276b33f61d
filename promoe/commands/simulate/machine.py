"""Machines and models as numbers: how long a layer computes, how fast experts come, how large they are.

A decode step reads every active weight once, so its compute time is bytes over memory bandwidth, plus an overhead per layer.
A long prompt takes as long as its products. The numbers are published ones, times the share of them that real kernels reach.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from promoe.errors import ConfigError

MIB = 2**20
GB = 1e9
# A trace that uses fewer experts than a model has over this is not of that model.
MOST_UNUSED = 1.1
# The name of a trace's model if its sizes are not known.
UNKNOWN = "an unknown model with experts of 16 MiB (assumed; see --model)"
# Shares of the peak that are reached by real kernels.
MEMORY_EFFICIENCY, FLOPS_EFFICIENCY = 0.8, 0.5


@dataclass(frozen=True, slots=True)
class Machine:
    """A processor or GPU, and the link that experts come over.

    Args:
        name: for reports.
        bandwidth_bytes_per_s: bandwidth that the link achieves.
        latency_s: latency of one transfer.
        memory_bytes_per_s: peak bandwidth of the memory that the slots are in.
        flops: peak of products in the weights' dtype, per second.
        layer_overhead_s: seconds per layer, whatever it computes: launches, norms, routing.
        chunk_bytes: the most that one transfer moves.
    """

    name: str
    bandwidth_bytes_per_s: float
    latency_s: float
    memory_bytes_per_s: float
    flops: float
    layer_overhead_s: float
    chunk_bytes: int

    def read_s(self, nbytes: float) -> float:
        """Return the seconds to read weights once from fast memory."""
        return nbytes / (MEMORY_EFFICIENCY * self.memory_bytes_per_s)

    def multiply_s(self, parameters: float, num_rows: int) -> float:
        """Return the seconds to multiply so many rows by matrices of so many parameters."""
        return 2.0 * parameters * num_rows / (FLOPS_EFFICIENCY * self.flops)

    def link_s(self, nbytes: float) -> float:
        """Return the seconds that bytes spend on the wire."""
        return nbytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True)
class Geometry:
    """A model's sizes.

    Args:
        name: for reports.
        num_layers: MoE layers.
        num_experts: routed experts of each layer.
        top_k: experts per token and layer.
        expert_parameters: parameters of one expert.
        other_parameters: all other parameters that a token reads: attention, shared experts, dense layers, head.
        bits_per_weight: bits of a weight of the experts, scales included; the others have 16.
    """

    name: str
    num_layers: int
    num_experts: int
    top_k: int
    expert_parameters: float
    other_parameters: float
    bits_per_weight: float = 16.0

    @property
    def expert_bytes(self) -> int:
        """Return the bytes of one expert, in store, link and slot."""
        return round(self.expert_parameters * self.bits_per_weight / 8)

    @property
    def token_bytes(self) -> int:
        """Return the bytes of the routed experts that one token uses."""
        return self.num_layers * self.top_k * self.expert_bytes

    def chunks(self, machine: Machine) -> tuple[int, ...]:
        """Return the bytes of each transfer of an expert: three matrices, in equal parts of at most the machine's chunk."""
        parts = max(1, -(-self.expert_bytes // (3 * machine.chunk_bytes)))
        whole, rest = divmod(self.expert_bytes, 3 * parts)
        return (whole + rest, *(whole,) * (3 * parts - 1)) if whole else (self.expert_bytes,)

    def layer_s(self, machine: Machine, num_tokens: int = 1) -> float:
        """Return the seconds that a layer computes besides its routed experts, for so many tokens."""
        parameters = self.other_parameters / self.num_layers
        work_s = max(machine.read_s(2.0 * parameters), machine.multiply_s(parameters, num_tokens))
        return machine.layer_overhead_s + work_s

    def expert_s(self, machine: Machine, num_rows: float = 1) -> float:
        """Return the seconds that one expert computes, for so many tokens."""
        return max(machine.read_s(self.expert_bytes), machine.multiply_s(self.expert_parameters, round(num_rows)))

    def token_s(self, machine: Machine) -> float:
        """Return C: the seconds per decoded token if nothing had to be fetched."""
        return self.num_layers * (self.layer_s(machine) + self.top_k * self.expert_s(machine))


MACHINES: Mapping[str, Machine] = {
    "rtx-4090": Machine("RTX 4090, PCIe 4.0 x16", 23.9 * GB, 10e-6, 1008 * GB, 165e12, 100e-6, 8 * MIB),
    "rtx-3090": Machine("RTX 3090, PCIe 4.0 x16", 23.9 * GB, 10e-6, 936 * GB, 71e12, 110e-6, 8 * MIB),
    "h100-pcie5": Machine("H100, PCIe 5.0 x16", 50 * GB, 8e-6, 2039 * GB, 756e12, 80e-6, 16 * MIB),
    "laptop-ssd": Machine("laptop CPU, NVMe SSD", 3 * GB, 80e-6, 60 * GB, 0.6e12, 20e-6, 4 * MIB),
}


def _geometry(
    name: str,
    layers: int,
    experts: int,
    top_k: int,
    sizes: tuple[int, int],
    active: float,
    bits_per_weight: float = 16.0,
) -> Geometry:
    """Make a preset. `active`: parameters that one token uses, as published; `sizes`: hidden and intermediate size."""
    hidden_size, intermediate_size = sizes
    expert = 3.0 * hidden_size * intermediate_size
    return Geometry(name, layers, experts, top_k, expert, active - layers * top_k * expert, bits_per_weight)


# The models of ProMoE's Table 1, then newer ones; sizes from their configurations, active parameters from their cards.
MODELS: Mapping[str, Geometry] = {
    one.name: one
    for one in (
        _geometry("deepseek-moe-16b", 27, 64, 6, (2048, 1408), 2.8e9),
        _geometry("deepseek-v2-lite", 26, 64, 6, (2048, 1408), 2.7e9),
        _geometry("qwen1.5-moe-a2.7b", 24, 60, 4, (2048, 1408), 2.7e9),
        _geometry("qwen2-57b-a14b", 28, 64, 8, (3584, 2560), 14e9),
        _geometry("mixtral-8x7b", 32, 8, 2, (4096, 14336), 12.9e9),
        _geometry("gpt-oss-20b", 24, 32, 4, (2880, 2880), 3.6e9, 4.25),
        _geometry("gpt-oss-120b", 36, 128, 4, (2880, 2880), 5.1e9, 4.25),
        _geometry("qwen3-30b-a3b", 48, 128, 8, (2048, 768), 3.3e9),
        _geometry("qwen3-235b-a22b", 94, 128, 8, (4096, 1536), 22e9),
        _geometry("deepseek-v3", 58, 256, 8, (7168, 2048), 37e9, 8.0),
    )
}


def machine_of(name: str) -> Machine:
    """Return the preset of that name. Raises ConfigError if there is none."""
    if name not in MACHINES:
        raise ConfigError(f"There is no hardware preset {name!r}. Choose from {', '.join(MACHINES)}.")
    return MACHINES[name]


def geometry_of(model: str | Geometry, num_layers: int, num_experts: int, top_k: int) -> Geometry:
    """Return the model that a trace of these sizes was recorded of.

    Args:
        model: a preset's name, "auto" (the first preset that has these sizes), or the model's own.
        num_layers: layers of the trace.
        num_experts: experts of each layer that the trace uses at least.
        top_k: experts per token and layer of the trace.

    Raises:
        ConfigError: there is no such preset, or it has other sizes.
    """
    if isinstance(model, Geometry):
        if (model.num_layers, model.top_k) != (num_layers, top_k) or num_experts > model.num_experts:
            raise _not_of(model, num_layers, num_experts, top_k)
        return model
    if model != "auto" and model not in MODELS:
        raise ConfigError(
            f"There is no model preset {model!r}. Choose from auto, {', '.join(MODELS)}; or give a checkpoint's folder, or a "
            "hub id such as org/name."
        )
    # An expert that was never used leaves no trace of itself, so there may be some more.
    fitting = [
        one
        for one in MODELS.values()
        if model in ("auto", one.name)
        and (one.num_layers, one.top_k) == (num_layers, top_k)
        and num_experts <= one.num_experts <= MOST_UNUSED * num_experts
    ]
    if fitting:
        return min(fitting, key=lambda one: one.num_experts)
    if model == "auto":
        return Geometry(UNKNOWN, num_layers, num_experts, top_k, 8.0 * MIB, num_layers * 30e6)
    raise _not_of(MODELS[model], num_layers, num_experts, top_k)


def _not_of(model: Geometry, num_layers: int, num_experts: int, top_k: int) -> ConfigError:
    return ConfigError(
        f"The trace is not of {model.name}: expected {model.num_layers} MoE layers of {model.num_experts} experts, top "
        f"{model.top_k}; found {num_layers} of {num_experts}, top {top_k}. Leave --model out, or give the trace of that model."
    )
