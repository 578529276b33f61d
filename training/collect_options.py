"""How a collection runs its prompts, and whether model and disk allow it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from promoe.errors import ConfigError, check_at_least
from promoe.training.trace_folder import TraceInfo, part_paths
from promoe.units import format_memory

MAX_DECODE_SHARE = 0.9
# Left free on the disk beside what the trace is expected to take.
SPARE_BYTES = 64 << 20


@dataclass(frozen=True)
class CollectOptions:
    """How prompts are run.

    Args:
        max_tokens: rows to record, over all shards; the batch in which they are reached is finished.
        decode_share: rows that are generated, of all; less where answers end early.
        max_prompt_tokens: longer conversations are cut after an earlier question.
        batch_size: prompts run together.
        temperature: of sampling; None: as the model's own generation config says.
        seed: of sampling.
        shard_index: which share of the prompts is run.
        num_shards: into how many the prompts are divided.
    """

    max_tokens: int = 100_000
    decode_share: float = 0.5
    max_prompt_tokens: int = 256
    batch_size: int = 32
    temperature: float | None = None
    seed: int = 0
    shard_index: int = 0
    num_shards: int = 1

    def __post_init__(self) -> None:
        check_at_least(
            1,
            max_tokens=self.max_tokens,
            max_prompt_tokens=self.max_prompt_tokens,
            batch_size=self.batch_size,
            num_shards=self.num_shards,
        )
        _require(
            0 <= self.decode_share <= MAX_DECODE_SHARE, "decode_share", f"0 to {MAX_DECODE_SHARE}", self.decode_share
        )
        _require(self.temperature is None or self.temperature > 0, "temperature", "more than 0", self.temperature)
        _require(
            0 <= self.shard_index < self.num_shards, "shard_index", f"0 to {self.num_shards - 1}", self.shard_index
        )
        _require(0 <= self.seed < 1 << 63, "seed", "0 to 2^63 - 1", self.seed)

    @property
    def shard_tokens(self) -> int:
        """Rows of this shard."""
        return -(-self.max_tokens // self.num_shards)

    @property
    def max_sequence(self) -> int:
        """Tokens of the longest sequence, generated ones included."""
        return self.max_prompt_tokens + self.new_tokens(self.max_prompt_tokens)

    def new_tokens(self, prompt_tokens: float) -> int:
        """Tokens to generate for each prompt, where they have so many on average."""
        return round(prompt_tokens * self.decode_share / (1 - self.decode_share))

    def settings(self, data: str, excluded: Collection[str], dtype: str) -> dict[str, Any]:
        """What must be the same for a trace to be gone on with; more tokens may be asked for.

        Args:
            data: where prompts come from.
            excluded: texts that are left out.
            dtype: of the model's weights, as it was asked for.
        """
        digest = hashlib.sha256(json.dumps(sorted(excluded)).encode()).hexdigest()
        return {
            "data": data,
            "excluded": f"{len(excluded)} prompts, sha256 {digest[:16]}" if excluded else None,
            "dtype": dtype,
            "decode_share": self.decode_share,
            "max_prompt_tokens": self.max_prompt_tokens,
            "batch_size": self.batch_size,
            "temperature": self.temperature,
            "seed": self.seed,
            "num_shards": self.num_shards,
        }


def _require(holds: bool, name: str, allowed: str, found: object) -> None:
    if not holds:
        raise ConfigError(f"--{name.replace('_', '-')} must be {allowed}. Got {found} instead.")


def check_positions(model: Any, options: CollectOptions) -> None:
    """Raise ConfigError if sequences may become longer than the model knows positions."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(positions, int) and options.max_sequence > positions:
        raise ConfigError(
            f"Prompts of {options.max_prompt_tokens:,} tokens and what is generated, {options.max_sequence:,} in all, are more "
            f"than the model's {positions:,} positions. Choose a smaller --max-prompt-tokens or --decode-share."
        )


def check_disk(info: TraceInfo, folder: Path, options: CollectOptions) -> str:
    """How large a shard's trace will be, in words.

    Raises:
        ConfigError: the disk has less free than is still missing.
    """
    present = sum(path.stat().st_size for path in part_paths(folder, options.shard_index))
    expected = options.shard_tokens * info.token_bytes
    last_batch = options.batch_size * options.max_sequence * info.token_bytes  # is finished, even for its first token
    existing = next(path for path in (folder, *folder.resolve().parents) if os.path.exists(path))
    free = shutil.disk_usage(existing).free
    size = f"{options.shard_tokens:,} tokens of {format_memory(info.token_bytes)} = {format_memory(expected)}"
    if present < expected and expected - present + last_batch + SPARE_BYTES > free:
        raise ConfigError(
            f"The trace needs {size} and up to {format_memory(last_batch)} for the batch that completes it; "
            f"{format_memory(present)} are there, and {existing} has {format_memory(free)} free. Choose fewer --max-tokens, a "
            "smaller --batch-size or another --out."
        )
    return f"{size} into {folder} ({format_memory(free)} free)"
