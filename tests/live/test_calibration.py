"""What a traced call costs is measured at start, on a function of our own, and leaves nothing behind."""

from __future__ import annotations

import os
import time

import pytest

from gputail.probes.governor import TICK_S
from gputail.probes.tracer import TraceOptions, Tracer
from gputail.sim.build import build
from gputail.sim.caller import Caller


@pytest.mark.parametrize("pids", [frozenset(), frozenset([1])])
def test_the_cost_of_a_call_is_known_from_the_start_and_our_own_calls_are_nobodys(pids):
    tracer = Tracer(TraceOptions(pids=pids))
    try:
        assert (tracer.health().call_cost_ns or 0) > 0
        batches = [tracer.poll(), tracer.poll(), tracer.finish()]
        assert not any(os.getpid() in batch.calls["tgid"] for batch in batches)
        assert not any(count for batch in batches for count in batch.lost.values())
    finally:
        tracer.close()


def test_the_share_that_tracing_takes_of_a_programs_time_is_estimated(tmp_path):
    with Caller(tmp_path / "gpu") as caller:
        caller.start_gpu()
        tracer = Tracer(TraceOptions(pids=frozenset([caller.pid]), libraries=(str(build().libraries / "libcuda.so.1"),)))
        try:
            caller.send("call", "cuEventQuery", 10**12, 0)
            deadline = time.monotonic() + 10 * TICK_S
            while tracer.health().overhead_ratio is None and time.monotonic() < deadline:
                tracer.poll()
            # It does nothing but traced calls: the probes take most of its time, and never more than all of it and a half.
            assert 0.3 < (tracer.health().overhead_ratio or 0) < 1.5
        finally:
            caller.process.kill()
            tracer.close()


def test_children_of_this_process_are_traced_where_it_was_asked_for(tmp_path):
    library = str(build().libraries / "libcuda.so.1")
    tracer = Tracer(TraceOptions(pids=frozenset([os.getpid()]), libraries=(library,), off_cpu=False))
    try:
        with Caller(tmp_path / "gpu") as caller:
            caller.do("call", "cuEventQuery", 23, 0)
            batches = [tracer.poll(), tracer.finish()]
        assert sum(int((batch.calls["tgid"] == caller.pid).sum()) for batch in batches) == 23
    finally:
        tracer.close()
