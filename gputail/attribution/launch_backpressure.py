"""Launches that blocked because the stream's queue was full, of the request's own work."""

from __future__ import annotations

import numpy as np

from gputail.attribution.case import Case, contribution
from gputail.budget import LAUNCH
from gputail.tail import Contribution

CAUSE = "launch_backpressure"


def explain(case: Case) -> list[Contribution]:
    """The time of the launches that blocked while nobody else held the GPU; the culprit is the stream of the longest."""
    blocked = case.blocked_launches
    if not case.left[LAUNCH] or not len(blocked):
        return []
    ns = case.take(LAUNCH, int(blocked["duration_ns"].sum()))
    return contribution(CAUSE, ns, None, f"stream {int(blocked['stream'][np.argmax(blocked['duration_ns'])]):#x}")
