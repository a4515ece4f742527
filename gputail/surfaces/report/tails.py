"""One workload's durations over the time of a recording, in a bounded number of slices.

In go the ends and durations of its requests, out come histograms of any stretch of slices. The slices grow to twice their width
whenever the recording outlasts them, so that neither its length nor its number of requests matters to memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gputail.histogram import BUCKETS, Histogram, bucket_of

SLICES = 64
FIRST_WIDTH_NS = 1 << 25  # 34 ms


class Tail:
    """Slice i holds the requests that ended in [origin_ns + i * width_ns, origin_ns + (i + 1) * width_ns).

    The first also holds what ended earlier. outliers, longest_ns: per slice, int64.
    """

    def __init__(self, origin_ns: int) -> None:
        self.origin_ns, self.width_ns = origin_ns, FIRST_WIDTH_NS
        self.outliers = np.zeros(SLICES, np.int64)
        self.longest_ns = np.zeros(SLICES, np.int64)
        self._counts = np.zeros((SLICES, BUCKETS + 1), np.int32)
        self._sums_ns = np.zeros(SLICES, np.int64)
        self._used = 0

    def add(self, ends_ns: Sequence[int], durations_ns: Sequence[int], outliers: Sequence[bool]) -> None:
        """Take in requests: when each ended, how long it lasted, whether it was an outlier."""
        if not ends_ns:
            return
        ends, durations = np.array(ends_ns, np.int64), np.array(durations_ns, np.int64)
        while (int(ends.max()) - self.origin_ns) // self.width_ns >= SLICES:
            self._widen()
        number = np.maximum(ends - self.origin_ns, 0) // self.width_ns
        np.add.at(self._counts, (number, bucket_of(durations)), 1)
        np.add.at(self._sums_ns, number, durations)
        np.add.at(self.outliers, number, np.array(outliers, np.int64))
        np.maximum.at(self.longest_ns, number, durations)
        self._used = max(self._used, int(number.max()) + 1)

    def __len__(self) -> int:
        """Slices from the first to the last that holds a request."""
        return self._used

    def histogram(self, first: int = 0, stop: int = SLICES) -> Histogram:
        """The durations of slices first to before stop."""
        whole = Histogram()
        whole.add_buckets(self._counts[first:stop].sum(axis=0, dtype=np.int64), int(self._sums_ns[first:stop].sum()))
        return whole

    def slice_of(self, time_ns: int) -> int:
        """The slice that a time belongs to, within those in use."""
        return min(max((time_ns - self.origin_ns) // self.width_ns, 0), max(self._used - 1, 0))

    def _widen(self) -> None:
        self.width_ns *= 2
        half = SLICES // 2
        for array in (self._counts, self._sums_ns, self.outliers):
            array[:half] = array[0::2] + array[1::2]
            array[half:] = 0
        self.longest_ns[:half] = np.maximum(self.longest_ns[0::2], self.longest_ns[1::2])
        self.longest_ns[half:] = 0
        self._used = -(-self._used // 2)
