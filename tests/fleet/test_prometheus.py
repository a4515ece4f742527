"""A real Prometheus and the metrics of 20 nodes: rules and dashboard give data, and quantiles of the fleet are right."""

from __future__ import annotations

import math
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import bcrypt
import numpy as np
import pytest
from prometheus_client import generate_latest

from gputail.blame import CulpritView
from gputail.config import Address, Settings
from gputail.histogram import Histogram
from gputail.surfaces import metrics_server
from gputail.surfaces.metrics import SnapshotCollector
from gputail.surfaces.metrics_access import Access
from gputail.surfaces.metrics_server import MetricsServer
from tests.unit.snapshots import MS, outlier, snapshot, view
from tests.unit.test_metrics_access import certificate as self_signed
from tests.unit.test_metrics_quality import ERROR, HOSTILE

from .conftest import program
from .prometheus import Prometheus, all_answer, prometheus, wait_until

NODES = 20
BUCKETS = "gputail_request_duration_seconds_bucket"


class Node:
    """A node's exposition server, and the durations of all requests of it so far."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._collector = SnapshotCollector()
        self._steps = 0
        self.durations = np.array([100_000])  # below all others: every bucket is there before anything is counted
        self.publish()
        self.server = MetricsServer(Address("127.0.0.1", 0), self._collector, Access(Settings()))

    def work(self, requests: int = 500) -> None:
        """Some more requests; nodes differ, and the last is ten times slower than the first."""
        random = np.random.default_rng(100 * self._steps + self._number)
        scale_ms = 5 * 10 ** (self._number / (NODES - 1))
        self.durations = np.concatenate([self.durations, (scale_ms * MS * random.lognormal(0, 0.4, requests)).astype(np.int64)])
        self._steps += 1
        self.publish()

    def publish(self) -> None:
        counted = Histogram()
        counted.add(self.durations)
        slow = {"foreign_kernel": 7 * self._steps}
        now_ns = time.monotonic_ns()
        seen = replace(
            view(1000, histogram=counted, requests=counted.count),
            recent_outliers=(outlier(start_ns=now_ns - 12 * MS, end_ns=now_ns),),
            outliers=slow,
            excess_ns={cause: count * MS for cause, count in slow.items()},
        )
        made = snapshot(
            seen,
            calls={"cuLaunchKernel": counted},
            culprits=(CulpritView(556, "python3", seen.excess_ns),),
            events=1000 * self._steps,
        )
        self._collector.publish(replace(made, health=replace(made.health, budget_ratio=0.01, overhead_ratio=0.004)))


@pytest.fixture(scope="module")
def fleet() -> Iterator[list[Node]]:
    nodes = [Node(number) for number in range(NODES)]
    yield nodes
    for node in nodes:
        node.server.close()


@pytest.fixture(scope="module")
def running(fleet: list[Node], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    with prometheus(Path(folder), [str(node.server.address) for node in fleet]) as made:
        yield made


def test_the_fleets_quantiles_are_within_the_histograms_error_of_the_true_ones(fleet: list[Node], running: Prometheus) -> None:
    total = f'sum({BUCKETS}{{le="+Inf"}})'
    wait_until(lambda: running.query(total) == [({}, NODES)], lambda: running.query(total))
    for node in fleet:
        node.work(20_000)
    counted = NODES + NODES * 20_000
    wait_until(lambda: running.query(total) == [({}, counted)], lambda: running.query(total))
    durations = np.sort(np.concatenate([node.durations[1:] for node in fleet]))
    for q in (0.5, 0.99, 0.999):
        true = durations[math.ceil(q * len(durations)) - 1] / 1e9
        ((_, got),) = running.query(f"histogram_quantile({q}, sum by (le) (increase({BUCKETS}[10m])))")
        assert abs(got - true) <= ERROR * true, (q, got, true)


def test_every_rule_and_every_query_of_the_dashboard_gives_data(fleet: list[Node], running: Prometheus) -> None:
    over = threading.Event()

    def work() -> None:
        while not over.wait(0.5):
            for node in fleet:
                node.work()

    working = threading.Thread(target=work)
    working.start()
    try:
        all_answer(running)
    finally:
        over.set()
        working.join()


def test_prometheus_takes_every_scrape_and_its_exemplars(fleet: list[Node], running: Prometheus) -> None:
    wait_until(lambda: running.exemplars(BUCKETS), lambda: "exemplars")
    found = running.exemplars(BUCKETS)
    assert {exemplar["labels"]["cause"] for exemplar in found} == {"foreign_kernel"}
    assert {exemplar["labels"]["culprit"] for exemplar in found} == {"sm90_xmma_gemm_f16"}
    assert {exemplar["series"]["workload"] for exemplar in found} == {"python3/1000/HtoD..sync"}
    assert [(target["health"], target["lastError"]) for target in running.targets()] == [("up", "")] * NODES


@pytest.mark.parametrize("name", HOSTILE)
def test_promtool_takes_a_scrape_without_complaint_whatever_processes_are_called(name: str) -> None:
    seen = replace(view(), name=name, comm=name, container=name, outliers={name: 1}, excess_ns={name: 1})
    collector = SnapshotCollector()
    collector.publish(snapshot(seen, calls={name: seen.histogram}, lost={name: 1}, culprits=(CulpritView(1, name, {name: 1}),)))
    text = generate_latest(metrics_server.registry(collector))
    done = subprocess.run([program("promtool"), "check", "metrics"], input=text, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_prometheus_scrapes_over_tls_with_a_password(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    (tmp_path / "htpasswd").write_text(f"prometheus:{bcrypt.hashpw(b's3cret', bcrypt.gensalt(4)).decode()}\n")
    (tmp_path / "password").write_text("s3cret")
    settings = Settings(metrics_tls_cert=str(certificate), metrics_tls_key=str(key), metrics_auth_file=str(tmp_path / "htpasswd"))
    server = MetricsServer(Address("localhost", 0), SnapshotCollector(), Access(settings))
    secured = {
        "scheme": "https",
        "tls_config": {"ca_file": str(certificate)},
        "basic_auth": {"username": "prometheus", "password_file": str(tmp_path / "password")},
    }
    try:
        with prometheus(tmp_path, [str(server.address)], **secured) as running:
            wait_until(lambda: running.query("gputail_build_info"), lambda: running.targets())
    finally:
        server.close()
