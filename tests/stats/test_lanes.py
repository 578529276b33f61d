from __future__ import annotations

import pytest

from promoe.errors import ConfigError
from promoe.stats.lanes import Lanes, Transfer, Work, lanes_of, median_pass, median_token
from promoe.stats.tracing import COMPUTE, PASS, PREDICTOR, STALL, Span, Tracer, link_worker


def recorded() -> list[Span]:
    """Two passes of two layers, in ms: a prompt without transfers, and a token that waits in both layers."""
    tracer = Tracer()

    def span(lane: str, start_ms: float, end_ms: float, **args: object) -> None:
        tracer.span(lane, "a name", 100 + start_ms / 1e3, 100 + end_ms / 1e3, **args)

    span(COMPUTE, 1, 4, layer=0)
    span(COMPUTE, 5, 9, layer=1)
    span(PASS, 0, 10, phase="prefill", tokens=12)
    # On its way before the pass begins, and until after it has ended.
    span(link_worker(1), 18, 22, cause="prefetch", layer=0, expert=3)
    span(STALL, 22, 24, layer=0)
    span(link_worker(0), 21, 24, cause="demand", layer=0, expert=5)
    span(COMPUTE, 21, 26, layer=0)
    span(PREDICTOR, 26, 27, layer=0)
    span(link_worker(1), 23, 25, cause="demand", layer=0, expert=6)
    span(STALL, 29, 30, layer=1)
    span(COMPUTE, 28, 32, layer=1)
    span(PASS, 20, 36, phase="decode", tokens=1)
    span(link_worker(0), 35, 39, cause="prefetch", layer=0, expert=1)
    return tracer.spans()


def ms(value: float) -> object:
    return pytest.approx(1e-3 * value, abs=1e-9)


def test_a_pass_has_what_happened_while_it_ran() -> None:
    prefill, decode = lanes_of(recorded())
    assert (prefill.phase, prefill.num_tokens, prefill.duration_s) == ("prefill", 12, ms(10))
    assert (decode.phase, decode.num_tokens, decode.duration_s) == ("decode", 1, ms(16))
    assert [work.layer for work in prefill.visits] == [0, 1]
    assert (prefill.waits, prefill.transfers, prefill.predictions) == ([], [], [])
    assert [(w.layer, w.start_s, w.end_s) for w in decode.visits] == [(0, ms(1), ms(6)), (1, ms(8), ms(12))]
    assert len(decode.predictions) == 1


def test_transfers_are_cut_to_the_pass() -> None:
    _, decode = lanes_of(recorded())
    assert [(t.reader, t.cause, t.layer, t.expert, t.start_s, t.end_s) for t in decode.transfers] == [
        (link_worker(1), "prefetch", 0, 3, 0.0, ms(2)),
        (link_worker(0), "demand", 0, 5, ms(1), ms(4)),
        (link_worker(1), "demand", 0, 6, ms(3), ms(5)),
        (link_worker(0), "prefetch", 0, 1, ms(15), ms(16)),
    ]
    assert decode.readers == [link_worker(0), link_worker(1)]


def test_the_parts_of_a_pass_add_up() -> None:
    _, decode = lanes_of(recorded())
    assert decode.stall_s == ms(3)
    assert decode.experts_s == ms(6)
    assert decode.rest_s == ms(7)
    assert decode.experts_s + decode.rest_s + decode.stall_s == pytest.approx(decode.duration_s)


def test_time_of_fetching_counts_overlapping_transfers_once() -> None:
    _, decode = lanes_of(recorded())
    assert decode.fetching_s("demand") == ms(4)
    assert decode.fetching_s("prefetch") == ms(3)


def test_the_median_pass_of_a_phase() -> None:
    passes = [Lanes("decode", 1, duration_s, [], [], [], []) for duration_s in (3.0, 1.0, 2.0, 9.0)]
    passes.append(Lanes("prefill", 5, 100.0, [], [], [], []))
    assert median_pass(passes).duration_s == 3.0
    assert median_pass(passes[:3]).duration_s == 2.0
    assert median_pass(passes, "prefill").num_tokens == 5
    with pytest.raises(ConfigError, match="no decode pass"):
        median_pass(passes[-1:])


def test_readers_are_in_the_order_of_their_numbers() -> None:
    transfers = [Transfer(link_worker(idx), "demand", 0, 0, 0.0, 1.0) for idx in (10, 2, 1)]
    lanes = Lanes("decode", 1, 1.0, [Work(0, 0.0, 1.0)], [], [], transfers)
    assert lanes.readers == [link_worker(1), link_worker(2), link_worker(10)]


def test_the_median_token_is_found_without_looking_at_the_others() -> None:
    spans = recorded()
    assert median_token(spans) == median_pass(lanes_of(spans))
    tracer = Tracer()
    for number, length_s in enumerate((9.0, 1.0, 3.0, 2.0)):
        tracer.span(PASS, "decode pass", 10.0 * number, 10.0 * number + length_s, phase="decode", tokens=1)
    token = median_token(tracer.spans())
    assert token is not None
    assert token.duration_s == 2.0, "the first may have lost its beginning"
    assert median_token([]) is None
