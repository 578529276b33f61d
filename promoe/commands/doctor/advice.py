"""Judges a machine from facts alone: what would be slow on it, why, and what to do."""

from __future__ import annotations

from collections.abc import Iterator

from promoe.commands.doctor.facts import MIB, Facts
from promoe.units import format_bandwidth, format_memory, format_number

TESTED = ("5.17", "5.23")
"""The oldest and the newest version of transformers that the tests run on."""
SLOW_DISK_BYTES_PER_S = 1e9
LEAST_LOCKED_BYTES = 64 * MIB
# The size of an expert in a model of ordinary size.
EXPERT_BYTES = 10e6


def advice(facts: Facts) -> list[str]:
    """Return a sentence or two about each thing that would be slow, the worst first; nothing where all is well."""
    return [*_disk(facts), *_memory(facts), *_computing(facts), *_gpus(facts), *_versions(facts)]


def _disk(facts: Facts) -> Iterator[str]:
    disk = facts.disk
    if disk.direct_bytes_per_s is None:
        yield (
            f"The file system of {disk.folder} has no O_DIRECT: experts are read through the page cache, which competes with "
            "everything else for RAM. Put the model on a local disk (ext4, xfs)."
        )
        return
    if disk.direct_bytes_per_s < SLOW_DISK_BYTES_PER_S:
        yield (
            f"The disk reads {format_bandwidth(disk.direct_bytes_per_s)}: an expert of 10 MB takes "
            f"{format_number(1e3 * EXPERT_BYTES / disk.direct_bytes_per_s)} ms, and a token that misses many waits for them. A "
            "larger cache helps most; an NVMe disk reads 3 to 7 GB/s."
        )
    if disk.cached_bytes_per_s < disk.direct_bytes_per_s:
        yield (
            'The page cache is slower than the disk here. Where all experts would fit into RAM, read_mode="direct" may be the '
            "better choice all the same."
        )


def _memory(facts: Facts) -> Iterator[str]:
    if facts.limited_by_group and facts.free_ram_bytes is not None:
        yield (
            f"A control group (a container's limit, for example) leaves this process {format_memory(facts.free_ram_bytes)} of "
            f"{format_memory(facts.total_ram_bytes)} of RAM. Caches are sized by what it leaves."
        )
    if facts.huge_pages == "never":
        yield (
            "Huge pages are switched off: reading into slots and computing from them is slower. As root: echo madvise > "
            "/sys/kernel/mm/transparent_hugepage/enabled"
        )


def _computing(facts: Facts) -> Iterator[str]:
    if facts.cores == 1:
        yield "There is one core: predictions and reads take their time from computing. Prefetch will gain little."
    if facts.threads < facts.cores:
        yield (
            f"torch computes with {facts.threads} of {facts.cores} cores (OMP_NUM_THREADS, torch.set_num_threads). The "
            "rest serves reads and predictions; where computing dominates, give it more."
        )
    if facts.threads > facts.cores:
        yield (
            f"torch computes with {facts.threads} threads on {facts.cores} cores: they wait for each other. Set "
            f"OMP_NUM_THREADS={facts.cores}."
        )
    if facts.sleep_at_once and facts.threads > 1:
        yield (
            f"{facts.sleep_at_once} has torch's threads sleep after each product. Decoding is hundreds of short ones a token, "
            "and to wake a thread takes longer than some of them: unset it, unless other processes need the cores."
        )
    if facts.taken is not None and facts.taken.much_by_others:
        yield (
            f"Other processes keep {facts.taken.by_others:.2f} of the {facts.taken.cores} cores busy. Threads that "
            "share a core with them make all others wait, several times as long as the core is missing: stop them before "
            "anything is measured, or leave them their cores (OMP_NUM_THREADS)."
        )
    if not facts.bfloat16:
        yield (
            "The processor has no bf16 products: torch emulates them. Decoding is bound by memory and hardly slower; prompts "
            "may take longer than in fp32."
        )


def _gpus(facts: Facts) -> Iterator[str]:
    limit = facts.locked_limit_bytes
    if facts.gpus and limit is not None and limit < LEAST_LOCKED_BYTES:
        yield (
            f"This process may lock {format_memory(limit)} of memory (ulimit -l): experts in RAM may not be pinned, and "
            "copies to the GPU are slower. Raise the limit."
        )


def _versions(facts: Facts) -> Iterator[str]:
    found = facts.versions["transformers"]
    minor = tuple(map(int, found.split(".")[:2])) if found[:1].isdigit() else None
    oldest, newest = (tuple(map(int, version.split("."))) for version in TESTED)
    if minor is not None and not oldest <= minor <= newest:
        yield (
            f"transformers {found} is not among the versions that promoe is tested with ({TESTED[0]} to {TESTED[1]}). What "
            "it does not know it refuses; `promoe doctor --chaos` compares outputs."
        )
