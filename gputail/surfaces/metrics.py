"""Prometheus metrics: a collector over the latest snapshot, and the server that scrapes reach.

In comes a snapshot per tick, out goes text when asked. A scrape reads one immutable snapshot and holds no lock while it
is written out, so that a slow scraper delays nobody. Workloads have their own series up to `max_workloads`; those beyond are folded
into one called `other`, and counted. What a workload is, and which are still alive, is left to the analysis.
"""

from __future__ import annotations

import errno
import socket
import socketserver
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import numpy as np
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from gputail import __version__, events
from gputail.config import Address
from gputail.errors import GputailError
from gputail.histogram import Histogram
from gputail.members import CommunicatorView
from gputail.snapshot import ProcessCost, Snapshot, WorkloadView

OTHER = "other"
MAX_WORKLOADS = 100
MAX_RANKS = 128
MAX_LABEL_CHARS = 128
SCRAPE_TIMEOUT_S = 10
WORKLOAD_LABELS = ("workload", "pid", "comm", "container")


def log_bounds_ns(first_ns: int, decades: int, per_decade: int) -> np.ndarray:
    """Bounds from first_ns over `decades`, `per_decade` to each, evenly spaced by ratio and rounded to three digits (ns)."""
    exact = first_ns * 10.0 ** (np.arange(decades * per_decade + 1) / per_decade)
    step = 10.0 ** (np.floor(np.log10(exact)) - 2)
    return (np.round(exact / step) * step).astype(np.int64)


# Requests from 100 us to 100 s, a quantile within 15% of the truth wherever it falls; calls coarser, from 1 us.
REQUEST_BOUNDS_NS = log_bounds_ns(100_000, 6, 8)
CALL_BOUNDS_NS = log_bounds_ns(1_000, 7, 3)


def _le(bound_ns: int) -> str:
    return repr(int(bound_ns) / 1e9)


def label(text: str | None) -> str:
    """A label value of bounded length that any parser takes: what cannot be encoded or printed becomes `?`."""
    if text is None:
        return "unknown"
    return "".join(char if char.isprintable() and char.isascii() or char.isalnum() else "?" for char in text[:MAX_LABEL_CHARS])


@dataclass
class _Totals:
    """What one workload, or all the folded ones together, has counted so far. Only ever grows."""

    buckets: np.ndarray = field(default_factory=lambda: np.zeros(len(REQUEST_BOUNDS_NS), np.int64))
    count: int = 0
    sum_ns: int = 0
    incomplete: int = 0
    outliers: Counter[str] = field(default_factory=Counter)
    excess_ns: Counter[str] = field(default_factory=Counter)

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

    def __init__(self, max_workloads: int = MAX_WORKLOADS) -> None:
        self._max_workloads = max_workloads
        self._folded: dict[str, WorkloadView] = {}
        self._own: set[str] = set()
        self._gone = _Totals()  # of folded workloads that are no more: a counter must not go down with them
        self._latest: tuple[Snapshot | None, tuple[WorkloadView, ...], tuple[WorkloadView, ...], _Totals] = (None, (), (), self._gone)

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
        self._latest = (snapshot, own, tuple(self._folded.values()), self._gone)

    def collect(self) -> Iterator[Metric]:
        build = InfoMetricFamily("gputail_build", "Version of gputail.")
        build.add_metric([], {"version": __version__})
        yield build
        snapshot, own, folded, gone = self._latest
        if snapshot is None:
            return
        yield from _of_workloads(own, folded, gone)
        yield from _of_calls(snapshot.calls)
        yield from _of_gputail(snapshot)


def _of_workloads(own: Iterable[WorkloadView], folded: tuple[WorkloadView, ...], gone: _Totals) -> Iterator[Metric]:
    durations = HistogramMetricFamily("gputail_request_duration_seconds", "Duration of requests.", labels=WORKLOAD_LABELS)
    requests = CounterMetricFamily("gputail_requests", "Requests that ended.", labels=WORKLOAD_LABELS)
    incomplete = CounterMetricFamily("gputail_incomplete_requests", "Requests with lost records: no verdict.", labels=WORKLOAD_LABELS)
    outliers = CounterMetricFamily("gputail_outliers", "Requests in the tail, by first cause.", labels=(*WORKLOAD_LABELS, "cause"))
    excess = CounterMetricFamily("gputail_excess_seconds", "Time outliers took beyond the usual.", labels=(*WORKLOAD_LABELS, "cause"))
    baseline = GaugeMetricFamily("gputail_request_baseline_seconds", "The usual duration of a workload's requests.", labels=WORKLOAD_LABELS)

    def add(labels: list[str], totals: _Totals) -> None:
        buckets = [(_le(bound), int(count)) for bound, count in zip(REQUEST_BOUNDS_NS, totals.buckets, strict=True)]
        durations.add_metric(labels, [*buckets, ("+Inf", totals.count)], totals.sum_ns / 1e9)
        requests.add_metric(labels, totals.count)
        incomplete.add_metric(labels, totals.incomplete)
        for cause, count in totals.outliers.items():
            outliers.add_metric([*labels, label(cause)], count)
        for cause, ns in totals.excess_ns.items():
            excess.add_metric([*labels, label(cause)], ns / 1e9)

    taken: set[tuple[str, ...]] = set()
    for view in own:
        labels = [label(view.name), str(view.tgid), label(view.comm), label(view.container or "")]
        while tuple(labels) in taken:  # names that differ only in what a label cannot hold
            labels[0] += "'"
        taken.add(tuple(labels))
        totals = _Totals()
        totals.add(view)
        add(labels, totals)
        if view.baseline_ns is not None:
            baseline.add_metric(labels, view.baseline_ns / 1e9)
    if folded or gone.count:
        other = gone.copy()
        for view in folded:
            other.add(view)
        add([OTHER, "", OTHER, ""], other)
    yield from (durations, requests, incomplete, outliers, excess, baseline)
    yield GaugeMetricFamily("gputail_folded_workloads", f'Workloads without series of their own, in "{OTHER}".', len(folded))


def _of_calls(calls: Mapping[str, Histogram]) -> Iterator[Metric]:
    durations = HistogramMetricFamily(
        "gputail_call_duration_seconds", "Time from entry to return of a driver or NCCL call.", labels=["call"]
    )
    for name, histogram in calls.items():
        counts = histogram.cumulative(CALL_BOUNDS_NS)
        buckets = [(_le(bound), int(count)) for bound, count in zip(CALL_BOUNDS_NS, counts, strict=True)]
        durations.add_metric([label(name)], [*buckets, ("+Inf", histogram.count)], histogram.sum_ns / 1e9)
    yield durations


def _of_gputail(snapshot: Snapshot) -> Iterator[Metric]:
    yield CounterMetricFamily("gputail_events", "Records of calls taken in.", snapshot.events)
    lost = CounterMetricFamily("gputail_events_lost", "Records and calls that could not be taken in, by stage.", labels=["stage"])
    for stage, count in ({stage: 0 for stage in (*events.KERNEL_STAGES, *events.USER_STAGES)} | dict(snapshot.lost)).items():
        lost.add_metric([label(stage)], count)
    yield lost
    health = snapshot.health
    yield from _of_communicators(snapshot.communicators)
    yield from _of_processes(health.processes)
    if health.overhead_ratio is not None:
        yield GaugeMetricFamily(
            "gputail_overhead_ratio", "Share of the traced processes' CPU time that tracing costs.", health.overhead_ratio
        )
    yield GaugeMetricFamily("gputail_attached_functions", "Function addresses with probes on them.", health.attached_functions)
    yield GaugeMetricFamily("gputail_attached_libraries", "Libraries with probes in them.", health.attached_libraries)
    yield GaugeMetricFamily("gputail_unattached", "Functions and libraries that could not be probed.", len(health.unattached))
    since = [one.since_ns for view in snapshot.communicators for one in view.open]
    yield GaugeMetricFamily("gputail_open_collectives", "Communicators with a collective that does not finish.", len(since))
    age_ns = snapshot.time_ns - min(since, default=snapshot.time_ns)
    yield GaugeMetricFamily("gputail_open_collective_age_seconds", "Age of the oldest of those; 0 where there is none.", age_ns / 1e9)
    yield GaugeMetricFamily("gputail_traced_processes", "Processes being traced.", health.traced_processes)


def _of_communicators(communicators: Sequence[CommunicatorView]) -> Iterator[Metric]:
    """Of each traced rank what tells, beside those of other nodes, which one the others wait for."""
    labels = ["communicator", "rank"]
    waits = CounterMetricFamily("gputail_collective_waits", "Waits that had an NCCL collective to wait for.", labels=labels)
    waited = CounterMetricFamily(
        "gputail_collective_wait_seconds", "Time from coming to a collective to the return of the wait for it.", labels=labels
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
    share = GaugeMetricFamily("gputail_process_overhead_ratio", "Share of a process's CPU time that tracing costs.", labels=labels)
    hits = GaugeMetricFamily("gputail_process_hits_per_second", "Calls and stretches off the CPU recorded of a process.", labels=labels)
    shed = CounterMetricFamily("gputail_process_shed_seconds", "Time that a process had less than the full tier.", labels=labels)
    for process in processes:
        who = [str(process.tgid), label(process.comm or "")]
        tiers.add_metric([*who, process.tier], 1)
        if process.share is not None:
            share.add_metric(who, process.share)
        hits.add_metric(who, process.hits_per_s)
        shed.add_metric(who, process.shed_s)
    yield from (tiers, share, hits, shed)


class _Handler(WSGIRequestHandler):
    timeout = SCRAPE_TIMEOUT_S  # a client that stalls is let go

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are no news."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        # Not HTTPServer's, which asks the resolver for our name and may wait for it.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: object, client_address: object) -> None:
        """A scraper that went away is no news."""


class MetricsServer:
    """Serves a collector over HTTP, each scrape on a thread of its own. Raises GputailError where it cannot listen."""

    def __init__(self, address: Address, collector: SnapshotCollector) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        try:
            family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][0]
            server_class = type("Server", (_Server,), {"address_family": family})
            self._server = server_class((address.host, address.port), _Handler)
        except (OSError, UnicodeError) as error:
            raise _cannot_listen(address, error) from error
        self._server.set_app(make_wsgi_app(registry))
        self.address = Address(address.host, self._server.server_port)  # port 0 has become a real one
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, within 0.2 s. A scrape that is still being written out is not waited for."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _cannot_listen(address: Address, error: OSError | UnicodeError) -> GputailError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    problem = f"cannot serve metrics on {address}: {reason.lower()}"
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        other = Address(address.host, address.port + 1 if address.port < 65535 else address.port - 1)
        return GputailError(problem, f"is gputail running already? else give --listen {other}, or --listen off")
    return GputailError(problem, "choose another address with --listen HOST:PORT, or --listen off")
