"""More or larger kernels than usual, and the copies and launches that come with them."""

from __future__ import annotations

from gputail.attribution.case import GREW, Case, contribution
from gputail.budget import HOST, LAUNCH
from gputail.tail import Contribution

CAUSE = "more_work"


def explain(case: Case) -> list[Contribution]:
    """Waits for the GPU if the kernels grew (a larger batch is copied for longer, too), launches if there are more."""
    launches, threads = case.grew("launches"), case.grew("block_threads")
    if launches < GREW and threads < GREW:
        return []
    usual, request = case.usual, case.request
    ns = case.take_waiting()
    if launches >= GREW:
        parts = usual.parts
        ns += case.take(LAUNCH, int(parts[LAUNCH] * (launches - 1))) + case.take(HOST, int(parts[HOST] * (launches - 1)))
    culprit = f"{request.launches} launches against {usual.launches}, {request.block_threads} threads against {usual.block_threads}"
    return contribution(CAUSE, ns, None, culprit)
