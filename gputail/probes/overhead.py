"""What tracing costs the traced programs, estimated: their traced calls times what one costs here, of their CPU time.

In: batches of CALL rows, and what a call was measured to cost. Out: a share. Rows of stretches off the CPU are not counted:
they are made in the scheduler, where the program was not running.
"""

from __future__ import annotations

import os
from collections import Counter

import numpy as np

from gputail.probes.table import OFF_CPU_CALL

EVERY_S = 2.0
MAX_PROCESSES = 4096
_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


class Overhead:
    """Counts calls, and compares them with CPU times every EVERY_S."""

    def __init__(self, call_cost_ns: float | None) -> None:
        self.call_cost_ns = call_cost_ns
        self.ratio: float | None = None  # of the last interval; None until there is one, or where the cost is not known
        self._calls: Counter[int] = Counter()
        self._cpu_ns: dict[int, int] = {}
        self._next_s = 0.0

    def count(self, calls: np.ndarray, now_s: float) -> None:
        """Take in a batch's rows; now_s: time.monotonic()."""
        if self.call_cost_ns is None:
            return
        tgids, counts = np.unique(calls["tgid"][calls["call"] != OFF_CPU_CALL], return_counts=True)
        self._calls.update(dict(zip(tgids.tolist(), counts.tolist(), strict=True)))
        if now_s < self._next_s:
            return
        first, self._next_s = not self._next_s, now_s + EVERY_S
        cost_ns = cpu_ns = 0.0
        known = {}
        for tgid, made in self._calls.most_common(MAX_PROCESSES):
            used_ns = cpu_time_ns(tgid)
            if used_ns is None:
                continue  # it has ended, and nobody can say what it used
            known[tgid] = used_ns
            if tgid in self._cpu_ns:
                cost_ns += made * self.call_cost_ns
                cpu_ns += used_ns - self._cpu_ns[tgid]
        if not first and cpu_ns > 0:
            self.ratio = cost_ns / cpu_ns
        self._calls.clear()
        self._calls.update(dict.fromkeys(known, 0))  # asked for next time even if they make no call
        self._cpu_ns = known


def cpu_time_ns(tgid: int) -> int | None:
    """CPU time (ns, in clock ticks) that a process has used; None when it is gone."""
    try:
        with open(f"/proc/{tgid}/stat", "rb") as stat:
            fields = stat.read(4096).rpartition(b")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) * _TICK_NS  # utime and stime, fields 14 and 15 of proc(5)
