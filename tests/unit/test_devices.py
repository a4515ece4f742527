"""Which GPU work is on: what rows and open device files tell, and what a verdict makes of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gputail import devices as devices_module
from gputail import events
from gputail.capture import CaptureReader, CaptureWriter
from gputail.devices import Devices
from gputail.discovery.describe import gpus_open
from gputail.pipeline import Pipeline
from gputail.streams import NON_BLOCKING
from tests.unit.streams import MS, NEVER, US, Actor, stream

THREAD, OTHER = 100, 101
FIRST_STREAM, SECOND_STREAM = 0x7000, 0x7100


def on_device(actor: Actor, ordinal: int, context: int | None = None, stream_made: int | None = None) -> Actor:
    context = context or 0xC000 + ordinal
    actor.call("cuDevicePrimaryCtxRetain", 5 * US, handle=context, size=ordinal).call("cuCtxSetCurrent", 5 * US, handle=context)
    return actor.call("cuStreamCreate", 5 * US, handle=stream_made, size=NON_BLOCKING) if stream_made else actor


def learned(*actors: Actor) -> Devices:
    known = Devices()
    known.learn(stream(*actors))
    return known


def test_a_stream_is_on_the_device_whose_context_was_current_when_it_was_made() -> None:
    one = on_device(on_device(Actor(), 0, stream_made=FIRST_STREAM), 1, stream_made=SECOND_STREAM)
    known = learned(one)
    assert known.ordinal(100, THREAD, FIRST_STREAM) == 0
    assert known.ordinal(100, THREAD, SECOND_STREAM) is None  # by then the thread had worked on two


def test_a_threads_default_stream_is_on_its_device_and_on_none_once_it_had_two() -> None:
    known = learned(on_device(Actor(), 2), on_device(Actor(100, OTHER), 3))
    assert [known.ordinal(100, tid, 0) for tid in (THREAD, OTHER)] == [2, 3]
    assert known.are_apart((100, THREAD, 0), (100, OTHER, 0))
    known.learn(stream(on_device(Actor(100, OTHER), 2)))
    assert known.ordinal(100, OTHER, 0) is None
    assert not known.are_apart((100, THREAD, 0), (100, OTHER, 0))


def test_a_context_that_was_made_before_tracing_began_may_be_on_any_device() -> None:
    known = learned(Actor().call("cuCtxSetCurrent", US, handle=0xC0), on_device(Actor(100, OTHER), 1))
    assert known.ordinal(100, THREAD, 0) is None
    assert not known.are_apart((100, THREAD, 0), (100, OTHER, 0))


def test_calls_that_failed_and_contexts_that_are_gone_tell_nothing() -> None:
    failed = Actor().call("cuDevicePrimaryCtxRetain", US, handle=0xC0, size=1, result=2).call("cuCtxSetCurrent", US, handle=0xC0)
    assert learned(failed).ordinal(100, THREAD, 0) is None
    gone = on_device(Actor(), 1, 0xC1).call("cuCtxDestroy", US, handle=0xC1)
    again = Actor(100, OTHER, gone.now_ns).call("cuCtxSetCurrent", US, handle=0xC1)
    assert learned(gone, again).ordinal(100, OTHER, 0) is None


def test_processes_are_apart_only_where_both_are_known_and_share_no_gpu() -> None:
    known = Devices()
    known.learn_processes([
        events.Process(1, gpus=("0",)), events.Process(2, gpus=("1",)), events.Process(3, gpus=("0", "1")), events.Process(4),
        events.Process(5, gpus=()),
    ])  # fmt: skip
    apart = {(a, b) for a in range(1, 6) for b in range(1, 6) if a < b and known.are_apart((a, a, 0), (b, b, 0))}
    assert apart == {(1, 2)}
    assert [known.gpu(tgid) for tgid in range(1, 6)] == ["0", "1", None, None, None]
    known.learn_processes([events.Process(1)])  # the pid is another's now
    assert known.gpu(1) is None


@pytest.mark.parametrize("limit", ["MAX_CONTEXTS", "MAX_THREADS", "MAX_STREAMS", "MAX_PROCESSES"])
def test_what_is_known_is_bounded(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(devices_module, limit, 8)
    known = Devices()
    for number in range(40):
        known.learn(stream(on_device(Actor(number + 1), 1, stream_made=FIRST_STREAM)))
        known.learn_processes([events.Process(number + 1, gpus=("0",))])
    store = {"MAX_CONTEXTS": known._contexts, "MAX_THREADS": known._threads, "MAX_STREAMS": known._streams, "MAX_PROCESSES": known._gpus}
    assert len(store[limit]) == 8


def verdict(*actors: Actor, processes: tuple[events.Process, ...] = ()) -> list[tuple[str, int | None]]:
    """Cause and culprit's pid of the first thread's outliers."""
    pipeline = Pipeline()
    pipeline.feed(events.Batch(stream(*actors), processes=processes, watermark_ns=NEVER))
    pipeline.finish()
    outliers = [record for record in pipeline.take_records() if record.outlier and record.tid == actors[0].tid]
    return [(record.contributions[0].cause, record.contributions[0].culprit_pid) for record in outliers]


def slowed(victim: Actor) -> tuple[Actor, int]:
    """A victim one of whose requests waits 12 ms instead of 2, and when that begins."""
    for _ in range(80):
        victim.serve(wait_ns=2 * MS)
    begin = victim.now_ns
    victim.serve(wait_ns=12 * MS)
    for _ in range(20):
        victim.serve(wait_ns=2 * MS)
    return victim, begin


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        (("0",), ("foreign_kernel", 900)),
        (("1",), ("unknown", None)),
        (("0", "1"), ("foreign_kernel", 900)),
        (None, ("foreign_kernel", 900)),
    ],
)
def test_another_process_is_blamed_unless_it_is_known_to_be_on_another_gpu(theirs: tuple[str, ...] | None, expected: tuple) -> None:
    victim, begin = slowed(Actor())
    other = Actor(900, at_ns=begin - 10 * MS).launch(10, grid=100_000).call("cuCtxSynchronize", 60 * MS)
    processes = (events.Process(100, gpus=("0",)), events.Process(900, gpus=theirs))
    assert verdict(victim, other, processes=processes) == [expected]


@pytest.mark.parametrize(("ordinal", "expected"), [(0, "sibling_kernel"), (1, "unknown")])
def test_another_thread_of_the_process_is_blamed_unless_it_works_on_another_device(ordinal: int, expected: str) -> None:
    victim, begin = slowed(on_device(Actor(), 0))
    sibling = on_device(Actor(100, OTHER, begin - 20 * MS), ordinal, stream_made=SECOND_STREAM)
    sibling.rest(begin - 10 * MS - sibling.now_ns)
    sibling.launch(10, stream=SECOND_STREAM, grid=100_000).sync(60 * MS, stream=SECOND_STREAM)
    assert [cause for cause, _ in verdict(victim, sibling)] == [expected]


def test_the_record_and_the_workload_say_which_gpu() -> None:
    victim, _ = slowed(Actor())
    pipeline = Pipeline()
    pipeline.feed(events.Batch(stream(victim), processes=(events.Process(100, gpus=("3",)),), watermark_ns=NEVER))
    pipeline.finish()
    assert {record.as_dict()["gpu"] for record in pipeline.take_records()} == {"3"}
    assert [view.gpu for view in pipeline.snapshot().workloads] == ["3"]


@pytest.fixture
def hold_open() -> object:
    opened: list[int] = []

    def hold(path: Path) -> None:
        opened.append(os.open(path, os.O_RDONLY | os.O_CREAT))

    yield hold
    for fd in opened:
        os.close(fd)


def test_gpus_are_told_by_the_names_of_open_device_files(tmp_path: Path, hold_open: Callable[[Path], None]) -> None:
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert gpus_open(os.getpid(), proc) == ()
        for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "nvidia2x", "xnvidia3", "nvidia99999"):
            hold_open(tmp_path / name)
        assert gpus_open(os.getpid(), proc) == ("2", "10")
        assert gpus_open(1 << 30, proc) is None  # no such process
    finally:
        os.close(proc)


def test_a_recording_keeps_them(tmp_path: Path) -> None:
    path = str(tmp_path / "one.gpt")
    processes = (events.Process(1, "a", gpus=("0", "7")), events.Process(2, "b", gpus=()), events.Process(3, "c"))
    with CaptureWriter(path) as writer:
        writer.write(events.Batch(processes=processes, watermark_ns=1))
    with CaptureReader(path) as reader:
        assert [batch.processes for batch in reader] == [processes]
