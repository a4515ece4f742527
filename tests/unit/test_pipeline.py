import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from gputail import events, traces
from gputail.budget import COPY
from gputail.pipeline import TIMELINE_EVERY_NS, VERDICT_DELAY_NS, Pipeline, replay_batches
from gputail.tail import RequestRecord
from gputail.timeline import CELLS, KERNELS
from tests.unit.streams import MS, START_NS, US, Actor, S, batches, random_cuts, replay, stream

DATA = Path(__file__).parent.parent / "data"


def logged(name: str) -> dict:
    with np.load(DATA / f"{name}.npz", allow_pickle=False) as data:
        return {key: data[key] for key in data.files}


def replayed(name: str) -> list[RequestRecord]:
    return list(replay_batches(traces.batches(traces.load(DATA / f"{name}.npz"))))


def injected(truth: dict) -> np.ndarray:
    windows = np.concatenate([truth["bursts"].reshape(-1, 2), truth["faults"].reshape(-1, 2)])
    return np.array([any(begin < w1 and w0 < end for w0, w1 in windows) for begin, end in truth["requests"]])


@pytest.mark.parametrize("name, calls", [("xgemm", 154), ("devsync", None), ("gil", 189)])
def test_every_request_that_a_recorded_program_logged_is_found_once(name: str, calls: int | None) -> None:
    truth = logged(name)
    mine = [record for record in replayed(name) if record.tid == truth["victim"]]
    assert len(mine) == len(truth["requests"])
    for record, (begin, end) in zip(mine, truth["requests"].tolist(), strict=True):
        assert begin <= record.start_ns < record.end_ns <= end
    if calls:
        assert {record.calls for record in mine} == {calls}
    assert not any(record.incomplete for record in mine)


@pytest.mark.parametrize(
    "name, causes, culprit",
    [
        ("xgemm", {"foreign_kernel"}, True),
        ("devsync", {"blocking_sync"}, False),
        ("gil", {"host_blocked", "cpu_preempted"}, False),
    ],
)
def test_injected_slow_requests_of_a_recording_get_their_cause_and_no_other_does(name: str, causes: set[str], culprit: bool) -> None:
    truth = logged(name)
    mine = [record for record in replayed(name) if record.tid == truth["victim"]]
    hit = injected(truth)
    slow = [record for record, was_hit in zip(mine, hit, strict=True) if was_hit and record.outlier]
    assert len(slow) >= 4
    assert all(record.cause in causes for record in slow)
    if culprit:
        assert {record.contributions[0].culprit_pid for record in slow} == {int(truth["aggressor"])}
    assert not [record for record, was_hit in zip(mine, hit, strict=True) if not was_hit and record.cause in causes]


@pytest.mark.parametrize("name", ["xgemm", "gil"])
def test_a_recording_gives_the_same_records_however_it_is_cut(name: str) -> None:
    trace = traces.load(DATA / f"{name}.npz")
    whole = replayed(name)
    for seed in range(3):
        pipeline = Pipeline()
        for batch in batches(trace.calls, random_cuts(trace.calls, seed)):
            pipeline.feed(events.Batch(batch.calls, watermark_ns=batch.watermark_ns))
        pipeline.finish()
        assert pipeline.take_records() == whole


def test_budgets_of_a_recording_sum_to_the_wall_time() -> None:
    for record in replayed("gil"):
        assert sum(record.budget_ns) == record.duration_ns
        assert sum(record.as_dict()["budget"].values()) == record.duration_ns


def serving(count: int = 100) -> Actor:
    actor = Actor()
    for _ in range(count):
        actor.serve()
    return actor


def test_records_come_in_order_of_their_end_and_can_be_printed() -> None:
    actors = [Actor(tgid=100 + n, at_ns=START_NS + n * MS) for n in range(3)]
    for n, actor in enumerate(actors):
        for _ in range(70):
            actor.serve(rest_ns=(1 + n) * MS)
    records = replay(*actors)
    assert len(records) == 210
    assert [record.end_ns for record in records] == sorted(record.end_ns for record in records)
    for record in records:
        assert json.loads(json.dumps(record.as_dict()))["pid"] == record.pid


def test_a_record_is_given_once_its_verdict_is_due() -> None:
    calls = stream(serving())
    pipeline = Pipeline()
    end = int(events.end_ns(calls)[-1])
    pipeline.feed(events.Batch(calls, watermark_ns=end))
    early = pipeline.take_records()
    pipeline.feed(events.Batch(watermark_ns=end + VERDICT_DELAY_NS))
    middle = pipeline.take_records()
    pipeline.feed(events.Batch(watermark_ns=end + VERDICT_DELAY_NS + 1))
    (last,) = pipeline.take_records()
    assert len(early) + len(middle) + 1 == 100
    assert last.end_ns == end
    assert all(record.end_ns + VERDICT_DELAY_NS < end for record in early)


def test_the_snapshot_shows_workloads_calls_and_losses() -> None:
    calls = stream(serving())
    pipeline = Pipeline()
    process = events.Process(100, comm="python3", command="python3 serve.py", container="abc")
    pipeline.feed(events.Batch(calls, processes=(process,), lost={"ring_full": 3}, watermark_ns=int(events.end_ns(calls)[-1])))
    pipeline.finish()
    snapshot = pipeline.snapshot()
    (workload,) = snapshot.workloads
    assert (workload.name, workload.shape, workload.comm, workload.container) == ("python3/100/HtoD..sync", "HtoD..sync", "python3", "abc")
    assert (workload.requests, workload.incomplete, workload.histogram.count, dict(workload.outliers)) == (100, 0, 100, {})
    assert workload.baseline_ns == pipeline.take_records()[-1].duration_ns
    assert (snapshot.events, dict(snapshot.lost)) == (len(calls), {"ring_full": 3})
    assert {name: histogram.count for name, histogram in snapshot.calls.items()} == {
        "cuLaunchKernel": 2000, "cuStreamSynchronize": 200, "cuMemcpyHtoDAsync": 100, "cuMemcpyDtoHAsync": 100,
    }  # fmt: skip


def test_a_snapshot_does_not_change_with_what_comes_after() -> None:
    calls = stream(serving())
    pipeline = Pipeline()
    pipeline.feed(events.Batch(calls[: len(calls) // 2], watermark_ns=int(events.end_ns(calls)[len(calls) // 2])))
    before = pipeline.snapshot()
    count = before.workloads[0].histogram.count
    pipeline.feed(events.Batch(calls[len(calls) // 2 :], watermark_ns=1 << 60))
    assert before.workloads[0].histogram.count == count < pipeline.snapshot().workloads[0].histogram.count


def test_off_cpu_rows_and_calls_of_unknown_duration_are_in_no_call_histogram() -> None:
    actor = Actor().call("cuLaunchKernel", 0, flags=events.ENTRY_ONLY).sleep(MS).call("cuLaunchKernel", 5_000)
    pipeline = Pipeline()
    pipeline.feed(events.Batch(stream(actor), watermark_ns=actor.now_ns))
    assert {name: histogram.count for name, histogram in pipeline.snapshot().calls.items()} == {"cuLaunchKernel": 1}


def test_an_incomplete_request_has_no_verdict_and_is_in_the_histogram() -> None:
    actor = serving(100)
    actor.htod().sync().launch(20).call("cuMemcpyDtoHAsync", 50 * MS, size=1024, flags=events.AFTER_GAP).sync().rest(2 * MS)
    for _ in range(5):
        actor.serve()
    pipeline = Pipeline()
    pipeline.feed(events.Batch(stream(actor), watermark_ns=1 << 60))
    records = pipeline.take_records()
    assert [(record.incomplete, record.outlier) for record in records if record.duration_ns > 40 * MS] == [(True, False)]
    (workload,) = pipeline.snapshot().workloads
    assert (workload.incomplete, workload.histogram.count) == (1, 106)


def test_requests_open_when_rows_of_unknown_threads_were_lost_are_incomplete() -> None:
    calls = stream(serving())
    ends = events.end_ns(calls)
    half = len(calls) // 2 + 3  # in the middle of a request
    pipeline = Pipeline()
    pipeline.feed(events.Batch(calls[:half], watermark_ns=int(ends[half - 1])))
    pipeline.feed(events.Batch(calls[half : half + 10], lost={"malformed": 1}, watermark_ns=int(ends[half + 9])))
    pipeline.feed(events.Batch(calls[half + 10 :], watermark_ns=1 << 60))
    incomplete = [record for record in pipeline.take_records() if record.incomplete]
    assert len(incomplete) == 1
    assert incomplete[0].start_ns <= ends[half + 9] and incomplete[0].end_ns >= ends[half - 1]


def test_unknown_names_are_null_and_hostile_ones_are_made_printable() -> None:
    calls = stream(serving())
    assert {record.comm for record in replay_batches(batches(calls))} == {None}
    pipeline = Pipeline()
    pipeline.feed(events.Batch(processes=(events.Process(100, comm='\x1b[2J"evil\n'),)))
    pipeline.feed(events.Batch(calls, watermark_ns=1 << 60))
    record = pipeline.take_records()[0]
    assert record.comm == '?[2J"evil?'
    assert record.workload == "__2J_evil_/100/HtoD..sync"


def test_one_unusual_request_is_judged_beside_the_usual_ones() -> None:
    actor = serving(100)
    actor.launch(20).dtoh(duration_ns=30 * MS).sync().rest(2 * MS)  # it begins otherwise
    actor.serve()
    records = replay(actor)
    assert {record.workload for record in records} == {"unknown/100/HtoD..sync"}
    assert [record.outlier for record in records] == [False] * 100 + [True, False]


def test_a_long_row_of_random_garbage_is_survived() -> None:
    chance = np.random.default_rng(5)
    calls = np.frombuffer(chance.bytes(64 * 3000), events.CALL).copy()
    calls["start_ns"] %= 10 * S
    calls["duration_ns"] %= S
    calls["tgid"] %= 3
    calls["tid"] %= 5
    calls["call"] = chance.choice([1, 8, 20, 25, 62, 63, 100, 200, 300, 7777], 3000)
    calls = calls[np.argsort(events.end_ns(calls), kind="stable")]
    records = list(replay_batches(batches(calls)))
    assert all(sum(record.budget_ns) == record.duration_ns for record in records)


def test_outliers_have_a_timeline_of_their_calls_and_the_culprits_work_one_a_second_of_a_workload() -> None:
    victim, other = Actor(tgid=100), Actor(tgid=200)
    slow = []
    for number in range(400):
        if number > 60 and number % 10 == 0:
            other.now_ns = victim.now_ns
            other.launch(duration_ns=5 * US, grid=4096).sync(9 * MS)
            slow.append(victim.now_ns)
            victim.serve(wait_ns=9 * MS)
        else:
            victim.serve()
    outliers = [record for record in replay(victim, other) if record.outlier and record.pid == 100]
    assert [record.start_ns for record in outliers] == slow
    with_one = [record for record in outliers if record.timeline]
    assert with_one[0] is outliers[0] and len(with_one) < len(outliers)
    gaps = [after.end_ns - before.end_ns for before, after in pairwise(with_one)]
    assert gaps and min(gaps) >= TIMELINE_EVERY_NS
    timeline = with_one[0].timeline
    own, beside = timeline.lanes
    assert (own.pid, beside.pid, len(own.kinds), len(beside.kinds)) == (None, 200, CELLS, CELLS)
    assert own.kinds[-CELLS // 2 :].count(COPY) > 0.9 * CELLS / 2
    assert beside.kinds.count(KERNELS) > 0.9 * CELLS
    assert "timeline" not in with_one[0].as_dict()
