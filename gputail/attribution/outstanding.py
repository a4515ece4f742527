"""What other threads and streams had given the GPU and not yet waited for: who could have held it, and when.

In: rows of threads, in order of their end. Out: for each stream the spans in which it had work outstanding, from the
first launch or copy to the return of the wait that covered it. Where no wait was seen the span is open: it is taken
to last until the given time, but no longer than OPEN_NS after the last work was queued.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gputail.budget import C_COPY, C_DTOH, C_GRAPH, C_HTOD, C_LAUNCH, C_MEMSET, CLASS_OF_CALL, WAIT_OF_CALL
from gputail.probes import table

OPEN_NS = 100_000_000
# Copies that can have kept a link busy for less than this share of a span did not hold up anyone else's copy.
COPY_SHARE = 0.25
# A link's speed for that judgement (bytes a ns): PCIe 5.0 x16 does about 50, an NVLink host link more.
LINK_BYTES_PER_NS = 50.0


@dataclass(frozen=True)
class GpuWork:
    """A span in which one stream had work outstanding (ns); `kernel` is the largest kernel's handle, 0 if none."""

    tgid: int
    tid: int
    stream: int
    start_ns: int
    end_ns: int
    waited: bool
    launches: int
    block_threads: int
    copy_bytes: int
    kernel: int

    def overlap_ns(self, start_ns: int, end_ns: int) -> int:
        return max(min(self.end_ns, end_ns) - max(self.start_ns, start_ns), 0)

    @property
    def is_copy(self) -> bool:
        """Whether copies rather than kernels are what the span is about."""
        busy = self.copy_bytes / LINK_BYTES_PER_NS
        return self.copy_bytes > 0 and (not self.launches or busy >= COPY_SHARE * (self.end_ns - self.start_ns))


class _Span:
    __slots__ = ("tid", "start", "last", "launches", "threads", "bytes", "largest", "kernel")

    def __init__(self, tid: int, start: int) -> None:
        self.tid, self.start, self.last = tid, start, start
        self.launches = self.threads = self.bytes = self.largest = self.kernel = 0


def gpu_work(rows: np.ndarray, until_ns: int) -> list[GpuWork]:
    """The spans that began before `until_ns`."""
    kind = CLASS_OF_CALL[rows["call"]]
    wait = WAIT_OF_CALL[rows["call"]] * (kind != 0)
    works = ((kind >= C_LAUNCH) & (kind <= C_MEMSET)) & (rows["start_ns"] < until_ns)
    keep = works | ((wait == 1) | ((wait == 2) & (rows["result"] == 0)))
    rows, kind, wait, works = rows[keep], kind[keep], wait[keep], works[keep]
    spans: dict[tuple[int, int], _Span] = {}
    done: list[GpuWork] = []

    def close(key: tuple[int, int], end: int, waited: bool) -> None:
        span = spans.pop(key)
        done.append(
            GpuWork(
                key[0], span.tid, key[1], span.start, max(end, span.start), waited, span.launches, span.threads, span.bytes, span.kernel
            )
        )

    columns = (rows["start_ns"], rows["duration_ns"], rows["tgid"], rows["tid"], rows["stream"], rows["size"], rows["block"],
               rows["handle"], rows["call"], kind, wait, works)  # fmt: skip
    for start, duration, tgid, tid, stream, size, block, handle, call, cls, waits, work in zip(*(c.tolist() for c in columns)):
        key = (tgid, stream)
        if work:
            span = spans.get(key)
            if span is not None and start - span.last > OPEN_NS:
                close(key, span.last + OPEN_NS, False)
                span = None
            if span is None:
                span = spans[key] = _Span(tid, start)
            span.last = max(span.last, start + duration if cls in (C_HTOD, C_DTOH, C_COPY) else start)
            if cls in (C_LAUNCH, C_GRAPH):
                span.launches += 1
                threads = size * block
                span.threads += threads
                if threads >= span.largest:
                    span.largest, span.kernel = threads, handle
            elif cls != C_MEMSET:
                span.bytes += size
        if waits:
            end = start + duration
            covers = table.BY_NUMBER[call].waits_for
            if covers == "stream" or covers == "copy" or (not covers and handle == 0):
                if key in spans:
                    close(key, end, True)
            else:
                # A device-wide wait covers the process's streams; an event is taken to cover those of its thread.
                for other in [k for k in spans if k[0] == tgid and (covers == "device" or spans[k].tid == tid)]:
                    if spans[other].start < start:
                        close(other, end, True)
    for key in list(spans):
        close(key, min(spans[key].last + OPEN_NS, max(until_ns, spans[key].last)), False)
    return [work for work in done if work.start_ns < until_ns]


def union_ns(work: list[GpuWork], start_ns: int, end_ns: int) -> int:
    """How long (ns) between two times at least one of the spans was there."""
    total, reached = 0, start_ns
    for span in sorted(work, key=lambda w: w.start_ns):
        low, high = max(span.start_ns, reached), min(span.end_ns, end_ns)
        if high > low:
            total += high - low
            reached = high
    return total
