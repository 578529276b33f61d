"""A device that is not there: queues whose work is done when a test says, or when somebody waits for it, and no sooner.

Its memory is RAM. Copies are made late, so that whoever reads without having waited reads NaN.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count

import torch

from promoe.errors import ConfigError
from promoe.transfer.devices import Pinned

_numbers = count()
ALIGNMENT_BYTES = 256


class FakeEvent:
    """Done once its queue has come to it."""

    def __init__(self, queue: FakeQueue) -> None:
        self.queue = queue
        self.done = False

    def wait_on_host(self) -> None:
        self.queue.host_waits += 1
        self.queue.run_until(self)


class FakeQueue:
    """Work in order.

    Args:
        device: whose.
        eager: for a processor that computes where it is called: kernels are done at once, and waiting is waiting. What is
            copied to the host arrives late all the same.
    """

    def __init__(self, device: FakeDevice, eager: bool = False) -> None:
        self.device = device
        self.key: Hashable = next(_numbers)
        self.host_waits = 0
        self._eager = eager
        self._work: deque[Callable[[], object] | FakeEvent | tuple[FakeEvent]] = deque()  # a tuple: to be waited for

    def mark(self) -> FakeEvent:
        event = FakeEvent(self)
        event.done = self._eager and not self._work
        if not event.done:
            self._work.append(event)
        return event

    def wait(self, event: FakeEvent) -> None:
        if self._eager:
            event.queue.run_until(event)
        else:
            self._work.append((event,))

    def wait_on_host(self) -> None:
        self.mark().wait_on_host()

    @contextmanager
    def running(self) -> Iterator[None]:
        """What is waited for is over; kernels are done where they are called."""
        self.run_until(self.mark())
        yield

    def copy_all(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for destination, source in copies:
            self.device.copied_bytes += source.numel()
            self.put(partial(destination.copy_, source))

    def copy_to_host(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        assert not destination.nbytes or any(
            destination.data_ptr() == memory.data_ptr() for memory in self.device.pinned_buffers
        )
        if self._eager:  # what the kernels after it do to the source is done before it
            source = source.clone()
        self._work.append(partial(_copy, destination, source))

    def put(self, work: Callable[[], object]) -> None:
        """Put in a kernel."""
        if self._eager:
            work()
        else:
            self._work.append(work)

    @property
    def blocked(self) -> bool:
        """Whether there is nothing that it can do now."""
        first = self._work[0] if self._work else None
        return first is None or (isinstance(first, tuple) and not first[0].done)

    def step(self) -> None:
        """Do the next piece of work; waiting for what has happened is one."""
        assert not self.blocked
        work = self._work.popleft()
        if isinstance(work, FakeEvent):
            work.done = True
        elif not isinstance(work, tuple):
            work()

    def run_until(self, event: FakeEvent) -> None:
        """Everything up to an event of this queue, and what that waits for. One thread at a time does the device's work."""
        with self.device.working:
            while not event.done:
                first = self._work[0]
                if isinstance(first, tuple) and not first[0].done:
                    first[0].queue.run_until(first[0])
                self.step()


@torch.inference_mode()  # whoever has the work done may not be
def _copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    destination.copy_(source)


class FakeDevice:
    """Satisfies `promoe.transfer.devices.Device`.

    Args:
        memory_bytes: of the device.
        compute: where kernels go; by default they are done where they are called.
    """

    name = "fake device"

    def __init__(self, memory_bytes: int = 2**40, eager: bool = True) -> None:
        self.torch_device = torch.device("cpu")
        self.compute = FakeQueue(self, eager)
        self.queues = [self.compute]
        self._side: FakeQueue | None = None
        self.memory_bytes = memory_bytes
        self.working = threading.RLock()
        self.copied_bytes = 0
        self.pinned_buffers: deque[torch.Tensor] = deque(maxlen=100)
        self.pinned: list[torch.Tensor] = []
        self.unpinnable_bytes = 0

    @property
    def host_waits(self) -> int:
        """Of all queues."""
        return sum(queue.host_waits for queue in self.queues)

    def free_bytes(self) -> int:
        return self.memory_bytes

    def allocate(self, nbytes: int) -> torch.Tensor:
        if nbytes > self.memory_bytes:
            raise ConfigError(f"No memory for a cache of {nbytes} bytes on the {self.name}. Choose a smaller cache.")
        self.memory_bytes -= nbytes
        with torch.inference_mode(False):
            memory = torch.full((nbytes + ALIGNMENT_BYTES,), 0xFF, dtype=torch.uint8)
        return memory[-memory.data_ptr() % ALIGNMENT_BYTES :][:nbytes]

    def allocate_pinned(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            self.pinned_buffers.append(torch.full((nbytes,), 0xFF, dtype=torch.uint8))
        return self.pinned_buffers[-1]

    def current(self) -> FakeQueue:
        return self.compute

    def new_queue(self) -> FakeQueue:
        self.queues.append(FakeQueue(self))
        return self.queues[-1]

    def side_queue(self) -> FakeQueue:
        if self._side is None:
            self._side = self.new_queue()
        return self._side

    def pin(self, tensors: Sequence[torch.Tensor], own_pages: bool = False) -> Pinned:
        """All of them, or, where some bytes cannot be, none."""
        self.pinned = [] if self.unpinnable_bytes else list(tensors)
        ranges = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in self.pinned]
        return Pinned(ranges, self.unpinnable_bytes, self.pinned.clear)

    def run_some(self, draw: random.Random, steps: int) -> None:
        """So many pieces of work, of queues drawn among those that can go on."""
        for _ in range(steps):
            able = [queue for queue in self.queues if not queue.blocked]
            if not able:
                return
            draw.choice(able).step()

    def run_all(self, draw: random.Random) -> None:
        """Everything that was put in, in an order that the queues allow."""
        self.run_some(draw, 10**9)
        assert not any(queue._work for queue in self.queues), "queues wait for each other"
