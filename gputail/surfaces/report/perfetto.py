"""Requests, calls and verdicts as Chrome trace-event JSON, which ui.perfetto.dev and chrome://tracing open.

In go batches and records as they come, out goes a file that is written as it grows and is whole JSON whenever it is closed, however
early the recording ended. Each thread has three tracks, on each of which slices nest or follow each other: its requests, its calls,
its time off the CPU. Times are CLOCK_MONOTONIC in µs, as the format wants, with the ns behind the point.
(Format: "Trace Event Format", Google, 2016.)
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from types import TracebackType

import numpy as np

from gputail import __version__, events
from gputail.baseline import RegimeChange
from gputail.errors import GputailError
from gputail.names import Names
from gputail.probes import table
from gputail.surfaces.report.stories import story
from gputail.surfaces.terminal import clean
from gputail.tail import RequestRecord

# Linux has no thread ids from here on (PID_MAX_LIMIT is 2^22): what is added to a thread's own makes those of its other tracks.
REQUESTS, OFF_CPU = 1 << 23, 1 << 24
MAX_TRACKS = 1 << 16  # threads that are given names
MAX_NAME = 200

_WHAT_SIZE_IS = {
    table.LAUNCH: "grid", table.COPY: "bytes", table.MEMSET: "bytes", table.ALLOC: "bytes", table.FREE: "bytes", table.COLLECTIVE: "bytes",
}  # fmt: skip
_RUNNABLE = (0, 256)


class TraceWriter:
    """Writes a trace; an existing file is replaced. Raises GputailError where it cannot be written."""

    def __init__(self, path: str, names: Names) -> None:
        self.path, self._names = path, names
        self._threads: dict[tuple[int, int], int] = {}  # (tgid, tid): bits, what tracks it has
        self._first = True
        self._facts: dict[str, object] = {"program": f"gputail {__version__}", "clock": "CLOCK_MONOTONIC"}
        try:
            self._file = open(path, "w", encoding="ascii")
        except OSError as error:
            raise self._cannot_write(error) from error
        self._write('{"displayTimeUnit":"ms","traceEvents":[')

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def note(self, name: str, value: object) -> None:
        """Say something of the whole recording."""
        self._facts[name] = value

    def calls(self, batch: events.Batch) -> None:
        """Add the calls of a batch, and what was lost until it."""
        lost = {stage: count for stage, count in batch.lost.items() if count}
        if lost:
            self._add([_instant(f"lost {sum(lost.values())}", "lost", batch.watermark_ns, lost)])
        if len(batch.calls):
            self._add(self._slices(batch.calls))

    def requests(self, records: Iterable[RequestRecord]) -> None:
        """Add requests; those that are outliers are named by their cause and have the verdict beside the record."""
        out = []
        for record in records:
            fields = record.as_dict()
            name = "request"
            if record.outlier:
                name = f"slow: {record.cause}"
                fields["story"] = story(record)
            elif record.incomplete:
                name = "request, incomplete"
            self._has(record.pid, record.tid, 2)
            ns = record.start_ns, record.duration_ns
            out.append(_slice(record.pid, record.tid + REQUESTS, json.dumps(name), '"request"', *ns, json.dumps(fields)))
        self._add(out)

    def regime_changes(self, changes: Iterable[RegimeChange]) -> None:
        for change in changes:
            facts = {"workload": change.workload, "before_ns": change.before_ns, "after_ns": change.after_ns}
            self._add([_instant("regime change", "regime_change", change.time_ns, facts)])

    def close(self) -> None:
        """Name the tracks and end the file."""
        if self._file.closed:
            return
        self._add(self._track_names())
        self._write('],"otherData":' + json.dumps(self._facts) + "}\n")
        try:
            self._file.close()
        except OSError as error:
            raise self._cannot_write(error) from error

    def _slices(self, calls: np.ndarray) -> list[str]:
        """One event a call. Of two that begin together the longer comes first: it holds the other."""
        calls = calls[np.lexsort((-calls["duration_ns"].astype(np.int64), calls["start_ns"]))]
        columns = (calls[name].tolist() for name in ("tgid", "tid", "call", "start_ns", "duration_ns", "handle", "stream", "size",
                                                     "block", "result", "cpu", "flags"))  # fmt: skip
        out = []
        for tgid, tid, call, start, duration, handle, stream, size, block, result, cpu, flags in zip(*columns, strict=True):
            function = table.BY_NUMBER.get(call)
            if function is None:
                continue
            if call == table.OFF_CPU_CALL:
                self._has(tgid, tid, 4)
                out.append(_off_cpu(tgid, tid, start, duration, handle, stream, size, block, cpu))
                continue
            self._has(tgid, tid, 1)
            args = [f'"stream":"{stream:#x}"'] if function.args.stream or function.category == table.LAUNCH else []
            if size and (what := _WHAT_SIZE_IS.get(function.category)):
                args.append(f'"{what}":{size}')
            if function.category == table.LAUNCH:
                kernel = self._names.kernel(tgid, handle)
                args.append(f'"block":{block},"kernel":{json.dumps(clean(kernel, MAX_NAME) if kernel else hex(handle))}')
            if result:
                args.append(f'"result":{result}')
            category = f'"{function.category}"'
            facts = "{" + ",".join(args) + "}"
            if flags & events.ENTRY_ONLY:  # how long it took is not known
                out.append(
                    f'{{"ph":"i","s":"t","pid":{tgid},"tid":{tid},"ts":{_us(start)},"name":"{function.name}","cat":{category},"args":{facts}}}'
                )
            else:
                out.append(_slice(tgid, tid, f'"{function.name}"', category, start, duration, facts))
        return out

    def _has(self, tgid: int, tid: int, track: int) -> None:
        key = (tgid, tid)
        if key in self._threads or len(self._threads) < MAX_TRACKS:
            self._threads[key] = self._threads.get(key, 0) | track

    def _track_names(self) -> list[str]:
        out = []
        for tgid in dict.fromkeys(tgid for tgid, _ in self._threads):
            process = self._names.process(tgid)
            out.append(_metadata(tgid, 0, "process_name", {"name": clean(process.command or process.comm or "unknown", MAX_NAME)}))
        for number, ((tgid, tid), tracks) in enumerate(sorted(self._threads.items())):
            comm = clean(self._names.thread(tgid, tid) or "thread")
            for place, (track, offset, what) in enumerate(((2, REQUESTS, "requests"), (1, 0, "calls"), (4, OFF_CPU, "off CPU"))):
                if tracks & track:
                    out.append(_metadata(tgid, tid + offset, "thread_name", {"name": f"{comm} {tid} {what}"}))
                    out.append(_metadata(tgid, tid + offset, "thread_sort_index", {"sort_index": 3 * number + place}))
        return out

    def _add(self, entries: list[str]) -> None:
        if entries:
            self._write(("\n" if self._first else ",\n") + ",\n".join(entries))
            self._first = False

    def _write(self, text: str) -> None:
        try:
            self._file.write(text)
        except OSError as error:
            # Python keeps what it could not write and tries again when closing: let that go nowhere.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._file.fileno())
            os.close(nowhere)
            self._file.close()
            raise self._cannot_write(error) from error

    def _cannot_write(self, error: OSError) -> GputailError:
        return GputailError(f"cannot write the trace to {self.path}: {(error.strerror or str(error)).lower()}")


def _us(ns: int) -> str:
    """ns as a decimal number of µs, exact."""
    return f"{ns // 1000}.{ns % 1000:03d}"


def _slice(pid: int, tid: int, name: str, category: str, start_ns: int, duration_ns: int, args: str) -> str:
    """A slice; name, category and args are JSON already."""
    return (
        f'{{"ph":"X","pid":{pid},"tid":{tid},"ts":{_us(start_ns)},"dur":{_us(duration_ns)},"name":{name},"cat":{category},"args":{args}}}'
    )


def _off_cpu(tgid: int, tid: int, start: int, duration: int, state: int, before: int, woken: int, waker: int, cpu: int) -> str:
    facts: dict[str, object] = {"cpu": cpu, "ran before on this cpu": f"tid {before}" if before else "idle"}
    if state in _RUNNABLE:
        name = "preempted"
    else:
        name = "asleep, uninterruptible" if state & 2 else "asleep"
        if start < woken <= start + duration:
            facts["waited for a cpu, us"] = (start + duration - woken) / 1000
        if waker:
            facts["woken by"] = f"tid {waker}"
    return _slice(tgid, tid + OFF_CPU, f'"{name}"', '"off_cpu"', start, duration, json.dumps(facts))


def _instant(name: str, category: str, time_ns: int, args: Mapping[str, object]) -> str:
    """Something that is about no one thread."""
    return (
        f'{{"ph":"i","s":"g","pid":0,"tid":0,"ts":{_us(time_ns)},"name":{json.dumps(name)},"cat":"{category}","args":{json.dumps(args)}}}'
    )


def _metadata(pid: int, tid: int, what: str, args: Mapping[str, object]) -> str:
    return f'{{"ph":"M","pid":{pid},"tid":{tid},"name":"{what}","args":{json.dumps(args)}}}'
