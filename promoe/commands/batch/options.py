"""What `promoe batch` can be asked for."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from promoe.commands.batch.source import Source
from promoe.commands.model_options import ModelOptions
from promoe.errors import ConfigError, check_at_least


@dataclass(frozen=True)
class Options(ModelOptions):
    """Answer a file of prompts, many at once, so that each expert is loaded once for all of them.

    INPUT has a JSON object per line: an OpenAI batch request (custom_id, method, url, body), or a "prompt" or "messages" with
    the fields of such a body. Answers are written to --out as they are completed, in OpenAI's format; a line that cannot be
    answered gets an error there. The same command again answers what is missing; answers of another model, or to lines that
    were changed, are refused. For many lines the machine is measured first,
    which takes half a minute, and the sizes that were not given are planned (`promoe plan MODEL --batch INPUT` says why).

    Example: `promoe batch MODEL questions.jsonl --out answers.jsonl --cache 25%`

    Raises:
        ConfigError: a value is out of range.
    """

    input: str
    """file of prompts (JSON lines); or, with --column, a data set of the hub, or its folder"""
    _: KW_ONLY
    out: str
    """file that answers are added to (JSON lines)"""
    column: str | None = None
    """column of the data set that has the prompts: texts, or lists of messages"""
    split: str = "train"
    """of the data set"""
    max_tokens: int = 256
    """longest answer, in tokens, for lines that do not say it; less where the model's context leaves less"""
    seed: int = 0
    """seed of sampling; each line has a seed of its own that follows from it, unless the line says one"""
    cache: str = "plan"
    """RAM for experts: "plan" (what the KV cache leaves of --memory), or as for the other commands: a size ("6GiB"), a share
    ("25%"), "auto" (what is free, less 2 GiB)"""
    memory: str | None = None
    """most memory of the process ("8GiB"), for the plan; by default what is free, less 1 GiB"""
    at_once: int | None = None
    """the most sequences that are computed together; planned by default"""
    step_tokens: int | None = None
    """the most tokens of a step; planned by default"""
    kv_tokens: int | None = None
    """tokens of the KV cache, which all sequences share; planned by default. Lines that need more are answered last"""

    replicas: int | None = None
    """answer with so many models in processes of a Ray cluster (needs the extra "ray"); sizes are those of each"""
    ray: str | None = None
    """with --replicas: address of the cluster ("auto", "HOST:PORT"); by default one is started on this machine"""

    @property
    def source(self) -> Source:
        """Where the prompts come from."""
        return Source(self.input, self.column, self.split)

    def __post_init__(self) -> None:
        sizes = {"at_once": self.at_once, "step_tokens": self.step_tokens, "kv_tokens": self.kv_tokens}
        given = {name: value for name, value in sizes.items() if value is not None}
        if self.replicas is not None:
            given["replicas"] = self.replicas
        check_at_least(1, max_tokens=self.max_tokens, **given)
        if self.replicas is not None and self.cache == "plan":
            raise ConfigError(
                "--replicas open models on machines that are not measured here: give each its --cache, such as 6GiB, or plan "
                "on such a machine (promoe plan MODEL --batch INPUT)."
            )
        if self.ray is not None and self.replicas is None:
            raise ConfigError("--ray is for --replicas: say how many models answer.")
