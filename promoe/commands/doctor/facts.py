"""Finds and measures what a machine is and what it can do. Judges nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from promoe.errors import ConfigError
from promoe.transfer.control_groups import CGROUPS, PROC, memory_groups
from promoe.transfer.cpu_contention import Taken, taken_now
from promoe.transfer.devices.cuda import CudaDevice
from promoe.transfer.links.direct import DirectUnsupportedError
from promoe.transfer.links.disk import drop_files
from promoe.transfer.links.free_ram import free_ram_bytes
from promoe.transfer.links.probe import probe_file
from promoe.transfer.processor import multiplies_bfloat16, num_cores, processor_name

MIB = 1024 * 1024
PACKAGES = ("promoe", "torch", "transformers", "safetensors", "numpy")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PROBE_FILE_BYTES = 256 * MIB
REQUEST_BYTES = 4 * MIB
READERS = 2
# More than the caches of processors hold.
COPIED_BYTES = 128 * MIB
COPIES = 5
# Settings that make the threads of GNU's and Intel's OpenMP sleep as soon as they have nothing to compute.
SLEEP_AT_ONCE = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}


@dataclass(frozen=True)
class Gpu:
    """One GPU, and how fast memory is copied to it."""

    name: str
    free_bytes: int
    pinned_bytes_per_s: float


@dataclass(frozen=True)
class Disk:
    """The disk that models are on, and how fast they are read past the page cache (None: that is impossible) and from it."""

    folder: str
    free_bytes: int
    direct_bytes_per_s: float | None
    cached_bytes_per_s: float


@dataclass(frozen=True)
class Facts:
    """All that `promoe doctor` finds out."""

    versions: dict[str, str]
    """Versions of packages; "none" for one that is not installed."""
    system: str
    processor: str
    cores: int
    """The number of cores that this process may use."""
    threads: int
    """The number of threads that torch computes with."""
    sleep_at_once: str | None
    """The environment variable that makes threads sleep between two products: "OMP_WAIT_POLICY=passive"; None: none does."""
    taken: Taken | None
    """What others took of the cores in half a second in which this process slept; None: the system does not say."""
    kernels: str
    """The best instructions that torch's kernels use: "AVX512"."""
    bfloat16: bool
    """Whether the processor multiplies bf16 numbers itself."""
    total_ram_bytes: int
    free_ram_bytes: int | None
    limited_by_group: bool
    """Whether a control group leaves this process less RAM than the machine has free."""
    locked_limit_bytes: int | None
    """How much memory this process may lock; None: no limit."""
    huge_pages: str
    """"always", "madvise", "never", or "unknown"."""
    copy_bytes_per_s: float
    """The speed of copies from RAM to RAM with one core."""
    disk: Disk
    gpus: list[Gpu]


def find_facts(folder: Path, proc: Path = PROC, cgroups: Path = CGROUPS) -> Facts:
    """Look and measure. It takes some seconds, and for as long 256 MiB on the disk.

    Args:
        folder: where models are.
        proc: for tests.
        cgroups: for tests.

    Raises:
        ConfigError: there is no such folder, or nothing can be written there.
    """
    soft_limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    ungrouped = free_ram_bytes(proc, Path("/nonexistent"))
    free = free_ram_bytes(proc, cgroups)
    return Facts(
        versions={"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        system=f"{platform.system()} {platform.release()}",
        processor=processor_name(proc),
        cores=num_cores(),
        threads=torch.get_num_threads(),
        sleep_at_once=_sleep_at_once(os.environ),
        taken=taken_now(),
        kernels=torch.backends.cpu.get_cpu_capability(),
        bfloat16=multiplies_bfloat16(proc),
        total_ram_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        free_ram_bytes=free,
        limited_by_group=bool(memory_groups(proc, cgroups))
        and free is not None
        and ungrouped is not None
        and free < ungrouped,
        locked_limit_bytes=None if soft_limit == resource.RLIM_INFINITY else soft_limit,
        huge_pages=_huge_pages(),
        copy_bytes_per_s=_copy_bandwidth(),
        disk=_disk(folder),
        gpus=[_gpu(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else [],
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _sleep_at_once(environment: Mapping[str, str]) -> str | None:
    for name, value in SLEEP_AT_ONCE.items():
        if environment.get(name, "").strip().lower() == value:
            return f"{name}={environment[name]}"
    return None


def _huge_pages() -> str:
    try:
        text = HUGE_PAGES.read_text()
    except OSError:
        return "unknown"
    return text.partition("[")[2].partition("]")[0] or "unknown"


def _per_second(nbytes: int, act: Callable[[], object]) -> float:
    """Return the median speed of some runs, after one to warm up."""
    times_s = []
    for _ in range(COPIES + 1):
        start_s = time.perf_counter()
        act()
        times_s.append(time.perf_counter() - start_s)
    return nbytes / median(times_s[1:])


def _copy_bandwidth() -> float:
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8).numpy()
    destination = source.copy()

    def copy() -> None:
        destination[:] = source

    return _per_second(COPIED_BYTES, copy)


def _disk(folder: Path) -> Disk:
    with scratch_file(folder) as path:
        drop_files([path])
        try:
            direct = probe_file(path, REQUEST_BYTES, READERS, "direct", 1.0).bytes_per_s
        except DirectUnsupportedError:
            direct = None
        probe_file(path, REQUEST_BYTES, 1, "page_cache", 0.5)  # what was dropped is read again
        cached = probe_file(path, REQUEST_BYTES, READERS, "page_cache", 0.5).bytes_per_s
        stat = os.statvfs(folder)
    return Disk(str(folder.resolve()), stat.f_bavail * stat.f_frsize, direct, cached)


@contextmanager
def scratch_file(folder: Path) -> Iterator[Path]:
    """Write a file of random bytes, which no file system can compress; it is deleted afterwards.

    Raises:
        ConfigError: it cannot be written there.
    """
    path = folder / f".promoe-doctor-{os.getpid()}"
    try:
        with path.open("xb") as file:
            for _ in range(PROBE_FILE_BYTES // REQUEST_BYTES):
                file.write(os.urandom(REQUEST_BYTES))
            file.flush()
            os.fsync(file.fileno())
        yield path
    except OSError as error:
        if isinstance(error, DirectUnsupportedError):
            raise
        raise ConfigError(
            f"The disk of '{folder}' could not be measured with a file of {PROBE_FILE_BYTES // MIB} MiB: {error}. Name a "
            "folder that you may write to, on the disk that your models are on."
        ) from error
    finally:
        with suppress(OSError):  # there may be none
            path.unlink()


def _gpu(index: int) -> Gpu:
    device = CudaDevice(f"cuda:{index}")
    source = device.allocate_pinned(COPIED_BYTES)
    destination = device.allocate(COPIED_BYTES)
    queue = device.new_queue()

    def copy() -> None:
        queue.copy_all([(destination, source)])
        queue.mark().wait_on_host()

    return Gpu(device.name, device.free_bytes(), _per_second(COPIED_BYTES, copy))
