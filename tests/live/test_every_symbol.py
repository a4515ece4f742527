"""Every symbol of the table of probed functions: as many records as calls, and the same by either way of attaching."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from gputail.events import PER_THREAD
from gputail.probes.table import ALLOC, BY_SYMBOL, CONTEXT, COPY, FUNCTIONS, LOOKUP, NCCL, Kind, is_per_thread
from gputail.probes.tracer import TraceOptions, Tracer
from gputail.sim.build import build
from gputail.sim.caller import Caller

SYMBOLS = [symbol for function in FUNCTIONS for symbol in function.symbols]
# One function for each way of reading arguments, with arguments that tell.
TELLING = {
    "cuLaunchKernel": "$f 3 5 7 2 11 13 0 $s params:1000 0",
    "cuLaunchKernelEx": "config:3,5,7,2,11,13,0,$s $f params:1000 0",
    "cuLaunchCooperativeKernelMultiDevice": "list:3,5,7,2,11,13,0,0,$f 1 0",
    "cuMemcpyHtoDAsync_v2": "$d buf:4099 4099 $s",
    "cuMemcpy2D_v2": "copy2d:1,1,64,3",
    "cuMemcpy3D_v2": "copy3d:1,1,64,3,5",
    "cuMemsetD2D32Async_ptsz": "$d 2048 0 300 7 $s",
    "cuMemAlloc_v2": "&other 65537",
}
SAME = ["call", "tid", "handle", "stream", "size", "block", "result", "flags", "depth"]


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    with Caller(tmp_path_factory.mktemp("sim") / "gpu") as running:
        running.do("load", "libnccl.so.2")
        yield running


@pytest.fixture(scope="module")
def seen(caller: Caller) -> dict[bool, np.ndarray]:
    """The CALL rows of both ways of attaching (multi: True), on the same libraries and at the same time.

    At the same time, since the kernel refuses a second probe at an address where the first has claimed a semaphore.
    """
    libraries = tuple(str(build().libraries / name) for name in ("libcuda.so.1", "libnccl.so.2"))
    tracers = {}
    try:
        for use_multi in (False, True):
            options = TraceOptions(pids=frozenset([caller.pid]), libraries=libraries, off_cpu=False, use_multi=use_multi)
            tracers[use_multi] = Tracer(options)
        for index, symbol in enumerate(SYMBOLS):
            caller.do("call", symbol, times(index), *arguments(symbol))
        caller.start_gpu()
        caller.kernel("_Z5saxpyv")
        caller.do("call", "cuStreamCreate", 1, "&s", 1)
        caller.do("call", "cuMemAlloc_v2", 1, "&d", 1 << 20)
        for symbol, text in TELLING.items():
            caller.do("call", symbol, 23, text)
        rows = {}
        for use_multi, tracer in tracers.items():
            batches = [tracer.poll(), tracer.finish()]
            assert not any(count for batch in batches for count in batch.lost.values())
            rows[use_multi] = np.concatenate([batch.calls for batch in batches])
        return rows
    finally:
        for tracer in tracers.values():
            tracer.close()


def times(index: int) -> int:
    return 1 + index % 7


def arguments(symbol: str) -> list[str]:
    """Nothing is initialized yet, so calls are refused; some look at what their pointers point at before."""
    function = BY_SYMBOL[symbol]
    if function.library == NCCL:
        return ["id:none"] if "CommInitRank" in symbol else []
    looks = function.category in (ALLOC, CONTEXT, COPY, LOOKUP) or function.args.kind == Kind.LAUNCH_CONFIG or "ExecUpdate" in symbol
    return ["buf:512" if looks else "0"] * 12


@pytest.mark.parametrize("use_multi", [True, False])
def test_every_symbol_of_the_table_is_counted_exactly(seen, use_multi):
    made: Counter[tuple[int, bool]] = Counter()
    for index, symbol in enumerate(SYMBOLS):
        made[BY_SYMBOL[symbol].number, is_per_thread(symbol)] += times(index)
    rows = seen[use_multi][: made.total()]
    counted = Counter((int(row["call"]), bool(row["flags"] & PER_THREAD)) for row in rows)
    assert counted == made
    assert len(SYMBOLS) == len(BY_SYMBOL)


def test_both_ways_of_attaching_read_the_same_arguments(seen):
    multi, single = seen[True], seen[False]
    assert len(multi) == len(single)
    for field in SAME:
        assert (multi[field] == single[field]).all(), field


@pytest.mark.parametrize(
    "symbol, size, block",
    [("cuLaunchKernel", 105, 286), ("cuLaunchKernelEx", 105, 286), ("cuMemcpyHtoDAsync_v2", 4099, 0), ("cuMemcpy3D_v2", 960, 0)],
)
def test_the_single_probes_read_what_was_passed(seen, caller, symbol, size, block):
    rows = seen[False][-23 * len(TELLING) :]
    rows = rows[rows["call"] == BY_SYMBOL[symbol].number]
    assert [(row["size"], row["block"]) for row in rows] == [(size, block)] * 23
    if "3D" not in symbol:
        assert set(rows["stream"]) == {caller.get("s")}
