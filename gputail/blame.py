"""Who made other processes' requests slow: the time that each culprit cost them, by cause.

In: request records. Out: a `CulpritView` for each of the processes blamed last, and one for those before them together, so that no
sum falls. Whether a verdict is right is attribution's affair.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from gputail.names import Names
from gputail.tail import RequestRecord

MAX_CULPRITS = 32


@dataclass(frozen=True)
class CulpritView:
    """What a process cost others; pid is None for those together that have not been blamed for long."""

    pid: int | None
    comm: str | None
    excess_ns: Mapping[str, int]  # by cause


class Blame:
    """Sums per culprit, of the last MAX_CULPRITS of them. Only what a process did to others counts."""

    def __init__(self) -> None:
        self._culprits: OrderedDict[int, Counter[str]] = OrderedDict()
        self._earlier: Counter[str] = Counter()

    def add(self, record: RequestRecord) -> None:
        for contribution in record.contributions:
            pid = contribution.culprit_pid
            if pid is None or pid == record.pid:
                continue
            self._culprits.setdefault(pid, Counter())[contribution.cause] += contribution.ns
            self._culprits.move_to_end(pid)
        while len(self._culprits) > MAX_CULPRITS:
            self.end_process(next(iter(self._culprits)))

    def end_process(self, pid: int) -> None:
        """Its number may become another process's."""
        self._earlier.update(self._culprits.pop(pid, {}))

    def views(self, names: Names) -> tuple[CulpritView, ...]:
        """The one blamed last comes last."""
        found = [CulpritView(pid, names.thread(pid, pid), dict(excess_ns)) for pid, excess_ns in self._culprits.items()]
        earlier = [CulpritView(None, None, dict(self._earlier))] if self._earlier else []
        return (*earlier, *found)
