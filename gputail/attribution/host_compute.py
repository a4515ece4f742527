"""The thread itself, on the CPU outside the driver, for longer than usual."""

from __future__ import annotations

from gputail.attribution.case import Case, contribution
from gputail.budget import COPY, HOST, LAUNCH, OTHER, SYNC
from gputail.tail import Contribution
from gputail.tiers import sees_off_cpu

CAUSE = "host_compute"
# A program that spends this share of its requests in waits for the GPU would spend more there if it gave it more to do.
WAITS_FOR_THE_GPU = 0.2
# Of the excess: what more in its waits is not told from chance.
SLIGHTLY = 0.2


def explain(case: Case) -> list[Contribution]:
    """What is left of host time, and of calls that only enqueue: both grow together where the CPU is slow.

    Where launches were not seen there may have been more of them: it is believed only of a program that waits for the GPU, and
    then would have waited longer. Nothing where time off the CPU was not seen, which may be in it.
    """
    if not sees_off_cpu(case.request.state) or not (case.request.are_launches_seen or _waited_no_longer(case)):
        return []
    ns = case.take(HOST) + case.take(LAUNCH) + case.take(OTHER)
    return contribution(CAUSE, ns, None, f"tid {case.request.tid}")


def _waited_no_longer(case: Case) -> bool:
    before, now = ((of.parts[SYNC] + of.parts[COPY]) for of in (case.usual, case.request))
    return before >= WAITS_FOR_THE_GPU * case.usual.duration_ns and now - before <= SLIGHTLY * case.excess_ns
