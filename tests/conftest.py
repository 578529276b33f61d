"""Common ground of all tests: one thread, fixed seeds, no network, no leftovers."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# Also of the processes that tests start: teams of threads on the same cores wait for each other most of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests with several threads run beside other tests: threads that spin while they wait keep the others' from their cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# Also of the processes that tests start: texts are compared, and wrap at the width of whatever terminal is there.
os.environ["COLUMNS"] = "100"

import torch
from hypothesis import HealthCheck, settings
from transformers.utils import logging as transformers_logging
from waiting import WAIT_S

from promoe.model import packing, spool

transformers_logging.disable_progress_bar()

# No test depends on time: a machine may be ten times as slow while others use its cores.
settings.register_profile(
    "patient", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("patient")


@pytest.fixture(autouse=True, scope="module")
def _what_is_there_stays() -> None:
    """Imports, and models that tests share: going through them at each collection takes more time than most tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _packing_gains() -> Iterator[None]:
    """Whatever the processor: tests pack matrices that are too small to gain anything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "LEAST_GAIN", 0.0)
        yield


@pytest.fixture(autouse=True)
def _one_thread_fixed_seed() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _no_thread_left_behind() -> Iterator[None]:
    """Whatever a test opens it closes: no promoe thread survives it."""
    before = set(threading.enumerate())
    yield
    new = [one for one in threading.enumerate() if one.name.startswith("promoe-") and one not in before]
    for thread in new:
        if thread.name in ("promoe-close", "promoe-predictor"):  # they end by themselves once the model is collected
            thread.join(WAIT_S)
    left = [thread.name for thread in new if thread.is_alive()]
    assert not left, f"threads left running: {left}"


@pytest.fixture(autouse=True)
def _temporary_files_are_on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as promoe can tell, also where they are in RAM."""
    monkeypatch.setattr(spool, "file_system", lambda folder: "ext4")


@pytest.fixture
def _heeding_ctrl_c() -> Iterator[None]:
    """A shell has what it starts in the background ignore SIGINT; then Python does, and every process that it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
