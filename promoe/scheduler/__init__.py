"""Decides what is fetched when, and what makes room for it: a pure state machine.

    scheduler         what layers need and will need: hints, visits, forecasts
    fetch_queue       what is fetched next, into which slot, and what arrived or failed
    visit             which experts of one layer may run now
    many_tokens       what differs where many tokens visit a layer
    cache             the slots of one pool, and the experts in them
    slot_reclaim      frees a slot: takes that of a paused transfer, or evicts
    eviction          the policies: they score experts, and the one with the largest score leaves
    reuse             how probable an expert's next use is, judged by its layer's past
    calibration       turns forecasts into probabilities that can be trusted
    online_models     the statistical models that `reuse` and `calibration` teach while the model runs
    speculation       what forecasts want, by deadline
    waste             how many bytes prefetch may still waste
    governor          switches prefetch off while it does not pay
    replay            counts what a policy fetches for recorded routing

It knows expert keys, slots, chunks, priorities and step numbers. It does not know torch, threads, clocks, files or
models. The threaded engine, the replay and the property tests drive the same code.
"""

from .config import ExpertKey, HotExperts, PoolSpec, SchedulerConfig
from .fetch_queue import Lease
from .many_tokens import most_needed_first
from .scheduler import Scheduler
from .visit import Visit

__all__ = ["ExpertKey", "HotExperts", "Lease", "PoolSpec", "Scheduler", "SchedulerConfig", "Visit", "most_needed_first"]
