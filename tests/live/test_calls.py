"""Exactly the calls that were made, with exactly their arguments: real probes on the simulated driver.

Field cases 10 to 12, 14, 16, 17 and 47.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from gputail.events import CALL, NAME_KERNEL, PER_THREAD
from gputail.probes.table import BY_NUMBER, BY_SYMBOL, OFF_CPU_CALL, is_per_thread
from gputail.probes.tracer import TraceOptions, Tracer
from gputail.sim.build import build
from gputail.sim.caller import Caller
from gputail.tiers import FULL, LAUNCH

PER_THREAD_STREAM = 2


class Trace:
    """A tracer on the simulated libraries, and what it has seen so far."""

    def __init__(self, *pids: int) -> None:
        folder = build().libraries
        libraries = (str(folder / "libcuda.so.1"), str(folder / "libnccl.so.2"))
        self.tracer = Tracer(TraceOptions(pids=frozenset(pids), libraries=libraries, off_cpu=False))
        self._batches: list[np.ndarray] = []
        self._lost: list[dict[str, int]] = []
        self._over = False

    def calls(self, symbol: str = "", *pids: int) -> np.ndarray:
        """The CALL rows of a symbol's function, of these processes or all; ends the trace."""
        if not self._over:
            batches = [self.tracer.poll(), self.tracer.finish()]
            self._batches = [batch.calls for batch in batches]
            self._lost = [dict(batch.lost) for batch in batches]
            self.names = np.concatenate([batch.names for batch in batches])
            self._over = True
        rows = np.concatenate([np.empty(0, CALL), *self._batches])
        rows = rows[rows["call"] != OFF_CPU_CALL]
        if symbol:
            rows = rows[rows["call"] == BY_SYMBOL[symbol].number]
        return rows[np.isin(rows["tgid"], pids)] if pids else rows

    def lost(self, stage: str) -> int:
        return sum(lost.get(stage, 0) for lost in self._lost)


@pytest.fixture
def trace() -> Iterator[Trace]:
    running = Trace()
    yield running
    running.tracer.close()


@pytest.fixture
def trace_only() -> Iterator[Callable[[Caller], Trace]]:
    """Traces one caller alone: what is counted by stage is not told apart by process."""
    started: list[Trace] = []

    def start(caller: Caller) -> Trace:
        started.append(Trace(caller.pid))
        return started[-1]

    yield start
    for one in started:
        one.tracer.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Caller]]:
    """Starts callers on one GPU, with a context unless told not to."""
    started: list[Caller] = []

    def start(gpu: bool = True, **options: bool) -> Caller:
        started.append(Caller(tmp_path / "gpu", **options))
        if gpu:
            started[-1].start_gpu()
        return started[-1]

    yield start
    for one in started:
        one.close()


LAUNCHES = {
    "cuLaunchKernel": "$f 3 5 7 2 11 13 0 $s params:1000 0",
    "cuLaunchCooperativeKernel": "$f 3 5 7 2 11 13 0 $s params:1000",
    "cuLaunchKernelEx": "config:3,5,7,2,11,13,0,$s $f params:1000 0",
}


@pytest.mark.parametrize("suffix", ["", "_ptsz"])
@pytest.mark.parametrize("name", LAUNCHES)
@pytest.mark.parametrize("own", [True, False])
def test_a_launch_is_seen_with_its_grid_block_stream_and_kernel(trace, start, name, suffix, own):
    caller = start()
    function = caller.kernel("_Z5saxpyv")
    if own:
        caller.do("call cuStreamCreate 1 &s 1")
    stream = caller.get("s") if own else PER_THREAD_STREAM if suffix else 0
    caller.do(f"call {name}{suffix} 23 {LAUNCHES[name]}")
    rows = trace.calls(name, caller.pid)
    assert len(rows) == 23
    assert set(rows["handle"]) == {function}
    assert set(rows["size"]) == {3 * 5 * 7} and set(rows["block"]) == {2 * 11 * 13}
    assert set(rows["stream"]) == {stream}
    assert set(rows["flags"] & PER_THREAD) == {PER_THREAD if suffix else 0}
    assert set(rows["result"]) == {0}


def test_launches_of_a_list_and_of_cuda_3_are_seen_with_what_they_tell(trace, start):
    caller = start()
    function = caller.kernel("_Z5saxpyv")
    caller.do("call cuLaunchCooperativeKernelMultiDevice 3 list:3,5,7,2,11,13,0,0,$f 1 0")
    caller.do("call cuLaunchGrid 5 $f 17 19")
    caller.do("call cuLaunchGridAsync 7 $f 17 19 0")
    listed = trace.calls("cuLaunchCooperativeKernelMultiDevice", caller.pid)
    assert [(row["handle"], row["size"], row["block"]) for row in listed] == [(function, 105, 286)] * 3
    for name, count in (("cuLaunchGrid", 5), ("cuLaunchGridAsync", 7)):
        rows = trace.calls(name, caller.pid)
        assert [(row["handle"], row["size"]) for row in rows] == [(function, 17 * 19)] * count


COPIES = {  # symbol -> arguments, bytes
    "cuMemcpyHtoD": ("0x1000 $b 4099", 4099),
    "cuMemcpyHtoD_v2": ("$d $b 4099", 4099),
    "cuMemcpyHtoD_v2_ptds": ("$d $b 4099", 4099),
    "cuMemcpyDtoH_v2": ("$b $d 4099", 4099),
    "cuMemcpyDtoD_v2_ptds": ("$d $d 4099", 4099),
    "cuMemcpy": ("$d $b 4099", 4099),
    "cuMemcpyPeer": ("$d $context $d $context 4099", 4099),
    "cuMemcpyHtoDAsync_v2": ("$d $b 4099 $s", 4099),
    "cuMemcpyHtoDAsync_v2_ptsz": ("$d $b 4099 $s", 4099),
    "cuMemcpyDtoHAsync_v2": ("$b $d 4099 $s", 4099),
    "cuMemcpyDtoDAsync_v2": ("$d $d 4099 $s", 4099),
    "cuMemcpyAsync_ptsz": ("$d $b 4099 $s", 4099),
    "cuMemcpyPeerAsync": ("$d $context $d $context 4099 $s", 4099),
    "cuMemcpy2D": ("copy2d1:1,2,300,7", 2100),
    "cuMemcpy2D_v2": ("copy2d:1,2,300,7", 2100),
    "cuMemcpy2DUnaligned_v2_ptds": ("copy2d:1,2,300,7", 2100),
    "cuMemcpy2DAsync": ("copy2d1:1,2,300,7 $s", 2100),
    "cuMemcpy2DAsync_v2_ptsz": ("copy2d:1,2,300,7 $s", 2100),
    "cuMemcpy3D": ("copy3d1:1,2,300,7,3", 6300),
    "cuMemcpy3D_v2": ("copy3d:1,2,300,7,3", 6300),
    "cuMemcpy3DAsync": ("copy3d1:1,2,300,7,3 $s", 6300),
    "cuMemcpy3DAsync_v2": ("copy3d:1,2,300,7,3 $s", 6300),
    "cuMemcpy3DPeerAsync": ("copy3d:2,2,300,7,3 $s", 6300),
    "cuMemsetD8_v2": ("$d 0 4099", 4099),
    "cuMemsetD16_v2": ("$d 0 4099", 2 * 4099),
    "cuMemsetD32_v2_ptds": ("$d 0 4099", 4 * 4099),
    "cuMemsetD8Async": ("$d 0 4099 $s", 4099),
    "cuMemsetD32Async_ptsz": ("$d 0 4099 $s", 4 * 4099),
    "cuMemsetD2D8_v2": ("$d 512 0 300 7", 2100),
    "cuMemsetD2D16Async": ("$d 1024 0 300 7 $s", 4200),
    "cuMemsetD2D32Async_ptsz": ("$d 2048 0 300 7 $s", 8400),
    "cuMemPrefetchAsync": ("$d 4099 0 $s", 4099),
    "cuMemPrefetchAsync_v2_ptsz": ("$d 4099 1 0 $s", 4099),
}


def test_every_kind_of_copy_and_memset_is_seen_with_its_bytes_and_stream(trace, start):
    caller = start()
    caller.do("call cuStreamCreate 1 &s 1")
    caller.do("call cuMemAllocManaged 1 &d 1048576 1")
    caller.do("call cuMemHostAlloc 1 &b 1048576 0")
    stream = caller.get("s")
    for symbol, (arguments, _) in COPIES.items():
        caller.do(f"call {symbol} 23 {arguments}")
    expected: dict[int, list[tuple[int, int]]] = {}
    for symbol, (arguments, size) in COPIES.items():
        default = PER_THREAD_STREAM if is_per_thread(symbol) else 0
        expected.setdefault(BY_SYMBOL[symbol].number, []).extend([(size, stream if "$s" in arguments else default)] * 23)
    for number, wanted in expected.items():
        rows = trace.calls()
        rows = rows[(rows["call"] == number) & (rows["tgid"] == caller.pid)]
        assert list(zip(rows["size"].tolist(), rows["stream"].tolist(), strict=True)) == wanted, BY_NUMBER[number].name


def test_kernels_loaded_before_tracing_are_named_from_their_handles(start):
    caller = start()
    early = caller.kernel("_Z5saxpyv", "early")
    trace = Trace(caller.pid)
    late = caller.kernel("_Z4gemmv", "late")
    for function in ("early", "late"):
        caller.do(f"call cuLaunchKernel 23 ${function} 1 1 1 1 1 1 0 0 params:1000 0")
    trace.calls()
    named = [(int(row["handle"]), bytes(row["text"])[: row["length"]]) for row in trace.names if row["kind"] == NAME_KERNEL]
    assert sorted(named) == sorted([(early, b"_Z5saxpyv"), (late, b"_Z4gemmv")])
    trace.tracer.close()


def test_threads_children_and_executed_programs_are_seen_as_themselves(trace, start):
    caller = start()
    threads = caller.do("threads 3 cuEventQuery 23 0")["by"]
    children = caller.do("fork 3 cuEventQuery 23 0")["by"]
    executed = caller.do("exec cuEventQuery 23 0")["by"]
    rows = trace.calls("cuEventQuery")
    for by in (*threads, *children, *executed):
        own = rows[rows["tid"] == by["tid"]]
        assert len(own) == 23 and set(own["tgid"]) == {by["pid"]}
    assert len(rows) == 23 * 7


def test_a_library_opened_after_the_start_is_seen_from_its_first_call_on(trace, start):
    caller = start(gpu=False, load=False)
    caller.do("load")
    caller.do("call cuEventQuery 23 0")
    assert len(trace.calls("cuEventQuery", caller.pid)) == 23


def test_a_call_inside_another_has_its_own_record_and_time(trace, start):
    caller = start()
    caller.do("nest 5 1000000 cuStreamSynchronize 0 / cuEventQuery 0")
    outer, inner = trace.calls("cuStreamSynchronize", caller.pid), trace.calls("cuEventQuery", caller.pid)
    assert len(outer) == len(inner) == 5
    assert set(outer["depth"]) == {0} and set(inner["depth"]) == {1}
    for around, inside in zip(outer, inner, strict=True):
        assert around["start_ns"] + 1_000_000 <= inside["start_ns"]
        assert inside["start_ns"] + inside["duration_ns"] <= around["start_ns"] + around["duration_ns"]


def test_a_call_that_does_not_return_has_no_record_until_it_does(trace, start):
    caller = start()
    held = caller.do("hold cuStreamSynchronize 1 0")
    caller.do("call cuEventQuery 23 0")
    caller.do("release")
    waits = trace.calls("cuStreamSynchronize", caller.pid)
    queries = trace.calls("cuEventQuery", caller.pid)
    assert len(waits) == 1 and waits["tid"][0] == held["tid"]
    assert len(queries) == 23
    assert waits["start_ns"][0] < queries["start_ns"][0]
    assert waits["start_ns"][0] + waits["duration_ns"][0] > queries["start_ns"][-1] + queries["duration_ns"][-1]


def test_a_call_still_open_at_the_end_has_no_record(trace, start):
    caller = start()
    caller.do("hold cuStreamSynchronize 1 0")
    caller.do("call cuEventQuery 23 0")
    assert len(trace.calls("cuStreamSynchronize", caller.pid)) == 0
    assert len(trace.calls("cuEventQuery", caller.pid)) == 23


def test_calls_left_by_longjmp_are_counted_and_pair_with_nothing(trace_only, start):
    caller = start()
    trace = trace_only(caller)
    caller.do("longjmp cuStreamSynchronize 20000 0")
    caller.do("call cuEventQuery 23 0")
    caller.do("call cuStreamSynchronize 1 0")
    # The last one left looks like a call around those that came deeper in the stack, until the thread ends.
    caller.close()
    waits = trace.calls("cuStreamSynchronize", caller.pid)
    assert len(trace.calls("cuEventQuery", caller.pid)) == 23
    assert len(waits) == 1
    assert trace.lost("entry_orphaned") == 20000


@pytest.mark.parametrize("tier", [LAUNCH, FULL])
def test_a_program_whose_system_calls_are_filtered_lives_and_ends_as_it_would_untraced(start, tier):
    caller = start()
    library = str(build().libraries / "libcuda.so.1")
    tracer = Tracer(TraceOptions(libraries=(library,), off_cpu=False, tier=tier))
    try:
        ended = caller.do("seccomp cuEventQuery 1000 0")
        batches = [tracer.poll(), tracer.finish()]
    finally:
        tracer.close()
    rows = np.concatenate([batch.calls for batch in batches])
    assert (ended["status"], ended["signal"]) == (7, 0)
    assert int(((rows["tgid"] == ended["pid"]) & (rows["call"] == BY_SYMBOL["cuEventQuery"].number)).sum()) == 1000


def test_calls_on_stacks_that_a_thread_switches_between_are_each_counted_once(trace_only, start):
    caller = start()
    trace = trace_only(caller)
    assert caller.do("fibers 7 cuStreamSynchronize 100 0")["made"] == 700
    assert len(trace.calls("cuStreamSynchronize", caller.pid)) == 700
    assert trace.lost("entry_orphaned") == trace.lost("return_orphaned") == 0


def test_threads_that_end_inside_a_call_are_counted(trace_only, start):
    caller = start()
    trace = trace_only(caller)
    caller.do("threadexit 50 cuStreamSynchronize 0")
    assert len(trace.calls("cuStreamSynchronize", caller.pid)) == 0
    assert trace.lost("entry_orphaned") == 50


def test_a_statically_linked_runtime_needs_nothing_special(trace, tmp_path):
    program = build().programs["static_runtime"]
    child = subprocess.Popen(
        [program, "1000", "per-thread"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "GPUTAIL_SIM_GPU": str(tmp_path / "gpu")},
    )  # fmt: skip
    assert child.communicate("\n")[0].splitlines()[-1] == "1000"
    rows = trace.calls("cuLaunchKernel", child.pid)
    assert [(row["size"], row["block"], row["stream"]) for row in rows] == [(7, 64, PER_THREAD_STREAM)] * 1000


def test_a_collective_is_seen_once_with_the_launch_inside_it(trace, start):
    caller = start()
    caller.do("load libnccl.so.2")
    caller.do("call ncclCommInitRank 1 &comm 1 id:only 0")
    caller.do("call ncclAllReduce 23 0 0 1024 7 0 $comm 0")
    collectives = trace.calls("ncclAllReduce", caller.pid)
    launches = trace.calls("cuLaunchKernelEx", caller.pid)
    assert [(row["size"], row["block"], row["handle"]) for row in collectives] == [(1024 * 4, 7, caller.get("comm"))] * 23
    assert len(launches) == 23 and set(launches["depth"]) == {1}
    begun = trace.calls("ncclCommInitRank", caller.pid)
    assert [(row["size"], row["block"], row["handle"]) for row in begun] == [(1, 0, caller.get("comm"))]
