"""Waiting while another process's copies held the link to the GPU."""

from __future__ import annotations

from gputail.attribution.case import Case, contribution
from gputail.attribution.outstanding import GpuWork, union_ns
from gputail.tail import Contribution

CAUSE = "foreign_copy"


def explain(case: Case) -> list[Contribution]:
    """Waits for the GPU, as far as other processes were copying; one contribution for each process."""
    if not case.waiting_left:
        return []
    start, end = case.request.start_ns, case.request.end_ns
    if not (case.request.htod_bytes or case.request.dtoh_bytes or case.request.copy_bytes):
        return []
    by_process: dict[int, list[GpuWork]] = {}
    for work in case.foreign:
        if work.is_copy:
            by_process.setdefault(work.tgid, []).append(work)
    out: list[Contribution] = []
    for tgid, spans in sorted(by_process.items(), key=lambda item: -union_ns(item[1], start, end)):
        ns = case.take_waiting(union_ns(spans, start, end))
        out += contribution(CAUSE, ns, tgid, f"{sum(span.copy_bytes for span in spans)} bytes")
    return out
