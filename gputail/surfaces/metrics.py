"""Prometheus metrics: a collector over the latest snapshot.

In comes a snapshot per tick, out go families of metrics when asked. A scrape reads one immutable snapshot and holds no lock, so that
a slow scraper delays nobody. Workloads have their own series up to `max_workloads`; those beyond are folded into one called `other`,
and counted. What is known of a workload besides its name is said once, by `gputail_workload_info`: a histogram has 50 series, each as
long as its labels. What a workload is, and which are still alive, is left to the analysis; how metrics are served to
metrics_server.py. docs/metrics.md explains each.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from gputail import __version__, events
from gputail.blame import CulpritView
from gputail.config import Settings
from gputail.histogram import Histogram
from gputail.members import CommunicatorView
from gputail.snapshot import ProcessCost, Snapshot, WorkloadView
from gputail.tail import RequestRecord

OTHER = "other"
MAX_RANKS = 128
MAX_LABEL_CHARS = 128
MAX_EXEMPLAR_CHARS = 128  # names and values of its labels together: as OpenMetrics demands
MAX_CAUSE_CHARS = 32
INFO_LABELS = ("pid", "comm", "container", "gpu")


def log_bounds_ns(first_ns: int, decades: int, per_decade: int) -> np.ndarray:
    """Bounds from first_ns over `decades`, `per_decade` to each, evenly spaced by ratio and rounded to three digits (ns)."""
    exact = first_ns * 10.0 ** (np.arange(decades * per_decade + 1) / per_decade)
    step = 10.0 ** (np.floor(np.log10(exact)) - 2)
    return (np.round(exact / step) * step).astype(np.int64)


# Requests from 100 us to 100 s, calls coarser, from 1 us. A quantile that Prometheus makes of them is somewhere in the bucket of the
# true one, hence off by a third, and what rounding adds. The first bucket begins at 0 to Prometheus: it is kept below 100 us.
REQUEST_BOUNDS_NS = np.concatenate([[75_000], log_bounds_ns(100_000, 6, 8)])
CALL_BOUNDS_NS = log_bounds_ns(1_000, 7, 3)


# By how much the wall clock may have been set before the times of exemplars follow it. Time that is only kept does not move them:
# the same exemplar at another time is a new one to Prometheus.
CLOCK_SET_NS = 1_000_000_000


def _les(bounds_ns: np.ndarray) -> list[str]:
    """The label `le` of each bucket, the one above all bounds included."""
    return [*(repr(bound / 1e9) for bound in bounds_ns.tolist()), "+Inf"]


_REQUEST_LES, _CALL_LES = _les(REQUEST_BOUNDS_NS), _les(CALL_BOUNDS_NS)


def label(text: str | None) -> str:
    """A label value of bounded length that any parser takes: what cannot be encoded or printed becomes `?`."""
    if text is None:
        return "unknown"
    if text.isascii() and text.isprintable():
        return text[:MAX_LABEL_CHARS]
    return "".join(char if char.isprintable() and char.isascii() or char.isalnum() else "?" for char in text[:MAX_LABEL_CHARS])


def exemplars(records: Iterable[RequestRecord], wall_offset_ns: int) -> dict[int, Exemplar]:
    """By number in REQUEST_BOUNDS_NS (beyond the last: +Inf), the latest of these outliers that is in the bucket.

    wall_offset_ns: what to add to CLOCK_MONOTONIC to get the time of day.
    """
    latest: dict[int, RequestRecord] = {}
    for record in records:
        bucket = int(np.searchsorted(REQUEST_BOUNDS_NS, record.duration_ns))
        if bucket not in latest or latest[bucket].end_ns <= record.end_ns:
            latest[bucket] = record
    return {
        bucket: Exemplar(_exemplar_labels(record), record.duration_ns / 1e9, (record.end_ns + wall_offset_ns) // 1_000_000 / 1e3)
        for bucket, record in latest.items()
    }


# Braces are common in names of kernels ("{lambda()#1}"), and to parsers as common as prometheus_client's the end of an exemplar's labels.
_NO_BRACES = str.maketrans("{}", "()")


def _exemplar_labels(record: RequestRecord) -> dict[str, str]:
    """The cause, the culprit as far as it is known and there is room for it, and `start_ns`, by which the request's record is found."""
    labels = {"cause": label(record.cause)[:MAX_CAUSE_CHARS].translate(_NO_BRACES), "start_ns": str(record.start_ns)}
    first = record.contributions[0] if record.contributions else None
    if first and first.culprit_pid is not None:
        labels["culprit_pid"] = str(first.culprit_pid)
    if first and first.culprit:
        room = MAX_EXEMPLAR_CHARS - len("culprit") - sum(len(name) + len(value) for name, value in labels.items())
        labels["culprit"] = label(first.culprit)[:room].translate(_NO_BRACES)
    return labels


class _View(NamedTuple):
    """What a scrape sees."""

    snapshot: Snapshot
    own: tuple[WorkloadView, ...]
    folded: tuple[WorkloadView, ...]
    gone: _Totals  # of folded workloads that are no more
    wall_offset_ns: int


@dataclass
class _Totals:
    """What one workload, or all the folded ones together, has counted so far. Only ever grows."""

    buckets: np.ndarray = field(default_factory=lambda: np.zeros(len(REQUEST_BOUNDS_NS), np.int64))
    count: int = 0
    sum_ns: int = 0
    incomplete: int = 0
    outliers: Counter[str] = field(default_factory=Counter)
    excess_ns: Counter[str] = field(default_factory=Counter)

    def counts(self) -> list[int]:
        """Requests up to each bound, and all of them."""
        return [*map(int, self.buckets), self.count]

    def copy(self) -> _Totals:
        return replace(self, outliers=self.outliers.copy(), excess_ns=self.excess_ns.copy())

    def add(self, view: WorkloadView) -> None:
        # Not +=: a copy shares the array.
        self.buckets = self.buckets + view.histogram.cumulative(REQUEST_BOUNDS_NS)
        self.count += view.histogram.count
        self.sum_ns += view.histogram.sum_ns
        self.incomplete += view.incomplete
        self.outliers.update(view.outliers)
        self.excess_ns.update(view.excess_ns)


class SnapshotCollector(Collector):
    """Turns the snapshot last published into metrics. `publish` on the thread that makes snapshots; `collect` on any."""

    def __init__(self, max_workloads: int = Settings.max_workloads) -> None:
        self._max_workloads = max_workloads
        self._folded: dict[str, WorkloadView] = {}
        self._own: set[str] = set()
        self._gone = _Totals()  # of folded workloads that are no more: a counter must not go down with them
        self._wall_offset_ns = 0
        self._latest: _View | None = None

    def publish(self, snapshot: Snapshot) -> None:
        """Make this snapshot the one that scrapes see. Quick: histograms are looked at when scraped."""
        views = {view.name: view for view in snapshot.workloads}
        for name, last in list(self._folded.items()):
            if name not in views or views[name].requests < last.requests:  # gone, or forgotten and begun again
                gone = self._gone.copy()  # a new value: a scrape may be reading the old one
                gone.add(self._folded.pop(name))
                self._gone = gone
        self._own &= views.keys()
        for name, view in views.items():
            # Once folded a workload stays so: moved to series of its own, `other` would go down.
            if name in self._folded or (name not in self._own and len(self._own) >= self._max_workloads):
                self._folded[name] = view
            else:
                self._own.add(name)
        own = tuple(view for name, view in views.items() if name in self._own)
        offset_ns = time.time_ns() - time.monotonic_ns()
        if abs(offset_ns - self._wall_offset_ns) > CLOCK_SET_NS:
            self._wall_offset_ns = offset_ns
        self._latest = _View(snapshot, own, tuple(self._folded.values()), self._gone, self._wall_offset_ns)

    def collect(self) -> Iterator[Metric]:
        build = InfoMetricFamily("gputail_build", "Version of gputail.")
        build.add_metric([], {"version": __version__})
        yield build
        view = self._latest
        if view is None:
            return
        yield from _of_workloads(view)
        yield _of_culprits(view.snapshot.culprits)
        yield from _of_calls(view.snapshot.calls)
        yield from _of_gputail(view.snapshot)


def _of_workloads(seen: _View) -> Iterator[Metric]:
    by, by_cause = ["workload"], ["workload", "cause"]
    info = GaugeMetricFamily("gputail_workload_info", "1: what is known of a workload.", labels=[*by, *INFO_LABELS])
    durations = HistogramMetricFamily("gputail_request_duration_seconds", "Duration of requests.", labels=by, unit="seconds")
    requests = CounterMetricFamily("gputail_requests", "Requests that ended.", labels=by)
    incomplete = CounterMetricFamily("gputail_incomplete_requests", "Requests with lost records: no verdict.", labels=by)
    outliers = CounterMetricFamily("gputail_outliers", "Requests in the tail, by first cause.", labels=by_cause)
    excess = CounterMetricFamily("gputail_excess_seconds", "Time outliers took beyond the usual.", labels=by_cause, unit="seconds")
    baseline = GaugeMetricFamily(
        "gputail_request_baseline_seconds", "The usual duration of a workload's requests.", labels=by, unit="seconds"
    )

    def add(name: str, totals: _Totals, examples: Mapping[int, Exemplar]) -> None:
        buckets = [
            (bound, count, examples[index]) if index in examples else (bound, count)
            for index, (bound, count) in enumerate(zip(_REQUEST_LES, totals.counts(), strict=True))
        ]
        durations.add_metric([name], buckets, totals.sum_ns / 1e9)
        requests.add_metric([name], totals.count)
        incomplete.add_metric([name], totals.incomplete)
        for cause, count in totals.outliers.items():
            outliers.add_metric([name, label(cause)], count)
        for cause, ns in totals.excess_ns.items():
            excess.add_metric([name, label(cause)], ns / 1e9)

    taken = {OTHER}
    for view in seen.own:
        name = label(view.name)
        while name in taken:  # names that differ only in what a label cannot hold
            name += "'"
        taken.add(name)
        totals = _Totals()
        totals.add(view)
        add(name, totals, exemplars(view.recent_outliers, seen.wall_offset_ns))
        info.add_metric([name, str(view.tgid), label(view.comm), label(view.container or ""), label(view.gpu or "")], 1)
        if view.baseline_ns is not None:
            baseline.add_metric([name], view.baseline_ns / 1e9)
    if seen.folded or seen.gone.count:
        other = seen.gone.copy()
        for view in seen.folded:
            other.add(view)
        add(OTHER, other, {})
    yield from (info, durations, requests, incomplete, outliers, excess, baseline)
    yield GaugeMetricFamily("gputail_folded_workloads", f'Workloads without series of their own, in "{OTHER}".', len(seen.folded))


def _of_culprits(culprits: Sequence[CulpritView]) -> Metric:
    excess = CounterMetricFamily(
        "gputail_culprit_excess_seconds",
        "Time that a process made outliers of others take longer.",
        labels=["pid", "comm", "cause"],
        unit="seconds",
    )
    for culprit in culprits:
        who = ["", OTHER] if culprit.pid is None else [str(culprit.pid), label(culprit.comm)]
        for cause, ns in culprit.excess_ns.items():
            excess.add_metric([*who, label(cause)], ns / 1e9)
    return excess


def _of_calls(calls: Mapping[str, Histogram]) -> Iterator[Metric]:
    durations = HistogramMetricFamily(
        "gputail_call_duration_seconds", "Time from entry to return of a driver or NCCL call.", labels=["call"], unit="seconds"
    )
    for name, histogram in calls.items():
        counts = [*map(int, histogram.cumulative(CALL_BOUNDS_NS)), histogram.count]
        durations.add_metric([label(name)], list(zip(_CALL_LES, counts, strict=True)), histogram.sum_ns / 1e9)
    yield durations


def _of_gputail(snapshot: Snapshot) -> Iterator[Metric]:
    yield CounterMetricFamily("gputail_events", "Records of calls taken in.", snapshot.events)
    lost = CounterMetricFamily("gputail_events_lost", "Records and calls that could not be taken in, by stage.", labels=["stage"])
    stages = dict.fromkeys((*events.KERNEL_STAGES, *events.USER_STAGES, *events.OUTLET_STAGES), 0)
    for stage, count in (stages | dict(snapshot.lost)).items():
        lost.add_metric([label(stage)], count)
    yield lost
    health = snapshot.health
    yield from _of_communicators(snapshot.communicators)
    yield from _of_processes(health.processes)
    if health.overhead_ratio is not None:
        yield GaugeMetricFamily(
            "gputail_overhead_ratio", "Share of the traced processes' CPU time that tracing costs.", health.overhead_ratio, unit="ratio"
        )
    if health.budget_ratio is not None:
        yield GaugeMetricFamily("gputail_overhead_budget_ratio", "What tracing may cost each process.", health.budget_ratio, unit="ratio")
    yield GaugeMetricFamily("gputail_attached_functions", "Function addresses with probes on them.", health.attached_functions)
    yield GaugeMetricFamily("gputail_attached_libraries", "Libraries with probes in them.", health.attached_libraries)
    yield GaugeMetricFamily("gputail_unattached", "Functions and libraries that could not be probed.", len(health.unattached))
    since = [one.since_ns for view in snapshot.communicators for one in view.open]
    yield GaugeMetricFamily("gputail_open_collectives", "Communicators with a collective that does not finish.", len(since))
    age_ns = snapshot.time_ns - min(since, default=snapshot.time_ns)
    yield GaugeMetricFamily(
        "gputail_open_collective_age_seconds", "Age of the oldest of those; 0 where there is none.", age_ns / 1e9, unit="seconds"
    )
    yield GaugeMetricFamily("gputail_traced_processes", "Processes being traced.", health.traced_processes)


def _of_communicators(communicators: Sequence[CommunicatorView]) -> Iterator[Metric]:
    """Of each traced rank what tells, beside those of other nodes, which one the others wait for."""
    labels = ["communicator", "rank"]
    waits = CounterMetricFamily("gputail_collective_waits", "Waits that had an NCCL collective to wait for.", labels=labels)
    waited = CounterMetricFamily(
        "gputail_collective_wait_seconds",
        "Time from coming to a collective to the return of the wait for it.",
        labels=labels,
        unit="seconds",
    )
    ranks = [
        (view.name, str(one.rank), one) for view in reversed(communicators) if view.size != 1 for one in view.ranks if one.rank is not None
    ]
    for name, rank, one in ranks[:MAX_RANKS]:
        waits.add_metric([name, rank], one.waits)
        waited.add_metric([name, rank], one.waited_ns / 1e9)
    yield from (waits, waited)
    yield GaugeMetricFamily(
        "gputail_folded_ranks", "Ranks of NCCL communicators without series of their own.", max(len(ranks) - MAX_RANKS, 0)
    )


def _of_processes(processes: Sequence[ProcessCost]) -> Iterator[Metric]:
    labels = ["pid", "comm"]
    tiers = GaugeMetricFamily("gputail_probe_tier", "1 for the tier of probes that a process has.", labels=[*labels, "tier"])
    share = GaugeMetricFamily(
        "gputail_process_overhead_ratio", "Share of a process's CPU time that tracing costs.", labels=labels, unit="ratio"
    )
    hits = GaugeMetricFamily("gputail_process_hits_per_second", "Calls and stretches off the CPU recorded of a process.", labels=labels)
    shed = CounterMetricFamily(
        "gputail_process_shed_seconds", "Time that a process had less than the full tier.", labels=labels, unit="seconds"
    )
    for process in processes:
        who = [str(process.tgid), label(process.comm or "")]
        tiers.add_metric([*who, process.tier], 1)
        if process.share is not None:
            share.add_metric(who, process.share)
        hits.add_metric(who, process.hits_per_s)
        shed.add_metric(who, process.shed_s)
    yield from (tiers, share, hits, shed)
