"""OTLP: metrics every ten seconds, each outlier as a log record, and where asked for as a span, too, for an OpenTelemetry receiver.

In come records and snapshots on the thread that drains, out they go on one of its own: a receiver that is slow or gone costs nothing
but records, which are counted. Nothing is ever sent twice knowingly; what a receiver did not take is tried again while there is room.
Metrics are the ones that Prometheus scrapes, under the same names. The wire format, batching of bytes and a receiver's pleas to wait are
opentelemetry's; its packages are needed only here.
"""

from __future__ import annotations

import importlib
import logging
import platform
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gputail import __version__
from gputail.errors import GputailError
from gputail.journal import WARNING, say
from gputail.surfaces.messages import verdict
from gputail.surfaces.words import clean
from gputail.tail import RequestRecord
from gputail.timeline import NOTHING, WORDS, Timeline, runs

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import Metric as OtlpMetric
    from opentelemetry.trace import Span

    from gputail.surfaces.metrics import SnapshotCollector

MAX_WAITING = 8192  # outliers
MAX_BATCH = 256
MAX_TEXT = 256  # of a name
LOGS_EVERY_S = 1.0
METRICS_EVERY_S = 10.0
# What one attempt may take, and for how long none is made after one that failed: twice as long each time.
TIMEOUT_S = 5.0
PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
_SCOPE = "gputail"
_KINDS = {"http": "http", "https": "http", "grpc": "grpc", "grpcs": "grpc"}


class OtlpExporter:
    """Sends to `url` (http, https, grpc or grpcs) until closed. GputailError where the packages are missing.

    spans: send each outlier as a span, too, with the stretches of its timeline as children. collector: whose metrics are sent.
    """

    def __init__(self, url: str, spans: bool, collector: SnapshotCollector) -> None:
        self.url = url
        self._lost = 0  # outliers
        self._collector = collector
        self._waiting: deque[RequestRecord] = deque()
        self._wake = threading.Condition()
        self._is_closing = False
        self._said = ""
        try:
            self._sender = _Sender(url, spans)
        except ImportError as error:
            raise GputailError(f"{error.name} is needed to send OTLP", "pip install 'gputail[otlp]', or --otlp off") from error
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """How many outliers were not taken, or not their spans."""
        return self._lost + self._sender.lost

    def offer(self, records: Iterable[RequestRecord]) -> None:
        """Outliers among these are sent soon. Never waits."""
        outliers = [record for record in records if record.outlier]
        if not outliers:
            return
        with self._wake:
            room = max(MAX_WAITING - len(self._waiting), 0)
            self._waiting.extend(outliers[:room])
            self._lost += len(outliers[room:])

    def close(self, within_s: float = 2.0) -> None:
        """Send what waits, if that goes within the time; the rest is lost."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join(within_s)
        self._sender.shutdown()
        with self._wake:
            self._lost += len(self._waiting)
            self._waiting.clear()

    def _run(self) -> None:
        pause = 0.0
        next_metrics = time.monotonic()
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._is_closing, pause or LOGS_EVERY_S)
                is_last = self._is_closing
            is_taken = self._send_outliers()
            if is_taken and (is_last or time.monotonic() >= next_metrics):
                next_metrics = time.monotonic() + METRICS_EVERY_S
                is_taken = self._sender.metrics(self._collector)
            self._say_whether(is_taken)
            pause = 0.0 if is_taken else min(2 * pause or PAUSE_S, MAX_PAUSE_S)
            if is_last:
                return

    def _send_outliers(self) -> bool:
        """Whether all were taken; what was not waits on."""
        while True:
            with self._wake:
                batch = [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]
            if not batch:
                return True
            try:
                is_taken = self._sender.outliers(batch)
            except Exception as error:  # whatever opentelemetry cannot make of it, it could not later
                say(f"{len(batch)} outliers cannot be sent: {type(error).__name__}: {clean(str(error), MAX_TEXT)}", WARNING)
                self._lost += len(batch)
                continue
            if not is_taken:
                with self._wake:
                    room = max(MAX_WAITING - len(self._waiting), 0)
                    self._lost += len(batch[room:])
                    self._waiting.extendleft(reversed(batch[:room]))
                return False

    def _say_whether(self, is_taken: bool) -> None:
        """Once when it begins and once when it ends."""
        if is_taken and self._said:
            self._said = ""
            say(f"{self.url} takes OTLP again")
        elif not is_taken and not self._said:
            self._said = self._sender.problem or "no reason given"
            say(f"{self.url} does not take OTLP ({self._said}); what waits is kept up to {MAX_WAITING} outliers", WARNING)


class _Sender:
    """Records and metrics as opentelemetry's, to its exporters. Used by one thread."""

    def __init__(self, url: str, spans: bool) -> None:
        from opentelemetry.sdk._logs import LoggerProvider
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        self.problem = ""
        self.lost = 0  # outliers whose log record was taken and whose span was not
        self._log, self._metric, self._span = (_exporter(url, signal) for signal in ("log", "metric", "trace"))
        # What is emitted is put here, to be exported in batches when it suits us.
        self._logs, self._spans = _Collected(), _Collected()
        self._resource = Resource.create({"service.name": "gputail", "service.version": __version__, "host.name": platform.node()})
        loggers = LoggerProvider(self._resource, shutdown_on_exit=False)
        loggers.add_log_record_processor(self._logs)  # type: ignore[arg-type]
        self._logger = loggers.get_logger(_SCOPE, __version__)
        self._tracer = None
        if spans:
            tracers = TracerProvider(resource=self._resource, shutdown_on_exit=False)
            tracers.add_span_processor(self._spans)  # type: ignore[arg-type]
            self._tracer = tracers.get_tracer(_SCOPE, __version__)
        self._start_ns = time.time_ns()
        self._listen()

    def _listen(self) -> None:
        """The exporters tell their reasons to Python's logging only."""
        handler = logging.Handler()

        def emit(record: logging.LogRecord) -> None:
            self.problem = " ".join(record.getMessage().split())[:200]

        handler.emit = emit  # type: ignore[method-assign]
        logger = logging.getLogger("opentelemetry")
        logger.handlers, logger.propagate = [handler], False

    def outliers(self, records: Sequence[RequestRecord]) -> bool:
        """Whether they were taken. What was is not sent again for its span's sake."""
        offset_ns = time.time_ns() - time.monotonic_ns()
        for record in records:
            self._emit(record, offset_ns)
        logs, spans = self._logs.take(), self._spans.take()
        if not _succeeded(self._log.export(logs)):
            return False
        if spans and not _succeeded(self._span.export(spans)):
            self.lost += len(records)
        return True

    def metrics(self, collector: SnapshotCollector) -> bool:
        from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        metrics = list(_metrics(collector, self._start_ns, time.time_ns()))
        scope = ScopeMetrics(InstrumentationScope(_SCOPE, __version__), metrics, "")
        return _succeeded(self._metric.export(MetricsData([ResourceMetrics(self._resource, [scope], "")]), timeout_millis=1000 * TIMEOUT_S))

    def shutdown(self) -> None:
        for exporter in (self._log, self._metric, self._span):
            exporter.shutdown()

    def _emit(self, record: RequestRecord, offset_ns: int) -> None:
        from opentelemetry._logs import LogRecord, SeverityNumber
        from opentelemetry.trace import set_span_in_context

        attributes = _attributes(record)
        context = None
        if self._tracer:
            span = self._tracer.start_span(
                f"request {clean(record.workload, MAX_TEXT)}", attributes=attributes, start_time=record.start_ns + offset_ns, context=None
            )
            context = set_span_in_context(span)
            if record.timeline:
                self._emit_stretches(record.timeline, context, offset_ns)
            span.end(record.end_ns + offset_ns)
        self._logger.emit(
            LogRecord(
                timestamp=record.end_ns + offset_ns,
                observed_timestamp=time.time_ns(),
                context=context,
                severity_number=SeverityNumber.WARN,
                severity_text="WARN",
                body=verdict(record)["story"],
                attributes=attributes,
                event_name="gputail.outlier",
            )
        )

    def _emit_stretches(self, timeline: Timeline, context: Any, offset_ns: int) -> None:
        """Each stretch of the timeline as a child span."""
        assert self._tracer
        for lane in timeline.lanes:
            cell_ns = (timeline.end_ns - timeline.start_ns) / len(lane.kinds)
            who = {"process.pid": lane.pid} if lane.pid is not None else {}
            for kind, first, stop in runs(lane.kinds):
                if kind == NOTHING:
                    continue
                begin, end = (timeline.start_ns + offset_ns + int(cell * cell_ns) for cell in (first, stop))
                child: Span = self._tracer.start_span(WORDS[kind], context=context, attributes=who, start_time=begin)
                child.end(end)


class _Collected:
    """A processor, of log records and of spans, that keeps them until taken."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def take(self) -> list[Any]:
        kept, self._kept = self._kept, []
        return kept

    def on_emit(self, record: Any) -> None:
        self._kept.append(record)

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        pass

    def _on_ending(self, span: Any) -> None:
        pass

    def on_end(self, span: Any) -> None:
        self._kept.append(span)

    def enabled(self, *_: Any, **__: Any) -> bool:
        return True

    def shutdown(self) -> None:
        pass

    def force_flush(self, timeout_millis: int = 0) -> bool:
        return True


def _exporter(url: str, signal: str) -> Any:
    """opentelemetry's exporter of "log", "metric" or "trace" for such a URL; headers and certificates it takes from the environment."""
    parts = urlsplit(url)
    kind = _KINDS[parts.scheme]
    module = importlib.import_module(f"opentelemetry.exporter.otlp.proto.{kind}.{'_log' if signal == 'log' else signal}_exporter")
    make: Callable[..., Any] = getattr(
        module, {"log": "OTLPLogExporter", "metric": "OTLPMetricExporter", "trace": "OTLPSpanExporter"}[signal]
    )
    if kind == "grpc":
        return make(endpoint=parts.netloc, insecure=parts.scheme == "grpc", timeout=TIMEOUT_S)
    return make(endpoint=f"{url.rstrip('/')}/v1/{signal}s", timeout=TIMEOUT_S)


def _succeeded(result: Any) -> bool:
    return bool(result.name == "SUCCESS")


def _attributes(record: RequestRecord) -> Mapping[str, Any]:
    """A verdict's facts: OpenTelemetry's names where it has them, else under gputail. What is not known is left out."""
    first = record.contributions[0] if record.contributions else None
    found = {
        "process.pid": record.pid,
        "process.executable.name": clean(record.comm, MAX_TEXT) if record.comm is not None else None,
        "thread.id": record.tid,
        "gputail.workload": clean(record.workload, MAX_TEXT),
        "gputail.duration_ns": record.duration_ns,
        "gputail.baseline_ns": record.baseline_ns,
        "gputail.excess_ns": record.excess_ns,
        "gputail.cause": record.cause,
        "gputail.confidence": record.confidence,
        "gputail.culprit": clean(first.culprit, MAX_TEXT) if first and first.culprit else None,
        "gputail.culprit.pid": first.culprit_pid if first else None,
        "gputail.tier": record.tier,
        "gputail.causes": [contribution.cause for contribution in record.contributions],
        "gputail.causes_ns": [contribution.ns for contribution in record.contributions],
    }
    return {name: value for name, value in found.items() if value is not None}


def _metrics(collector: SnapshotCollector, start_ns: int, now_ns: int) -> Iterator[OtlpMetric]:
    """The families that Prometheus would be given."""
    from opentelemetry.sdk.metrics.export import AggregationTemporality, Gauge, Histogram, Metric, NumberDataPoint, Sum

    total = AggregationTemporality.CUMULATIVE
    for family in collector.collect():
        unit = "s" if family.unit == "seconds" else "1"
        data: Histogram | Sum | Gauge
        if family.type == "histogram":
            data = Histogram(list(_histogram_points(family.samples, start_ns, now_ns)), total)
        elif family.type in ("counter", "gauge"):
            points = [NumberDataPoint(dict(s.labels), start_ns, now_ns, s.value) for s in family.samples if not s.name.endswith("_created")]
            data = Sum(points, total, True) if family.type == "counter" else Gauge(points)
        else:
            continue  # what is built is said of the resource
        yield Metric(family.name, family.documentation, unit, data)


def _histogram_points(samples: Iterable[Any], start_ns: int, now_ns: int) -> Iterator[Any]:
    """One point for each set of labels, whose samples come together: its buckets, the last of them +Inf, and its sum."""
    from opentelemetry.sdk.metrics.export import HistogramDataPoint

    bounds: list[float] = []
    counts: list[int] = []
    for sample in samples:
        if sample.name.endswith("_bucket"):
            bounds.append(float(sample.labels["le"]))
            counts.append(int(sample.value))
        elif sample.name.endswith("_sum"):
            each = [after - before for before, after in zip([0, *counts], counts, strict=False)]
            unknown: Any = None  # the least and the largest
            yield HistogramDataPoint(dict(sample.labels), start_ns, now_ns, counts[-1], sample.value, each, bounds[:-1], unknown, unknown)
            bounds, counts = [], []
