"""More or larger kernels than usual, and the copies and launches that come with them."""

from __future__ import annotations

from gputail.attribution.case import GREW, Case, contribution
from gputail.budget import HOST, LAUNCH
from gputail.tail import Contribution

CAUSE = "more_work"


def explain(case: Case) -> list[Contribution]:
    """Waits for the GPU (a larger batch is copied for longer, too), and launching and host time as far as in proportion."""
    launches, threads = case.grew("launches"), case.grew("block_threads")
    if launches < GREW and threads < GREW:
        return []
    usual, request = case.usual, case.request
    ns = case.take_waiting() + case.take(LAUNCH, int(usual.parts[LAUNCH] * max(launches - 1, 0)))
    # Work of another size is prepared for longer by the host, too.
    ns += case.take(HOST, int(usual.parts[HOST] * (max(launches, threads) - 1)))
    culprit = f"{request.launches} launches against {usual.launches}, {request.block_threads} threads against {usual.block_threads}"
    return contribution(CAUSE, ns, None, culprit)
