"""Allocation, free, pinning."""

from __future__ import annotations

import numpy as np

from gputail.attribution.case import Case, contribution
from gputail.budget import ALLOC, C_ALLOC, C_FREE
from gputail.probes import table
from gputail.tail import Contribution

CAUSE = "memory_alloc"


def explain(case: Case) -> list[Contribution]:
    """All of the allocation excess; the culprit is the longest such call."""
    ns = case.take(ALLOC)
    if not ns:
        return []
    calls = case.own[(case.own_class == C_ALLOC) | (case.own_class == C_FREE)]
    if not len(calls):
        return contribution(CAUSE, ns)
    longest = calls[np.argmax(calls["duration_ns"])]
    return contribution(
        CAUSE, ns, None, f"{table.BY_NUMBER[int(longest['call'])].name}, {int(calls['size'].sum())} bytes in {len(calls)} calls"
    )
