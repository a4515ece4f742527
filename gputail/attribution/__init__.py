"""Why an outlier was slow: contributions that explain its excess, largest first.

In: a request well above what is usual, and the rows around it. Out: a verdict. One file per cause. The causes are
asked in the order below, each taking what it can account for from the excess of the budget's parts: first what the
request's own rows prove, then who else held the GPU that it waited for, then what is left to its own calls and host
time. What nothing accounts for is `unknown`, unless it could not be seen and precedents.py tells what it most probably is.
"""

from __future__ import annotations

from dataclasses import dataclass

from gputail.attribution import (
    blocking_sync,
    collective_wait,
    cpu_preempted,
    foreign_copy,
    foreign_kernel,
    host_blocked,
    host_compute,
    launch_backpressure,
    memcpy,
    memory_alloc,
    module_load,
    more_work,
    sibling_kernel,
)  # fmt: skip
from gputail.attribution.case import Case
from gputail.attribution.precedents import Precedent, Precedents
from gputail.baseline import Usual
from gputail.communicators import Communicators
from gputail.devices import Devices
from gputail.history import History
from gputail.names import Names
from gputail.requests import Request
from gputail.streams import Streams
from gputail.tail import Contribution
from gputail.tiers import FULL

UNKNOWN = "unknown"

_OWN = (collective_wait, cpu_preempted, host_blocked, memory_alloc, module_load, more_work, memcpy)
_HELD = (blocking_sync, sibling_kernel, foreign_copy, foreign_kernel)
_REST = (launch_backpressure, host_compute)
CAUSES = (*(module.CAUSE for module in (*_OWN, *_HELD, *_REST)), UNKNOWN)


@dataclass(frozen=True)
class Verdict:
    """cause: that of the largest contribution; confidence: the share (0 to 1) of the excess that it explains.

    Where precedents told the cause, that share times the probability that they are right.
    """

    cause: str
    confidence: float
    contributions: tuple[Contribution, ...]


def attribute(
    request: Request,
    usual: Usual,
    history: History,
    until_ns: int,
    names: Names,
    streams: Streams,
    communicators: Communicators,
    devices: Devices,
    precedents: Precedents,
) -> Verdict:
    """What made the request slow, from rows that ended before `until_ns`. The contributions sum to its excess."""
    case = Case(request, usual, history, until_ns, names, streams, communicators, devices)
    precedent = None if request.tier == FULL else precedents.of(case)
    case.in_launches = precedent is not None and precedent.in_launches
    if request.are_launches_seen and not case.in_launches:
        precedent = None  # all but how long launches took is there to be seen
    set_aside = _disproved(precedent)
    found = [contribution for cause in _OWN if cause.CAUSE not in set_aside for contribution in cause.explain(case)]
    if case.waiting_left:
        found += case.allot_waiting([claim for cause in _HELD for claim in cause.claims(case)])
    found += memcpy.explain_rest(case)
    found += [contribution for cause in _REST if cause.CAUSE not in set_aside for contribution in cause.explain(case)]
    contributions = _fit(found, case)
    top = contributions[0]
    if top.cause == UNKNOWN and precedent is not None and precedent.cause is not None:
        like = f"as {precedent.agree} of {precedent.of} like it that were seen whole"
        contributions[0] = top = Contribution(precedent.cause, top.ns, None, like)
        return Verdict(top.cause, _share(top.ns * precedent.probability, case), tuple(contributions))
    if request.state == FULL:
        precedents.learn(case, top.cause)
    return Verdict(top.cause, 0.0 if top.cause == UNKNOWN else _share(top.ns, case), tuple(contributions))


def _disproved(precedent: Precedent | None) -> set[str]:
    """Causes that one would believe while launches are not seen whole, if precedents did not say otherwise."""
    if precedent is None:
        return set()
    asleep_in_launches = {host_blocked.CAUSE} if precedent.in_launches else set()
    launches_in_host_time = {host_compute.CAUSE} if precedent.cause != host_compute.CAUSE else set()
    return asleep_in_launches | launches_in_host_time


def _share(ns: float, case: Case) -> float:
    return round(ns / max(case.excess_ns, 1), 3)


def _fit(found: list[Contribution], case: Case) -> list[Contribution]:
    """Make contributions sum to the excess, largest first.

    They sum to more where other parts took less time than usual: all shrink alike. What is missing is unknown.
    """
    excess_ns = case.excess_ns
    total = sum(contribution.ns for contribution in found)
    if total > excess_ns:
        found = [Contribution(c.cause, c.ns * excess_ns // total, c.culprit_pid, c.culprit) for c in found]
        total = sum(contribution.ns for contribution in found)
    found = sorted((c for c in found if c.ns > 0), key=lambda c: -c.ns)
    rest = excess_ns - total
    if rest and total and rest < len(found) + 2:  # what rounding down left over
        found[0] = Contribution(found[0].cause, found[0].ns + rest, found[0].culprit_pid, found[0].culprit)
    elif rest > 0 or not found:
        found.append(Contribution(UNKNOWN, rest, None, case.waited_for_itself()))
    return sorted(found, key=lambda c: -c.ns)
