"""Waiting while the same process's other stream held the GPU."""

from __future__ import annotations

from gputail.attribution import blocking_sync
from gputail.attribution.case import Case, Claim
from gputail.attribution.outstanding import union_ns

CAUSE = "sibling_kernel"


def claims(case: Case) -> list[Claim]:
    """How long other streams of the process had kernels outstanding, less what a wait for all of them accounts for."""
    start, end = case.request.start_ns, case.request.end_ns
    kernels = [work for work in case.siblings if work.launches]
    beside = [work for work in kernels if work.overlap_ns(start, end)]
    if not beside:
        return []
    whole, in_all = union_ns(beside, start, end), union_ns([work for work in beside if work.proven], start, end)
    # A stream that nobody was seen to wait for may have been idle in the usual requests, too: nothing to compare with.
    _, proven = case.beyond_usual([work for work in kernels if work.proven])
    waited = sum(claim.ns for claim in blocking_sync.claims(case))
    largest = max(beside, key=lambda work: work.block_threads)
    kernel = case.names.kernel(largest.tgid, largest.kernel) or f"kernel {largest.kernel:#x}"
    culprit = f"tid {largest.tid}, stream {largest.stream:#x}, {kernel}"
    proven = max(proven - waited, 0)
    rest = max(whole - max(waited, in_all), 0)
    return [Claim(CAUSE, proven, True, largest.tgid, culprit), Claim(CAUSE, rest, False, largest.tgid, culprit)]
