"""Real machines, and links that give a small model their balance of transfer and compute."""

from __future__ import annotations

from dataclasses import dataclass

from promoe.transfer.links import EmulatedLink


@dataclass(frozen=True)
class RealSetup:
    """A model on a machine, as published."""

    name: str
    token_bytes: float
    """Bytes of all routed experts that one token needs."""
    bandwidth_bytes_per_s: float
    """Achieved by the link that experts come over."""
    compute_s: float
    """Per output token, without any waiting."""

    @property
    def transfer_s(self) -> float:
        """Seconds to move all of a token's experts."""
        return self.token_bytes / self.bandwidth_bytes_per_s

    @property
    def ratio(self) -> float:
        """Transfer / compute, if nothing were cached."""
        return self.transfer_s / self.compute_s


# ProMoE (arXiv 2410.22134), motivation: TPOT 67.9 ms at a 50% cache (LRU), of which 58.1 ms is waiting for experts.
DEEPSEEK_ON_4090 = RealSetup(
    name="DeepSeek-MoE-16B on an RTX 4090 (PCIe 4.0 x16)",
    token_bytes=2.67 * 2**30,
    bandwidth_bytes_per_s=23.9e9,
    compute_s=67.9e-3 - 58.1e-3,
)


def emulate(setup: RealSetup, token_bytes: int, compute_s: float) -> EmulatedLink:
    """A link over which a model takes `setup.ratio` times its own compute time to move all of a token's experts.

    Args:
        setup: what to imitate.
        token_bytes: bytes of all routed experts that one token of the model needs.
        compute_s: measured seconds per output token of the model with everything resident.
    """
    return EmulatedLink(bandwidth_bytes_per_s=token_bytes / (setup.ratio * compute_s))
