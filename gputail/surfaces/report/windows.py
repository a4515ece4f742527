"""The calls around chosen requests: the second look at a recording, in bounded memory.

In go request records, then the whole stream again; out come, for each record, the rows of its thread during the request and those
of its process and its culprits around it. What they mean is left to timeline.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gputail import events
from gputail.rows import take
from gputail.tail import RequestRecord
from gputail.timeline import Around, culprits

# Work that a request waits for may have been given to the GPU so long before, and waited for so long after.
BEFORE_NS = 500_000_000
AFTER_NS = 400_000_000
# Rows (64 bytes each) that are kept for all windows together.
MAX_ROWS = 1 << 20


class Windows:
    """Feed it every batch of the stream, then ask `around`."""

    def __init__(self, records: Sequence[RequestRecord]) -> None:
        self._windows = [_Window(record, MAX_ROWS // (2 * len(records))) for record in records]
        self._open = sorted(self._windows, key=lambda window: window.since_ns)

    def feed(self, batch: events.Batch) -> None:
        if self._open and len(batch.calls):
            ends = events.end_ns(batch.calls)
            for window in self._open:
                window.add(batch.calls, ends)
        if self._open:
            self._open = [window for window in self._open if window.until_ns >= batch.watermark_ns]

    def is_done(self) -> bool:
        """Whether the rest of the stream can tell nothing more."""
        return not self._open

    def around(self) -> tuple[Around, ...]:
        """In the order of the records."""
        return tuple(window.around() for window in self._windows)


class _Rows:
    """Rows, the last ones of at most so many."""

    def __init__(self, limit: int) -> None:
        self._limit, self._kept, self.count = limit, [events.no_calls()], 0
        self.partly = False

    def add(self, rows: np.ndarray) -> None:
        if not len(rows):
            return
        self._kept.append(rows)
        self.count += len(rows)
        if self.count > self._limit:
            self._kept = [np.concatenate(self._kept)[-self._limit :].copy()]
            self.count, self.partly = self._limit, True

    def all(self) -> np.ndarray:
        return np.concatenate(self._kept)


class _Window:
    def __init__(self, record: RequestRecord, max_rows: int) -> None:
        self.record = record
        self.since_ns, self.until_ns = record.start_ns - BEFORE_NS, record.end_ns + AFTER_NS
        self._pids = np.array(sorted({record.pid, *(pid for _, pid in culprits(record))}), np.uint32)
        self._own, self._others = _Rows(max_rows), _Rows(max_rows)

    def add(self, calls: np.ndarray, ends: np.ndarray) -> None:
        first, stop = np.searchsorted(ends, max(self.since_ns, 0)), np.searchsorted(ends, self.until_ns, side="right")
        if first >= stop:
            return
        part, ends = calls[first:stop], ends[first:stop]
        record = self.record
        of_pids = np.isin(part["tgid"], self._pids)
        own = part["tid"] == record.tid
        # A sleep may have begun before the request and end in it, or begin in it and end after.
        during = (ends > record.start_ns) & (part["start_ns"] < record.end_ns)
        self._own.add(take(part, own & during))
        self._others.add(take(part, of_pids))

    def around(self) -> Around:
        return Around(self.record, self._own.all(), self._others.all(), self._own.partly, self._others.partly)
