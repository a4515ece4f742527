"""A device-wide wait for work that is not the request's own."""

from __future__ import annotations

import numpy as np

from gputail.attribution.case import Case, contribution
from gputail.attribution.outstanding import union_ns
from gputail.probes import table
from gputail.tail import Contribution

CAUSE = "blocking_sync"
_DEVICE_WIDE = np.array([function.number for function in table.FUNCTIONS if function.waits_for == "device"])


def explain(case: Case) -> list[Contribution]:
    """The time in device-wide waits during which other streams of the process had work outstanding."""
    if not case.waiting_left:
        return []
    waits = case.own[np.isin(case.own["call"], _DEVICE_WIDE)]
    if not len(waits) or not case.siblings:
        return []
    longest = waits[np.argmax(waits["duration_ns"])]
    ns = 0
    for wait in waits:
        start = int(wait["start_ns"])
        ns += union_ns(case.siblings, start, start + int(wait["duration_ns"]))
    largest = max(case.siblings, key=lambda work: work.block_threads)
    kernel = case.names.kernel(largest.tgid, largest.kernel) or f"kernel {largest.kernel:#x}"
    culprit = f"{table.BY_NUMBER[int(longest['call'])].name} waited for stream {largest.stream:#x} (tid {largest.tid}, {kernel})"
    return contribution(CAUSE, case.take_waiting(ns), None, culprit)
