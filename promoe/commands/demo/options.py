"""What `promoe demo` can be asked for."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from promoe.errors import check_at_least


@dataclass(frozen=True)
class Options:
    """Show what promoe buys over fetching experts on demand, on a small trained model. Takes two to four minutes.

    First one answer. Then on-demand LRU and promoe side by side: with experts behind an emulated link that is as slow, for
    this model, as PCIe is for a real one; then with experts of real size, read from this machine's disk. Every system's tokens
    are compared with the unmodified model's. Writes reports and timelines.

    Example: `promoe demo --prompts 2 --skip-widened`

    Raises:
        ConfigError: a number is out of range.
    """

    _: KW_ONLY
    model: str | None = None
    """folder of the demo model; by default examples/sharegpt_moe/checkpoint"""
    cache: str = "20%"
    """slots, as a share of the routed experts ("20%") or a size"""
    prompts: int = 3
    """held-out ShareGPT prompts that are measured, after one to warm up"""
    max_new_tokens: int = 16
    """tokens generated for each prompt"""
    repeat: int = 128
    """how many times wider the experts of the second part are (128: about 10 MB each)"""
    out: str = "promoe-out"
    """folder for reports, timelines and the widened model (several GB, written once)"""
    skip_widened: bool = False
    """leave out the second part"""
    steps: bool = False
    """show what caching, preemption, reordering, eviction and prefetch each buy, one after the other (twice as long)"""

    def __post_init__(self) -> None:
        check_at_least(1, prompts=self.prompts, repeat=self.repeat)
        check_at_least(2, max_new_tokens=self.max_new_tokens)
