"""The tail: what is usual for a workload, and which requests are well above it.

In: requests, in order of their release. Out: for each whether it is an outlier and against what; the record that
surfaces are given is defined here, too. The cause of an outlier is left to attribution/.

The baseline of a workload is the median of its recent requests that were no outliers. A request is an outlier if it
lasted longer than that by OUTLIER_SHARE of it, and either it or one part of its budget is beyond by OUTLIER_SPREADS of the
usual spread, too: where a program's own speed varies widely, a copy that never took long is still told. If most of the recent
requests lie beyond, the world has changed: that is one regime change, and they are the new baseline.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from operator import gt
from typing import Any

import numpy as np

from gputail.budget import HOST, LAUNCH, OTHER, PARTS
from gputail.requests import Request

SCHEMA = 1
WINDOW = 128  # usual requests that the baseline is made from
REFRESH_EVERY = 16
MIN_REQUESTS = 32  # before which nothing is called usual
OUTLIER_SHARE = 0.2
OUTLIER_SPREADS = 3.5
# A shift has lasted when the median of this many requests, over at least so long, lies beyond what is usual.
REGIME_REQUESTS = 64
REGIME_NS = 1_000_000_000
REGIME_FASTER = 0.67
# A program that moves between levels (the clock of its CPU does) is at home on those it was on lately.
FORMER_EVERY_NS = 2_000_000_000
FORMER_NS = 60_000_000_000
_OF_THE_CPU = (HOST, LAUNCH, OTHER)

COUNTERS = ("launches", "block_threads", "htod_bytes", "dtoh_bytes", "copy_bytes")


@dataclass(frozen=True)
class Contribution:
    """A share of an outlier's excess: `ns` of it are due to `cause`; culprits are None where not known."""

    cause: str
    ns: int
    culprit_pid: int | None = None
    culprit: str | None = None


@dataclass(frozen=True)
class RequestRecord:
    """One request as surfaces show it; times are CLOCK_MONOTONIC. The last five fields say something of outliers only."""

    pid: int
    tid: int
    comm: str | None
    workload: str
    start_ns: int
    end_ns: int
    boundary: str
    calls: int
    launches: int
    incomplete: bool
    outlier: bool
    budget_ns: tuple[int, ...]  # by budget.PARTS; they sum to the duration
    baseline_ns: int | None = None
    excess_ns: int | None = None
    cause: str | None = None
    confidence: float | None = None
    contributions: tuple[Contribution, ...] = ()

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns

    def as_dict(self) -> dict[str, Any]:
        """The fixed request record, and `budget` besides it."""
        record: dict[str, Any] = {
            "schema": SCHEMA,
            "pid": self.pid,
            "tid": self.tid,
            "comm": self.comm,
            "workload": self.workload,
            "start_ns": self.start_ns,
            "end_ns": self.end_ns,
            "duration_ns": self.duration_ns,
            "boundary": self.boundary,
            "calls": self.calls,
            "launches": self.launches,
            "incomplete": self.incomplete,
            "outlier": self.outlier,
            "budget": {part: ns for part, ns in zip(PARTS, self.budget_ns, strict=True) if ns},
        }
        if self.outlier:
            record |= {
                "baseline_ns": self.baseline_ns,
                "excess_ns": self.excess_ns,
                "cause": self.cause,
                "confidence": self.confidence,
                "contributions": [
                    {"cause": c.cause, "ns": c.ns, "culprit_pid": c.culprit_pid, "culprit": c.culprit} for c in self.contributions
                ],
            }
        return record


@dataclass(frozen=True)
class Usual:
    """Medians over a workload's recent usual requests.

    threshold_ns: the duration above which a request is an outlier whatever made it long; part_thresholds_ns: how long
    each part may last, in a request that is at least `least_ns` long.
    """

    duration_ns: int
    threshold_ns: int
    least_ns: int
    part_thresholds_ns: tuple[int, ...]
    parts: tuple[int, ...]
    launches: int
    block_threads: int
    htod_bytes: int
    dtoh_bytes: int
    copy_bytes: int

    def is_exceeded_by(self, request: Request) -> bool:
        """Whether the request is an outlier."""
        duration = request.duration_ns
        if duration <= self.least_ns:
            return False
        return duration > self.threshold_ns or any(map(gt, request.parts, self.part_thresholds_ns))


@dataclass(frozen=True)
class RegimeChange:
    """A shift that lasted: what was usual before and is now (ns), noticed at `time_ns`."""

    workload: str
    time_ns: int
    before_ns: int
    after_ns: int


class Baseline:
    """What is usual for one workload."""

    __slots__ = ("usual", "_window", "_recent", "_until_refresh", "_shifted_since_ns", "_shifted_from", "_former")

    def __init__(self) -> None:
        self.usual: Usual | None = None
        self._window: deque[tuple[int, ...]] = deque(maxlen=WINDOW)
        self._recent: deque[tuple[int, ...]] = deque(maxlen=REGIME_REQUESTS)
        self._until_refresh = MIN_REQUESTS
        self._shifted_since_ns: int | None = None
        self._shifted_from: Usual | None = None  # what was usual when the shift began; a faster level soon becomes usual
        self._former: deque[tuple[int, Usual]] = deque()

    def judge(self, request: Request) -> tuple[bool, Usual | None, tuple[int, int] | None]:
        """(outlier, what is usual, the medians before and after if this request completes a regime change).

        Incomplete requests are judged never, and nothing is learned from them.
        """
        if request.incomplete:
            return False, self.usual, None
        row = (
            request.duration_ns, *request.parts, request.launches, request.block_threads, request.htod_bytes, request.dtoh_bytes,
            request.copy_bytes, request.end_ns,
        )  # fmt: skip
        self._recent.append(row)
        outlier = self.usual is not None and self.usual.is_exceeded_by(request)
        if not outlier:
            self._window.append(row)
        shift = None
        self._until_refresh -= 1
        if self._until_refresh <= 0:
            self._until_refresh = REFRESH_EVERY
            shift = self._regime_change()
            if len(self._window) >= MIN_REQUESTS:
                # A window changed by nothing but outliers gives what it gave before.
                self.usual = self._refreshed(request.end_ns)
        if shift is not None and self.usual is not None:
            outlier = self.usual.is_exceeded_by(request)
            return outlier, self.usual, (shift, self.usual.duration_ns)
        return outlier, self.usual, None

    def _refreshed(self, now_ns: int) -> Usual:
        """What is usual now: that of the window, and the levels of the CPU that were usual lately."""
        former = self._former
        while former and now_ns - former[0][0] > FORMER_NS:
            former.popleft()
        usual = _usual(self._window)
        if not former or now_ns - former[-1][0] >= FORMER_EVERY_NS:
            former.append((now_ns, usual))
        threshold = max(usual.threshold_ns, *(level.threshold_ns for _, level in former))
        parts = list(usual.part_thresholds_ns)
        for part in _OF_THE_CPU:
            parts[part] = max(parts[part], *(level.part_thresholds_ns[part] for _, level in former))
        return replace(usual, threshold_ns=threshold, part_thresholds_ns=tuple(parts))

    def _regime_change(self) -> int | None:
        """The median before, if the recent requests are another regime; they are the window then."""
        recent, usual = self._recent, self._shifted_from or self.usual
        if usual is None or len(recent) < REGIME_REQUESTS:
            return None
        median = sorted(row[0] for row in recent)[len(recent) // 2]
        if REGIME_FASTER * usual.duration_ns <= median <= usual.threshold_ns:
            self._shifted_from = self._shifted_since_ns = None
            return None
        if self._shifted_since_ns is None:
            self._shifted_from, self._shifted_since_ns = usual, recent[0][-1]
        if recent[-1][-1] - self._shifted_since_ns < REGIME_NS:
            return None
        self._shifted_from = self._shifted_since_ns = None
        self._window.clear()
        self._window.extend(recent)
        recent.clear()
        return usual.duration_ns


def _usual(rows: deque[tuple[int, ...]]) -> Usual:
    table = np.sort(np.array(rows, np.int64), axis=0)
    middle = table[len(table) // 2]
    # Half the distance of the quartiles, as a standard deviation (normal distribution: 0.6745).
    spread = (table[3 * len(table) // 4] - table[len(table) // 4]) / 2 / 0.6745
    least_excess = np.maximum(OUTLIER_SHARE * middle[0], OUTLIER_SPREADS * spread)
    thresholds = (middle + least_excess).astype(np.int64).tolist()
    values = middle.tolist()
    counters = 1 + len(PARTS)
    return Usual(
        values[0], thresholds[0], int(values[0] * (1 + OUTLIER_SHARE)), tuple(thresholds[1:counters]), tuple(values[1:counters]),
        *values[counters : counters + len(COUNTERS)],
    )  # fmt: skip
