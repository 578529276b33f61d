"""What `promoe run` can be asked for."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal

from promoe.commands.model_options import ModelOptions
from promoe.errors import ConfigError, check_at_least, shown
from promoe.runtime.sampling import LEAST_TEMPERATURE


@dataclass(frozen=True)
class Options(ModelOptions):
    """Open a checkpoint with its experts left on disk, and let it answer one prompt.

    The answer streams to stdout; progress, a live status line and the final report go to stderr.

    Example: `promoe run MODEL "What is a lighthouse?" --cache 25% --report report.html`

    Raises:
        ConfigError: a value is out of range.
    """

    prompt: str
    """what to say to it; a chat template is applied where the tokenizer has one"""
    _: KW_ONLY
    store: Literal["auto", "disk", "host"] = "auto"
    """where experts stay: "disk" (the checkpoint's files), "host" (all of them in RAM, the stock model), or "auto" (disk)"""
    max_new_tokens: int = 128
    """longest answer, in tokens"""
    temperature: float = 0.0
    """temperature of sampling; 0 takes the most likely token each time"""
    seed: int = 0
    """seed of sampling"""
    trace: str | None = None
    """file for a timeline (Chrome-trace JSON, for ui.perfetto.dev)"""
    report: str | None = None
    """file for a report (one self-contained HTML page); beside it, its numbers as JSON for `promoe report`"""
    live: bool = False
    """show below the answer how it goes, now and so far: hit rate, ready rate, link use, stall, bytes. Where stderr is not a
    terminal, print a line a second. With rich installed (the extra "live") it is drawn"""

    def __post_init__(self) -> None:
        check_at_least(1, max_new_tokens=self.max_new_tokens)
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(f"--temperature must be 0 (greedy) or more. Got {self.temperature} instead.")
        if self.store == "host" and self.device != "cpu":
            raise ConfigError('--store host keeps all experts in RAM without slots. Leave it out with --device "cuda".')
        if self.store == "host" and self.experts not in ("auto", "checkpoint"):
            raise ConfigError(
                "--store host runs the stock model with the checkpoint's own experts. Leave --experts out."
            )
        if self.store == "host" and self.cache not in (ModelOptions.cache, "100%"):
            raise ConfigError(
                f"--store host keeps all experts in RAM, without slots: --cache {self.cache} would do nothing. Leave one out."
            )
        if not self.prompt.strip():
            raise ConfigError("The prompt is empty. Give the model something to answer, in quotes.")
        try:
            self.prompt.encode()
        except UnicodeEncodeError as error:  # the command line had bytes that are not UTF-8
            raise ConfigError(f"The prompt is no text in UTF-8: {shown(self.prompt)}. Type it anew.") from error
        if self.report is not None and Path(self.report).suffix == ".json":
            raise ConfigError(
                f"--report writes a page, and its numbers beside it as .json. Give it another name than '{self.report}', "
                f"such as '{Path(self.report).with_suffix('.html')}'."
            )

    @property
    def samples(self) -> bool:
        """Return whether tokens are drawn at random; else the most likely one is taken."""
        return self.temperature >= LEAST_TEMPERATURE
