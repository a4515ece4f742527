"""The thread could run and did not: another thread had the CPU, or its cgroup's quota was used up."""

from __future__ import annotations

import numpy as np

from gputail.attribution.case import Case, contribution
from gputail.budget import C_OFF_CPU, RUN_QUEUE
from gputail.tail import Contribution

CAUSE = "cpu_preempted"


def was_runnable(off_cpu: np.ndarray) -> np.ndarray:
    """Of off-CPU rows, which were switched out able to run: prev_state 0, or the kernel's mark for a preemption (256)."""
    return (off_cpu["handle"] == 0) | (off_cpu["handle"] == 256)


def explain(case: Case) -> list[Contribution]:
    """All of the run queue's excess; the culprit is the thread that ran before, over the longest time in sum."""
    ns = case.take(RUN_QUEUE)
    if not ns:
        return []
    off = case.own[case.own_class == C_OFF_CPU]
    if not len(off):
        return contribution(CAUSE, ns)
    preempted = was_runnable(off)
    woken = off["size"].astype(np.int64)
    end = (off["start_ns"] + off["duration_ns"]).astype(np.int64)
    waited = np.where(preempted, off["duration_ns"].astype(np.int64), np.where(woken > 0, end - woken, 0))
    runners, of = np.unique(off["stream"], return_inverse=True)
    by_runner = np.bincount(of, weights=waited)
    runner = int(runners[np.argmax(by_runner)])
    # The idle thread (0) ran before: nobody held the CPU, so it was a quota, or the CPU slept.
    return contribution(
        CAUSE, ns, runner or None, f"tid {runner} ran on cpu {int(off['cpu'][0])}" if runner else "cpu was idle: quota or wake-up latency"
    )
