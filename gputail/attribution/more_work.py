"""More or larger kernels than usual, and the copies and launches that come with them."""

from __future__ import annotations

from gputail.attribution.case import GREW, Case, contribution
from gputail.budget import HOST, LAUNCH
from gputail.tail import Contribution

CAUSE = "more_work"
# Programs mostly launch exactly as much each time; less than this more is not worth a word.
SLIGHTLY = 0.05
# The time of a little more work may be so many times what is in proportion to it.
ROOM = 1.5


def explain(case: Case) -> list[Contribution]:
    """Waits for the GPU (a larger batch is copied for longer, too), and launching and host time as far as in proportion.

    Where it is only a little more, its waits are believed in proportion, too.
    """
    launches, threads = case.grew("launches"), case.grew("block_threads")
    more = max(launches, threads) - 1
    if more < SLIGHTLY:
        return []
    usual, request = case.usual, case.request
    is_much = more >= GREW - 1
    ns = case.take_waiting(None if is_much else int(ROOM * more * usual.duration_ns))
    # Work of another size is prepared for longer by the host, too.
    room = 1 if is_much else ROOM
    ns += case.take(LAUNCH, int(room * usual.parts[LAUNCH] * max(launches - 1, 0))) + case.take(HOST, int(room * usual.parts[HOST] * more))
    culprit = f"{request.launches} launches against {usual.launches}, {request.block_threads} threads against {usual.block_threads}"
    return contribution(CAUSE, ns, None, culprit)
