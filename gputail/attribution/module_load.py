"""Loading or compiling kernels."""

from __future__ import annotations

import numpy as np

from gputail.attribution.case import Case, contribution
from gputail.budget import C_MODULE, MODULE
from gputail.probes import table
from gputail.tail import Contribution

CAUSE = "module_load"


def explain(case: Case) -> list[Contribution]:
    """All of the excess in calls that load; the culprit is the longest of them and what it loaded."""
    ns = case.take(MODULE)
    if not ns:
        return []
    calls = case.own[case.own_class == C_MODULE]
    if not len(calls):
        return contribution(CAUSE, ns)
    longest = calls[np.argmax(calls["duration_ns"])]
    name = case.names.kernel(case.request.tgid, int(longest["handle"]))
    return contribution(CAUSE, ns, None, table.BY_NUMBER[int(longest["call"])].name + (f" ({name})" if name else ""))
