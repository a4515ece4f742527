"""The whole path: simulated programs under real probes, cut and named, against what they logged of themselves."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from gputail import traces
from gputail.pipeline import Pipeline, replay_batches
from gputail.probes.tracer import TraceOptions, Tracer
from gputail.sim.build import build
from gputail.sim.judge import Judgement, judge
from gputail.sim.scenario import Truth, scenario, write_trace

SECONDS = 5.0


@pytest.fixture(autouse=True)
def away_from_the_victim() -> Iterator[list[int]]:
    """The victim has the last CPU; what traces it must not be what preempts it."""
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus[:-1] or cpus)
    yield cpus
    os.sched_setaffinity(0, cpus)


def trace(label: str, cpus: list[int]) -> tuple[list[dict], np.ndarray, dict[str, int], Truth]:
    """Records, rows, losses and truth of a run."""
    options = TraceOptions(pids=frozenset([os.getpid()]), libraries=(str(build().libraries / "libcuda.so.1"),))
    tracer, pipeline = Tracer(options), Pipeline()
    rows, lost = [], {}
    try:
        with scenario(label, SECONDS, seed=11, cpus=cpus) as running:
            while running.is_running():
                batch = tracer.poll()
                rows.append(batch.calls)
                pipeline.feed(batch)
            batch = tracer.finish()
            rows.append(batch.calls)
            pipeline.feed(batch)
            truth = running.truth()
    finally:
        tracer.close()
    pipeline.finish()
    lost = dict(pipeline.snapshot().lost)
    return [record.as_dict() for record in pipeline.take_records()], np.concatenate(rows), lost, truth


def hold(result: Judgement) -> None:
    """What holds for every kind: cut as the program logged it, the injected cause first, the culprit right."""
    assert result.one_to_one >= 0.99 * result.requests, result
    if result.slow:
        assert result.right >= 0.8 * result.slow, result
    if result.named is not None:
        assert result.named == result.right, result


@pytest.mark.parametrize("label", ["gpu", "graph", "async", "gpu+xgemm", "graph+xgemm", "devsync", "gil"])
def test_requests_are_cut_as_logged_and_the_injected_cause_is_named(label, away_from_the_victim):
    records, _, lost, truth = trace(label, away_from_the_victim)
    assert lost == {}
    assert len(truth.requests) > 100
    hold(judge(records, truth))


def test_kernels_on_another_gpu_are_not_blamed(away_from_the_victim):
    records, _, _, truth = trace("gpu+elsewhere", away_from_the_victim)
    assert len(truth.bursts) > 3  # they were there
    assert {record["gpu"] for record in records if record["pid"] == truth.victim} == {"0"}
    assert not [c for record in records if record["outlier"] for c in record["contributions"] if c["cause"].startswith("foreign")]
    beside, *_ = trace("gpu+xgemm", away_from_the_victim)  # and would be on the same one
    assert [c for record in beside if record["outlier"] for c in record["contributions"] if c["cause"] == "foreign_kernel"]


def test_a_live_run_written_as_a_labelled_trace_replays_to_the_same_judgement(tmp_path, away_from_the_victim):
    records, rows, _, truth = trace("gpu+xgemm", away_from_the_victim)
    path = tmp_path / "live.npz"
    write_trace(path, rows, truth)
    again = [record.as_dict() for record in replay_batches(traces.batches(traces.load(str(path))))]
    assert judge(again, truth) == judge(records, truth)
