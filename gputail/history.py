"""The recent rows, kept for verdicts: what else was going on around a request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from gputail import events
from gputail.budget import CLASS_OF_CALL, IS_WORK, WAIT_OF_CALL
from gputail.rows import take

# How far back rows are kept, and how many at most (64 bytes each) besides those of the latest batch.
KEEP_NS = 5_000_000_000
MAX_ROWS = 1 << 18
# How far back and through how many rows one look goes: less than is kept, so that it does not matter when it is taken.
LOOK_NS = 2_500_000_000
MAX_LOOK = 1 << 17


class _Chunk:
    """Rows, and beside them the columns that they are chosen by."""

    __slots__ = ("calls", "ends", "tids", "tgids", "streams", "waits", "on_gpu")

    def __init__(self, calls: np.ndarray) -> None:
        self.calls, self.ends = calls, events.end_ns(calls).astype(np.int64)
        self.tids, self.tgids, self.streams = calls["tid"].copy(), calls["tgid"].copy(), calls["stream"].copy()
        self.waits = WAIT_OF_CALL[calls["call"]]
        self.on_gpu = IS_WORK[CLASS_OF_CALL[calls["call"]]] | (self.waits > 0)


class History:
    """Rows in order of their end, the last of them up to a bound that does not depend on batches."""

    def __init__(self) -> None:
        self._chunks: deque[_Chunk] = deque()
        self._rows = 0

    def add(self, calls: np.ndarray) -> None:
        self._chunks.append(_Chunk(calls))
        self._rows += len(calls)

    def forget(self, watermark_ns: int) -> None:
        """Let go of what no verdict will look at any more."""
        while self._chunks:
            oldest = self._chunks[0]
            spare = self._rows - len(oldest.calls)
            if spare < MAX_ROWS and int(oldest.ends[-1]) >= watermark_ns - KEEP_NS:
                break
            self._chunks.popleft()
            self._rows = spare

    def thread(self, tid: int, start_ns: int, end_ns: int) -> np.ndarray:
        """Rows of one thread that lie wholly between two times."""
        rows = self._select(start_ns, end_ns, lambda chunk, part: chunk.tids[part] == tid)
        return take(rows, rows["start_ns"] >= start_ns)

    def thread_beside(self, tid: int, streams: list[int], since_ns: int, until_ns: int) -> np.ndarray:
        """Rows of one thread that ended between two times and wait, or are about none of `streams`."""

        def chosen(chunk: _Chunk, part: slice) -> np.ndarray:
            elsewhere = chunk.tids[part] == tid
            for stream in streams:
                elsewhere &= chunk.streams[part] != stream
            return elsewhere | ((chunk.waits[part] > 0) & (chunk.tids[part] == tid))

        return self._select(since_ns, until_ns, chosen)

    def siblings(self, tgid: int, tid: int, since_ns: int, before_ns: int) -> np.ndarray:
        """Work for the GPU and waits by the other threads of a process that ended from `since_ns` to before `before_ns`."""

        def chosen(chunk: _Chunk, part: slice) -> np.ndarray:
            return (chunk.tgids[part] == tgid) & (chunk.tids[part] != tid) & chunk.on_gpu[part]

        return self._select(since_ns, before_ns - 1, chosen)

    def process(self, tgid: int, since_ns: int, before_ns: int) -> np.ndarray:
        """All rows of a process that ended from `since_ns` to before `before_ns`."""
        return self._select(since_ns, before_ns - 1, lambda chunk, part: chunk.tgids[part] == tgid)

    def foreign(self, tgid: int, since_ns: int, before_ns: int) -> np.ndarray:
        """Work for the GPU and waits by all other processes."""
        return self._select(since_ns, before_ns - 1, lambda chunk, part: (chunk.tgids[part] != tgid) & chunk.on_gpu[part])

    def _select(self, low_ns: int, high_ns: int, chosen: Callable[[_Chunk, slice], np.ndarray]) -> np.ndarray:
        """The chosen ones of the rows that ended within [low_ns, high_ns]; the last MAX_LOOK of those are looked at."""
        found = []
        budget = MAX_LOOK
        low_ns = max(low_ns, high_ns - LOOK_NS)
        for chunk in reversed(self._chunks):
            if not len(chunk.ends) or chunk.ends[0] > high_ns:
                continue
            if chunk.ends[-1] < low_ns or budget <= 0:
                break
            first, stop = int(np.searchsorted(chunk.ends, low_ns)), int(np.searchsorted(chunk.ends, high_ns, side="right"))
            part = slice(max(first, stop - budget), stop)
            budget -= stop - part.start
            found.append(take(chunk.calls[part], chosen(chunk, part)))
        return np.concatenate(found[::-1]) if found else events.no_calls()
