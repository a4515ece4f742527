"""The thread slept in the program itself: a lock, the interpreter lock, I/O, a page fault."""

from __future__ import annotations

import numpy as np

from gputail.attribution.case import Case, contribution
from gputail.attribution.cpu_preempted import was_runnable
from gputail.budget import C_OFF_CPU, OFF_CPU
from gputail.tail import Contribution

CAUSE = "host_blocked"
_UNINTERRUPTIBLE = 2


def explain(case: Case) -> list[Contribution]:
    """All of the off-CPU excess; the culprit is the waker of the longest sleep, where it was recorded."""
    ns = case.take(OFF_CPU)
    if not ns:
        return []
    off = case.own[case.own_class == C_OFF_CPU]
    off = off[~was_runnable(off)]
    if not len(off):
        return contribution(CAUSE, ns)
    longest = off[np.argmax(off["duration_ns"])]
    kind = "uninterruptible wait (I/O or page fault)" if longest["handle"] == _UNINTERRUPTIBLE else "sleep (lock, I/O or timer)"
    waker = int(longest["block"])
    return contribution(CAUSE, ns, None, f"{kind}, woken by tid {waker}" if waker else kind)
