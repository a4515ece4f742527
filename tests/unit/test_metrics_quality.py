"""What Prometheus can make of a scrape: quantiles within the stated error, exemplars of outliers, few bytes and series."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.samples import Exemplar

from gputail.snapshot import Snapshot, WorkloadView
from gputail.surfaces import metrics_server
from gputail.surfaces.metrics import MAX_EXEMPLAR_CHARS, REQUEST_BOUNDS_NS, SnapshotCollector
from gputail.tail import Contribution
from tests.unit.snapshots import MS, S, histogram, outlier, snapshot, view

PAGE = Path(__file__).resolve().parents[2] / "docs/metrics.md"
ERROR = int(re.search(r"off by (\d+)% of the true", " ".join(PAGE.read_text().split()))[1]) / 100  # type: ignore[index]
BUCKET = "gputail_request_duration_seconds_bucket"
HOSTILE = [
    'quote " backslash \\ newline \n',
    "\udcff\x00\x1b[2J",
    "\u2028\ufeff",
    "日本語" * 100,
    "x" * 5000,
    "",
    '"} 1 # {a="b"} 2',
    "void f<{lambda()#1}>(int) # {}",
]


def collector_of(*views: WorkloadView, max_workloads: int = 100, **changes: object) -> SnapshotCollector:
    collector = SnapshotCollector(max_workloads)
    collector.publish(snapshot(*views, **changes))  # type: ignore[arg-type]
    return collector


def openmetrics(collector: SnapshotCollector) -> str:
    return generate_openmetrics(metrics_server.registry(collector)).decode()


def histogram_quantile(q: float, buckets: Sequence[tuple[float, float]]) -> float:
    """As Prometheus defines it, of (le, cumulative count) in order of le: interpolated linearly in the bucket of the quantile."""
    rank = q * buckets[-1][1]
    index = next(index for index, (_, count) in enumerate(buckets) if count >= rank)
    if index == len(buckets) - 1:
        return buckets[-2][0]
    begin, below = buckets[index - 1] if index else (0.0, 0.0)
    end, count = buckets[index]
    return begin + (end - begin) * (rank - below) / (count - below)


def buckets_of(text: str) -> list[tuple[float, float]]:
    samples = [sample for family in parse_openmetrics(text) for sample in family.samples if sample.name == BUCKET]
    return [(float(sample.labels["le"]), sample.value) for sample in samples]


def durations() -> dict[str, np.ndarray]:
    """Such that each quantile is at either end of a bucket somewhere, or has spread around it, or two modes."""
    random = np.random.default_rng(1)
    made = {f"all at {ns} ns": np.full(1000, ns) for bound in REQUEST_BOUNDS_NS[1:].tolist() for ns in (bound - 1, bound, bound + 1)}
    made |= {f"{scale} ms": scale * MS * random.lognormal(0, 0.3, 5000) for scale in (0.3, 5.2, 90, 4000, 30_000)}
    made |= {f"two modes, {ms} ms": np.concatenate([np.full(9850, ms * MS), np.full(150, 2.4 * ms * MS)]) for ms in (0.1, 5, 700, 40_000)}
    return {name: np.clip(some, 100_000, 100 * S).astype(np.int64) for name, some in made.items()}


@pytest.mark.parametrize("q", [0.5, 0.9, 0.99, 0.999])
def test_quantiles_from_100_us_to_100_s_are_within_the_stated_error(q: float) -> None:
    assert 0 < ERROR < 0.5
    for name, some in durations().items():
        made = buckets_of(openmetrics(collector_of(view(histogram=histogram(some)))))
        true = np.sort(some)[math.ceil(q * len(some)) - 1] / 1e9
        assert abs(histogram_quantile(q, made) - true) <= ERROR * true, f"{name}: {histogram_quantile(q, made)} s instead of {true}"


def exemplars_in(text: str) -> dict[str, Exemplar]:
    """By the bound of the bucket."""
    samples = [sample for family in parse_openmetrics(text) for sample in family.samples]
    assert not [sample for sample in samples if sample.exemplar and sample.name != BUCKET]
    return {sample.labels["le"]: sample.exemplar for sample in samples if sample.exemplar}


def test_a_bucket_has_the_latest_outlier_that_fell_into_it_as_its_exemplar() -> None:
    some = [outlier(end_ns=number * S, start_ns=number * S - ms * MS) for number, ms in enumerate((12, 30, 13, 31, 12), 1)]
    collector = collector_of(view(histogram=histogram([12 * MS, 30 * MS, 13 * MS, 31 * MS, 12 * MS]), recent_outliers=tuple(some)))
    found = exemplars_in(openmetrics(collector))
    assert {bound: exemplar.value for bound, exemplar in found.items()} == {"0.0133": 0.012, "0.0316": 0.031}
    last = some[-1]
    assert found["0.0133"].labels == {
        "cause": "foreign_kernel", "culprit": "sm90_xmma_gemm_f16", "culprit_pid": "556", "start_ns": str(last.start_ns),
    }  # fmt: skip


def test_an_exemplar_is_in_its_bucket_also_at_the_bounds_and_beyond_them() -> None:
    bounds = [*REQUEST_BOUNDS_NS.tolist(), 200 * S]
    for ns in (ns for bound in bounds for ns in (bound - 1, bound, bound + 1)):
        seen = view(histogram=histogram([ns, 5 * S]), recent_outliers=(outlier(end_ns=ns, start_ns=0),))
        found = exemplars_in(openmetrics(collector_of(seen)))
        for bound, exemplar in found.items():
            index = bounds.index(round(float(bound) * 1e9)) if bound != "+Inf" else len(REQUEST_BOUNDS_NS)
            assert (bounds[index - 1] / 1e9 if index else 0) < exemplar.value <= float(bound)


def test_an_exemplar_has_the_time_of_day_and_keeps_it() -> None:
    before, end_ns, after = time.time_ns(), time.monotonic_ns(), time.time_ns()
    seen = view(recent_outliers=(outlier(end_ns=end_ns),))
    collector = collector_of(seen)
    (first,) = exemplars_in(openmetrics(collector)).values()
    assert first.timestamp is not None
    assert before / 1e9 - 1.001 <= float(first.timestamp) <= after / 1e9 + 1.001
    collector.publish(snapshot(seen))
    assert list(exemplars_in(openmetrics(collector)).values()) == [first]


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_of_another_process_breaks_an_exemplar(name: str) -> None:
    record = outlier(cause=name, contributions=(Contribution(name, 7 * MS, 2**22, name),), start_ns=2**63 - 12 * MS, end_ns=2**63 - 1)
    seen = replace(view(), name=name, comm=name, container=name, outliers={name: 1}, excess_ns={name: 1}, recent_outliers=(record,))
    (exemplar,) = exemplars_in(openmetrics(collector_of(seen, calls={name: histogram([1])}, lost={name: 1}))).values()
    assert sum(len(key) + len(text) for key, text in exemplar.labels.items()) <= MAX_EXEMPLAR_CHARS
    assert exemplar.labels["culprit_pid"] == str(2**22) and exemplar.labels["start_ns"] == str(2**63 - 12 * MS)


def test_what_is_not_known_of_a_culprit_is_left_out() -> None:
    record = outlier(contributions=(Contribution("unknown", 7 * MS),), cause="unknown")
    (exemplar,) = exemplars_in(openmetrics(collector_of(view(recent_outliers=(record,))))).values()
    assert exemplar.labels == {"cause": "unknown", "start_ns": str(record.start_ns)}


def test_exemplars_are_in_openmetrics_alone() -> None:
    made = metrics_server.registry(collector_of(view()))
    plain = [line for line in generate_latest(made).decode().splitlines() if not line.startswith("#")]
    assert [line for line in generate_openmetrics(made).decode().splitlines() if " # {" in line]
    assert not [line for line in plain if "#" in line]


def test_a_scrape_of_200_workloads_has_less_than_a_megabyte() -> None:
    views = [view(1000 + number) for number in range(200)]
    calls = {f"cuFunctionNumber{number}": views[0].histogram for number in range(40)}
    text = openmetrics(collector_of(*views, max_workloads=200, calls=calls))
    assert text.count("gputail_workload_info{") == 200
    assert len(text.encode()) < 1_000_000


def test_100_000_requests_and_1_000_short_processes_leave_the_number_of_series_as_it_is() -> None:
    steady = [view(1000 + number) for number in range(3)]
    collector = collector_of(*steady, max_workloads=3 + 1)
    short = view(5000, name="python3/5000/HtoD..sync")
    collector.publish(snapshot(*steady, short))
    before = openmetrics(collector).count("\n")
    for number in range(1000):
        requests = histogram(np.arange(100) * 1000 + 5 * MS + number)
        steady = [replace(one, histogram=requests, requests=(number + 1) * 100) for one in steady]
        passing = replace(short, tgid=6000 + number, name=f"python3/{6000 + number}/HtoD..sync")
        collector.publish(snapshot(*steady, passing))
    assert openmetrics(collector).count("\n") == before


def test_a_workload_that_nobody_looked_at_yet_is_scraped_without_exemplars() -> None:
    collector = SnapshotCollector()
    collector.publish(Snapshot(1))
    assert exemplars_in(openmetrics(collector)) == {}
