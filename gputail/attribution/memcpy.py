"""The request's own copy: larger than usual, or out of pageable memory."""

from __future__ import annotations

import numpy as np

from gputail.attribution.case import GREW, MATERIAL, Case, contribution
from gputail.budget import C_COPY, C_DTOH, C_GRAPH, C_HTOD, C_LAUNCH, CLASS_OF_CALL, COPY, SYNC
from gputail.tail import Contribution

CAUSE = "memcpy"
# Copies smaller than this take their time for other reasons than their size.
LARGE_BYTES = 64 << 10
LATEST = 5  # usual requests that say how long such copies took before


def explain(case: Case) -> list[Contribution]:
    """The time of the copies of the direction that grew, and of waits right behind them.

    Where launches were not seen, only of those to the GPU: others may have waited for more work than usual.
    """
    are_launches_seen = case.request.are_launches_seen
    copies = ((C_HTOD, "htod_bytes", "HtoD"), (C_DTOH, "dtoh_bytes", "DtoH"), (C_COPY, "copy_bytes", "copy"))
    out: list[Contribution] = []
    for kind, counter, name in copies:
        have, usual = getattr(case.request, counter), getattr(case.usual, counter)
        if have - usual < LARGE_BYTES or have < GREW * usual or not (are_launches_seen or kind == C_HTOD):
            continue
        rows = case.own[case.own_class == kind]
        if not len(rows):
            continue
        # The large ones, which make up what there is more of.
        rows = rows[rows["size"] > (have - usual) / (4 * len(rows))]
        ns = case.take(COPY, int(rows["duration_ns"].sum()))
        blocking = float(np.max(rows["duration_ns"]))
        if blocking < 0.5 * case.left[SYNC] and are_launches_seen:
            ns += case.take(SYNC)  # pinned: the copy returned at once, and the wait behind it was for the copy
        out += contribution(CAUSE, ns, None, f"{have} bytes {name} against {usual}")
    return out


def explain_rest(case: Case) -> list[Contribution]:
    """Copies to the GPU of the usual size that blocked though nobody else held them up: they came out of pageable memory.

    Only those that came before any work of the request that they could have waited for, and only what they took beyond
    those of the last usual requests.
    """
    left = case.left[COPY]
    if left < MATERIAL * case.excess_ns or not case.request.are_launches_seen:
        return []
    rows = _uploads(case.own)
    took = int(rows["duration_ns"].sum())
    before = sorted(int(_uploads(usual)["duration_ns"].sum()) for usual in case.latest_usual(LATEST))
    beyond = took - before[len(before) // 2] if before else 0
    if beyond < left / 2 or beyond < took / 2:
        return []
    longest = rows[np.argmax(rows["duration_ns"])]
    culprit = f"{int(longest['size'])} bytes HtoD blocked for {int(longest['duration_ns']) / 1e6:.1f} ms: pageable memory"
    return contribution(CAUSE, case.take(COPY, beyond), None, culprit)


def _uploads(rows: np.ndarray) -> np.ndarray:
    """The large copies to the GPU before the first launch."""
    kind = CLASS_OF_CALL[rows["call"]]
    work = np.flatnonzero((kind == C_LAUNCH) | (kind == C_GRAPH))
    first = work[0] if len(work) else len(rows)
    return rows[:first][(kind[:first] == C_HTOD) & (rows["size"][:first] >= LARGE_BYTES)]
