"""What other threads and streams had given the GPU and not yet waited for: who could have held it, and when.

In: rows of threads, in any order. Out: for each stream the spans in which it had work outstanding, from the first
launch or copy to the return of the wait that covered it. Where no wait was seen the span is open: it is taken to last
until OPEN_NS after the last work was queued. A blocking wait can tell of outstanding work that was queued too long ago
to be among the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gputail import events
from gputail.budget import BLOCKS, C_COPY, C_GRAPH, C_HTOD, C_LAUNCH, C_MEMSET, C_SYNC, CLASS_OF_CALL, WAIT_OF_CALL
from gputail.probes import table
from gputail.rows import take
from gputail.streams import PER_THREAD_STREAM

OPEN_NS = 200_000_000
# A wait that took less has found the work done.
BLOCKED_NS = 100_000
# Copies that can have kept a link busy for less than this share of a span did not hold up anyone else's copy.
COPY_SHARE = 0.25
# A link's speed for that judgement (bytes a ns): PCIe 5.0 x16 does about 50, an NVLink host link more.
LINK_BYTES_PER_NS = 50.0
MAX_STREAMS = 256

_COVERS = np.zeros(65536, np.uint8)
_STREAM, _THREAD, _DEVICE = 1, 2, 3
for _function in table.FUNCTIONS:
    _COVERS[_function.number] = {"stream": _STREAM, "copy": _STREAM, "event": _THREAD, "device": _DEVICE}.get(_function.waits_for, 0)
    if _function.category == table.QUERY:
        _COVERS[_function.number] = _STREAM if _function.args.stream else _THREAD
_MIX = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64)
_OPEN_END = np.iinfo(np.int64).max


@dataclass(frozen=True)
class GpuWork:
    """A span in which one stream had work outstanding (ns); `kernel` is its largest kernel's handle, 0 if not known.

    proven: somebody was seen to wait for its end. Otherwise the work may have been done long before the span's end.
    """

    tgid: int
    tid: int
    stream: int
    start_ns: int
    end_ns: int
    launches: int
    block_threads: int
    copy_bytes: int
    kernel: int
    proven: bool

    def overlap_ns(self, start_ns: int, end_ns: int) -> int:
        return max(min(self.end_ns, end_ns) - max(self.start_ns, start_ns), 0)

    @property
    def is_copy(self) -> bool:
        """Whether copies rather than kernels are what the span is about."""
        busy = self.copy_bytes / LINK_BYTES_PER_NS
        return self.copy_bytes > 0 and (not self.launches or busy >= COPY_SHARE * (self.end_ns - self.start_ns))


def gpu_work(rows: np.ndarray, start_ns: int, end_ns: int, waits_alone: bool = True) -> list[GpuWork]:
    """The spans that overlap [start_ns, end_ns).

    waits_alone: a blocking wait is a span of its own where nothing that it waits for is among the rows.
    """
    kind = CLASS_OF_CALL[rows["call"]]
    covers = _COVERS[rows["call"]]
    is_work = (kind >= C_LAUNCH) & (kind <= C_MEMSET) & (rows["start_ns"] < end_ns)
    is_wait = (covers > 0) & ((WAIT_OF_CALL[rows["call"]] == BLOCKS) | (rows["result"] == 0))
    waits, covers = take(rows, is_wait), covers[is_wait]
    blocked = waits[(CLASS_OF_CALL[waits["call"]] == C_SYNC) & (waits["duration_ns"] >= BLOCKED_NS)]
    work, kind = take(rows, is_work), kind[is_work]
    spans: list[GpuWork] = []
    if len(work):
        # A mix of the three is as good a key: two streams that collide are taken for one, once in 2^64.
        owner = np.where(work["stream"] == PER_THREAD_STREAM, work["tid"], 0)
        key = work["stream"] * _MIX[0] + work["tgid"] * _MIX[1] + owner * _MIX[2]
        streams, of = np.unique(key, return_inverse=True)
        for number in range(min(len(streams), MAX_STREAMS)):
            mine = of == number
            spans += _spans_of_stream(take(work, mine), kind[mine], waits, covers)
    spans = [span for span in spans if span.overlap_ns(start_ns, end_ns) > 0]
    for wait in blocked if waits_alone else ():
        begin = int(wait["start_ns"])
        whole = GpuWork(int(wait["tgid"]), int(wait["tid"]), int(wait["stream"]), begin, begin + int(wait["duration_ns"]), 1, 0, 0, 0, True)
        if whole.overlap_ns(start_ns, end_ns) and not any(s.tgid == whole.tgid and s.overlap_ns(begin, whole.end_ns) for s in spans):
            spans.append(whole)
    return spans


def _spans_of_stream(work: np.ndarray, kind: np.ndarray, waits: np.ndarray, covers: np.ndarray) -> list[GpuWork]:
    order = np.argsort(work["start_ns"], kind="stable")
    work, kind = take(work, order), kind[order]
    tgid, stream = int(work["tgid"][0]), int(work["stream"][0])
    per_thread = stream == PER_THREAD_STREAM
    # A device-wide wait covers every stream of its process; an event is taken to cover the streams its thread works on.
    covering = (waits["tgid"] == tgid) & (
        (covers == _DEVICE)
        | ((covers == _STREAM) & (waits["stream"] == stream) & ((waits["tid"] == work["tid"][0]) | (not per_thread)))
        | ((covers == _THREAD) & np.isin(waits["tid"], np.unique(work["tid"])))
    )
    waits = take(waits, covering)
    waits = take(waits, np.argsort(waits["start_ns"], kind="stable"))
    ends = events.end_ns(waits).astype(np.int64)
    returns = np.append(np.minimum.accumulate(ends[::-1])[::-1], _OPEN_END)
    blocked = set(ends[waits["duration_ns"] >= BLOCKED_NS].tolist())
    begin = work["start_ns"].astype(np.int64)
    done = returns[np.searchsorted(waits["start_ns"].astype(np.int64), begin)]
    copies = (kind >= C_HTOD) & (kind <= C_COPY)
    queued = np.where(copies, begin + work["duration_ns"].astype(np.int64), begin)
    is_new = np.ones(len(work), bool)
    is_new[1:] = (done[1:] != done[:-1]) | ((done[1:] == _OPEN_END) & (begin[1:] - queued[:-1] > OPEN_NS))
    firsts = np.flatnonzero(is_new)
    threads = np.where(kind == C_LAUNCH, work["size"].astype(np.float64) * work["block"], 0.0)
    sums = [np.add.reduceat(column, firsts).tolist() for column in (
        ((kind == C_LAUNCH) | (kind == C_GRAPH)).astype(np.int64), threads, np.where(copies, work["size"], 0).astype(np.float64),
    )]  # fmt: skip
    last_queued = np.maximum.reduceat(queued, firsts).tolist()
    spans = []
    stops = np.append(firsts[1:], len(work)).tolist()
    for number, (first, stop) in enumerate(zip(firsts.tolist(), stops, strict=True)):
        largest = first + int(np.argmax(threads[first:stop]))
        end = int(done[first]) if done[first] != _OPEN_END else last_queued[number] + OPEN_NS
        spans.append(
            GpuWork(
                tgid,
                int(work["tid"][first]),
                stream,
                int(begin[first]),
                end,
                sums[0][number],
                int(sums[1][number]),
                int(sums[2][number]),
                int(work["handle"][largest]) if sums[0][number] else 0,
                end in blocked,
            )  # fmt: skip
        )
    return spans


def union_ns(work: list[GpuWork], start_ns: int, end_ns: int) -> int:
    """How long (ns) between two times at least one of the spans was there."""
    total, reached = 0, start_ns
    for span in sorted(work, key=lambda w: w.start_ns):
        low, high = max(span.start_ns, reached), min(span.end_ns, end_ns)
        if high > low:
            total += high - low
            reached = high
    return total
