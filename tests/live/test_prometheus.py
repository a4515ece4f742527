"""The daemon scraped by a real Prometheus while simulated programs run: rules and dashboard show their tails, causes and culprits."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from gputail.sim.build import build
from gputail.sim.scenario import scenario
from tests.fleet.prometheus import all_answer, prometheus
from tests.fleet.prometheus import wait_until as wait_long_until

from .conftest import free_port

SECONDS = 12.0


@pytest.fixture
def cpus() -> Iterator[list[int]]:
    """The victim has the last CPU; what watches it must not be what preempts it."""
    found = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, found[:-1] or found)
    yield found
    os.sched_setaffinity(0, found)


def test_prometheus_shows_the_tail_of_simulated_programs_with_cause_and_culprit(gputail, tmp_path, cpus):
    port = free_port()
    arguments = ("run", "--library", str(build().libraries / "libcuda.so.1"), "--listen", f"127.0.0.1:{port}", "--socket", "off")
    daemon = gputail(*arguments)
    daemon.wait_for("tracing")
    with prometheus(tmp_path, [f"127.0.0.1:{port}"]) as running, scenario("gpu+xgemm", SECONDS, seed=11, cpus=cpus) as programs:
        all_answer(running)
        truth = programs.truth()
        outliers = (
            f"gputail_outliers_total{{cause='foreign_kernel'}} * on (workload) group_left () gputail_workload_info{{pid='{truth.victim}'}}"
        )
        culprit = f"gputail_culprit_excess_seconds_total{{pid='{truth.aggressor}',comm='aggressor',cause='foreign_kernel'}}"
        wait_long_until(lambda: running.query(f"sum({outliers}) > 0") and running.query(f"{culprit} > 0"), lambda: daemon.stderr)
        shown = [one["labels"] for one in running.exemplars("gputail_request_duration_seconds_bucket")]
        assert {labels["culprit_pid"] for labels in shown if labels["cause"] == "foreign_kernel"} == {str(truth.aggressor)}
        (target,) = running.targets()
        assert (target["health"], target["lastError"]) == ("up", "")
    assert daemon.end() == 0
