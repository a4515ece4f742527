"""Waiting while the same process's other stream held the GPU."""

from __future__ import annotations

from gputail.attribution.case import Case, contribution
from gputail.attribution.outstanding import union_ns
from gputail.tail import Contribution

CAUSE = "sibling_kernel"


def explain(case: Case) -> list[Contribution]:
    """Waits for the GPU, as far as another stream of the process had kernels outstanding while the request ran."""
    kernels = [work for work in case.siblings if work.launches]
    if not case.waiting_left or not kernels:
        return []
    ns = case.take_waiting(union_ns(kernels, case.request.start_ns, case.request.end_ns))
    largest = max(kernels, key=lambda work: work.block_threads)
    kernel = case.names.kernel(largest.tgid, largest.kernel) or f"kernel {largest.kernel:#x}"
    return contribution(CAUSE, ns, largest.tgid, f"tid {largest.tid}, stream {largest.stream:#x}, {kernel}")
