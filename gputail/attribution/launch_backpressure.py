"""Launches that blocked because the stream's queue was full."""

from __future__ import annotations

import numpy as np

from gputail.attribution.case import Case, contribution
from gputail.budget import C_GRAPH, C_LAUNCH, LAUNCH
from gputail.tail import Contribution

CAUSE = "launch_backpressure"
# A launch takes a few microseconds; one that takes this long and many times the median has waited for room.
BLOCKED_NS = 100_000
BLOCKED_RATIO = 10


def explain(case: Case) -> list[Contribution]:
    """The time of the launches that blocked; the culprit is the stream of the longest."""
    if not case.left[LAUNCH]:
        return []
    launches = case.own[(case.own_class == C_LAUNCH) | (case.own_class == C_GRAPH)]
    if not len(launches):
        return []
    duration = launches["duration_ns"]
    blocked = duration > max(BLOCKED_NS, BLOCKED_RATIO * float(np.median(duration)))
    if not blocked.any():
        return []
    ns = case.take(LAUNCH, int(duration[blocked].sum()))
    return contribution(CAUSE, ns, None, f"stream {int(launches['stream'][np.argmax(duration)]):#x}")
