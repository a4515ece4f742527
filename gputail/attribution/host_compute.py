"""The thread itself, on the CPU outside the driver, for longer than usual."""

from __future__ import annotations

from gputail.attribution.case import Case, contribution
from gputail.budget import HOST, LAUNCH, OTHER
from gputail.tail import Contribution
from gputail.tiers import sees_off_cpu

CAUSE = "host_compute"


def explain(case: Case) -> list[Contribution]:
    """What is left of host time, and of calls that only enqueue: both grow together where the CPU is slow.

    Nothing where launches or time off the CPU were not seen: there may have been more of those.
    """
    if not case.request.are_launches_seen or not sees_off_cpu(case.request.state):
        return []
    ns = case.take(HOST) + case.take(LAUNCH) + case.take(OTHER)
    return contribution(CAUSE, ns, None, f"tid {case.request.tid}")
