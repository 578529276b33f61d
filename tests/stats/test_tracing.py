from __future__ import annotations

import json
import logging
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from promoe.errors import ConfigError
from promoe.files import check_writable
from promoe.stats.tracing import (
    COMPUTE,
    LINK_IN_FORWARD,
    PREDICTOR,
    STALL,
    Tracer,
    link_worker,
)


def check_schema(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Assert that `document` is a Chrome trace that Perfetto takes as it is; returns its events.

    Every event has name, ph, pid and tid; times are non-negative microseconds; every lane has a name and a place; in
    a lane, spans nest or follow each other.
    """
    assert set(document) == {"displayTimeUnit", "otherData", "traceEvents"}
    events: list[dict[str, Any]] = document["traceEvents"]
    named = {e["tid"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    sorted_ = {e["tid"] for e in events if e["ph"] == "M" and e["name"] == "thread_sort_index"}
    assert [e["name"] for e in events if e["ph"] == "M"].count("process_name") == 1
    for event in events:
        assert event["ph"] in {"M", "X"}, event
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["tid"] in named & sorted_
            assert isinstance(event["args"], dict)
    for tid in named:
        open_until: list[int] = []
        spans = [e for e in events if e["ph"] == "X" and e["tid"] == tid]
        for span in sorted(spans, key=lambda e: (e["ts"], -e["dur"])):
            start, end = round(span["ts"] * 1e3), round((span["ts"] + span["dur"]) * 1e3)
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1], f"{span} overlaps in its lane"
            open_until.append(end)
    return events


def written(tracer: Tracer, path: Path) -> list[dict[str, Any]]:
    tracer.write(path)
    return check_schema(json.loads(path.read_text(encoding="utf-8")))


def lanes(events: list[dict[str, Any]]) -> list[str]:
    return [e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"]


def test_a_span_keeps_its_name_times_in_us_and_args(tmp_path: Path) -> None:
    tracer = Tracer("tiny model")
    tracer.span(COMPUTE, "layer 0", 100.0, 100.5, layer=0)
    tracer.span(link_worker(0), "demand", 100.25, 100.250001, layer=0, expert=3, nbytes=4096, cause="demand")
    events = written(tracer, tmp_path / "t.json")
    first, second = (e for e in events if e["ph"] == "X")
    assert (first["name"], first["ts"], first["dur"]) == ("layer 0", 0.0, 500_000.0)
    assert (second["ts"], second["dur"]) == (250_000.0, 1.0)
    assert second["args"] == {"layer": 0, "expert": 3, "nbytes": 4096, "cause": "demand"}
    assert events[0]["args"] == {"name": "tiny model"}


def test_lanes_come_in_a_fixed_order(tmp_path: Path) -> None:
    tracer = Tracer()
    for lane in ("something else", LINK_IN_FORWARD, link_worker(10), PREDICTOR, link_worker(2), STALL, COMPUTE):
        tracer.span(lane, "s", 1.0, 2.0)
    events = written(tracer, tmp_path / "t.json")
    assert lanes(events) == [
        "compute",
        "wait (stall)",
        "link worker 2",
        "link worker 10",
        "link worker (in the forward)",
        "predictor",
        "something else",
    ]


def test_spans_may_nest_and_touch_but_what_overlaps_gets_a_row_of_its_own(tmp_path: Path) -> None:
    tracer = Tracer()
    tracer.span(COMPUTE, "visit", 0.0, 10.0)
    tracer.span(COMPUTE, "expert", 1.0, 2.0)
    tracer.span(COMPUTE, "expert", 2.0, 10.0)
    assert lanes(written(tracer, tmp_path / "a.json")) == ["compute"]
    tracer.span(COMPUTE, "another thread", 9.0, 11.0)
    events = written(tracer, tmp_path / "b.json")
    assert lanes(events) == ["compute", "compute (2)"]
    other = next(e for e in events if e["name"] == "another thread")
    assert other["tid"] == 2


def test_neighbours_do_not_overlap_through_rounding(tmp_path: Path) -> None:
    tracer = Tracer()
    edges = [123456.7 + i * 1.23456789e-6 for i in range(500)]
    for start, end in pairwise(edges):
        tracer.span(COMPUTE, "s", start, end)
    assert lanes(written(tracer, tmp_path / "t.json")) == ["compute"]


def test_memory_is_bounded_and_drops_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracer = Tracer(max_spans=3)
    for i in range(10):
        tracer.span(COMPUTE, str(i), float(i), i + 0.5)
    assert (len(tracer), tracer.dropped) == (3, 7)
    with caplog.at_level(logging.WARNING, logger="promoe.stats.tracing"):
        tracer.write(tmp_path / "t.json")
    assert "7 later ones were dropped" in caplog.text
    document = json.loads((tmp_path / "t.json").read_text())
    assert document["otherData"]["events_dropped"] == "7"
    assert [e["name"] for e in document["traceEvents"] if e["ph"] == "X"] == ["0", "1", "2"]


def test_the_latest_events_may_be_kept_instead(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracer = Tracer(max_spans=3, latest=True)
    for i in range(10):
        tracer.span(COMPUTE, str(i), float(i), i + 0.5)
    assert (len(tracer), tracer.dropped) == (3, 7)
    assert [span.name for span in tracer.spans()] == ["7", "8", "9"]
    with caplog.at_level(logging.WARNING, logger="promoe.stats.tracing"):
        tracer.write(tmp_path / "t.json")
    assert "the latest 3 events; 7 earlier ones were dropped" in caplog.text


def test_threads_lose_no_event() -> None:
    tracer = Tracer(max_spans=3_000)

    def work(worker_idx: int) -> None:
        for i in range(1_000):
            tracer.span(link_worker(worker_idx), "chunk", float(i), float(i) + 0.5)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(tracer), tracer.dropped) == (3_000, 1_000)


def test_args_that_are_not_json_become_text(tmp_path: Path) -> None:
    tracer = Tracer()
    tracer.span(COMPUTE, 'quote " and </script>', 0.0, 1.0, where=tmp_path)
    document = json.loads(tracer.write(tmp_path / "t.json").read_text())
    assert next(e for e in document["traceEvents"] if e["ph"] == "X")["args"]["where"] == str(tmp_path)


def test_an_empty_timeline_is_a_valid_file(tmp_path: Path) -> None:
    assert [e["ph"] for e in written(Tracer(), tmp_path / "t.json")] == ["M"]


def test_tracing_may_go_on_after_a_write(tmp_path: Path) -> None:
    tracer = Tracer()
    tracer.span(COMPUTE, "a", 0.0, 1.0)
    tracer.write(tmp_path / "t.json")
    tracer.span(COMPUTE, "b", 1.0, 2.0)
    assert [e["name"] for e in written(tracer, tmp_path / "t.json") if e["ph"] == "X"] == ["a", "b"]


def test_a_span_that_ends_before_it_starts_is_our_bug() -> None:
    with pytest.raises(AssertionError, match=r"ends 1\.0"):
        Tracer().span(COMPUTE, "s", 2.0, 1.0)


def test_an_unwritable_path_is_known_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        check_writable(tmp_path / "missing" / "t.json")
    with pytest.raises(ConfigError, match="does not exist"):
        Tracer().write(tmp_path / "missing" / "t.json")
