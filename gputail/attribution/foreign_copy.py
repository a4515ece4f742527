"""Waiting while another process's copies held the link to the GPU."""

from __future__ import annotations

from gputail.attribution.case import Case, Claim

CAUSE = "foreign_copy"


def claims(case: Case) -> list[Claim]:
    """How long other processes were copying, of a request that copies itself; for each process proven or not."""
    if not (case.request.htod_bytes or case.request.dtoh_bytes or case.request.copy_bytes):
        return []
    out: list[Claim] = []
    for tgid, work in case.foreign.items():
        spans = [span for span in work if span.is_copy]
        if not spans:
            continue
        whole, proven = case.beyond_usual(spans)
        copied = sum(span.copy_bytes for span in spans if span.overlap_ns(case.request.start_ns, case.request.end_ns))
        culprit = f"{copied} bytes"
        out += [Claim(CAUSE, proven, True, tgid, culprit), Claim(CAUSE, whole - proven, False, tgid, culprit)]
    return out
