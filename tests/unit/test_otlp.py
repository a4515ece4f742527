"""What an OpenTelemetry receiver is sent, by one that speaks the protocol over gRPC and over HTTP."""

from __future__ import annotations

import gzip
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2 as logs_pb2
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2_grpc as logs_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb2
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc

from gputail.surfaces import otlp
from gputail.surfaces.metrics import REQUEST_BOUNDS_NS, SnapshotCollector
from gputail.surfaces.otlp import OtlpExporter
from tests.unit.snapshots import outlier, snapshot, view

WITHIN_S = 20


class Receiver:
    """What has come; refuses all while told to."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.logs: list[Any] = []  # log records
        self.spans: list[Any] = []
        self.metrics: dict[str, Any] = {}
        self.resources: list[dict[str, str]] = []
        self.refusing = False
        self.refused = 0

    def take(self, request: Any) -> bool:
        with self.changed:
            self.changed.notify_all()
            if self.refusing:
                self.refused += 1
                return False
            for resource in getattr(request, "resource_logs", ()):
                self.logs += [record for scope in resource.scope_logs for record in scope.log_records]
                self.resources.append({one.key: one.value.string_value for one in resource.resource.attributes})
            for resource in getattr(request, "resource_spans", ()):
                self.spans += [span for scope in resource.scope_spans for span in scope.spans]
            for resource in getattr(request, "resource_metrics", ()):
                self.metrics |= {metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics}
            return True

    def wait(self, until: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(until, WITHIN_S)


@pytest.fixture(params=["grpc", "http"])
def receiver(request: pytest.FixtureRequest) -> Iterator[tuple[Receiver, str]]:
    of = Receiver()
    if request.param == "grpc":
        with ThreadPoolExecutor(4) as pool:
            server = grpc.server(pool)
            for calls, name, answer in (
                (logs_grpc, "LogsService", logs_pb2.ExportLogsServiceResponse),
                (metrics_grpc, "MetricsService", metrics_pb2.ExportMetricsServiceResponse),
                (trace_grpc, "TraceService", trace_pb2.ExportTraceServiceResponse),
            ):

                def export(self: Any, message: Any, context: Any, answer: Any = answer) -> Any:
                    if not of.take(message):
                        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not now")
                    return answer()

                servicer = type("Servicer", (getattr(calls, f"{name}Servicer"),), {"Export": export})
                getattr(calls, f"add_{name}Servicer_to_server")(servicer(), server)
            port = server.add_insecure_port("127.0.0.1:0")
            server.start()
            yield of, f"grpc://127.0.0.1:{port}"
            server.stop(None).wait()
        return
    kinds = {
        "/v1/logs": logs_pb2.ExportLogsServiceRequest,
        "/v1/metrics": metrics_pb2.ExportMetricsServiceRequest,
        "/v1/traces": trace_pb2.ExportTraceServiceRequest,
    }

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            self.send_response(200 if of.take(kinds[self.path].FromString(body)) else 400)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield of, f"http://127.0.0.1:{http.server_port}"
    http.shutdown()
    http.server_close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "LOGS_EVERY_S", 0.05)
    monkeypatch.setattr(otlp, "PAUSE_S", 0.05)
    monkeypatch.setattr(otlp, "TIMEOUT_S", 1.0)


def attributes(of: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in of.attributes}


def test_outliers_come_as_log_records_with_their_facts_and_others_not_at_all(receiver: tuple[Receiver, str]) -> None:
    got, url = receiver
    exporter = OtlpExporter(url, False, SnapshotCollector())
    exporter.offer([outlier(1000), outlier(1001, outlier=False), outlier(1002, cause="unknown", contributions=())])
    got.wait(lambda: len(got.logs) == 2)
    exporter.close()
    first, second = got.logs
    told = attributes(first)
    assert (told["process.pid"], told["gputail.cause"], told["gputail.excess_ns"]) == (1000, "foreign_kernel", 7_300_000)
    assert (told["gputail.culprit.pid"], told["gputail.culprit"]) == (556, "sm90_xmma_gemm_f16")
    assert [value.int_value for value in told["gputail.causes_ns"].values] == [7_100_000, 200_000]
    assert first.body.string_value.startswith("12.5 ms instead of 5.20 ms") and first.severity_text == "WARN"
    assert "gputail.culprit" not in attributes(second)
    assert got.resources[0]["service.name"] == "gputail" and got.resources[0]["host.name"]
    assert not got.spans and exporter.lost == 0


def test_an_outliers_span_lasts_as_long_as_the_request_and_the_stretches_of_its_time_are_children(receiver: tuple[Receiver, str]) -> None:
    got, url = receiver
    exporter = OtlpExporter(url, True, SnapshotCollector())
    exporter.offer([outlier(1000)])
    got.wait(lambda: got.spans)
    exporter.close()
    (request,) = (span for span in got.spans if not span.parent_span_id)
    children = [span for span in got.spans if span.parent_span_id == request.span_id]
    assert request.end_time_unix_nano - request.start_time_unix_nano == 12_500_000
    assert len(children) == len(got.spans) - 1 == 4
    assert [(span.name, attributes(span)) for span in children][-1] == ("kernels given to the GPU and not yet done", {"process.pid": 556})
    assert (got.logs[0].trace_id, got.logs[0].span_id) == (request.trace_id, request.span_id)
    assert attributes(request)["gputail.cause"] == "foreign_kernel"


def test_metrics_are_those_that_prometheus_scrapes(receiver: tuple[Receiver, str]) -> None:
    got, url = receiver
    collector = SnapshotCollector()
    shown = view(1000)
    collector.publish(snapshot(shown))
    exporter = OtlpExporter(url, False, collector)
    got.wait(lambda: got.metrics)
    exporter.close()
    families = {family.name: family for family in collector.collect() if family.type != "info"}
    assert got.metrics.keys() == families.keys()
    (point,) = got.metrics["gputail_request_duration_seconds"].histogram.data_points
    assert attributes(point)["workload"] == shown.name
    assert point.count == shown.requests == sum(point.bucket_counts)
    assert point.sum == pytest.approx(shown.histogram.sum_ns / 1e9)
    assert [bound * 1e9 for bound in point.explicit_bounds] == pytest.approx(REQUEST_BOUNDS_NS.tolist())
    assert sum(point.bucket_counts[:20]) == shown.histogram.cumulative(REQUEST_BOUNDS_NS)[19]
    (events,) = got.metrics["gputail_events"].sum.data_points
    assert events.as_int == 123_456 and got.metrics["gputail_events"].sum.is_monotonic
    assert not got.metrics["gputail_traced_processes"].HasField("sum")


def test_what_a_receiver_refuses_is_sent_when_it_takes_again_once_and_in_order(receiver: tuple[Receiver, str]) -> None:
    got, url = receiver
    got.refusing = True
    exporter = OtlpExporter(url, False, SnapshotCollector())
    exporter.offer([outlier(pid) for pid in range(1, 601)])  # three batches
    got.wait(lambda: got.refused >= 2)
    got.refusing = False
    got.wait(lambda: len(got.logs) >= 600)
    exporter.close()
    assert [attributes(record)["process.pid"] for record in got.logs] == list(range(1, 601))
    assert exporter.lost == 0


def test_a_receiver_that_is_gone_costs_counted_outliers_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(otlp, "MAX_WAITING", 100)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        exporter = OtlpExporter(f"http://127.0.0.1:{taken.getsockname()[1]}", False, SnapshotCollector())
        for pid in range(1, 1001):
            exporter.offer([outlier(pid)])
        exporter.close(within_s=WITHIN_S)
    assert exporter.lost == 1000
    assert capsys.readouterr().err.count("does not take OTLP") == 1


def test_a_receiver_that_says_nothing_delays_neither_the_drain_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "TIMEOUT_S", 3600.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        exporter = OtlpExporter(f"http://127.0.0.1:{silent.getsockname()[1]}", False, SnapshotCollector())
        exporter.offer([outlier(1)])
        connection, _ = silent.accept()
        with connection:
            assert connection.recv(1)
            for pid in range(2, otlp.MAX_WAITING + 100):
                exporter.offer([outlier(pid)])
            assert exporter.lost > 0
            exporter.close(within_s=0.1)
    assert exporter._thread.daemon


def test_names_that_are_no_text_are_sent_as_what_can_be(receiver: tuple[Receiver, str]) -> None:
    got, url = receiver
    exporter = OtlpExporter(url, True, SnapshotCollector())
    hostile = "pyt\udcc3\x1b[2J\x00"
    exporter.offer([replace(outlier(1), comm=hostile, workload=f"{hostile}/1/x"), outlier(2)])
    got.wait(lambda: len(got.logs) == 2)
    exporter.close()
    assert exporter.lost == 0 and [attributes(record)["process.pid"] for record in got.logs] == [1, 2]
    assert attributes(got.logs[0])["process.executable.name"].startswith("pyt")


def test_a_span_that_cannot_be_encoded_is_lost_and_counted_and_the_next_is_sent(
    receiver: tuple[Receiver, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    got, url = receiver
    monkeypatch.setattr(otlp, "clean", lambda text, most: text)  # whose work it is to let no such name through
    monkeypatch.setattr(otlp, "MAX_BATCH", 1)
    exporter = OtlpExporter(url, True, SnapshotCollector())
    exporter.offer([replace(outlier(1), workload="\ud800"), outlier(2)])
    got.wait(lambda: len(got.spans) >= 5)
    exporter.close()
    assert exporter.lost == 1 and {attributes(record)["process.pid"] for record in got.logs} == {1, 2}
    assert {span.name for span in got.spans if not span.parent_span_id} == {f"request {outlier(2).workload}"}
