"""The trace for Perfetto is whole JSON, has every call and request once at its time, and its slices nest."""

from __future__ import annotations

import json
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gputail import cli, events, traces
from gputail.names import Names
from gputail.pipeline import replay_batches
from gputail.probes import table
from gputail.source import Source
from gputail.surfaces.report.perfetto import OFF_CPU, REQUESTS, TraceWriter
from gputail.surfaces.report.stories import story
from tests.unit.reports import CULPRIT, DATA, HOSTILE, HOSTILE_BYTES, TRACES, VICTIM, record, serving_beside_a_burst
from tests.unit.streams import MS, START_NS, Actor, stream


def trace_of(path: Path, out: Path, *options: str, status: int = 0) -> dict[str, Any]:
    """The trace that the verb writes, its times as exact decimals."""
    assert cli.main(["report", str(path), "--perfetto", str(out), *options]) == status
    read: dict[str, Any] = json.loads(out.read_text(encoding="ascii"), parse_float=Decimal)
    return read


def slices(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def ns(event: dict[str, Any]) -> tuple[int, int]:
    return int(event["ts"] * 1000), int(event["dur"] * 1000)


@pytest.mark.parametrize("name", TRACES)
def test_every_call_and_request_is_there_once_at_its_time(name: str, tmp_path: Path) -> None:
    path = DATA / f"{name}.npz"
    found = slices(trace_of(path, tmp_path / "trace.json"))
    calls = traces.load(path).calls
    is_off = calls["call"] == table.OFF_CPU_CALL
    expected = sorted(
        (int(c["tgid"]), int(c["tid"]) + OFF_CPU * bool(off), int(c["start_ns"]), int(c["duration_ns"]))
        for c, off in zip(calls, is_off, strict=True)
    )
    assert sorted((e["pid"], e["tid"], *ns(e)) for e in found if e["cat"] != "request") == expected
    records = list(replay_batches(Source(str(path))))
    requests = [e for e in found if e["cat"] == "request"]
    assert len(requests) == len(records)
    for event, own in zip(requests, records, strict=True):
        assert (event["pid"], event["tid"], *ns(event)) == (own.pid, own.tid + REQUESTS, own.start_ns, own.duration_ns)
        told = event["args"].pop("story", None)
        assert event["args"] == json.loads(json.dumps(own.as_dict()), parse_float=Decimal)
        assert event["name"] == (f"slow: {own.cause}" if own.outlier else "request")
        assert told == (story(own) if own.outlier else None)


@pytest.mark.parametrize("name", TRACES)
def test_slices_of_a_track_nest_or_follow_each_other(name: str, tmp_path: Path) -> None:
    tracks = defaultdict(list)
    for event in slices(trace_of(DATA / f"{name}.npz", tmp_path / "trace.json")):
        start, duration = ns(event)
        tracks[event["pid"], event["tid"]].append((start, start + duration))
    assert len(tracks) >= 3
    for spans in tracks.values():
        around: list[int] = []
        # A viewer takes events in order of their start, and of two that start together the first in the file.
        for start, end in sorted(spans, key=lambda span: span[0]):
            while around and around[-1] <= start:
                around.pop()
            assert not around or end <= around[-1]
            around.append(end)


def test_of_two_calls_that_begin_together_the_outer_comes_first(tmp_path: Path) -> None:
    calls = stream(Actor().row(1, START_NS, 10, depth=1).row(1, START_NS, 50))
    with TraceWriter(str(tmp_path / "trace"), Names()) as writer:
        writer.calls(events.Batch(calls))
    found = slices(json.loads((tmp_path / "trace").read_text()))
    assert [event["dur"] for event in found] == [0.05, 0.01]


def test_every_track_has_a_name(tmp_path: Path) -> None:
    trace = trace_of(record(tmp_path / "slow.gpt", serving_beside_a_burst()), tmp_path / "trace.json")
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in slices(trace)} == set(named)
    assert named[VICTIM, VICTIM + REQUESTS] == f"python3 {VICTIM} requests"
    processes = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert processes == {VICTIM: "python3 serve.py", CULPRIT: "python3 serve.py"}
    launch = next(e for e in slices(trace) if e["pid"] == CULPRIT and e["name"] == "cuLaunchKernel")
    assert launch["args"] == {"stream": "0x0", "grid": 4096, "block": 256, "kernel": "gemm"}


def test_a_call_whose_return_was_not_probed_is_an_instant(tmp_path: Path) -> None:
    calls = stream(Actor().call("cuLaunchKernel", 0, flags=events.ENTRY_ONLY))
    with TraceWriter(str(tmp_path / "trace"), Names()) as writer:
        writer.calls(events.Batch(calls))
    (first, *rest) = json.loads((tmp_path / "trace").read_text())["traceEvents"]
    assert (first["ph"], first["ts"], "dur" in first) == ("i", START_NS / 1000, False)
    assert {event["ph"] for event in rest} == {"M"}


def test_what_was_lost_and_what_changed_for_good_is_marked(tmp_path: Path) -> None:
    victim = Actor(tgid=VICTIM)
    for number in range(1000):
        victim.serve(wait_ns=2 * MS if number < 500 else 8 * MS)
    trace = trace_of(record(tmp_path / "shift.gpt", (victim,), lost=7), tmp_path / "trace.json")
    marks = [event for event in trace["traceEvents"] if event["ph"] == "i"]
    assert [(mark["name"], mark["cat"]) for mark in marks] == [("lost 7", "lost"), ("regime change", "regime_change")]
    assert marks[1]["args"]["after_ns"] - marks[1]["args"]["before_ns"] == pytest.approx(6 * MS, rel=0.05)
    assert trace["otherData"]["recording"]["lost"] == {"ring_full": 7}


@pytest.mark.parametrize("cut", [60, 2000, 5000])
def test_the_trace_of_a_cut_off_recording_is_whole(cut: int, tmp_path: Path) -> None:
    path = record(tmp_path / "slow.gpt", serving_beside_a_burst())
    whole = len(slices(trace_of(path, tmp_path / "trace.json")))
    path.write_bytes(path.read_bytes()[:-cut])
    trace = trace_of(path, tmp_path / "trace.json", status=1)
    assert 0 < len(slices(trace)) <= whole
    assert "cut off" in trace["otherData"]["recording"]["damage"]


def test_an_interrupted_trace_is_whole(tmp_path: Path) -> None:
    calls = stream(*serving_beside_a_burst(5, ()))
    with pytest.raises(KeyboardInterrupt), TraceWriter(str(tmp_path / "trace"), Names()) as writer:
        writer.calls(events.Batch(calls))
        raise KeyboardInterrupt
    assert len(slices(json.loads((tmp_path / "trace").read_text()))) == len(calls)


def test_only_requests_asked_for_are_in_the_trace(tmp_path: Path) -> None:
    path = record(tmp_path / "slow.gpt", serving_beside_a_burst())
    found = slices(trace_of(path, tmp_path / "trace.json", "--workload", f"/{CULPRIT}/"))
    assert {event["pid"] for event in found if event["cat"] == "request"} == {CULPRIT}
    assert {event["pid"] for event in found if event["cat"] == "launch"} == {VICTIM, CULPRIT}


@pytest.mark.parametrize("name", [HOSTILE, '"}]},{"', "\udcff\ud800", "\x00\x07"])
def test_names_of_other_processes_are_strings_and_nothing_else(name: str, tmp_path: Path) -> None:
    path = record(tmp_path / "slow.gpt", serving_beside_a_burst(), name=name, kernel=HOSTILE_BYTES)
    trace = trace_of(path, tmp_path / "trace.json")
    assert set(trace) == {"displayTimeUnit", "traceEvents", "otherData"}
    assert {key for event in trace["traceEvents"] for key in event} == {"ph", "pid", "tid", "ts", "dur", "name", "cat", "args"}
    strings = [value for event in trace["traceEvents"] for value in event["args"].values() if isinstance(value, str)]
    assert all(value.isprintable() for value in strings)


def test_rows_of_functions_that_are_not_known_are_left_out(tmp_path: Path) -> None:
    calls = np.zeros(2, events.CALL)
    calls["call"] = 9999
    with TraceWriter(str(tmp_path / "trace"), Names()) as writer:
        writer.calls(events.Batch(calls))
    assert json.loads((tmp_path / "trace").read_text())["traceEvents"] == []
