"""Threads that move experts as the scheduler orders, and forwards that wait for them.

    engine     the whole: starts and ends the link workers; what forwards and the predictor call
    monitor    the scheduler behind one lock, and what stops it; each of the other modules builds on it
    transfers  carries out orders, and publishes which transfers failed
    visit      a layer's visit as its forward sees it
    waiter     waits until something arrives, or raises when nothing moves any more
    warming    fills free slots before a forward asks
    resizing   resizes the pools of an open model

The engine knows links, slots and errors. It does not know models.
"""

from promoe.transfer.engine.engine import Engine
from promoe.transfer.engine.visit import EngineVisit

__all__ = ["Engine", "EngineVisit"]
