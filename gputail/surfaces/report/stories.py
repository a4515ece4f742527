"""Verdicts in words, one sentence each.

In go request records and findings, out comes text in which the names of other processes are already fit to print (terminal.clean);
markup is left to the outputs.
"""

from __future__ import annotations

import re

from gputail.attribution import UNKNOWN
from gputail.surfaces.report.gathering import Findings
from gputail.surfaces.terminal import clean, duration
from gputail.tail import Contribution, RequestRecord

MAX_CULPRIT = 140
# Contributions are told until so much of the excess is, and so many at most.
TELL_SHARE = 0.9
MAX_TOLD = 3

_BEHIND = {
    "foreign_kernel": "waiting behind kernels",
    "foreign_copy": "waiting behind copies",
}
_WORDS = {
    "sibling_kernel": "waiting behind another stream of its own process",
    "blocking_sync": "in a wait for more than its own work",
    "memory_alloc": "allocating or freeing memory",
    "module_load": "loading or compiling kernels",
    "memcpy": "in larger or slower copies of its own",
    "more_work": "in more work of its own than usual",
    "launch_backpressure": "in launches that blocked, the queue being full",
    "collective_wait": "waiting for another rank of a collective",
    "cpu_preempted": "ready to run, but not on a CPU",
    "host_blocked": "asleep outside the driver",
    "host_compute": "on the CPU in the program itself",
    "nic_pressure": "beside a busy host network",
    "gpu_throttled": "on a GPU with lowered clocks",
    UNKNOWN: "unexplained",
}


def cause_in_words(cause: str) -> str:
    """What a contribution of this cause was spent with, as in "3.1 ms ..."."""
    return _BEHIND.get(cause) or _WORDS.get(cause) or clean(cause.replace("_", " "))


def reason(c: Contribution) -> str:
    """A contribution without its time: "waiting behind kernels of pid 556 (python3, gemm)"."""
    culprit = clean(c.culprit, MAX_CULPRIT) if c.culprit else ""
    if c.cause in _BEHIND and c.culprit_pid is not None:
        return f"{_BEHIND[c.cause]} of pid {c.culprit_pid}" + (f" ({culprit})" if culprit else "")
    if c.culprit_pid is not None and not re.search(rf"\b[pt]id {c.culprit_pid}\b", culprit):
        culprit = f"pid {c.culprit_pid}" + (f", {culprit}" if culprit else "")
    return cause_in_words(c.cause) + (f" ({culprit})" if culprit else "")


def headline(found: Findings) -> str:
    """A workload that had outliers in one sentence: how many, and what most of their excess went to."""
    first = found.shares[0]
    text = f"{clean(found.name, MAX_CULPRIT)}: {found.outliers} of {found.requests} requests were slow, "
    text += f"by {duration(found.excess_ns)} in all; {first.permille / 10:.1f}% of that: "
    culprit = next((c for c in found.culprits if c.cause == first.cause), None)
    if culprit is None:
        return text + cause_in_words(first.cause)
    others = sum(c.cause == first.cause for c in found.culprits) - 1
    text += reason(Contribution(first.cause, first.ns, culprit.pid, culprit.text))
    return text + (f" and {others} other{'s' * (others > 1)}" if others > 0 else "")


def story(record: RequestRecord) -> str:
    """An outlier in one sentence: "12.5 ms instead of 5.16 ms: 7.31 ms waiting behind kernels of pid 556 (python3, gemm)"."""
    excess_ns = record.excess_ns or 0
    told, told_ns = [], 0
    for c in record.contributions[:MAX_TOLD]:
        told.append(f"{duration(c.ns)} {reason(c)}")
        told_ns += c.ns
        if told_ns >= TELL_SHARE * excess_ns:
            break
    rest = len(record.contributions) - len(told)
    if rest > 0:
        told.append(f"{duration(excess_ns - told_ns)} in {rest} smaller part" + "s" * (rest > 1))
    head = f"{duration(record.duration_ns)} instead of {duration(record.baseline_ns)}"
    return f"{head}: {'; '.join(told)}" if told else f"{head}: unexplained"
