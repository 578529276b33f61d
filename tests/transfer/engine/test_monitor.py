"""Signal handlers that come in the midst of a change."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from promoe.errors import (
    EngineError,
    PatchStateError,
)

from .engines import in_the_midst_of_a_hint, running, visit

KNOWS_ITS_DEPTH = pytest.mark.skipif(
    not hasattr(threading.RLock(), "_recursion_count"), reason="this Python's locks do not say how often they are held"
)


@KNOWS_ITS_DEPTH
def test_a_signal_handler_is_refused_in_the_midst_of_a_change() -> None:
    """Otherwise it would wait for itself. A handler that catches the error has done no harm."""
    with running() as (engine, _):

        def handler() -> None:
            for call in (
                partial(visit, engine, 0, [3]),
                partial(engine.hint, 1, [3]),
                partial(engine.set_prefetch, False),
            ):
                with pytest.raises(PatchStateError, match="signal handler"):
                    call()

        in_the_midst_of_a_hint(engine, handler)
        assert not engine.torn
        assert visit(engine, 0, [1, 2]) == [1, 2]


@KNOWS_ITS_DEPTH
def test_a_handler_that_does_not_catch_it_leaves_a_state_that_is_not_trusted() -> None:
    with running() as (engine, _):
        with pytest.raises(PatchStateError, match="signal handler"):
            in_the_midst_of_a_hint(engine, partial(engine.hint, 1, [3]))
        assert engine.torn
        with pytest.raises(EngineError, match="was being changed"):
            visit(engine, 0, [1, 2])
