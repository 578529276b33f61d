"""Answer mixed requests on a small cache for half an hour, with faults injected, and check every answer.

    python benchmarks/soak.py [--minutes 30] [--cache 12.5%] [--failed 2e-5] [--slow 0.01] [--model FOLDER]
        [--seed 0] [--json FILE]

Prints the requests, the faults and what became of them, percentiles of the time per token, and how memory, threads and
open files changed after the warm-up. The warm-up is the first tenth of the time, and lasts until every request was
answered twice, because the libraries below keep memory for each shape that they have computed. Takes --minutes, and
some more to open the model.

The demo model with experts of real size answers requests drawn at random: greedy, sampled, beams, padded batches, a
long prompt, two threads at once, and an answer that is given up half way. Tokens and logits are compared bit by bit
with those of the unmodified model, which answered each request once before. Transfers fail, are torn, or take longer,
at random; a request that fails is asked again until it is answered.

Ends with status 1 if an answer was wrong, a fault was not survived, or anything grew: anonymous memory in use by more
than 1%, threads or open files at all. The C library keeps memory that was freed for later use. How much that is depends
on the last request, so it is returned before each look, and printed apart.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import logging
import os
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers
from common import DTYPE, heldout_prompts, make_parser, save, widened_demo
from memory import anonymous_bytes
from transformers.generation.streamers import BaseStreamer

import promoe
from promoe.commands.bench.stock import load_stock
from promoe.config import PromoeConfig
from promoe.transfer.links.faults import FaultKind, FaultyLink, seeded
from promoe.units import format_memory, format_ms

MOST_TRIES = 20
PROMPTS = 13
GROWTH = 0.01
WARM_UP_SHARE = 0.1


class GivenUpError(Exception):
    """The client of a request does not want the answer any more."""


class Client(BaseStreamer):  # type: ignore[misc]
    """A streamer that notes when tokens come, and gives up after `patience` of them."""

    def __init__(self, patience: int | None = None) -> None:
        self.times_s: list[float] = []
        self._patience = patience

    def put(self, value: torch.Tensor) -> None:
        """Note the time of the prompt, then of each token."""
        self.times_s.append(time.perf_counter())
        if self._patience is not None and len(self.times_s) > self._patience:
            raise GivenUpError

    def end(self) -> None:
        """Do nothing: there is nothing to flush."""


@dataclasses.dataclass(frozen=True)
class Request:
    """Something to ask: the inputs of `generate`, whether it is streamed, and when its client gives up."""

    kind: str
    inputs: dict[str, Any]
    seed: int = 0
    streamed: bool = False
    patience: int | None = None

    def answer(self, model: Any) -> tuple[list[torch.Tensor], list[float]]:
        """Return what must be the same bit by bit, and the seconds between tokens (if streamed)."""
        client = Client(self.patience) if self.streamed else None
        if self.inputs.get("do_sample"):
            torch.manual_seed(self.seed)
        try:
            with torch.inference_mode():
                out = model.generate(
                    **self.inputs, streamer=client, return_dict_in_generate=True, output_logits=True, pad_token_id=0
                )
        except GivenUpError:
            assert self.patience is not None
            return [], []
        times_s = [] if client is None else np.diff(client.times_s[1:]).tolist()
        return [out.sequences, *out.logits], times_s


def make_requests(rng: random.Random) -> list[Request]:
    """Return some requests of each kind."""
    everything = [token for prompt in heldout_prompts(PROMPTS) for token in prompt[0].tolist()]

    def batch(*rows: list[int]) -> dict[str, Any]:
        longest = max(map(len, rows))
        padded = [[0] * (longest - len(row)) + row for row in rows]
        return {
            "input_ids": torch.tensor(padded),
            "attention_mask": torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows]),
        }

    def some(most: int) -> list[int]:
        start = rng.randrange(len(everything) - most)
        return everything[start : start + rng.randint(2, most)]

    greedy = [Request("greedy", {**batch(some(60)), "max_new_tokens": n}, streamed=True) for n in (4, 12, 32, 64)]
    sampled = [
        Request("sampled", {**batch(some(40)), "max_new_tokens": n, "do_sample": True, "top_p": 0.9}, n, True)
        for n in (8, 24)
    ]
    beams = [Request("beams", {**batch(some(30)), "max_new_tokens": n, "num_beams": 3}) for n in (6, 12)]
    batches = [
        Request("batch", {**batch(*(some(50) for _ in range(n))), "max_new_tokens": 8, "min_new_tokens": 8})
        for n in (2, 4, 8)
    ]
    long = [Request("long prompt", {**batch(everything[:n]), "max_new_tokens": 4}) for n in (300, 700)]
    given_up = [
        Request("given up", {**batch(some(40)), "max_new_tokens": 40}, streamed=True, patience=n) for n in (2, 9)
    ]
    return [*greedy, *sampled, *beams, *batches, *long, *given_up]


class Soak:
    """One run: what was asked, answered, and went wrong."""

    def __init__(self, model: Any, requests: list[Request], expected: list[list[torch.Tensor]], seed: int) -> None:
        self.model = model
        self.requests = requests
        self.expected = expected
        self.rng = random.Random(seed)
        self.answered: Counter[str] = Counter()
        self.times_answered: Counter[int] = Counter()
        self.errors: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.gaps_s: list[float] = []
        self._lock = threading.Lock()

    def ask(self, number: int) -> None:
        """Ask a request until it is answered."""
        request = self.requests[number]
        for _ in range(MOST_TRIES):
            try:
                found, gaps_s = request.answer(self.model)
            except promoe.PromoeError as error:
                with self._lock:
                    self.errors[type(error).__name__] += 1
                continue
            expected = self.expected[number] if request.patience is None else []
            same = len(found) == len(expected) and all(map(torch.equal, found, expected))
            with self._lock:
                self.answered[request.kind] += 1
                self.times_answered[number] += 1
                self.gaps_s += gaps_s
                if not same:
                    self.wrong.append(f"{request.kind}, request {number}")
            return
        self.wrong.append(f"{request.kind}, request {number}: no answer in {MOST_TRIES} tries")

    @property
    def warm(self) -> bool:
        """Whether every request was answered twice."""
        return all(self.times_answered[number] >= 2 for number in range(len(self.requests) + 1))

    def ask_two_at_once(self) -> None:
        """Ask two greedy requests, in a thread each."""
        numbers = [number for number, request in enumerate(self.requests) if request.kind == "greedy"]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(self.ask, self.rng.sample(numbers, 2)))
        self.answered["two threads at once"] += 1
        self.times_answered[len(self.requests)] += 1

    def step(self) -> None:
        """Ask something drawn at random."""
        number = self.rng.randrange(len(self.requests) + 1)
        self.ask_two_at_once() if number == len(self.requests) else self.ask(number)


def give_back_free_memory() -> None:
    """Have the C library return what it keeps for later allocations, so that the rest is in use."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def look() -> dict[str, int]:
    """Return what this process holds, and the freed memory that the C library kept."""
    gc.collect()
    kept = anonymous_bytes()
    give_back_free_memory()
    return {
        "anonymous_bytes": anonymous_bytes(),
        "freed_bytes": kept - anonymous_bytes(),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
    }


def report(soak: Soak, injected: Counter[FaultKind], looks: list[dict[str, int]], transfers: int) -> dict[str, Any]:
    """Print the run, and return it for the JSON."""
    after, last = looks[: max(1, len(looks) // 10)], looks[-max(1, len(looks) // 10) :]
    grown = {
        name: median(look[name] for look in last) / median(look[name] for look in after) - 1
        for name in ("anonymous_bytes", "threads", "files")
    }
    p50, p95, p99 = np.percentile(soak.gaps_s, [50, 95, 99]).tolist() if soak.gaps_s else [float("nan")] * 3
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(soak.answered.items()))
    print(f"requests answered: {soak.answered.total()} ({kinds}), {len(soak.wrong)} wrong or never")
    print(
        f"faults injected into {transfers} transfers: {dict(injected)}; errors, after which the request was asked again: "
        f"{dict(soak.errors)}"
    )
    print(
        f"TPOT of single answers: p50 {format_ms(p50)}, p95 {format_ms(p95)}, p99 {format_ms(p99)} ms "
        f"({len(soak.gaps_s)} tokens)"
    )
    held = median(look["anonymous_bytes"] for look in after)
    print(
        f"after the warm-up: {format_memory(int(held))} of anonymous memory in use, {grown['anonymous_bytes']:+.2%} to the "
        f"end (beside it the C library kept up to {format_memory(max(look['freed_bytes'] for look in looks))} that a request "
        "had freed)"
    )
    print(", ".join(f"{name} {after[0][name]} -> {last[-1][name]}" for name in ("threads", "files")))
    for what in soak.wrong:
        print(f"  WRONG: {what}")
    return {
        "answered": soak.answered,
        "wrong": soak.wrong,
        "errors": soak.errors,
        "injected": injected,
        "tpot_s": {"p50": p50, "p95": p95, "p99": p99},
        "growth": grown,
        "looks": looks,
    }


def main() -> None:
    parser = make_parser(__doc__, __file__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--cache", default="12.5%")
    parser.add_argument(
        "--failed",
        type=float,
        default=2e-5,
        help="share of transfers that fail, and as many each that are torn, out of memory, or break",
    )
    parser.add_argument("--slow", type=float, default=0.01, help="share of transfers that take up to 20 ms more")
    parser.add_argument("--model", type=Path, help="a checkpoint in place of the widened demo model")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    logging.getLogger("promoe").setLevel(logging.ERROR)  # it warns of each prediction whose transfer failed
    checkpoint = options.model or widened_demo()
    requests = make_requests(random.Random(options.seed))
    stock = load_stock(checkpoint, DTYPE)
    expected = [request.answer(stock)[0] for request in requests]
    del stock
    gc.collect()
    shares: dict[FaultKind, float] = {
        "slow": options.slow,
        **dict.fromkeys(("failed", "torn", "short", "no_memory"), options.failed),
    }
    model: Any = promoe.from_pretrained(checkpoint, cache=options.cache, dtype=DTYPE, config=PromoeConfig())
    engine = model.promoe.runtime.engine
    engine.link = link = FaultyLink(engine.link, seeded(options.seed, shares, 0.02))
    soak = Soak(model, requests, expected, options.seed)
    looks: list[dict[str, int]] = []
    start_s = time.monotonic()
    until_s = start_s + 60 * options.minutes
    while time.monotonic() < until_s:
        soak.step()
        if soak.warm and time.monotonic() > start_s + 60 * options.minutes * WARM_UP_SHARE:
            looks.append(look())
    if not looks:
        model.promoe.close()
        sys.exit(f"{options.minutes:g} minutes are too few: not every request was answered twice. Give --minutes more.")
    found = report(soak, link.injected, looks, link._started)
    model.promoe.close()
    save(options.json, found)
    grown = found["growth"]
    if soak.wrong or grown["anonymous_bytes"] > GROWTH or grown["threads"] > 0 or grown["files"] > 0:
        sys.exit(1)


if __name__ == "__main__":
    main()
