"""The thread itself, on the CPU outside the driver, for longer than usual."""

from __future__ import annotations

from gputail.attribution.case import Case, contribution
from gputail.budget import HOST, LAUNCH, OTHER
from gputail.tail import Contribution

CAUSE = "host_compute"


def explain(case: Case) -> list[Contribution]:
    """What is left of host time, and of calls that only enqueue: both grow together where the CPU is slow."""
    ns = case.take(HOST) + case.take(LAUNCH) + case.take(OTHER)
    return contribution(CAUSE, ns, None, f"tid {case.request.tid}")
