"""Threads that move experts as the scheduler orders, and forwards that wait for them."""

from promoe.transfer.engine.engine import Engine
from promoe.transfer.engine.visit import EngineVisit

__all__ = ["Engine", "EngineVisit"]
