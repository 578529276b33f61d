"""Options that `promoe-train fit` hands to Lightning; apart, so that help is answered without loading it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainerOptions:
    """Passed to Lightning's Trainer.

    Args:
        max_epochs: passes over the training prompts
        devices: processes or GPUs per node; "auto"
        num_nodes: machines
        strategy: "auto", "ddp", ...
        accelerator: "auto", "cpu", "gpu"
        precision: "32-true", "bf16-mixed", ...
    """

    max_epochs: int = 6
    devices: int | str = 1
    num_nodes: int = 1
    strategy: str = "auto"
    accelerator: str = "auto"
    precision: str = "32-true"
