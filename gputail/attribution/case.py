"""One outlier as the causes see it: its request, what is usual, the rows around it, and what is still to be explained.

A cause that the request's own rows prove has a function `explain(case) -> list[Contribution]`, which takes what it can
account for from the case's `left`. One that says whom a wait for the GPU was for has `claims(case) -> list[Claim]`, since
several may have held it at the time. The order in which they are asked is in the package's `__init__`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gputail.attribution.outstanding import GpuWork, gpu_work, union_ns
from gputail.baseline import Usual
from gputail.budget import C_GRAPH, C_LAUNCH, CLASS_OF_CALL, COPY, HOST, IS_WORK, LAUNCH, OFF_CPU, SYNC
from gputail.communicators import Communicators
from gputail.devices import Devices
from gputail.history import History
from gputail.members import Round
from gputail.names import Names
from gputail.requests import Request
from gputail.streams import PER_THREAD_STREAM, Streams
from gputail.tail import Contribution
from gputail.tiers import sees_off_cpu

# How long before a request work may have been queued that it still waits for.
LOOK_BACK_NS = 500_000_000
# Share of the excess that is worth looking beyond the request's own rows for.
MATERIAL = 0.05
# A quantity that grew by less than this is what it always is.
GREW = 1.3
# Who is there for a larger share of the time is there for the usual request, too.
MOSTLY = 0.5
# A launch takes a few microseconds; one that takes this long and many times the median has waited for the GPU.
BLOCKED_NS = 100_000
BLOCKED_RATIO = 10


@dataclass(frozen=True)
class Claim:
    """Somebody held the GPU for so long (ns) while the request ran; proven as `GpuWork.proven`."""

    cause: str
    ns: int
    proven: bool
    pid: int | None
    culprit: str


class Case:
    """left: for each part of the budget the excess (ns) no cause has accounted for yet.

    in_launches: whether precedents say that it waited in launches, where those were not seen or not for how long.
    """

    def __init__(
        self,
        request: Request,
        usual: Usual,
        history: History,
        until_ns: int,
        names: Names,
        streams: Streams,
        communicators: Communicators,
        devices: Devices,
    ) -> None:
        self.request, self.usual, self.names, self.streams, self.communicators = request, usual, names, streams, communicators
        self._history, self._until_ns, self._devices = history, until_ns, devices
        self.excess_ns = request.duration_ns - usual.duration_ns
        self.left = [max(part - before, 0) for part, before in zip(request.parts, usual.parts, strict=True)]
        self.in_launches = False
        self._since_ns = min([request.start_ns, *(start for start, _ in usual.latest)])

    @cached_property
    def own(self) -> np.ndarray:
        """The request's own rows."""
        return self._history.thread(self.request.tid, self.request.start_ns, self.request.end_ns)

    @cached_property
    def own_class(self) -> np.ndarray:
        return CLASS_OF_CALL[self.own["call"]]

    def latest_usual(self, count: int) -> list[np.ndarray]:
        """The rows of the last usual requests of the same thread, of those that are still known."""
        rows = [self._history.thread(self.request.tid, start, end) for start, end in self.usual.latest[-count:]]
        return [some for some in rows if len(some)]

    @cached_property
    def siblings(self) -> list[GpuWork]:
        """What the process had outstanding on streams that the request has nothing on, whichever thread gave it.

        As for `foreign`, while the last usual requests before it ran, too.
        """
        request = self.request
        own = np.unique(self.own["stream"][IS_WORK[self.own_class]]).tolist()
        since_ns = self._since_ns - LOOK_BACK_NS
        beside = self._history.thread_beside(request.tid, own, since_ns, request.end_ns)
        of_process = self._history.siblings(request.tgid, request.tid, since_ns, self._until_ns)
        work = gpu_work(np.concatenate([beside, of_process]), self._since_ns, request.end_ns, waits_alone=False)
        beside_own = [span for span in work if span.stream not in own or (span.stream == PER_THREAD_STREAM and span.tid != request.tid)]
        return [span for span in beside_own if not self._is_elsewhere(span)]

    @cached_property
    def foreign(self) -> dict[int, list[GpuWork]]:
        """What other processes had outstanding while the request, and the last usual ones before it, ran; by process."""
        request = self.request
        rows = self._history.foreign(request.tgid, self._since_ns - LOOK_BACK_NS, self._until_ns)
        by_process: dict[int, list[GpuWork]] = {}
        peers = self.communicators.peers(request.tgid)  # ranks of its communicators: on other GPUs
        for work in gpu_work(rows, self._since_ns, request.end_ns):
            if work.tgid in peers or self._is_elsewhere(work):
                continue
            by_process.setdefault(work.tgid, []).append(work)
        return by_process

    def _is_elsewhere(self, work: GpuWork) -> bool:
        """Whether it is known to be on other GPUs than whatever the request waits for."""
        request = self.request
        streams = np.unique(self.own["stream"][IS_WORK[self.own_class]]).tolist() or [0]
        there = (work.tgid, work.tid, work.stream)
        return all(self._devices.are_apart((request.tgid, request.tid, stream), there) for stream in streams)

    def beyond_usual(self, spans: list[GpuWork]) -> tuple[int, int]:
        """How long (ns) these were there while the request ran, in all and proven, beyond what usual requests had of them.

        Whoever was there all along is in what is usual already: then only what it did more of counts.
        """
        start, end = self.request.start_ns, self.request.end_ns
        whole = union_ns(spans, start, end)
        proven = union_ns([span for span in spans if span.proven], start, end)
        beside = sorted((union_ns(spans, *span), span) for span in self.usual.latest)
        if not beside:
            return whole, proven
        before, (begin, until) = beside[len(beside) // 2]
        if before < MOSTLY * (until - begin):
            return whole, proven
        if _volume(spans, start, end) <= GREW * _volume(spans, begin, until):
            return 0, 0
        return max(whole - before, 0), max(proven - before, 0)

    def thread(self, start_ns: int, end_ns: int) -> np.ndarray:
        """The rows of the request's thread that lie between two times."""
        return self._history.thread(self.request.tid, start_ns, end_ns)

    def process(self, tgid: int, start_ns: int, end_ns: int) -> np.ndarray:
        """The rows of a process that ended between two times; empty where they are not known any more."""
        return self._history.process(tgid, start_ns, min(end_ns, self._until_ns))

    def rounds(self, start_ns: int, end_ns: int) -> list[Round]:
        """The collectives that the request's process came to between two times."""
        return self.communicators.rounds(self.request.tgid, self.request.tid, start_ns, end_ns, self._until_ns)

    @cached_property
    def blocked_launches(self) -> np.ndarray:
        """Those of the request's launches that did not return at once: the stream's queue was full, or the driver busy."""
        launches = self.own[(self.own_class == C_LAUNCH) | (self.own_class == C_GRAPH)]
        if not len(launches):
            return launches
        duration = launches["duration_ns"]
        return launches[duration > max(BLOCKED_NS, BLOCKED_RATIO * float(np.median(duration)))]

    @property
    def _blocked_left(self) -> int:
        """Excess (ns) in launches that blocked; where their durations were not seen and `in_launches` is set, that of the host."""
        if self.in_launches:
            return self.left[HOST] + self.left[OFF_CPU]
        return min(self.left[LAUNCH], int(self.blocked_launches["duration_ns"].sum()))

    def _take_blocked(self, at_most_ns: int) -> int:
        if not self.in_launches:
            return self.take(LAUNCH, min(at_most_ns, self._blocked_left))
        taken = self.take(OFF_CPU, at_most_ns)
        return taken + self.take(HOST, at_most_ns - taken)

    @property
    def waiting_left(self) -> int:
        """Excess (ns) in waits for the GPU, in whichever call they were; 0 where it is too little to ask what else went on.

        A launch that blocks waits for the GPU, too: its queue is full, or a call of another thread that waits for it goes first.
        """
        left = self.left[SYNC] + self.left[COPY] + self._blocked_left
        return left if left >= MATERIAL * self.excess_ns else 0

    def waited_for_itself(self) -> str | None:
        """What to say of time that nothing explains, where most of it went to waits for the GPU: nobody else held it."""
        unseen = [] if self.request.are_launches_seen else ["launches"]
        unseen += [] if sees_off_cpu(self.request.state) else ["time off the CPU"]
        if unseen:
            return f"{' and '.join(unseen)} not seen"
        waiting = self.left[SYNC] + self.left[COPY]
        if 2 * waiting < sum(self.left) or not waiting:
            return None
        for of in self.rounds(self.request.start_ns, self.request.end_ns):
            known = of.communicator
            if known.size is None:
                return f"a collective of communicator {known.name}, not all ranks of which are known to be traced"
            if known.untraced:
                verb = "is" if known.untraced == 1 else "are"
                return f"a collective of communicator {known.name}, of which {known.untraced} of {known.size} ranks {verb} not traced"
        graphs = self.own[self.own_class == C_GRAPH]
        return f"own GPU work, inside graph {int(graphs['handle'][-1]):#x}" if len(graphs) else "own GPU work"

    def allot_waiting(self, claims: list[Claim]) -> list[Contribution]:
        """Account for the excess in waits: to what is proven first, and in proportion where claims exceed it."""
        out: list[Contribution] = []
        for proven in (True, False):
            among = [claim for claim in claims if claim.proven == proven and claim.ns > 0]
            claimed, left = sum(claim.ns for claim in among), self.waiting_left
            for claim in among:
                share = claim.ns if claimed <= left else claim.ns * left // claimed
                ns = self.take_waiting(share)
                ns += self._take_blocked(share - ns)
                out += contribution(claim.cause, ns, claim.pid, claim.culprit)
        return out

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


def _volume(spans: list[GpuWork], start_ns: int, end_ns: int) -> float:
    """Threads launched and bytes copied a ns between two times, each span's spread evenly over it."""
    total = sum(
        (span.block_threads + span.copy_bytes + span.launches) * span.overlap_ns(start_ns, end_ns) / max(span.end_ns - span.start_ns, 1)
        for span in spans
    )
    return total / max(end_ns - start_ns, 1)
