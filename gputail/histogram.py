"""Latency histograms: log-linear buckets, bounded relative error, mergeable.

A value of up to 2^SUB_BITS ns has a bucket of its own; above, each doubling is split into 2^(SUB_BITS-1) equal
buckets, so that a bucket is at most 1/64 of its lower bound wide and its middle is within 0.8% of every value in it
(Gil Tene's HdrHistogram has the same layout). Values range from 0 to about 2.4 hours; what is beyond is counted in
`overflow` and never hidden in the last bucket.
"""

from __future__ import annotations

import numpy as np

SUB_BITS = 7
_HALF = 1 << (SUB_BITS - 1)
MAX_BITS = 43
BUCKETS = (MAX_BITS - SUB_BITS + 2) * _HALF
MAX_NS = (1 << MAX_BITS) - 1


def bucket_of(durations_ns: np.ndarray) -> np.ndarray:
    """Bucket number (int64) of each duration; BUCKETS for those above MAX_NS. Negative ones count as 0."""
    values = np.clip(np.asarray(durations_ns).astype(np.int64), 0, MAX_NS + 1)
    # frexp's exponent is the bit length; exact, since the values stay below 2^53.
    bits = np.frexp(values.astype(np.float64))[1].astype(np.int64)
    shift = np.maximum(bits - SUB_BITS, 0)
    return np.minimum(shift * _HALF + (values >> shift), BUCKETS)


def lower_bounds() -> np.ndarray:
    """Smallest value (ns) of each bucket and, last, of the overflow: BUCKETS + 1 values."""
    number = np.arange(BUCKETS + 1)
    shift = np.maximum(number // _HALF - 1, 0)
    return (number - shift * _HALF) << shift


_LOWER = lower_bounds()


class Histogram:
    """Durations in ns. Not thread-safe; `copy` gives surfaces one of their own."""

    __slots__ = ("counts", "sum_ns")

    def __init__(self) -> None:
        self.counts = np.zeros(BUCKETS + 1, np.int64)
        self.sum_ns = 0

    @property
    def count(self) -> int:
        return int(self.counts.sum())

    @property
    def overflow(self) -> int:
        """How many durations were above MAX_NS."""
        return int(self.counts[BUCKETS])

    def add(self, durations_ns: np.ndarray) -> None:
        """Count each duration of an array (ns)."""
        durations = np.asarray(durations_ns)
        if len(durations) == 0:
            return
        self.add_buckets(np.bincount(bucket_of(durations), minlength=BUCKETS + 1), int(durations.sum(dtype=np.int64)))

    def add_buckets(self, counts: np.ndarray, sum_ns: int) -> None:
        """Add counts per bucket (BUCKETS + 1 of them) that were made elsewhere, and the sum of their durations."""
        self.counts += counts
        self.sum_ns += sum_ns

    def merge(self, other: Histogram) -> None:
        self.add_buckets(other.counts, other.sum_ns)

    def copy(self) -> Histogram:
        twin = Histogram()
        twin.merge(self)
        return twin

    def quantile(self, q: float) -> int | None:
        """The duration (ns) that a share `q` (0 to 1) does not exceed, within the bucket's error; None when empty.

        A quantile that falls among the overflow gives MAX_NS + 1: at least that much.
        """
        total = self.count
        if not total:
            return None
        rank = min(max(int(np.ceil(q * total)), 1), total)
        bucket = int(np.searchsorted(np.cumsum(self.counts), rank))
        if bucket >= BUCKETS:
            return MAX_NS + 1
        return int(_LOWER[bucket] + _LOWER[bucket + 1] - 1) // 2

    def cumulative(self, bounds_ns: np.ndarray) -> np.ndarray:
        """How many durations were at or below each bound, a bucket counting by its middle (overflow never)."""
        middles = (_LOWER[:-1] + _LOWER[1:] - 1) // 2
        upto = np.concatenate([[0], np.cumsum(self.counts[:BUCKETS])])
        return upto[np.searchsorted(middles, np.asarray(bounds_ns), side="right")]
