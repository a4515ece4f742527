"""Waiting while another process's kernels held the GPU."""

from __future__ import annotations

from gputail.attribution.case import Case, contribution
from gputail.attribution.outstanding import GpuWork, union_ns
from gputail.tail import Contribution

CAUSE = "foreign_kernel"


def explain(case: Case) -> list[Contribution]:
    """Waits for the GPU, as far as other processes had kernels outstanding; one contribution for each process."""
    if not case.waiting_left:
        return []
    start, end = case.request.start_ns, case.request.end_ns
    by_process: dict[int, list[GpuWork]] = {}
    for work in case.foreign:
        if work.launches and not work.is_copy:
            by_process.setdefault(work.tgid, []).append(work)
    out: list[Contribution] = []
    for tgid, spans in sorted(by_process.items(), key=lambda item: -union_ns(item[1], start, end)):
        ns = case.take_waiting(union_ns(spans, start, end))
        largest = max(spans, key=lambda span: span.block_threads)
        kernel = case.names.kernel(tgid, largest.kernel) or f"kernel {largest.kernel:#x}"
        comm = case.names.process(tgid).comm
        out += contribution(CAUSE, ns, tgid, f"{case.names.thread(tgid, tgid)}, {kernel}" if comm else kernel)
    return out
