"""Which workloads are shown in which order, and what top knows beyond one snapshot: how fast its counters move.

In come snapshot messages and the user's wishes, out comes the list of rows. Rows keep their places as figures change: they are
put in order when the user asks for it, new ones come last.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from gputail.surfaces.words import short_command

Workload = dict[str, Any]

KEPT_SNAPSHOTS = 10  # that speeds are measured over
SORTS = ("outliers", "name", "rate", "p50", "p99", "p99.9")
_FIELDS = {"rate": "rate", "p50": "p50_ns", "p99": "p99_ns", "p99.9": "p999_ns"}


class Model:
    """The state of the list."""

    def __init__(self, sort: str = "outliers", text: str = "") -> None:
        self.sort = sort
        self.filter = text
        self.is_inverted = self.is_paused = self.shows_silent = False
        self.figures = "recent"  # or "total": since tracing began
        self.snapshot: dict[str, Any] = {}
        self.workloads: dict[str, Workload] = {}
        self._order: list[str] = []
        self._past: deque[tuple[int, int, float | None]] = deque(maxlen=KEPT_SNAPSHOTS)

    def apply(self, snapshot: dict[str, Any]) -> None:
        """Take in a snapshot; rows stay where they are."""
        if snapshot.get("daemon") != self.snapshot.get("daemon"):
            self._past.clear()  # another daemon counts from 0
        self.snapshot = snapshot
        self.workloads = {workload["name"]: workload for workload in snapshot["workloads"]}
        self._past.append((snapshot["time_ns"], snapshot["events"], snapshot["health"]["cpu_s"]))
        if not self._order:
            self.put_in_order()
            return
        placed = set(self._order)
        self._order = [name for name in self._order if name in self.workloads]
        new = [workload for name, workload in self.workloads.items() if name not in placed and self._is_wanted(workload)]
        self._order += [workload["name"] for workload in sorted(new, key=self._key)]

    def put_in_order(self) -> None:
        """Sort afresh, leaving out what has been silent for long."""
        wanted = [workload for workload in self.workloads.values() if self._is_wanted(workload)]
        self._order = [workload["name"] for workload in sorted(wanted, key=self._key, reverse=self.is_inverted)]

    def rows(self) -> list[Workload]:
        """The workloads to show, in their places."""
        rows = [self.workloads[name] for name in self._order if name in self.workloads]
        if not self.filter:
            return rows
        wanted = self.filter.lower()
        return [row for row in rows if wanted in _searched(row)]

    def hidden(self) -> int:
        """How many workloads are left out for their silence."""
        return len(self.workloads) - len(self._order)

    def worst(self) -> Workload | None:
        """The workload with the most outliers a minute now."""
        found = max(self.workloads.values(), key=lambda row: row["recent"]["outliers_per_min"] or 0, default=None)
        return found if found and found["recent"]["outliers_per_min"] else None

    def events_per_s(self) -> float | None:
        return self._speed(1)

    def cpu_share(self) -> float | None:
        """Of one core, lately; since its start where only one snapshot is known."""
        if len(self._past) >= 2:
            return self._speed(2)
        cpu_s, start_ns = self.snapshot["health"]["cpu_s"], self.snapshot["daemon"].get("start_ns")
        if cpu_s is None or start_ns is None or self.snapshot["time_ns"] <= start_ns:
            return None
        return cpu_s / (self.snapshot["time_ns"] - start_ns) * 1e9

    def _speed(self, field: int) -> float | None:
        if len(self._past) < 2:
            return None
        first, last = self._past[0], self._past[-1]
        passed_s = (last[0] - first[0]) / 1e9
        if passed_s <= 0 or first[field] is None or last[field] is None:
            return None
        return (last[field] - first[field]) / passed_s  # type: ignore[operator]

    def _is_wanted(self, workload: Workload) -> bool:
        return self.shows_silent or any(tail is not None for tail in workload["trend"]) or bool(workload["recent"]["requests"])

    def _key(self, workload: Workload) -> tuple:
        """What comes first is smallest; not known is last."""
        figures = workload[self.figures]
        if self.sort == "name":
            first: Any = (title(workload).lower(), workload["pid"])
        elif self.sort == "outliers":
            first = (-(figures["outliers_per_min"] or 0), -workload["excess_ns"])
        else:
            value = figures[_FIELDS[self.sort]]
            first = (value is None, -(value or 0))
        return (first, workload["name"])


def title(workload: Workload) -> str:
    """The name that people call the process."""
    return short_command(workload["command"], workload["comm"])


def _searched(row: Workload) -> str:
    top = row["top"] or {}
    fields = (row["name"], row["command"], row["comm"], row["container"], row["gpu"], top.get("cause"), top.get("culprit"))
    return " ".join(field for field in fields if field).lower()
