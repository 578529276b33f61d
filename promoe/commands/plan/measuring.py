"""Measures a machine for a plan: what a model's blocks take, what a group of experts costs, how fast experts come."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

from promoe.commands.contention import contention
from promoe.commands.doctor.facts import PROBE_FILE_BYTES, scratch_file
from promoe.commands.plan.stand_in import StandIn, Timed, token_ids
from promoe.commands.plan.time_model import ComputeTimes, Curve, LinkSpeed
from promoe.scheduler import ExpertKey
from promoe.stores.base import compute_chunk
from promoe.stores.file_store import FileStore
from promoe.transfer.links.direct import DirectUnsupportedError
from promoe.transfer.links.disk import FileMode, drop_files
from promoe.transfer.links.probe import ProbeMode, ReadBandwidth, all_chunks, probe_file, probe_read_bandwidth

PROMPTS = 2
SECONDS = 1.5
FEWEST_PASSES = 5
READ_SECONDS = 1.0
REQUEST_BYTES = 4 * 2**20
# The part of the files that is read again and again to measure the page cache: after the first time it is there.
CACHED_BYTES = 256 * 2**20
GROUP_PASSES, GROUP_SLEEP_S = 10, 0.002
CONVERSIONS = 3


def measure_compute(stand_in: StandIn, prompt_tokens: int) -> ComputeTimes:
    """Time single tokens and a prompt through some of the model's blocks.

    Args:
        stand_in: those blocks.
        prompt_tokens: tokens of the prompt.
    """
    prompt = token_ids(stand_in.model, prompt_tokens)
    prompts = [stand_in.run(prompt) for _ in range(PROMPTS + 1)][1:]
    cache = prompts[-1][0]
    tokens: list[Timed] = []
    started_s = time.perf_counter()
    while time.perf_counter() - started_s < SECONDS or len(tokens) < FEWEST_PASSES:
        cache, run = stand_in.run(token_ids(stand_in.model, len(tokens) + 1)[:, -1:], cache)
        tokens.append(run)
    layer_s = median(run.pass_s - run.experts_s for run in tokens) / len(stand_in.layers)
    stand_in.layer_s = min(stand_in.layer_s, layer_s)
    points = [(1, 1.0, tokens)]
    if prompt_tokens > 1:
        runs = [run for _, run in prompts]
        points.append((prompt_tokens, max(1.001, runs[0].pairs / runs[0].experts_used), runs))
    return ComputeTimes(
        layer=Curve(tuple((n, median(run.others_s for run in runs) / stand_in.num_layers) for n, _, runs in points)),
        expert=Curve(
            tuple((rows, median(run.experts_s / run.experts_used for run in runs)) for _, rows, runs in points)
        ),
        expert_bytes=tokens[0].experts_bytes // tokens[0].experts_used,
        group_s=group_cost_s(stand_in),
        how=f"{len(stand_in.blocks)} of {stand_in.num_blocks} blocks, with made-up weights"
        + (f", {stand_in.form}" if stand_in.form else ""),
    )


def group_cost_s(stand_in: StandIn) -> float:
    """Return by how much a layer's time grows per group if its experts come one by one, after a short sleep each."""
    found, cache = [], None
    for ids in token_ids(stand_in.model, GROUP_PASSES)[0].split(1):
        experts_s = []
        for pause_s in (None, GROUP_SLEEP_S):
            stand_in.pause_s = pause_s
            cache, run = stand_in.run(ids[None], cache)
            experts_s.append(run.experts_s / max(1, run.experts_used))
        found.append(experts_s[1] - experts_s[0] - GROUP_SLEEP_S)
    stand_in.pause_s = None
    return max(0.0, median(found))


def measure_link(
    stand_in: StandIn | None, store: FileStore | None, folder: Path, mode: FileMode, workers: int
) -> LinkSpeed:
    """Measure how fast experts come from files, alone and beside a model that computes, and what both lose to each other.

    Args:
        stand_in: the model that computes meanwhile; None: nothing does.
        store: the store whose files are read; None: a file that is written and deleted in `folder`.
        folder: where the model's files would be.
        mode: "direct" (which becomes "page_cache" where the file system does not have it) or "page_cache".
        workers: threads that read.

    Raises:
        ConfigError: nothing can be written to `folder`.
    """
    probe_mode: ProbeMode = "page_cache" if mode == "page_cache" else "direct"
    read: Callable[[ProbeMode, float], ReadBandwidth]
    with ExitStack() as stack:
        if store is None:
            path = stack.enter_context(scratch_file(folder))
            drop_files([path])
            read = partial(probe_file, path, REQUEST_BYTES, workers)
            how, convert_s = f"a file of {PROBE_FILE_BYTES >> 20} MiB in {folder}", 0.0
        else:
            chunks = list(all_chunks(store))
            if probe_mode == "page_cache":
                chunks = chunks[: max(1, CACHED_BYTES // max(chunk.source_nbytes for chunk in chunks))]
            read = partial(probe_read_bandwidth, store, REQUEST_BYTES, workers, chunks=chunks)
            how, convert_s = "the model's own files", _conversion_s(store)
        try:
            alone = read(probe_mode, READ_SECONDS)
        except DirectUnsupportedError:
            probe_mode = "page_cache"
            read(probe_mode, READ_SECONDS)
        if probe_mode == "page_cache":
            alone = read(probe_mode, READ_SECONDS)  # what was read once is there
        beside_bytes_per_s, slowdown = alone.bytes_per_s, 1.0
        if stand_in is not None:
            tokens = itertools.cycle(token_ids(stand_in.model, 64)[0].split(1))
            found = contention(lambda: stand_in.run(next(tokens)[None])[1].pass_s, partial(read, probe_mode))
            beside_bytes_per_s, slowdown = min(found.bandwidth_bytes_per_s, alone.bytes_per_s), found.slowdown
    name = "O_DIRECT" if probe_mode == "direct" else "page cache"
    return LinkSpeed(name, alone.bytes_per_s, beside_bytes_per_s, slowdown, convert_s, how)


def _conversion_s(store: FileStore) -> float:
    """Return the seconds to compute one expert from what is stored; 0 where it is stored as it is."""
    times_s = []
    for _ in range(CONVERSIONS):
        start_s = time.perf_counter()
        for chunk in store.chunks(ExpertKey(0, 0)):
            if chunk.compute is not None:
                compute_chunk(chunk, memoryview(bytearray(chunk.source_nbytes)), memoryview(bytearray(chunk.nbytes)))
        times_s.append(time.perf_counter() - start_s)
    return min(times_s) if any(chunk.compute for chunk in store.chunks(ExpertKey(0, 0))) else 0.0
