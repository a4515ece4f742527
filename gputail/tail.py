"""The record of a request, as surfaces are given it.

In: nothing; plain data. Which requests are outliers is baseline.py's, why they were slow attribution's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gputail.budget import PARTS

if TYPE_CHECKING:
    from gputail.timeline import Timeline

SCHEMA = 1


@dataclass(frozen=True)
class Contribution:
    """A share of an outlier's excess: `ns` of it are due to `cause`; culprits are None where not known."""

    cause: str
    ns: int
    culprit_pid: int | None = None
    culprit: str | None = None


@dataclass(frozen=True)
class RequestRecord:
    """One request as surfaces show it; times are CLOCK_MONOTONIC. From baseline_ns to contributions they say something of outliers only."""

    pid: int
    tid: int
    comm: str | None
    workload: str
    start_ns: int
    end_ns: int
    boundary: str
    calls: int
    launches: int | None  # None: the probes did not see them
    incomplete: bool
    outlier: bool
    budget_ns: tuple[int, ...]  # by budget.PARTS; they sum to the duration
    baseline_ns: int | None = None
    excess_ns: int | None = None
    cause: str | None = None
    confidence: float | None = None
    contributions: tuple[Contribution, ...] = ()
    tier: str = "full"  # of the probes while it ran
    gpu: str | None = None  # that its process is on; None where it is not known or may be several
    timeline: Timeline | None = None  # of some outliers, for those who look at one; not part of the fixed record

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns

    def as_dict(self) -> dict[str, Any]:
        """The fixed request record, and `budget`, `tier` and `gpu` besides it."""
        record: dict[str, Any] = {
            "schema": SCHEMA,
            "pid": self.pid,
            "tid": self.tid,
            "comm": self.comm,
            "workload": self.workload,
            "start_ns": self.start_ns,
            "end_ns": self.end_ns,
            "duration_ns": self.duration_ns,
            "boundary": self.boundary,
            "calls": self.calls,
            "launches": self.launches,
            "incomplete": self.incomplete,
            "outlier": self.outlier,
            "tier": self.tier,
            "gpu": self.gpu,
            "budget": {part: ns for part, ns in zip(PARTS, self.budget_ns, strict=True) if ns},
        }
        if self.outlier:
            record |= {
                "baseline_ns": self.baseline_ns,
                "excess_ns": self.excess_ns,
                "cause": self.cause,
                "confidence": self.confidence,
                "contributions": [
                    {"cause": c.cause, "ns": c.ns, "culprit_pid": c.culprit_pid, "culprit": c.culprit} for c in self.contributions
                ],
            }
        return record
