"""ProMoE for Hugging Face Transformers: run Mixture-of-Experts models whose experts do not fit in fast memory.

    model = promoe.from_pretrained("path/or/hub-id", cache="25%")   # experts stay on disk
    model = promoe.patch(model, cache="6GiB", link=...)              # a model already in memory
    print(model.promoe.report())

Output is identical to the unmodified model's. See docs/structure.md for how it works.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from promoe.config import Ablation, PromoeConfig
    from promoe.errors import (
        CheckpointError,
        ConfigError,
        EngineClosedError,
        EngineError,
        EngineStalledError,
        ExpertLoadError,
        PatchStateError,
        PromoeError,
        UnsupportedModelError,
    )
    from promoe.experts.moe_layers import MoELayer, find_moe_layers
    from promoe.runtime.batches import BatchAnswer, BatchPrompt, generate_batch
    from promoe.runtime.loading import from_pretrained
    from promoe.runtime.patching import patch, unpatch
    from promoe.runtime.sampling import Sampling
    from promoe.stats.totals import Stats
    from promoe.transfer.links import EmulatedLink

__version__ = "0.1.0"

__all__ = [
    "Ablation",
    "BatchAnswer",
    "BatchPrompt",
    "CheckpointError",
    "ConfigError",
    "EmulatedLink",
    "EngineClosedError",
    "EngineError",
    "EngineStalledError",
    "ExpertLoadError",
    "MoELayer",
    "PatchStateError",
    "PromoeConfig",
    "PromoeError",
    "Sampling",
    "Stats",
    "UnsupportedModelError",
    "find_moe_layers",
    "from_pretrained",
    "generate_batch",
    "patch",
    "unpatch",
]

_HOMES = {
    "Ablation": "config",
    "BatchAnswer": "runtime.batches",
    "BatchPrompt": "runtime.batches",
    "EmulatedLink": "transfer.links",
    "MoELayer": "experts.moe_layers",
    "PromoeConfig": "config",
    "Sampling": "runtime.sampling",
    "Stats": "stats.totals",
    "find_moe_layers": "experts.moe_layers",
    "from_pretrained": "runtime.loading",
    "generate_batch": "runtime.batches",
    "patch": "runtime.patching",
    "unpatch": "runtime.patching",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `promoe --help` does not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module 'promoe' has no attribute {name!r}")
    member = getattr(importlib.import_module(f"promoe.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = member
    return member


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
