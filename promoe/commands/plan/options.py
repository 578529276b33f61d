"""What `promoe plan` can be asked for."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from promoe.errors import ConfigError, check_at_least


@dataclass(frozen=True)
class Options:
    """Say whether a model runs on this machine, how fast with which cache, what limits it, and what to type.

    Reads a checkpoint's headers (or, where there are none, its config.json); no weights are loaded. Measures the machine
    with blocks of the model's shapes and, where its files are here, by reading them. That takes half a minute, on busy cores
    two. Prefetch is not counted.

    Example: `promoe plan MODEL --cache 10% 25%`

    Raises:
        ConfigError: a value is out of range.
    """

    model: str
    """folder of a checkpoint, or of a config.json alone; a GGUF file; or a hub id (of a GGUF file: org/name/file.gguf)"""
    _: KW_ONLY
    experts: str = "auto"
    """form of the experts: "auto" (as they are, or packed), or "int8" or "int4" (also before `promoe quantize` has written
    them), or a folder that it wrote"""
    cache: list[str] = field(default_factory=list)
    """cache sizes to look at, as shares of the routed experts, sizes or "auto"; by default 12.5% to 100%"""
    device: str = "cpu"
    """where the slots are: cpu, or cuda (sizes only: no speeds)"""
    context: int = 4096
    """length of the KV cache, in tokens"""
    prompt_tokens: int = 256
    """length of the prompts that TTFT is predicted for"""
    new_tokens: int = 32
    """length of the answers that TPOT is predicted for"""
    batch: str | None = None
    """plan `promoe batch` for this file of prompts instead: how many at once, and what of the memory is for slots"""
    memory: str | None = None
    """with --batch: most memory of the process ("8GiB"); by default what is free, less 1 GiB"""
    max_tokens: int = 256
    """with --batch: longest answer, in tokens, of lines that do not say it"""
    tokens_per_second: float | None = None
    """find the smallest cache that is as fast as this"""
    trace: str | None = None
    """recorded routing of this model, in place of assumptions: an .npz of expert ids, or a folder of `promoe-train collect`"""
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """dtype of the weights; the checkpoint's by default"""
    read_mode: Literal["auto", "direct", "page_cache"] = "auto"
    """how files are read: auto (the page cache where all experts fit into free RAM), direct, or page_cache"""
    verify: bool = False
    """also run the model with these caches, and print what was predicted beside what is measured"""
    json: str | None = None
    """file to write everything to"""

    def __post_init__(self) -> None:
        check_at_least(1, context=self.context, prompt_tokens=self.prompt_tokens, new_tokens=self.new_tokens)
        check_at_least(1, max_tokens=self.max_tokens)
        if self.batch is not None and (self.device != "cpu" or len(self.cache) > 1):
            raise ConfigError(
                "--batch is planned for slots in RAM, with at most one --cache. Got "
                f"--device {self.device} and {len(self.cache)} sizes."
            )
        if self.tokens_per_second is not None and not 0 < self.tokens_per_second < float("inf"):
            raise ConfigError(f"--tokens-per-second must be more than 0. Got {self.tokens_per_second:g}.")
