"""What `promoe serve` can be asked for."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from promoe.commands.model_options import ModelOptions, cache_size
from promoe.errors import ConfigError, check_at_least


@dataclass(frozen=True)
class Options(ModelOptions):
    """Open a checkpoint with its experts left on disk, and answer OpenAI's clients over HTTP until Ctrl-C.

    Chat completions and completions, whole or streamed, by Transformers' own server (the extra "serve"). Requests are answered
    one after the other; an answer ends when its client disconnects. Statistics are at /promoe/report and /promoe/stats.

    Example: `promoe serve MODEL --cache 25% --port 8000`

    Raises:
        ConfigError: a value is out of range.
    """

    _: KW_ONLY
    host: str = "127.0.0.1"
    """address to listen at; with another than 127.0.0.1, other machines may reach it"""
    port: int = 8000
    """port to listen at; 0 takes one that is free, and says which"""
    name: str | None = None
    """name by which clients call the model; by default MODEL as it was given"""
    api_key: str | None = None
    """key that clients must show; better in the environment, PROMOE_API_KEY, which other users cannot see"""
    max_prompt_tokens: int = 8192
    """longest prompt, in tokens"""
    max_new_tokens: int = 1024
    """longest answer, in tokens; also the limit of a request that does not say one"""
    max_body: str = "1MiB"
    """longest request, in bytes"""
    max_waiting: int = 32
    """most requests at once: the one that is answered, and those that wait"""
    warm: str | None = None
    """JSON file beside the page of a run's report: the experts used most there are fetched before requests are taken"""

    def __post_init__(self) -> None:
        from promoe.runtime.sizes import check_cache, fixed_bytes  # imports torch, and help need not wait for that

        check_at_least(
            1,
            max_prompt_tokens=self.max_prompt_tokens,
            max_new_tokens=self.max_new_tokens,
            max_waiting=self.max_waiting,
        )
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be from 0 (any that is free) to 65535. Got {self.port} instead.")
        if self.api_key is not None and (not self.api_key.isascii() or not self.api_key.strip()):
            raise ConfigError("The API key must be plain ASCII text that is not empty. Leave it out to ask for none.")
        check_cache(cache_size(self.cache))
        try:
            fixed_bytes(self.max_body)
        except ConfigError as error:
            raise ConfigError(f"--max-body: {error}") from None

    @property
    def served_name(self) -> str:
        """Return the name by which clients call the model."""
        return self.name or self.model
