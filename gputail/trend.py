"""The recent past of a workload in windows of equal length: requests, outliers and the tail of each.

In: the workload's histogram whenever a window ends, and how many outliers it had. Out: `Window`s, oldest first. Time is the
time at which requests became known (`Request.release_ns`), so windows do not depend on batches. What was usual is left to
baseline.py, the distribution over the whole life to histogram.py.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from gputail.histogram import Histogram

WINDOW_NS = 5_000_000_000
KEPT = 48  # windows
DETAILED = 12  # of those, the ones that keep their distribution
TAIL = 0.99

_NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True)
class Window:
    """One window; without a request there is none. Its distribution as two arrays is empty once it is older than DETAILED windows."""

    start_ns: int
    requests: int
    outliers: int
    tail_ns: int  # the duration that 99% did not exceed; with less than 100 requests the longest
    buckets: np.ndarray  # numbers of histogram buckets (int64)
    counts: np.ndarray  # requests in each of those

    def add_to(self, counts: np.ndarray) -> None:
        """Add its distribution to counts by bucket."""
        counts[self.buckets] += self.counts


class Trend:
    """The windows of one workload."""

    __slots__ = ("end_ns", "outliers", "_base", "_windows")

    def __init__(self) -> None:
        self.end_ns = 0  # of the window that is open now
        self.outliers = 0  # in it
        self._base: np.ndarray | None = None  # what the histogram counted before it
        self._windows: deque[Window] = deque(maxlen=KEPT - 1)

    def roll(self, now_ns: int, histogram: Histogram) -> None:
        """End the open window; what comes next belongs to that of `now_ns`. The histogram has all that came before."""
        window = self._open(histogram)
        if window is not None:
            self._windows.append(window)
            if len(self._windows) >= DETAILED:
                self._windows[-DETAILED] = replace(self._windows[-DETAILED], buckets=_NOTHING, counts=_NOTHING)
        self.end_ns = (now_ns // WINDOW_NS + 1) * WINDOW_NS
        self.outliers = 0
        self._base = histogram.counts.copy()

    def windows(self, histogram: Histogram) -> tuple[Window, ...]:
        """All windows kept, oldest first; the last may be the open one."""
        window = self._open(histogram)
        return (*self._windows, window) if window is not None else tuple(self._windows)

    def _open(self, histogram: Histogram) -> Window | None:
        if self._base is None:
            return None
        of_window = Histogram()
        of_window.counts = histogram.counts - self._base
        tail_ns = of_window.quantile(TAIL)
        if tail_ns is None:
            return None
        buckets = np.flatnonzero(of_window.counts)
        return Window(self.end_ns - WINDOW_NS, of_window.count, self.outliers, tail_ns, buckets, of_window.counts[buckets])


def recent(windows: tuple[Window, ...], now_ns: int) -> tuple[Histogram, int, int]:
    """Durations and outliers of the last DETAILED windows (the open one counts as one), and when the first of them began (ns)."""
    start_ns = (now_ns // WINDOW_NS - DETAILED + 1) * WINDOW_NS
    histogram, outliers = Histogram(), 0
    for window in windows:
        if window.start_ns >= start_ns:
            window.add_to(histogram.counts)
            outliers += window.outliers
    return histogram, outliers, start_ns
