"""The request's own copy: larger than usual, or out of pageable memory."""

from __future__ import annotations

import numpy as np

from gputail.attribution.case import GREW, Case, contribution
from gputail.budget import C_COPY, C_DTOH, C_HTOD, COPY, SYNC
from gputail.tail import Contribution

CAUSE = "memcpy"
# Copies smaller than this take their time for other reasons than their size.
LARGE_BYTES = 64 << 10


def explain(case: Case) -> list[Contribution]:
    """The time of the copies of the direction that grew, and of waits right behind them."""
    copies = ((C_HTOD, "htod_bytes", "HtoD"), (C_DTOH, "dtoh_bytes", "DtoH"), (C_COPY, "copy_bytes", "copy"))
    out: list[Contribution] = []
    for kind, counter, name in copies:
        have, usual = getattr(case.request, counter), getattr(case.usual, counter)
        if have - usual < LARGE_BYTES or have < GREW * usual:
            continue
        rows = case.own[case.own_class == kind]
        if not len(rows):
            continue
        # The large ones, which make up what there is more of.
        rows = rows[rows["size"] > (have - usual) / (4 * len(rows))]
        ns = case.take(COPY, int(rows["duration_ns"].sum()))
        blocking = float(np.max(rows["duration_ns"]))
        if blocking < 0.5 * case.left[SYNC]:
            ns += case.take(SYNC)  # pinned: the copy returned at once, and the wait behind it was for the copy
        out += contribution(CAUSE, ns, None, f"{have} bytes {name} against {usual}")
    return out
