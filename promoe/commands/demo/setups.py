"""Real machines whose balance of transfer and computing a small model can imitate behind an emulated link."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RealSetup:
    """A model on a machine, as published.

    Attributes:
        name: model, machine and link.
        token_bytes: bytes of all routed experts that one token needs.
        bandwidth_bytes_per_s: that the link achieves.
        compute_s: seconds per output token without any waiting.
    """

    name: str
    token_bytes: float
    bandwidth_bytes_per_s: float
    compute_s: float

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
