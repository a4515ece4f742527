"""What is usual for a workload, and which requests are well above it.

In: requests, in order of their release. Out: for each whether it is an outlier, against what, and whether the program has
come to another regime. Why an outlier was slow is left to attribution/.

Two things are usual. The *usual* of a workload are the medians of its recent requests that were no outliers. But the CPU
that a program runs on moves between speeds (its clock, a sibling hyperthread, another virtual machine), for seconds and
by a factor of two, and what else went on is then hidden in that. So a request that may be an outlier is compared with
those of the last minute that took about as much CPU time as itself (`_Memory`): what it took beyond them, it did not
take on the CPU.

A request is an outlier if it lasted longer than usual by OUTLIER_SHARE of that, and either it or one part of its budget
is beyond by OUTLIER_SPREADS of the usual spread, too.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from itertools import islice
from operator import gt

import numpy as np

from gputail.budget import HOST, LAUNCH, OFF_CPU, OTHER, PARTS, RUN_QUEUE
from gputail.requests import Request
from gputail.tiers import FULL, sees_launches, sees_off_cpu, tier_of

WINDOW = 128  # usual requests that the baseline is made from
REFRESH_EVERY = 16
MIN_REQUESTS = 32  # before which nothing is called usual
OUTLIER_SHARE = 0.07
OUTLIER_SPREADS = 3.5
# Where requests vary less than this share of their duration, it is taken for their spread: a clock's granularity.
LEAST_SPREAD = 0.01
# A shift has lasted when the median of this many requests lies beyond what is usual, and has for so long.
REGIME_REQUESTS = 64
REGIME_NS = 1_000_000_000
REGIME_SHARE = 0.05
REGIME_SPREADS = 2
# Where this share of requests is slow, what is slow is what is usual; where fewer are, something comes and goes.
NEARLY_ALL = 0.9
# What is remembered to find requests of about the same CPU time among.
MEMORY_ROWS = 1024
MEMORY_EVERY_NS = 60_000_000_000 // MEMORY_ROWS
NEIGHBOURS = 24
# Requests whose CPU time was within this share of each other ran at the same speed.
SAME_SPEED = 0.1
# One that took by this share more than those just before it took it for something else than the CPU's speed.
OTHER_SPEED = 0.25
# Of how many usual requests it is told when they ran.
LATEST = 15
# How many requests just before one tell the speed that the CPU has now, and how many how much that varies.
JUST_BEFORE, AROUND = 3, 21

OF_THE_CPU = (HOST, LAUNCH, OTHER)
_NEVER = 1 << 62
COUNTERS = ("launches", "block_threads", "htod_bytes", "dtoh_bytes", "copy_bytes")
# Columns of a remembered request: its duration, its parts, COUNTERS, when it ended.
_Row = tuple[int, ...]
_PARTS = slice(1, 1 + len(PARTS))
_CPU = [1 + part for part in OF_THE_CPU]
_COLUMNS = 1 + len(PARTS) + len(COUNTERS)


@dataclass(frozen=True)
class Usual:
    """Medians over usual requests, and their spreads (ns; as a standard deviation).

    latest: when the last few of them ran, (start, end) in ns.
    """

    duration_ns: int
    parts: tuple[int, ...]
    launches: int
    block_threads: int
    htod_bytes: int
    dtoh_bytes: int
    copy_bytes: int
    spread_ns: int
    part_spreads_ns: tuple[int, ...]
    latest: tuple[tuple[int, int], ...] = ()

    def is_exceeded_by(self, request: Request) -> bool:
        """Whether the request is an outlier against this."""
        excess, least = request.duration_ns - self.duration_ns, int(OUTLIER_SHARE * self.duration_ns)
        return excess > least and (
            excess > OUTLIER_SPREADS * self.spread_ns
            or any(
                part - usual > max(least, OUTLIER_SPREADS * spread)
                for part, usual, spread in zip(request.parts, self.parts, self.part_spreads_ns, strict=True)
            )
        )

    def on_a_slower_cpu(self, by_ns: int) -> Usual:
        """The same, had the CPU taken so much longer (ns)."""
        cpu = sum(self.parts[part] for part in OF_THE_CPU)
        parts = list(self.parts)
        for part in OF_THE_CPU:
            parts[part] += by_ns * parts[part] // cpu if cpu else 0
        return replace(self, duration_ns=self.duration_ns + by_ns, parts=tuple(parts))


@dataclass(frozen=True)
class RegimeChange:
    """A shift that lasted: what was usual before and is now (ns), noticed at `time_ns`."""

    workload: str
    time_ns: int
    before_ns: int
    after_ns: int


class Baseline:
    """What is usual for one workload."""

    __slots__ = (
        "usual",
        "_window",
        "_recent",
        "_flagged",
        "_slow_since_ns",
        "_cpu_before",
        "_until_refresh",
        "_memory",
        "_least_ns",
        "_part_limits",
        "_besides_limit_ns",
        "_known_cpu_ns",
        "_regime",
    )

    def __init__(self) -> None:
        self.usual: Usual | None = None
        self._window: deque[_Row] = deque(maxlen=WINDOW)
        self._recent: deque[_Row] = deque(maxlen=REGIME_REQUESTS)
        self._flagged: deque[bool] = deque(maxlen=REGIME_REQUESTS)  # which of those were outliers
        self._slow_since_ns: int | None = None  # since when nearly all of them are
        self._cpu_before: deque[int] = deque(maxlen=AROUND)  # CPU time of the last requests, ns
        self._until_refresh = MIN_REQUESTS
        self._memory = _Memory()
        # What tells at a glance that a request is usual: its duration, or its CPU time and what it took besides.
        self._least_ns = 0
        self._part_limits: tuple[int, ...] = ()
        self._besides_limit_ns = 0
        self._known_cpu_ns = 0
        self._regime = _Regime()

    @classmethod
    def seen_less(cls, other: Baseline, state: int) -> Baseline:
        """What is usual where the probes see only what they do in `state`, of which the other one's saw all."""
        new = cls()
        new._window.extend(tuple(row) for row in _as_seen(np.array(other._window, np.int64).reshape(-1, _COLUMNS + 1), state).tolist())
        new._memory = other._memory.seen_less(state)
        new._cpu_before.extend(sum(row[column] for column in _CPU) for row in new._window)
        new._until_refresh = REFRESH_EVERY
        if other.usual is not None:
            new._refresh()
        return new

    def judge(self, request: Request) -> tuple[bool, Usual | None, tuple[int, int] | None]:
        """(outlier, what is usual for such a request, the medians before and after if it completes a regime change).

        Incomplete requests are judged never, and nothing is learned from them.
        """
        if request.incomplete:
            return False, self.usual, None
        row = (
            request.duration_ns, *request.parts, request.launches, request.block_threads, request.htod_bytes, request.dtoh_bytes,
            request.copy_bytes, request.end_ns,
        )  # fmt: skip
        usual = self.usual
        outlier = False
        if usual is not None and self._may_be_slow(request):
            usual = self._usual_for(request)
            outlier = usual.is_exceeded_by(request)
            if not outlier:
                usual, outlier = self._usual_just_before(request, usual)
        if outlier and usual is not None:
            usual = replace(usual, latest=tuple((row[-1] - row[0], row[-1]) for row in list(self._window)[-LATEST:]))
        self._recent.append(row)
        self._flagged.append(outlier)
        self._cpu_before.append(row[_CPU[0]] + row[_CPU[1]] + row[_CPU[2]])
        if not outlier:
            self._window.append(row)
            self._memory.add(row)
        self._until_refresh -= 1
        shift = None
        if self._until_refresh <= 0:
            self._until_refresh = REFRESH_EVERY
            shift = self._refresh()
            if shift is not None and outlier:
                usual = replace(self._usual_for(request), latest=usual.latest if usual else ())
                outlier = usual.is_exceeded_by(request)
        return outlier, usual, shift

    def _is_all_slow(self, now_ns: int) -> bool:
        """Whether nearly all requests have been outliers for so long that they are what is usual, announced or not.

        A program that wanders between levels which it has been at before comes to no other regime, and yet may have left what is
        remembered of it.
        """
        if sum(self._flagged) < NEARLY_ALL * len(self._flagged):
            self._slow_since_ns = None
        elif self._slow_since_ns is None:
            self._slow_since_ns = now_ns
        return self._slow_since_ns is not None and now_ns - self._slow_since_ns >= REGIME_NS

    def _may_be_slow(self, request: Request) -> bool:
        parts = request.parts
        if any(map(gt, parts, self._part_limits)):
            return True
        duration, cpu = request.duration_ns, parts[HOST] + parts[LAUNCH] + parts[OTHER]
        if duration <= self._least_ns:
            return False
        return cpu > self._known_cpu_ns or duration - cpu > self._besides_limit_ns or cpu > self._level()[1]

    def _level(self) -> tuple[int, int]:
        """The CPU time (ns) that requests just before took, and up to what one is as slow as they were.

        A CPU that becomes slow stays so for a while: one request of more CPU time than those around it was not slowed by that.
        """
        before = sorted(self._cpu_before)
        if len(before) < JUST_BEFORE:
            return 0, _NEVER
        now = sorted(islice(reversed(self._cpu_before), JUST_BEFORE))[JUST_BEFORE // 2]
        level, quarter = before[len(before) // 2], len(before) // 4
        spread = (before[-1 - quarter] - before[quarter]) / 2 / 0.6745
        if now > level:
            level = now
        return level, int(level + max(OTHER_SPEED * level, OUTLIER_SPREADS * spread))

    def _usual_for(self, request: Request) -> Usual:
        """What is usual for a request that takes as much CPU time as this one."""
        parts = request.parts
        own = parts[HOST] + parts[LAUNCH] + parts[OTHER]
        usual = _usual(self._memory.near(own))
        known = sum(usual.parts[part] for part in OF_THE_CPU)
        beyond = own - known
        if beyond <= SAME_SPEED * known:
            return usual
        # Not known to be that slow. If it has just become so, and something else was slow besides, then that is what is
        # peculiar to this request.
        slower = usual.on_a_slower_cpu(max(min(self._level()[0], own) - known, 0))
        besides = sum(max(part - was, 0) for number, (part, was) in enumerate(zip(parts, usual.parts)) if number not in OF_THE_CPU)
        return slower if besides > OUTLIER_SHARE * slower.duration_ns and slower.is_exceeded_by(request) else usual

    def _usual_just_before(self, request: Request, usual: Usual) -> tuple[Usual, bool]:
        """Against those that ran just before, whether it is an outlier for the CPU time that it took itself."""
        level, limit = self._level()
        if sum(request.parts[part] for part in OF_THE_CPU) <= limit:
            return usual, False
        then = _usual(self._memory.near(level))
        return (then, True) if then.is_exceeded_by(request) else (usual, False)

    def _refresh(self) -> tuple[int, int] | None:
        """Take up what has become usual; the medians before and after if it is another regime."""
        shift = None
        if len(self._recent) == REGIME_REQUESTS and self.usual is not None:
            recent = np.array(self._recent, np.int64)
            now = _usual(recent[:, :-1])
            quartiles = np.sort(recent[:, 0])[[REGIME_REQUESTS // 4, 3 * REGIME_REQUESTS // 4]].tolist()
            shift = self._regime.moved(
                now.duration_ns, (quartiles[0], quartiles[1]), self._memory.spread_ns(), int(recent[0, -1]), int(recent[-1, -1])
            )
            if shift is not None or self._is_all_slow(int(recent[-1, -1])):
                self._window.clear()
                self._window.extend(self._recent)
                for row in self._recent:
                    self._memory.add(row, always=True)
                self._recent.clear()
                self._flagged.clear()
                self._slow_since_ns = None
        if len(self._window) >= MIN_REQUESTS:
            # A window changed by nothing but outliers gives what it gave before.
            usual = self.usual = _usual(np.array(self._window, np.int64)[:, :-1])
            self._least_ns = int((1 + OUTLIER_SHARE) * usual.duration_ns)
            limits = [
                part + int(max(OUTLIER_SHARE * usual.duration_ns, OUTLIER_SPREADS * spread))
                for part, spread in zip(usual.parts, usual.part_spreads_ns, strict=True)
            ]
            for part in OF_THE_CPU:
                limits[part] = _NEVER
            self._part_limits = tuple(limits)
            cpu = sum(usual.parts[part] for part in OF_THE_CPU)
            self._besides_limit_ns = self._least_ns - cpu
            self._known_cpu_ns = max(self._memory.known_cpu_ns(), cpu)
        return shift


class _Regime:
    """The median that the program has settled at, and since when it lies elsewhere."""

    __slots__ = ("_median_ns", "_since_ns")

    def __init__(self) -> None:
        self._median_ns = 0
        self._since_ns: int | None = None

    def moved(self, median_ns: int, quartiles_ns: tuple[int, int], spread_ns: int, begin_ns: int, end_ns: int) -> tuple[int, int] | None:
        """The medians before and after, once the shift has lasted.

        Most requests must have moved, by the nearer quartile: where one in two is slow, something comes and goes. spread_ns: of the
        last minute's requests, so that a program that always moves between speeds is not said to
        shift; begin_ns, end_ns: when the requests of which this is the median ended.
        """
        settled = self._median_ns
        least = int(max(REGIME_SHARE * settled, REGIME_SPREADS * spread_ns))
        if not settled:
            self._median_ns = median_ns
        elif quartiles_ns[0] - least <= settled <= quartiles_ns[1] + least:
            self._since_ns = None
        elif self._since_ns is None:
            self._since_ns = begin_ns
        if self._since_ns is None or end_ns - self._since_ns < REGIME_NS:
            return None
        self._median_ns, self._since_ns = median_ns, None
        return settled, median_ns


class _Memory:
    """Usual requests of about the last minute, to be found by their CPU time (ns)."""

    __slots__ = ("_rows", "_cpu", "_count", "_next", "_last_ns")

    def __init__(self) -> None:
        self._rows: np.ndarray = np.zeros((64, _COLUMNS), np.float32)
        self._cpu: np.ndarray = np.zeros(64, np.float32)
        self._count = self._next = self._last_ns = 0

    def add(self, row: _Row, always: bool = False) -> None:
        """Remember a request, unless another was just remembered and there are enough of them."""
        if not always and self._count >= NEIGHBOURS * 4 and row[-1] - self._last_ns < MEMORY_EVERY_NS:
            return
        if self._next == len(self._rows) < MEMORY_ROWS:
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
            self._cpu = np.concatenate([self._cpu, np.zeros_like(self._cpu)])
        self._next %= len(self._rows)
        self._rows[self._next] = row[:-1]
        self._cpu[self._next] = row[_CPU[0]] + row[_CPU[1]] + row[_CPU[2]]
        self._next += 1
        self._count = max(self._count, self._next)
        self._last_ns = row[-1]

    def seen_less(self, state: int) -> _Memory:
        new = _Memory()
        new._rows = _as_seen(self._rows, state)
        new._cpu = new._rows[:, _CPU].sum(axis=1)
        new._count, new._next, new._last_ns = self._count, self._next, self._last_ns
        return new

    def near(self, cpu_ns: int) -> np.ndarray:
        """The rows with about that CPU time: those nearest to it."""
        cpu = self._cpu[: self._count]
        if self._count <= NEIGHBOURS:
            return self._rows[: self._count]
        distance = np.abs(cpu - np.float32(cpu_ns))
        return self._rows[np.argpartition(distance, NEIGHBOURS)[:NEIGHBOURS]]

    def spread_ns(self) -> int:
        """Half the distance of the durations' quartiles, as a standard deviation (normal distribution: 0.6745)."""
        count = self._count
        low, high = np.partition(self._rows[:count, 0], (count // 4, 3 * count // 4))[[count // 4, 3 * count // 4]]
        return int((high - low) / 2 / 0.6745)

    def known_cpu_ns(self) -> int:
        """The CPU time that a few of them had at least."""
        cpu = self._cpu[: self._count]
        few = min(NEIGHBOURS // 2, self._count - 1)
        return int(np.partition(cpu, self._count - 1 - few)[self._count - 1 - few] * (1 + SAME_SPEED))


def _as_seen(rows: np.ndarray, state: int) -> np.ndarray:
    """rows: (n, at least _COLUMNS), as the probes would have seen them in that state: what is not seen is host time."""
    rows = rows.copy()
    unseen = [] if tier_of(state) == FULL else [LAUNCH]
    unseen += [] if sees_off_cpu(state) else [OFF_CPU, RUN_QUEUE]
    for part in unseen:
        rows[:, 1 + HOST] += rows[:, 1 + part]
        rows[:, 1 + part] = 0
    if not sees_launches(state):
        for counter in ("launches", "block_threads"):
            rows[:, _PARTS.stop + COUNTERS.index(counter)] = 0
    return rows


def _usual(rows: np.ndarray) -> Usual:
    """rows: (n, _COLUMNS)."""
    table = np.sort(rows, axis=0)
    middle = table[len(table) // 2].astype(np.int64).tolist()
    # Half the distance of the quartiles, as a standard deviation (normal distribution: 0.6745).
    spread = ((table[3 * len(table) // 4] - table[len(table) // 4]) / 2 / 0.6745).astype(np.int64).tolist()
    least = int(LEAST_SPREAD * middle[0])
    duration, launches, block_threads, htod, dtoh, copy = (middle[column] for column in (0, *range(_PARTS.stop, _COLUMNS)))
    part_spreads = tuple(max(part, least) for part in spread[_PARTS])
    return Usual(duration, tuple(middle[_PARTS]), launches, block_threads, htod, dtoh, copy, max(spread[0], least), part_spreads)
