"""One outlier as the causes see it: its request, what is usual, the rows around it, and what is still to be explained.

Each cause's module has a function `explain(case) -> list[Contribution]`, which takes what it can account for from the
case's `left` and says so. The order they are asked in is in the package's `__init__`.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from gputail.attribution.outstanding import PER_THREAD_STREAM, GpuWork, gpu_work
from gputail.baseline import Usual
from gputail.budget import CLASS_OF_CALL, COPY, IS_WORK, SYNC
from gputail.history import History
from gputail.names import Names
from gputail.requests import Request
from gputail.tail import Contribution

# How long before a request work may have been queued that it still waits for.
LOOK_BACK_NS = 500_000_000
# Share of the excess that is worth looking beyond the request's own rows for.
MATERIAL = 0.05
# A quantity that grew by less than this is what it always is.
GREW = 1.3


class Case:
    """left: for each part of the budget the excess (ns) no cause has accounted for yet."""

    def __init__(self, request: Request, usual: Usual, history: History, until_ns: int, names: Names) -> None:
        self.request, self.usual, self.names = request, usual, names
        self._history, self._until_ns = history, until_ns
        self.excess_ns = request.duration_ns - usual.duration_ns
        self.left = [max(part - before, 0) for part, before in zip(request.parts, usual.parts, strict=True)]

    @cached_property
    def own(self) -> np.ndarray:
        """The request's own rows."""
        return self._history.thread(self.request.tid, self.request.start_ns, self.request.end_ns)

    @cached_property
    def own_class(self) -> np.ndarray:
        return CLASS_OF_CALL[self.own["call"]]

    @cached_property
    def siblings(self) -> list[GpuWork]:
        """What the process had outstanding on streams that the request has nothing on, whichever thread gave it."""
        request = self.request
        own = np.unique(self.own["stream"][IS_WORK[self.own_class]]).tolist()
        since_ns = request.start_ns - LOOK_BACK_NS
        beside = self._history.thread_beside(request.tid, own, since_ns, request.end_ns)
        of_process = self._history.siblings(request.tgid, request.tid, since_ns, self._until_ns)
        work = gpu_work(np.concatenate([beside, of_process]), request.start_ns, request.end_ns, waits_alone=False)
        return [span for span in work if span.stream not in own or (span.stream == PER_THREAD_STREAM and span.tid != request.tid)]

    @cached_property
    def foreign(self) -> list[GpuWork]:
        """What other processes had outstanding while the request ran."""
        request = self.request
        rows = self._history.foreign(request.tgid, request.start_ns - LOOK_BACK_NS, self._until_ns)
        return gpu_work(rows, request.start_ns, request.end_ns)

    @property
    def waiting_left(self) -> int:
        """Excess (ns) in waits for the GPU, in whichever call they were; 0 where it is too little to ask what else went on."""
        left = self.left[SYNC] + self.left[COPY]
        return left if left >= MATERIAL * self.excess_ns else 0

    def grew(self, counter: str) -> float:
        """How many times the usual of `counter` (see tail.COUNTERS) the request had; 1 where nothing is usual."""
        usual = getattr(self.usual, counter)
        return getattr(self.request, counter) / usual if usual else 1.0

    def take(self, part: int, at_most_ns: int | None = None) -> int:
        """Account for up to so much of a part's excess; returns how much (ns) there was to take."""
        taken = self.left[part] if at_most_ns is None else min(self.left[part], max(at_most_ns, 0))
        self.left[part] -= taken
        return taken

    def take_waiting(self, at_most_ns: int | None = None) -> int:
        """Account for up to so much of the excess in waits for the GPU."""
        taken = self.take(SYNC, at_most_ns)
        return taken + self.take(COPY, None if at_most_ns is None else at_most_ns - taken)


def contribution(cause: str, ns: int, pid: int | None = None, culprit: str | None = None) -> list[Contribution]:
    """A list of the one contribution, or of none if there is nothing to say."""
    return [Contribution(cause, ns, pid, culprit)] if ns > 0 else []
