"""What is lost is counted exactly, and marks what it touches: real probes, rings that overflow."""

from __future__ import annotations

import os

import numpy as np
import pytest

from gputail.events import AFTER_GAP
from gputail.pipeline import Pipeline
from gputail.probes.table import BY_SYMBOL
from gputail.probes.tracer import TraceOptions, Tracer
from gputail.sim.build import build
from gputail.sim.caller import Caller

CALLS = 20_011


@pytest.fixture
def caller(tmp_path):
    with Caller(tmp_path / "gpu") as running:
        running.start_gpu()
        # One ring: moved to another CPU amid its calls, it would find room there, and so have two gaps.
        os.sched_setaffinity(running.pid, {min(os.sched_getaffinity(0))})
        yield running


@pytest.fixture
def small_rings(caller):
    """Traces the caller with rings of one page, which a few dozen records fill."""
    library = str(build().libraries / "libcuda.so.1")
    tracer = Tracer(TraceOptions(pids=frozenset([caller.pid]), libraries=(library,), off_cpu=False, ring_bytes=4096))
    yield tracer
    tracer.close()


def test_every_call_is_received_or_counted_as_lost(caller, small_rings):
    caller.do("call", "cuEventQuery", CALLS, 0)
    first = small_rings.poll()
    caller.do("call", "cuEventQuery", 23, 0)
    last = small_rings.finish()
    calls = np.concatenate([first.calls, last.calls])
    calls = calls[calls["call"] == BY_SYMBOL["cuEventQuery"].number]
    lost = sum(batch.lost.get("ring_full", 0) for batch in (first, last))
    assert lost > 0
    assert len(calls) + lost == CALLS + 23
    # The record that follows the lost ones says so, and no other does.
    after_gap = np.flatnonzero(calls["flags"] & AFTER_GAP)
    assert after_gap.tolist() == [len(calls) - 23]


def test_a_request_that_lost_calls_is_incomplete_and_the_next_is_whole(caller, small_rings):
    caller.kernel("_Z5saxpyv")
    pipeline = Pipeline()
    for number in range(12):
        caller.do("call", "cuLaunchKernel", CALLS if number == 5 else 3, *"$f 1 1 1 1 1 1 0 0 params:1000 0".split())
        caller.do("call", "cuStreamSynchronize", 1, 0)
        pipeline.feed(small_rings.poll())
    pipeline.feed(small_rings.finish())
    pipeline.finish()
    records = [record for record in pipeline.take_records() if record.pid == caller.pid and record.launches]
    assert len(records) >= 11
    longest = max(records, key=lambda record: record.launches)
    assert 3 < longest.launches < CALLS
    assert [record for record in records if record.incomplete] == [longest]
    assert not longest.outlier


def test_calls_that_run_while_probes_go_on_and_come_off_are_no_loss(caller):
    caller.send("call", "cuEventQuery", 10**12, 0)
    tracer = Tracer(TraceOptions(pids=frozenset([caller.pid]), libraries=(str(build().libraries / "libcuda.so.1"),)))
    try:
        batches = [tracer.poll(), tracer.poll(), tracer.finish()]
    finally:
        tracer.close()
    assert caller.process.poll() is None
    caller.process.kill()
    assert sum(len(batch.calls) for batch in batches) > 0
    # The one call that was open when the probes went on may be told as an orphan. (The rings may overflow; that is another thing.)
    assert sum(count for batch in batches for stage, count in batch.lost.items() if "orphaned" in stage) <= 1
