"""What a page says, whatever it is written in: the findings, the worst requests with their calls, and the recording they are from."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from gputail.surfaces.report.gathering import Findings
from gputail.surfaces.report.timeline import Around
from gputail.surfaces.terminal import clean

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

    def command(self, pid: int) -> str | None:
        """A process's command line, fit to print."""
        return self.commands.get(pid)
