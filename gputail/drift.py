"""Fail-slow: a lasting shift of how late one rank comes to its collectives, found as a change point and not as outliers.

In: for each collective when a rank came to it, and by how much later than the middle one of the ranks. Out: a shift, once,
when the median of the last RECENT has left what was usual and the times in it span a while. Single late collectives, however
many, do not move a median; what is usual from then on is the shifted lateness.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

RECENT = 48  # collectives that are looked at
EVERY = 8  # of those between two looks
SPREADS = 4.0  # of the usual lateness, as a standard deviation
LEAST_SHARE = 0.02  # of the time from one collective to the next
LEAST_NS = 100_000
SPAN_NS = 2_000_000_000  # that they span at the least, so they are that far apart: what is over sooner is no shift
NEARLY_ALL = 0.9


@dataclass(frozen=True)
class Drift:
    """A rank comes later (or earlier again) to its collectives than it did, lastingly; times in ns, noticed at `time_ns`.

    cadence_ns: from one collective to the next, before and after: what the shift costs all ranks.
    """

    communicator: str
    rank: int | None
    pid: int
    time_ns: int
    before_ns: int
    after_ns: int
    cadence_before_ns: int
    cadence_after_ns: int


class Lateness:
    """The recent lateness of one rank, and what was usual before."""

    __slots__ = ("_come", "_late", "_number", "_rounds", "_usual", "_until")

    def __init__(self) -> None:
        self._come: deque[int] = deque(maxlen=RECENT)
        self._late: deque[int] = deque(maxlen=RECENT)
        self._rounds: deque[int] = deque(maxlen=RECENT)  # their numbers, of all
        self._number = 0
        self._usual: tuple[int, float, int] | None = None  # lateness, its spread, the cadence
        self._until = RECENT

    def add(self, come_ns: int, late_ns: int) -> tuple[int, int, int, int] | None:
        """Take in a collective; (lateness before, after, cadence before, after) in ns where it shows a shift that lasted."""
        self._number += 1
        if self._come and come_ns - self._come[-1] < SPAN_NS // RECENT:
            return None
        self._come.append(come_ns)
        self._late.append(late_ns)
        self._rounds.append(self._number)
        self._until -= 1
        if self._until > 0:
            return None
        self._until = EVERY
        cadence = (self._come[-1] - self._come[0]) // (self._rounds[-1] - self._rounds[0])
        late = int(median(self._late))
        spread = 1.4826 * median(abs(one - late) for one in self._late)
        if self._usual is None:
            self._usual = late, spread, cadence
            return None
        before, usual_spread, cadence_before = self._usual
        if abs(late - before) <= max(SPREADS * usual_spread, LEAST_SHARE * cadence_before, LEAST_NS):
            return None
        # Nearly all of them, not just half: so it is told once, and what it is from now on is known.
        shifted = sum(abs(one - late) < abs(one - before) for one in self._late)
        if shifted < NEARLY_ALL * len(self._late):
            return None
        self._usual = late, spread, cadence
        return before, late, cadence_before, cadence
