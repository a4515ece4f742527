"""What a page says, whatever it is written in: the findings, the worst requests with their calls, and the recording they are from."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from gputail.surfaces.report.gathering import Findings
from gputail.surfaces.report.stories import headline
from gputail.surfaces.terminal import clean, duration, losses
from gputail.timeline import Around

LOST = "calls were lost while tracing: requests known to lack some count as incomplete; others may have had more calls than are seen"
MAX_DAMAGE = 400
_MAX_UNIX_NS = 1 << 62


@dataclass(frozen=True)
class Page:
    """metadata: the recording's description of itself, not trusted. start_ns, end_ns: CLOCK_MONOTONIC, of what is reported on.

    damage: why the recording could not be read to its end, or None. commands: of each process that is known, by pid.
    """

    file: str
    metadata: Mapping[str, object]
    start_ns: int
    end_ns: int
    events: int
    lost: Mapping[str, int]
    damage: str | None
    workloads: tuple[Findings, ...]
    further_workloads: int
    further_requests: int
    worst: tuple[Around, ...]
    commands: Mapping[int, str]

    @property
    def node(self) -> str | None:
        node = self.metadata.get("node")
        return clean(node) if isinstance(node, str) and node else None

    def clock(self, time_ns: int, millis: bool = False) -> str | None:
        """A time of the recording as date and UTC; None where the recording does not tell (a trace, a damaged description)."""
        began, unix = self.metadata.get("started_monotonic_ns"), self.metadata.get("started_unix_ns")
        if type(began) is not int or type(unix) is not int:
            return None
        at_ns = unix + time_ns - began
        if not 0 <= at_ns < _MAX_UNIX_NS:
            return None
        text = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at_ns // 10**9))
        return text + (f".{at_ns // 10**6 % 1000:03d}" if millis else "")

    def when(self, time_ns: int) -> str:
        """A time of the recording for a reader: seconds from its first request on, and UTC where it is known."""
        clock = self.clock(time_ns, millis=True)
        after = f"+{max(time_ns - self.start_ns, 0) / 1e9:.3f} s"
        return f"{clock.split(' ')[1]} UTC ({after})" if clock else after

    def facts(self) -> str:
        """Where, when and how long, and what was lost."""
        began = self.clock(self.start_ns) if self.workloads else None
        lasted = f"{(self.end_ns - self.start_ns) / 1e9:.1f} s"
        parts = [
            f"on {self.node}" if self.node else "",
            f"{began} UTC" if began else "",
            lasted,
            f"{self.events} events",
            losses(self.lost),
        ]
        return "; ".join(filter(None, parts))

    def notices(self) -> list[str]:
        """What stands between the page and the whole truth."""
        out = [f"NOT WHOLE: {clean(self.damage, MAX_DAMAGE)}"] if self.damage else []
        incomplete = sum(found.incomplete for found in self.workloads)
        if incomplete:
            longest = duration(max(found.longest_incomplete_ns or 0 for found in self.workloads))
            what = (
                "1 request is incomplete and has no verdict:"
                if incomplete == 1
                else f"{incomplete} requests are incomplete and have no verdict, the longest"
            )
            out.append(f"{what} {longest}")
        if any(self.lost.values()):
            out.append(LOST)
        if self.further_workloads:
            out.append(f"{self.further_requests} requests of {self.further_workloads} workloads that came and went are not shown")
        return out

    def headline(self) -> str:
        """The page in one sentence: the workload with the largest excess, or why there are no outliers."""
        slow = next((found for found in self.workloads if found.outliers), None)
        if slow is not None:
            return headline(slow)
        if all(found.baseline_ns is None for found in self.workloads):
            return "no outliers: too few complete requests were seen to know what is usual"
        return "no outliers: no request was well above what is usual for its workload"

    def command(self, pid: int) -> str | None:
        """A process's command line, fit to print."""
        return self.commands.get(pid)
