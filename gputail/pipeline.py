"""The analysis stages joined: batches in, request records and snapshots out.

In: `events.Batch`es. Out: `tail.RequestRecord`s in order of their end, each once its verdict is due, and a
`snapshot.Snapshot` whenever one is asked for. It knows no clock: the watermark is the only time there is, and the
same stream gives the same records however it is cut into batches.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from gputail import attribution, events
from gputail.baseline import Baseline, RegimeChange, Usual
from gputail.blame import Blame
from gputail.communicators import Communicators
from gputail.devices import Devices
from gputail.histogram import BUCKETS, Histogram, bucket_of
from gputail.history import History
from gputail.names import Names
from gputail.probes import table
from gputail.requests import Request, Requests
from gputail.snapshot import Health, Snapshot, WorkloadView
from gputail.streams import Streams
from gputail.tail import RequestRecord
from gputail.tiers import FULL, TIERS, Tiers, sees_all_of, tier_of
from gputail.timeline import CELLS, Around, culprits
from gputail.trend import Trend

# A verdict uses what ended less than this after its request did, and is given then.
VERDICT_DELAY_NS = 400_000_000

# Larger batches are taken in parts, which keeps the columns worked on in the caches.
MAX_ROWS = 65536
MAX_WORKLOADS = 512
MAX_BASELINES = 32  # of one workload: tiers of probes, and threads
MAX_SHAPES = 16  # of one process; further ones share a workload
RECENT_OUTLIERS = 256
RECENT_REGIMES = 64
RECENT_OF_WORKLOAD = 32  # outliers
# Outliers with a timeline: how far apart at least, of one workload and of all.
TIMELINE_EVERY_NS = 1_000_000_000
TIMELINE_APART_NS = 20_000_000
# Work that a request waits for may have been given to the GPU so long before.
TIMELINE_BEFORE_NS = 500_000_000
# What was usual before a pause this long in a tier of probes is learned anew.
FORGET_BASELINE_NS = 60_000_000_000

_NO_CALLS = (table.OFF_CPU_CALL, table.MEMBER_CALL)  # rows that no call of its own stands behind
# What was lost where the thread it belongs to is not known: requests open at that time may lack it.
_LOST_ANYWHERE = ("malformed", "in_flight_full", "too_deep")


class _Workload:
    """What is kept of one workload."""

    __slots__ = (
        "name",
        "tgid",
        "shape",
        "histogram",
        "state",
        "_tid",
        "_has_threads",
        "_baselines",
        "requests",
        "incomplete",
        "outliers",
        "excess_ns",
        "first_start_ns",
        "last_end_ns",
        "fresh",
        "timeline_ns",
        "trend",
        "recent",
    )

    def __init__(self, name: str, tgid: int, shape: str, first_start_ns: int) -> None:
        self.name, self.tgid, self.shape, self.first_start_ns = name, tgid, shape, first_start_ns
        self.histogram, self.trend = Histogram(), Trend()
        self.state = FULL  # of the probes at its last request
        self._tid: int | None = None  # of its last request
        self._has_threads = False  # whether more than one has answered
        # by state and thread, the longest unused first; with each the end of the last request judged by it
        self._baselines: dict[tuple[int, int], tuple[Baseline, int]] = {}
        self.recent: deque[RequestRecord] = deque(maxlen=RECENT_OF_WORKLOAD)  # outliers
        self.requests = self.incomplete = self.last_end_ns = 0
        self.timeline_ns = 0  # when the last outlier with a timeline ended
        self.outliers: dict[str, int] = {}
        self.excess_ns: dict[str, int] = {}
        self.fresh: list[int] = []  # durations not yet in the histogram

    def judge(self, request: Request) -> tuple[bool, Usual | None, tuple[int, int] | None]:
        """What the baseline says of it: its thread's, or, while that has not learned enough, that of all threads.

        Threads of one process may answer requests that look alike and are of different sizes.
        """
        self.state = request.state
        if request.tid != self._tid:
            self._tid, self._has_threads = request.tid, self._tid is not None
        common = self._baseline(request, 0)
        if not self._has_threads:
            return common.judge(request)
        own = self._baseline(request, request.tid)
        learned = own.usual is not None
        judged = own.judge(request)
        return judged if learned else common.judge(request)

    def _baseline(self, request: Request, tid: int) -> Baseline:
        """What is usual for a thread (0: for all) while the probes see as much as they did of this request: budgets differ with that.

        What was usual too long ago is not any more.
        """
        key = request.state, tid
        known, last_ns = self._baselines.pop(key, (None, 0))
        if known is None or request.end_ns - last_ns > FORGET_BASELINE_NS:
            known = self._from_more(request, tid) or Baseline()
        self._baselines[key] = known, request.end_ns
        if len(self._baselines) > MAX_BASELINES:
            del self._baselines[next(iter(self._baselines))]
        return known

    def _from_more(self, request: Request, tid: int) -> Baseline | None:
        """What was lately usual while the probes saw all that they do now, and more."""
        for (state, of), (known, last_ns) in reversed(self._baselines.items()):
            is_recent = request.end_ns - last_ns <= FORGET_BASELINE_NS
            if of == tid and state != request.state and is_recent and known.usual and sees_all_of(state, request.state):
                return Baseline.seen_less(known, request.state)
        return None

    @property
    def usual_ns(self) -> int | None:
        known = self._baselines.get((self.state, 0))
        return known[0].usual.duration_ns if known and known[0].usual else None

    def count_fresh(self) -> None:
        if self.fresh:
            self.histogram.add(np.array(self.fresh, np.int64))
            self.fresh = []


class Pipeline:
    """Requests, histograms, tail and attribution over one stream."""

    def __init__(self) -> None:
        self._tiers = Tiers()
        self._requests = Requests(self._tiers)
        self._history = History()
        self._names = Names()
        self._streams = Streams()
        self._communicators = Communicators()
        self._devices = Devices()
        self._precedents = attribution.Precedents()
        self._blame = Blame()
        self._workloads: OrderedDict[tuple[int, str], _Workload] = OrderedDict()
        self._released: list[tuple[int, int, int, Request]] = []
        self._due: list[tuple[int, int, int, Request, _Workload, bool, Usual | None]] = []
        self._records: list[RequestRecord] = []
        self._watermark_ns = 0
        self._timeline_ns = 0  # when the last outlier with a timeline ended
        self._events = 0
        self._lost: dict[str, int] = {}
        self._gaps: deque[tuple[int, int]] = deque(maxlen=256)
        self._calls: dict[int, Histogram] = {}
        self._outliers: deque[RequestRecord] = deque(maxlen=RECENT_OUTLIERS)
        self._regimes: deque[RegimeChange] = deque(maxlen=RECENT_REGIMES)

    def feed(self, batch: events.Batch) -> None:
        """Take in a batch and whatever its watermark makes known."""
        if len(batch.calls) > MAX_ROWS:
            self._feed_in_parts(batch)
            return
        self._names.learn(batch)
        self._devices.learn_processes(batch.processes)
        for stage, count in batch.lost.items():
            self._lost[stage] = self._lost.get(stage, 0) + count
            if count and stage in _LOST_ANYWHERE:
                self._gaps.append((self._watermark_ns, batch.watermark_ns))
        calls = self._tiers.learn(batch.calls)
        exits = calls["call"] == table.EXIT_CALL
        ended = [(int(row["tgid"]), int(row["start_ns"])) for row in calls[exits]]
        calls = calls[~exits] if ended else calls
        self._events += len(calls)
        if len(calls):
            self._history.add(calls)
            self._streams.learn(calls)
            self._devices.learn(calls)
            self._communicators.learn(calls)
            self._count_calls(calls)
        self._watermark_ns = max(self._watermark_ns, batch.watermark_ns)
        self._take(self._requests.feed(calls, self._watermark_ns), self._watermark_ns)
        self._history.forget(self._watermark_ns)
        for tgid, at_ns in ended:
            self._communicators.end_process(tgid, at_ns)
            self._blame.end_process(tgid)
        self._communicators.forget(self._watermark_ns)

    def _feed_in_parts(self, batch: events.Batch) -> None:
        for first in range(0, len(batch.calls), MAX_ROWS):
            part = batch.calls[first : first + MAX_ROWS]
            if first + MAX_ROWS < len(batch.calls):
                self.feed(events.Batch(part, watermark_ns=int(events.end_ns(part[-1:])[0])))
            else:
                self.feed(replace(batch, calls=part))

    def finish(self) -> None:
        """The stream has ended: what is still held back becomes known now."""
        self._take(self._requests.finish(), 1 << 62)

    def take_records(self) -> list[RequestRecord]:
        """The records finished since it was last asked, in order of their end."""
        records, self._records = self._records, []
        return records

    def snapshot(self, health: Health | None = None) -> Snapshot:
        """Everything known at the watermark."""
        views = []
        for workload in self._workloads.values():
            process = self._names.process(workload.tgid)
            views.append(
                WorkloadView(
                    name=workload.name,
                    tgid=workload.tgid,
                    comm=process.comm,
                    command=process.command,
                    container=process.container,
                    shape=workload.shape,
                    histogram=workload.histogram.copy(),
                    requests=workload.requests,
                    incomplete=workload.incomplete,
                    outliers=dict(workload.outliers),
                    excess_ns=dict(workload.excess_ns),
                    baseline_ns=workload.usual_ns,
                    tier=TIERS[tier_of(workload.state)],
                    last_end_ns=workload.last_end_ns,
                    first_start_ns=workload.first_start_ns,
                    windows=workload.trend.windows(workload.histogram),
                    recent_outliers=tuple(workload.recent),
                    gpu=self._devices.gpu(workload.tgid),
                )  # fmt: skip
            )
        return Snapshot(
            time_ns=self._watermark_ns,
            workloads=tuple(views),
            calls={_label(number): histogram.copy() for number, histogram in sorted(self._calls.items())},
            events=self._events,
            lost=dict(self._lost),
            recent_outliers=tuple(self._outliers),
            regime_changes=tuple(self._regimes),
            culprits=self._blame.views(self._names),
            communicators=self._communicators.views(self._watermark_ns),
            drifts=tuple(self._communicators.drifts),
            health=health or Health(),
        )

    def _count_calls(self, calls: np.ndarray) -> None:
        """Durations of calls, by function."""
        number, duration = calls["call"], calls["duration_ns"]
        if (calls["flags"] & events.ENTRY_ONLY).any():
            measured = (calls["flags"] & events.ENTRY_ONLY) == 0
            number, duration = number[measured], duration[measured]
        seen = np.flatnonzero(np.bincount(number))
        rank = np.zeros(int(seen[-1]) + 1 if len(seen) else 1, np.int64)
        rank[seen] = np.arange(len(seen))
        row = rank[number]
        cells = np.bincount(row * (BUCKETS + 1) + bucket_of(duration), minlength=len(seen) * (BUCKETS + 1))
        sums = np.bincount(row, weights=duration, minlength=len(seen))
        for index, function in enumerate(seen.tolist()):
            if function in _NO_CALLS:
                continue
            histogram = self._calls.setdefault(function, Histogram())
            histogram.add_buckets(cells[index * (BUCKETS + 1) : (index + 1) * (BUCKETS + 1)], int(sums[index]))

    def _take(self, requests: list[Request], until_ns: int) -> None:
        """Judge the requests released before `until_ns`, then finish those whose verdict is due before it."""
        released = self._released
        released += [(request.release_ns, request.end_ns, request.tid, request) for request in requests]
        released.sort(key=_first_three)
        known = 0
        touched: list[_Workload] = []
        for release_ns, end_ns, tid, request in released:
            if release_ns >= until_ns:
                break
            known += 1
            workload = self._workload(request)
            if self._gaps and any(request.start_ns <= end and start <= end_ns for start, end in self._gaps):
                request.incomplete = True
            outlier, usual, shift = workload.judge(request)
            if shift is not None:
                self._regimes.append(RegimeChange(workload.name, end_ns, *shift))
            if release_ns >= workload.trend.end_ns:
                workload.count_fresh()
                workload.trend.roll(release_ns, workload.histogram)
            workload.trend.outliers += outlier
            workload.requests += 1
            workload.incomplete += request.incomplete
            workload.last_end_ns = max(workload.last_end_ns, end_ns)
            if not workload.fresh:
                touched.append(workload)
            workload.fresh.append(request.duration_ns)
            self._due.append((max(release_ns, end_ns + VERDICT_DELAY_NS), end_ns, tid, request, workload, outlier, usual))
        del released[:known]
        for workload in touched:
            workload.count_fresh()
        self._due.sort(key=_first_three)
        finished = 0
        for due_ns, _, _, request, workload, outlier, usual in self._due:
            if due_ns >= until_ns:
                break
            finished += 1
            self._records.append(self._record(request, workload, usual if outlier else None))
        del self._due[:finished]
        self._records.sort(key=lambda record: (record.end_ns, record.tid))

    def _record(self, request: Request, workload: _Workload, usual: Usual | None) -> RequestRecord:
        common = (
            request.tgid, request.tid, self._names.thread(request.tgid, request.tid), workload.name, request.start_ns, request.end_ns,
            request.boundary, request.calls, request.launches if request.are_launches_seen else None, request.incomplete,
        )  # fmt: skip
        tier, gpu = TIERS[request.tier], self._devices.gpu(request.tgid)
        if usual is None:
            return RequestRecord(*common, False, request.parts, tier=tier, gpu=gpu)
        verdict = attribution.attribute(
            request, usual, self._history, request.end_ns + VERDICT_DELAY_NS, self._names, self._streams, self._communicators,
            self._devices, self._precedents,
        )  # fmt: skip
        workload.outliers[verdict.cause] = workload.outliers.get(verdict.cause, 0) + 1
        for contribution in verdict.contributions:
            workload.excess_ns[contribution.cause] = workload.excess_ns.get(contribution.cause, 0) + contribution.ns
        record = RequestRecord(
            *common, True, request.parts, usual.duration_ns, request.duration_ns - usual.duration_ns, verdict.cause,
            verdict.confidence, verdict.contributions, tier, gpu,
        )  # fmt: skip
        if request.end_ns - max(workload.timeline_ns + TIMELINE_EVERY_NS, self._timeline_ns + TIMELINE_APART_NS) >= 0:
            workload.timeline_ns = self._timeline_ns = request.end_ns
            record = replace(record, timeline=self._around(record).timeline(CELLS))
        self._outliers.append(record)
        self._blame.add(record)
        workload.recent.append(record)
        return record

    def _around(self, record: RequestRecord) -> Around:
        """The rows of the request, and those of its process and its culprits around it."""
        since_ns, until_ns = record.start_ns - TIMELINE_BEFORE_NS, record.end_ns + VERDICT_DELAY_NS
        pids = {record.pid, *(pid for cause, pid in culprits(record) if cause != "cpu_preempted")}
        others = [self._history.process(pid, since_ns, until_ns) for pid in sorted(pids)]
        return Around(record, self._history.thread(record.tid, record.start_ns, record.end_ns), np.concatenate(others))

    def _workload(self, request: Request) -> _Workload:
        key = (request.tgid, request.shape)
        workload = self._workloads.get(key)
        if workload is None:
            shape = request.shape
            if sum(tgid == request.tgid for tgid, _ in self._workloads) >= MAX_SHAPES:
                shape = "other"
                key = (request.tgid, shape)
                if key in self._workloads:
                    return self._workloads[key]
            if len(self._workloads) >= MAX_WORKLOADS:
                self._workloads.popitem(last=False)
            workload = self._workloads[key] = _Workload(
                f"{self._names.label(request.tgid)}/{request.tgid}/{shape}", request.tgid, shape, request.start_ns
            )
        self._workloads.move_to_end(key)
        return workload


def replay_batches(batches: Iterable[events.Batch]) -> Iterator[RequestRecord]:
    """The records of a stream that ends, in order of their end, as they become known."""
    pipeline = Pipeline()
    for batch in batches:
        pipeline.feed(batch)
        yield from pipeline.take_records()
    pipeline.finish()
    yield from pipeline.take_records()


def _first_three(entry: tuple) -> tuple:
    return entry[:3]


def _label(number: int) -> str:
    function = table.BY_NUMBER.get(number)
    return function.name if function else "unknown"
