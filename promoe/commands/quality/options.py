"""What `promoe quality` can be asked for."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from promoe.commands.model_options import ModelOptions
from promoe.errors import ConfigError, check_at_least

# Of the held-out prompts and other data, unless --tokens asks for more.
DEFAULT_TOKENS = 4096
PLOT_SUFFIXES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Options:
    """Measure what fewer bits change, beside the same model with the checkpoint's own experts.

    The models are opened one after the other with their experts on disk, so they may be larger than memory. The first
    one's logits are kept in a temporary file.

    Texts are encoded one by one, put one after the other, and cut into windows that do not overlap. The model reads each
    window by itself, and predicts all its tokens but the first. A conversation goes through the model's chat template
    (without one, its messages are lines); a single text is read as it is. If the tokenizer begins each text with a token
    (BOS), each window begins with it, too.

    Example: `promoe quality MODEL --experts int8 int4 --data texts.jsonl --tokens 50000 --plot quality.png`

    Raises:
        ConfigError: a value is out of range.
    """

    model: str
    """folder of a checkpoint, a GGUF file, or a hub id (of a GGUF file: org/name/file.gguf)"""
    _: KW_ONLY
    experts: list[str] = field(default_factory=list)
    """forms of the experts: int8, int4, int3 or int2 (as `promoe quantize` wrote them), or folders of its --out; by default
    all folders promoe-int* beside the checkpoint's files"""
    data: str | None = None
    """texts: a file of JSON lines with `text`, `messages` or `conversations` (.jsonl), a ShareGPT file (.json), "sharegpt", or
    the hub id of a data set with a split "train"; by default the held-out prompts of promoe's repository (about 500 tokens,
    enough to see large changes only)"""
    tokens: int | None = None
    """tokens to read, from the first text on; by default 4096, or what the data have"""
    window: int = 512
    """tokens of a window"""
    prompts: int = 4
    """greedy answers to compare, to the first questions of the data (of a single text, its first tokens); 0: none"""
    max_new_tokens: int = 64
    """longest answer, in tokens"""
    cache: str = ModelOptions.cache
    """RAM (with --device cuda, GPU memory) for the experts of each model: a size ("6GiB"), a share of the routed experts
    ("25%"), bytes, or "auto"; it changes no figure"""
    predictor: str = ModelOptions.predictor
    """what predicts the experts to prefetch, see `promoe run --help`; it changes no figure"""
    device: str = ModelOptions.device
    """"cuda" puts slots, and everything but the experts, on the GPU, which computes with other bits than a CPU"""
    dtype: str | None = None
    """dtype of the model, as given to `promoe quantize`; the checkpoint's by default"""
    spool: str | None = None
    """folder for the temporary file: 2 bytes for each token read and each entry of the vocabulary (4 if the model's logits are
    fp32); by default the system's folder for such files"""
    json: str | None = None
    """file to write the figures to"""
    plot: str | None = None
    """file for a picture of quality against memory (.png, .svg, .pdf)"""

    def __post_init__(self) -> None:
        check_at_least(2, window=self.window, tokens=self.tokens)
        check_at_least(0, prompts=self.prompts)
        check_at_least(1, max_new_tokens=self.max_new_tokens)
        if self.plot is not None and Path(self.plot).suffix not in PLOT_SUFFIXES:
            raise ConfigError(f"--plot must end in {', '.join(PLOT_SUFFIXES)}. Got '{self.plot}' instead.")

    def for_opening(self, experts: str) -> dict[str, Any]:
        """Return the arguments of `promoe.from_pretrained` that open the model with this form of the experts."""
        shared = ModelOptions(
            self.model, experts=experts, cache=self.cache, predictor=self.predictor, device=self.device
        )
        return {**shared.for_opening(), "dtype": self.dtype}
