"""A collective waited for a late rank."""

from __future__ import annotations

import numpy as np

from gputail.attribution.case import Case, contribution
from gputail.budget import C_COLLECTIVE, COLLECTIVE
from gputail.tail import Contribution

CAUSE = "collective_wait"


def explain(case: Case) -> list[Contribution]:
    """All of the excess in NCCL calls; the culprit is the communicator of the longest."""
    ns = case.take(COLLECTIVE)
    calls = case.own[case.own_class == C_COLLECTIVE]
    if not ns or not len(calls):
        return contribution(CAUSE, ns)
    longest = calls[np.argmax(calls["duration_ns"])]
    return contribution(CAUSE, ns, None, f"communicator {int(longest['handle']):#x}")
