"""What a report says, added up from request records as they come.

In go `RequestRecord`s, and at the end the snapshot; out comes a `Findings` for each workload, and the worst requests.
Memory is bounded whatever the number of requests, workloads and culprits: what no longer fits is counted as further ones.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gputail.attribution import UNKNOWN
from gputail.baseline import REGIME_NS, RegimeChange
from gputail.histogram import Histogram
from gputail.snapshot import Snapshot
from gputail.surfaces.report.tails import Tail
from gputail.tail import RequestRecord

MAX_WORKLOADS = 128
MAX_CULPRITS = 1024  # of one workload
MAX_CULPRIT_CHARS = 200
# A change between the halves of a recording is shown where a quantile moved by so much.
SHIFT = 1.2
QUANTILES = (0.5, 0.9, 0.99, 0.999)

# Counts and sizes in a culprit's description differ from request to request; what is left tells culprits apart.
_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")


@dataclass(frozen=True)
class Share:
    """A cause's part of a workload's whole excess. permille: of all shares they sum to 1000."""

    cause: str
    outliers: int  # with this as their first cause
    ns: int
    permille: int


@dataclass(frozen=True)
class Culprit:
    """Who or what a contribution names: its excess in all, and in how many requests. text: of the largest contribution."""

    cause: str
    pid: int | None
    text: str
    ns: int
    requests: int


@dataclass(frozen=True)
class Change:
    """A workload before and after. what: "regime change" or "first and second half"; time_ns: where the two meet."""

    what: str
    time_ns: int
    before: Histogram
    after: Histogram
    outliers_before: int
    outliers_after: int
    further: int = 0  # regime changes that are not shown


@dataclass(frozen=True)
class Findings:
    """All that is said of one workload. `longest_incomplete_ns` is None where every request was complete."""

    name: str
    pid: int
    requests: int
    incomplete: int
    longest_incomplete_ns: int | None
    outliers: int
    first_ns: int
    last_ns: int
    baseline_ns: int | None  # what is usual at the end; None if it was never learned
    histogram: Histogram
    tail: Tail
    excess_ns: int
    shares: tuple[Share, ...]
    culprits: tuple[Culprit, ...]
    change: Change | None

    @property
    def longest_ns(self) -> int:
        return int(self.tail.longest_ns.max())

    def quantile(self, q: float) -> int | None:
        """The quantile (ns), None where there are too few requests to speak of it; a bucket's middle never tops the longest."""
        ns = spoken_quantile(self.histogram, q)
        return None if ns is None else min(ns, self.longest_ns)

    @property
    def per_second(self) -> float | None:
        return self.requests / (self.last_ns - self.first_ns) * 1e9 if self.requests > 1 and self.last_ns > self.first_ns else None


@dataclass
class _CulpritSum:
    ns: int = 0
    requests: int = 0
    largest_ns: int = -1
    text: str = ""


@dataclass
class _Sum:
    """What is added up of one workload."""

    tail: Tail
    pid: int
    first_ns: int
    last_ns: int = 0
    requests: int = 0
    incomplete: int = 0
    longest_incomplete_ns: int | None = None
    outliers: int = 0
    excess_ns: int = 0
    by_cause: dict[str, list[int]] = field(default_factory=dict)  # cause: outliers, ns
    culprits: dict[tuple[str, int | None, str], _CulpritSum] = field(default_factory=dict)


class Gathering:
    """wanted: a part of the names of the workloads to report on, "" for all. worst: how many requests to single out."""

    def __init__(self, wanted: str = "", worst: int = 5) -> None:
        self._wanted, self._worst_count = wanted, worst
        self._sums: dict[str, _Sum] = {}
        self._worst: list[tuple[int, int, int, RequestRecord]] = []  # a heap, the least bad first
        self._origin_ns: int | None = None
        self._passed_over: dict[str, None] = {}
        self.further_workloads = 0  # that are counted nowhere else
        self.further_requests = 0

    def is_wanted(self, record: RequestRecord) -> bool:
        """Whether the request is of a workload to be reported on; the names of others are kept for `passed_over`."""
        if self._wanted in record.workload:
            return True
        if len(self._passed_over) < MAX_WORKLOADS:
            self._passed_over[record.workload] = None
        return False

    def add(self, records: Iterable[RequestRecord]) -> None:
        """Take in requests that are wanted."""
        fresh: dict[str, list[RequestRecord]] = {}
        for record in records:
            fresh.setdefault(record.workload, []).append(record)
        for name, found in fresh.items():
            self._add(name, found)

    def passed_over(self) -> list[str]:
        """Names of the workloads that were not wanted, for an error that helps."""
        return list(self._passed_over)

    def findings(self, snapshot: Snapshot) -> tuple[Findings, ...]:
        """What is to be said of each workload, the largest excess first; what is usual and what changed is the snapshot's."""
        usual = {view.name: view.baseline_ns for view in snapshot.workloads}
        changes = snapshot.regime_changes
        out = [_findings(name, entry, usual.get(name), [c for c in changes if c.workload == name]) for name, entry in self._sums.items()]
        return tuple(sorted(out, key=lambda found: (-found.excess_ns, -found.requests, found.name)))

    def worst(self) -> tuple[RequestRecord, ...]:
        """The outliers with the largest excess, the worst first."""
        return tuple(entry[-1] for entry in sorted(self._worst, key=lambda entry: entry[:-1], reverse=True))

    def _add(self, name: str, records: list[RequestRecord]) -> None:
        entry = self._sums.get(name)
        if entry is None:
            if self._origin_ns is None:
                self._origin_ns = records[0].start_ns
            if len(self._sums) >= MAX_WORKLOADS:
                self._let_go()
            entry = self._sums[name] = _Sum(Tail(self._origin_ns), records[0].pid, records[0].start_ns)
        entry.tail.add([r.end_ns for r in records], [r.duration_ns for r in records], [r.outlier for r in records])
        entry.requests += len(records)
        for record in records:
            entry.first_ns, entry.last_ns = min(entry.first_ns, record.start_ns), max(entry.last_ns, record.end_ns)
            if record.incomplete:
                entry.incomplete += 1
                entry.longest_incomplete_ns = max(entry.longest_incomplete_ns or 0, record.duration_ns)
            if record.outlier:
                self._add_outlier(entry, record)

    def _add_outlier(self, entry: _Sum, record: RequestRecord) -> None:
        excess_ns = record.excess_ns or 0
        entry.outliers += 1
        entry.excess_ns += excess_ns
        entry.by_cause.setdefault(record.cause or UNKNOWN, [0, 0])[0] += 1
        left_ns = excess_ns
        seen: set[tuple[str, int | None, str]] = set()
        for c in record.contributions:
            left_ns -= c.ns
            entry.by_cause.setdefault(c.cause, [0, 0])[1] += c.ns
            if c.culprit_pid is None and not c.culprit:
                continue
            text = (c.culprit or "")[:MAX_CULPRIT_CHARS]
            key = (c.cause, c.culprit_pid, _NUMBER.sub("#", text))
            if key not in entry.culprits and len(entry.culprits) >= MAX_CULPRITS:
                continue
            culprit = entry.culprits.setdefault(key, _CulpritSum())
            culprit.ns += c.ns
            culprit.requests += key not in seen
            seen.add(key)
            if c.ns > culprit.largest_ns:
                culprit.largest_ns, culprit.text = c.ns, text
        if left_ns:  # what the contributions leave over is explained by nothing
            entry.by_cause.setdefault(UNKNOWN, [0, 0])[1] += left_ns
        if self._worst_count:
            item = (excess_ns, -record.end_ns, -record.tid, record)
            if len(self._worst) < self._worst_count:
                heapq.heappush(self._worst, item)
            elif item[:-1] > self._worst[0][:-1]:
                heapq.heapreplace(self._worst, item)

    def _let_go(self) -> None:
        """Make room for another workload: the one with the fewest requests is counted among the further ones."""
        name = min(self._sums, key=lambda name: self._sums[name].requests)
        self.further_workloads += 1
        self.further_requests += self._sums.pop(name).requests


def permille(parts: Sequence[int]) -> list[int]:
    """Each part's share of their sum in thousandths, which sum to 1000 (largest remainders rounded up); zeros for a sum of 0."""
    total = sum(parts)
    if total <= 0:
        return [0] * len(parts)
    shares = [1000 * part // total for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda i: (-(1000 * parts[i] % total), i))
    for i in by_remainder[: 1000 - sum(shares)]:
        shares[i] += 1
    return shares


def _findings(name: str, entry: _Sum, baseline_ns: int | None, changes: list[RegimeChange]) -> Findings:
    causes = sorted(entry.by_cause.items(), key=lambda item: (-item[1][1], -item[1][0], item[0]))
    parts = permille([ns for _, (_, ns) in causes])
    shares = tuple(Share(cause, outliers, ns, part) for (cause, (outliers, ns)), part in zip(causes, parts, strict=True))
    culprits = [Culprit(cause, pid, c.text, c.ns, c.requests) for (cause, pid, _), c in entry.culprits.items()]
    return Findings(
        name=name,
        pid=entry.pid,
        requests=entry.requests,
        incomplete=entry.incomplete,
        longest_incomplete_ns=entry.longest_incomplete_ns,
        outliers=entry.outliers,
        first_ns=entry.first_ns,
        last_ns=entry.last_ns,
        baseline_ns=baseline_ns,
        histogram=entry.tail.histogram(),
        tail=entry.tail,
        excess_ns=entry.excess_ns,
        shares=shares,
        culprits=tuple(sorted(culprits, key=lambda c: (-c.ns, -c.requests, c.text))),
        change=_regime_change(entry.tail, changes) or _halves(entry),
    )


def _regime_change(tail: Tail, changes: list[RegimeChange]) -> Change | None:
    """The largest regime change; the slices in which the shift began and was noticed belong to neither side."""
    if not changes:
        return None
    largest = max(changes, key=lambda c: max(c.after_ns, c.before_ns) / max(min(c.after_ns, c.before_ns), 1))
    began_ns = largest.time_ns - REGIME_NS
    stop, first = tail.slice_of(began_ns), tail.slice_of(largest.time_ns) + 1
    return _between("regime change", tail, began_ns, stop, first, len(changes) - 1)


def _halves(entry: _Sum) -> Change | None:
    """The two halves of the recording, where they differ."""
    tail = entry.tail
    middle_ns = (entry.first_ns + entry.last_ns) // 2
    middle = tail.slice_of(middle_ns)
    change = _between("first and second half", tail, tail.origin_ns + middle * tail.width_ns, middle, middle)
    for q in QUANTILES:
        before, after = spoken_quantile(change.before, q), spoken_quantile(change.after, q)
        if before and after and not 1 / SHIFT <= after / before <= SHIFT:
            return change
    return None


def _between(what: str, tail: Tail, time_ns: int, stop: int, first: int, further: int = 0) -> Change:
    before, after = tail.histogram(0, stop), tail.histogram(first)
    return Change(what, time_ns, before, after, int(tail.outliers[:stop].sum()), int(tail.outliers[first:].sum()), further)


def spoken_quantile(histogram: Histogram, q: float) -> int | None:
    """The quantile (ns), None where fewer than one request lies beyond it: too few to speak of it."""
    return histogram.quantile(q) if round(histogram.count * (1 - q), 6) >= 1 else None
