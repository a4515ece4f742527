"""Prometheus metrics: the fixed names, counters that never go down, and text that a strict parser takes."""

from __future__ import annotations

import gzip
import socket
import urllib.request
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from gputail import __version__, config, events, pipeline
from gputail.config import Address, Settings
from gputail.errors import GputailError
from gputail.histogram import Histogram
from gputail.snapshot import Health, ProcessCost, Snapshot, WorkloadView
from gputail.surfaces import metrics, metrics_server
from gputail.surfaces.metrics import SnapshotCollector
from gputail.surfaces.metrics_access import Access
from gputail.surfaces.metrics_server import MetricsServer
from gputail.surfaces.outlets import Outlets

MS = 1_000_000
OPEN = Access(Settings())


def histogram(*durations_ns: int) -> Histogram:
    made = Histogram()
    made.add(np.array(durations_ns, np.int64))
    return made


def view(name: str = "python3/7/HtoD..sync", requests: int = 4, **changes: object) -> WorkloadView:
    made = WorkloadView(
        name=name, tgid=7, comm="python3", command=None, container=None, shape="HtoD..sync", histogram=histogram(*[5 * MS] * requests),
        requests=requests, incomplete=1, outliers={"foreign_kernel": 2}, excess_ns={"foreign_kernel": 3 * MS, "unknown": MS},
        baseline_ns=5 * MS, last_end_ns=0,
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def scrape(collector: SnapshotCollector) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample by name and labels; the same one twice is an error."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in parse(generate_latest(registry).decode()):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in samples, key
            samples[key] = sample.value
    list(parse_openmetrics(generate_openmetrics(registry).decode()))
    return samples


def published(*views: WorkloadView, **changes: object) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    collector = SnapshotCollector()
    collector.publish(replace(Snapshot(1, tuple(views)), **changes))  # type: ignore[arg-type]
    return scrape(collector)


def value(samples: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float:
    (found,) = [number for (sample, had), number in samples.items() if sample == name and set(labels.items()) <= had]
    return found


def test_the_fixed_names_are_there() -> None:
    costs = (ProcessCost(7, "python3", "light", 1200.0, 0.004, 30.0),)
    samples = published(
        view(),
        calls={"cuLaunchKernel": histogram(2000)},
        events=23,
        health=Health(37, 1, overhead_ratio=0.004, processes=costs),
    )
    assert value(samples, "gputail_build_info", version=__version__) == 1
    assert value(samples, "gputail_requests_total", workload="python3/7/HtoD..sync") == 4
    assert value(samples, "gputail_workload_info", workload="python3/7/HtoD..sync", pid="7", comm="python3", container="", gpu="") == 1
    assert value(samples, "gputail_outliers_total", cause="foreign_kernel") == 2
    assert value(samples, "gputail_excess_seconds_total", cause="foreign_kernel") == 0.003
    assert value(samples, "gputail_request_duration_seconds_count") == 4
    assert value(samples, "gputail_request_duration_seconds_sum") == 0.02
    assert value(samples, "gputail_call_duration_seconds_count", call="cuLaunchKernel") == 1
    assert value(samples, "gputail_events_total") == 23
    assert value(samples, "gputail_attached_functions") == 37
    assert value(samples, "gputail_overhead_ratio") == 0.004
    assert value(samples, "gputail_probe_tier", pid="7", comm="python3", tier="light") == 1
    assert value(samples, "gputail_process_overhead_ratio", pid="7", comm="python3") == 0.004
    assert value(samples, "gputail_process_hits_per_second", pid="7", comm="python3") == 1200
    assert value(samples, "gputail_process_shed_seconds_total", pid="7", comm="python3") == 30


def test_before_the_first_snapshot_a_scrape_is_answered() -> None:
    assert {name for name, _ in scrape(SnapshotCollector())} == {"gputail_build_info"}


def test_what_is_not_known_is_left_out_and_what_is_none_is_zero() -> None:
    samples = published(view(baseline_ns=None), lost={"ring_full": 5, "new_stage": 1})
    names = {name for name, _ in samples}
    assert "gputail_overhead_ratio" not in names and "gputail_request_baseline_seconds" not in names
    lost = {dict(labels)["stage"]: number for (name, labels), number in samples.items() if name == "gputail_events_lost_total"}
    assert lost == dict.fromkeys((*events.KERNEL_STAGES, *events.USER_STAGES, *events.OUTLET_STAGES), 0) | {"ring_full": 5, "new_stage": 1}


def test_buckets_cover_short_and_long_requests_and_show_what_is_beyond() -> None:
    durations = [800_000, 95_000 * MS, 200_000 * MS]
    samples = published(view(histogram=histogram(*durations), requests=3))
    buckets = {
        float(dict(labels)["le"]): number for (name, labels), number in samples.items() if name == "gputail_request_duration_seconds_bucket"
    }
    bounds = sorted(buckets)
    assert [bounds[0], bounds[-2], bounds[-1]] == [7.5e-05, 100.0, float("inf")]
    counts = [buckets[bound] for bound in bounds]
    assert counts == sorted(counts)
    assert (buckets[bounds[0]], buckets[100.0], buckets[float("inf")]) == (0, 2, 3)
    for duration in durations[:2]:
        upper = next(bound for bound in bounds if buckets[bound] > sum(other < duration for other in durations))
        assert duration / 1e9 <= upper * 1.01 <= duration / 1e9 * 10 ** (1 / 8) * 1.02


def test_buckets_below_the_shortest_request_are_not_sent_and_all_others_are() -> None:
    collector = SnapshotCollector()
    collector.publish(Snapshot(1, (view(histogram=histogram(5 * MS, 70 * MS)),)))
    made = CollectorRegistry(auto_describe=False)
    made.register(collector)
    name = "gputail_request_duration_seconds_bucket"
    (whole, sent) = (
        {sample.labels["le"]: sample.value for family in parse(text.decode()) for sample in family.samples if sample.name == name}
        for text in (generate_latest(made), generate_latest(metrics_server.registry(collector)))
    )
    assert len(whole) == len(metrics.REQUEST_BOUNDS_NS) + 1
    empty = [bound for bound, count in whole.items() if count == 0]
    assert len(empty) > 10
    # The last empty one is where a quantile in the first bucket begins.
    assert sent == {bound: count for bound, count in whole.items() if bound not in empty[:-1]}


@pytest.mark.parametrize("bounds", [metrics.REQUEST_BOUNDS_NS, metrics.CALL_BOUNDS_NS], ids=["requests", "calls"])
def test_bounds_rise_evenly(bounds: np.ndarray) -> None:
    ratios = bounds[1:] / bounds[:-1]
    assert ratios.min() > 1 and ratios.max() / ratios.min() < 1.02


@pytest.mark.parametrize("name", ['quote " backslash \\ newline \n', "\udcff\x00\x1b[2J", "\u2028\ufeff", "日本", "x" * 5000, ""])
def test_no_name_of_another_process_breaks_a_scrape(name: str) -> None:
    samples = published(view(name=name, comm=name, container=name, outliers={name: 1}), calls={name: histogram(1)}, lost={name: 1})
    assert max(len(text) for _, labels in samples for _, text in labels) <= 128
    assert value(samples, "gputail_requests_total") == 4


def test_two_workloads_whose_labels_look_alike_stay_two() -> None:
    samples = published(view("a\x01", 2), view("a\x02", 3))
    assert sorted(number for (name, _), number in samples.items() if name == "gputail_requests_total") == [2, 3]


def test_workloads_beyond_the_limit_are_folded_and_counted() -> None:
    collector = SnapshotCollector(max_workloads=2)
    collector.publish(Snapshot(1, tuple(view(f"w{number}", number + 1) for number in range(5))))
    samples = scrape(collector)
    assert value(samples, "gputail_folded_workloads") == 3
    assert {dict(labels)["workload"]: number for (name, labels), number in samples.items() if name == "gputail_requests_total"} == {
        "w0": 1,
        "w1": 2,
        "other": 3 + 4 + 5,
    }
    assert value(samples, "gputail_outliers_total", workload="other") == 6


def test_what_the_settings_allow_is_what_a_scrape_of_the_daemon_has() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = Address("127.0.0.1", probe.getsockname()[1])
    outlets = Outlets(Settings(listen=address, socket=None, max_workloads=2))
    try:
        outlets.publish(Snapshot(1, tuple(view(f"w{number}") for number in range(5))))
        assert "gputail_folded_workloads 3.0" in fetch(address)
    finally:
        outlets.close()


def test_as_many_workloads_can_have_series_as_are_kept() -> None:
    assert config.MAX_SERIES == pipeline.MAX_WORKLOADS


def test_100_000_workloads_are_a_bounded_number_of_series() -> None:
    collector = SnapshotCollector(max_workloads=3)
    few = [view(f"w{number}") for number in range(10)]
    collector.publish(Snapshot(1, tuple(few)))
    before = len(scrape(collector))
    for start in range(0, 100_000, 1000):
        collector.publish(Snapshot(1, (*few, *(replace(few[0], name=f"n{number}") for number in range(start, start + 1000)))))
    samples = scrape(collector)
    assert len(samples) == before
    assert value(samples, "gputail_requests_total", workload="other") == (7 + 100_000) * 4


def test_the_folded_never_go_down_when_one_of_them_ends_or_is_begun_again() -> None:
    collector = SnapshotCollector(max_workloads=1)
    seen = []
    for views in (
        [view("own"), view("a", 5), view("b", 7)],
        [view("own"), view("a", 6)],  # b has ended
        [view("own"), view("a", 2)],  # a was forgotten, and is new
        [view("own")],
    ):
        collector.publish(Snapshot(1, tuple(views)))
        seen.append(value(scrape(collector), "gputail_requests_total", workload="other"))
    assert seen == [12, 13, 15, 15]


def test_series_of_a_workload_that_ended_are_dropped() -> None:
    collector = SnapshotCollector()
    collector.publish(Snapshot(1, (view("a"), view("b"))))
    collector.publish(Snapshot(2, (view("b"),)))
    assert {dict(labels)["workload"] for name, labels in scrape(collector) if name == "gputail_requests_total"} == {"b"}


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    collector = SnapshotCollector()
    collector.publish(Snapshot(1, (view(),), events=23))
    made = MetricsServer(Address("127.0.0.1", 0), collector, OPEN)
    yield made
    made.close()


def fetch(address: Address) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def get(server: MetricsServer) -> str:
    return fetch(server.address)


def test_a_scrape_is_answered_over_http(server: MetricsServer) -> None:
    assert "\ngputail_events_total 23.0\n" in get(server)


@pytest.mark.parametrize(
    ("accept", "content"),
    [
        # As Prometheus 2.42 and 3 ask.
        ("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1", "application/openmetrics-text"),
        ("application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,*/*;q=0.1", "application/openmetrics-text"),
        ("text/plain;version=0.0.4;q=0.5,*/*;q=0.1", "text/plain"),
    ],
)  # fmt: skip
def test_the_format_is_the_one_that_the_scraper_accepts(server: MetricsServer, accept: str, content: str) -> None:
    request = urllib.request.Request(f"http://{server.address}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as answer:
        text = answer.read().decode()
        assert answer.headers.get_content_type() == content
    assert text.endswith("\n# EOF\n") == (content == "application/openmetrics-text")


def test_a_scrape_is_packed_for_who_takes_that(server: MetricsServer) -> None:
    request = urllib.request.Request(f"http://{server.address}/metrics", headers={"Accept-Encoding": "gzip"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.headers["Content-Encoding"] == "gzip"
        assert b"\ngputail_events_total 23.0\n" in gzip.decompress(answer.read())


def test_a_client_that_stalls_does_not_delay_others(server: MetricsServer) -> None:
    with socket.create_connection((server.address.host, server.address.port)) as stalled:
        stalled.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert "gputail_events_total" in get(server)


def test_a_port_in_use_is_one_clear_error_that_names_it(server: MetricsServer) -> None:
    with pytest.raises(GputailError) as caught:
        MetricsServer(server.address, SnapshotCollector(), OPEN)
    assert caught.value.problem == f"cannot serve metrics on {server.address}: address already in use"
    assert f"--listen 127.0.0.1:{server.address.port + 1}" in caught.value.hint


def test_a_port_is_free_again_after_close() -> None:
    first = MetricsServer(Address("127.0.0.1", 0), SnapshotCollector(), OPEN)
    get(first)
    first.close()
    MetricsServer(first.address, SnapshotCollector(), OPEN).close()


@pytest.mark.parametrize("host", ["192.0.2.1", "x" * 300, "no.such.host.invalid"])
def test_an_address_that_is_not_ours_is_one_clear_error(host: str) -> None:
    with pytest.raises(GputailError, match="cannot serve metrics on"):
        MetricsServer(Address(host, 0), SnapshotCollector(), OPEN)
