"""Outliers that were seen whole, as they would look while launches are not seen: what an outlier like them most probably is.

A program is slow for the same few reasons again and again. While its launches are not seen, some of these look alike at
first (more launches and more work on the CPU, say), and the request's own rows prove none of them. Then those of the same
process that were seen whole say which it was, if they agree. In: the outliers of all processes. Out: a cause, and how many
agree on it. Who else held the GPU is never taken from them: that is there in the rows or it is not.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass

import numpy as np

from gputail.attribution import blocking_sync, host_compute, launch_backpressure, memcpy, more_work, sibling_kernel
from gputail.attribution.case import Case
from gputail.budget import C_GRAPH, C_LAUNCH, C_OFF_CPU, HOST, LAUNCH, OFF_CPU, OTHER, RUN_QUEUE
from gputail.tiers import sees_off_cpu

REMEMBERED = 64  # outliers of one process
MAX_PROCESSES = 512
ENOUGH = 3  # that are alike
AGREED = 0.75  # share of them with the same cause
MOST = 0.5  # of an excess
# Of the excess, what may lie in other parts of the budget: 0 where all lies in the same, 2 where none does.
ALIKE = 0.4
# How many times as large, beside what is usual, may its excess be.
AS_LARGE = 5.0
# Causes that cannot be told while launches are not seen, but where the request itself is to blame, or its process.
_HIDDEN = {module.CAUSE for module in (more_work, host_compute, launch_backpressure, sibling_kernel, blocking_sync, memcpy)}


@dataclass(frozen=True)
class Precedent:
    """`agree` outliers `of` those alike were slow for this cause; None: for several.

    in_launches: most of them for having waited in launches, for whatever reason.
    """

    cause: str | None
    agree: int
    of: int
    in_launches: bool

    @property
    def probability(self) -> float:
        """That the next one is, too (Laplace's rule of succession)."""
        return (self.agree + 1) / (self.of + 2)


@dataclass(frozen=True)
class _Known:
    """size: its excess beside what is usual; looks: without and with time off the CPU."""

    size: float
    looks: tuple[np.ndarray, np.ndarray]
    cause: str
    in_launches: bool


class Precedents:
    """The latest outliers of each process that were seen whole."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, deque[_Known]] = OrderedDict()

    def learn(self, case: Case, cause: str) -> None:
        """Take in an outlier that was seen whole, and its cause."""
        tgid = case.request.tgid
        known = self._known.setdefault(tgid, deque(maxlen=REMEMBERED))
        excess = _excess(case)
        blocked = min(int(case.blocked_launches["duration_ns"].sum()), excess[LAUNCH])
        in_launches = blocked >= MOST * sum(excess)
        asleep = min(_asleep_in_launches(case), excess[LAUNCH])
        excess[LAUNCH] -= asleep
        excess[OFF_CPU] += asleep
        known.append(_Known(_size(case), (_look(excess, False), _look(excess, True)), cause, in_launches))
        self._known.move_to_end(tgid)
        if len(self._known) > MAX_PROCESSES:
            self._known.popitem(last=False)

    def of(self, case: Case) -> Precedent | None:
        """What those like this one were, where enough are known."""
        known = self._known.get(case.request.tgid, ())
        is_off_cpu_seen = sees_off_cpu(case.request.state)
        size, look = _size(case), _look(_excess(case), is_off_cpu_seen)
        alike = [
            one
            for one in known
            if size <= AS_LARGE * one.size and one.size <= AS_LARGE * size and np.abs(one.looks[is_off_cpu_seen] - look).sum() <= ALIKE
        ]
        count = len(alike)
        if count < ENOUGH:
            return None
        cause, agree = Counter(one.cause for one in alike).most_common(1)[0]
        in_launches = sum(one.in_launches for one in alike) >= AGREED * count
        return Precedent(cause if cause in _HIDDEN and agree >= AGREED * count else None, agree, count, in_launches)


def _size(case: Case) -> float:
    return case.excess_ns / max(case.usual.duration_ns, 1)


def _excess(case: Case) -> list[int]:
    return [max(part - usual, 0) for part, usual in zip(case.request.parts, case.usual.parts, strict=True)]


def _look(excess: list[int], is_off_cpu_seen: bool) -> np.ndarray:
    """Shares of the excess by part, as they look while launches are not seen: their time is the program's own."""
    look = np.array(excess, float)
    unseen = [LAUNCH, OTHER] + ([] if is_off_cpu_seen else [OFF_CPU, RUN_QUEUE])
    look[HOST] += look[unseen].sum()
    look[unseen] = 0
    return look / max(look.sum(), 1.0)


def _asleep_in_launches(case: Case) -> int:
    """How long (ns) the request slept inside of launches: time off the CPU like any other where they are not seen."""
    kind = case.own_class
    launches = case.own[(kind == C_LAUNCH) | (kind == C_GRAPH)]
    asleep = case.own[kind == C_OFF_CPU]
    if not len(launches) or not len(asleep):
        return 0
    start = np.sort(launches["start_ns"])
    end = np.sort(launches["start_ns"] + launches["duration_ns"])
    place = np.searchsorted(start, asleep["start_ns"], side="right") - 1
    inside = (place >= 0) & (asleep["start_ns"] < end[np.maximum(place, 0)])
    return int(asleep["duration_ns"][inside].sum())
