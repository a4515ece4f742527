"""Several ranks under real probes: the late one by name, nobody where it cannot be known, and a collective that hangs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gputail import events
from gputail.pipeline import Pipeline
from gputail.probes.tracer import TraceOptions, Tracer
from gputail.sim.build import build
from gputail.sim.caller import Caller
from gputail.sim.ranks import JobTruth, job, judge
from gputail.snapshot import Snapshot
from tests.live.conftest import wait_until

SECONDS = 5.0
LIBRARIES = tuple(str(build().libraries / name) for name in ("libcuda.so.1", "libnccl.so.2"))


@pytest.fixture(autouse=True)
def away_from_the_late_rank() -> Iterator[list[int]]:
    """The late rank has the last CPU; what traces it must not be what makes it late."""
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus[:-1] or cpus)
    yield cpus
    os.sched_setaffinity(0, cpus)


@dataclass(frozen=True)
class Run:
    records: list[dict]
    batches: list[events.Batch]
    snapshot: Snapshot
    truth: JobTruth


def analyse(batches: list[events.Batch]) -> tuple[list[dict], Snapshot]:
    pipeline = Pipeline()
    for batch in batches:
        pipeline.feed(batch)
    pipeline.finish()
    return [record.as_dict() for record in pipeline.take_records()], pipeline.snapshot()


def trace(label: str, cpus: list[int], seconds: float = SECONDS, seed: int = 11) -> Run:
    tracer = Tracer(TraceOptions(pids=frozenset([os.getpid()]), libraries=LIBRARIES))
    batches = []
    try:
        with job(label, seconds, seed=seed, cpus=cpus) as running:
            while running.is_running():
                batches.append(tracer.poll())
            batches.append(tracer.finish())
            truth = running.truth()
    finally:
        tracer.close()
    records, snapshot = analyse(batches)
    return Run(records, batches, snapshot, truth)


@pytest.mark.parametrize(
    "label, instead",
    [("latecopy", "copying"), ("latework", "192 launches against 24"), ("latehog", "preempted"), ("latepinned", "copying")],
)
def test_the_late_rank_is_named_in_99_of_100(label: str, instead: str, away_from_the_late_rank: list[int]) -> None:
    run = trace(label, away_from_the_late_rank, seconds=8.0 if label == "latehog" else SECONDS)
    result = judge(run.records, run.truth)
    assert result.slow >= 30, result  # a request of each of the two that waited
    assert result.one_to_one >= 0.99 * result.requests, result
    assert result.named >= 0.99 * result.slow, result
    assert result.false <= 0.002 * result.requests, result
    assert result.texts.get(instead, 0) >= 0.8 * result.named, result
    (view,) = run.snapshot.communicators
    assert [(one.rank, one.tgid) for one in view.ranks] == list(enumerate(run.truth.pids))
    assert view.rounds == sum(map(len, run.truth.collectives)) // 3


def test_a_late_rank_that_is_not_traced_leaves_it_unknown(away_from_the_late_rank: list[int]) -> None:
    run = trace("latecopy", away_from_the_late_rank)
    late = run.truth.pids[run.truth.late]
    without = [
        events.Batch(b.calls[b.calls["tgid"] != late], b.names[b.names["tgid"] != late], b.processes, b.lost, b.watermark_ns)
        for b in run.batches
    ]
    records, snapshot = analyse(without)
    result = judge(records, run.truth)
    assert result.slow >= 30 and result.right == 0, result
    assert result.wrong.get("unknown", 0) >= 0.9 * result.slow, result
    assert not any(c["culprit_pid"] == late for r in records if r["outlier"] for c in r["contributions"])
    assert snapshot.communicators[0].untraced == 1


def test_a_rank_that_is_slow_while_nobody_waits_is_not_blamed(away_from_the_late_rank: list[int]) -> None:
    run = trace("idlecopy", away_from_the_late_rank, seconds=8.0)
    result = judge(run.records, run.truth)
    assert result.requests > 500 and result.false <= 0.002 * result.requests, result


def test_a_lasting_shift_names_the_rank_once(away_from_the_late_rank: list[int]) -> None:
    run = trace("lateshift", away_from_the_late_rank, seconds=10.0)
    (drift,) = run.snapshot.drifts
    assert (drift.pid, drift.rank) == (run.truth.pids[run.truth.late], run.truth.late)
    assert 2_000_000 < drift.after_ns - drift.before_ns < 4_000_000  # 3 ms more in every step
    assert drift.time_ns > int(run.truth.faults[0, 0])


def test_a_collective_that_a_rank_never_comes_to_is_shown_with_its_age(tmp_path: Path) -> None:
    """Field case 28: one rank is absent, and the others' wait returns no call that could be recorded."""
    callers = [Caller(tmp_path / "gpu") for _ in range(2)]
    tracer, pipeline = Tracer(TraceOptions(pids=frozenset(c.pid for c in callers), libraries=LIBRARIES, off_cpu=False)), Pipeline()

    def ages() -> Callable[[], bool]:
        def older() -> bool:
            pipeline.feed(tracer.poll())
            snapshot = pipeline.snapshot()
            found = [snapshot.time_ns - one.since_ns for view in snapshot.communicators for one in view.open]
            return bool(found) and found[0] > 1_500_000_000

        return older

    try:
        for rank, caller in enumerate(callers):
            caller.do("load", "libnccl.so.2")
            caller.send("call", "ncclCommInitRank", 1, "&comm", 2, "id:hang", rank)
        for caller in callers:
            caller.receive()
        callers[0].do("call", "ncclAllReduce", 1, 0, 0, 1024, 7, 0, "$comm", 0)
        callers[0].send("call", "cuCtxSynchronize", 1)  # does not return
        wait_until(ages(), "a collective that is open for a while")
        (view,) = pipeline.snapshot().communicators
        (hanging,) = view.open
        assert (hanging.function, hanging.came, hanging.missing) == ("ncclAllReduce", ((0, callers[0].pid),), ((1, callers[1].pid),))
        callers[1].do("call", "ncclAllReduce", 1, 0, 0, 1024, 7, 0, "$comm", 0)
        callers[1].do("call", "cuCtxSynchronize", 1)
        callers[0].receive()
        pipeline.feed(tracer.finish())
        assert pipeline.snapshot().communicators[0].open == ()
    finally:
        tracer.close()
        for caller in callers:
            caller.close()
