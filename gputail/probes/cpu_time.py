"""The CPU time that a process has used, from /proc."""

from __future__ import annotations

import os

_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def cpu_time_ns(tgid: int) -> int | None:
    """CPU time (ns, in clock ticks) that a process has used; None when it is gone."""
    try:
        with open(f"/proc/{tgid}/stat", "rb") as stat:
            fields = stat.read(4096).rpartition(b")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) * _TICK_NS  # utime and stime, fields 14 and 15 of proc(5)
