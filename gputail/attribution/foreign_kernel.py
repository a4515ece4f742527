"""Waiting while another process's kernels held the GPU."""

from __future__ import annotations

from gputail.attribution.case import Case, Claim

CAUSE = "foreign_kernel"


def claims(case: Case) -> list[Claim]:
    """How long other processes had kernels outstanding; for each process what is proven and what is not."""
    out: list[Claim] = []
    for tgid, work in case.foreign.items():
        spans = [span for span in work if span.launches and not span.is_copy]
        if not spans:
            continue
        whole, proven = case.beyond_usual(spans)
        largest = max(spans, key=lambda span: (span.overlap_ns(case.request.start_ns, case.request.end_ns) > 0, span.block_threads))
        kernel = case.names.kernel(tgid, largest.kernel) or f"kernel {largest.kernel:#x}"
        comm = case.names.process(tgid).comm
        culprit = f"{case.names.thread(tgid, tgid)}, {kernel}" if comm else kernel
        out += [Claim(CAUSE, proven, True, tgid, culprit), Claim(CAUSE, whole - proven, False, tgid, culprit)]
    return out
