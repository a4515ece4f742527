from collections.abc import Callable

import pytest

from gputail.pipeline import VERDICT_DELAY_NS
from gputail.tail import RequestRecord
from tests.unit.streams import MS, US, Actor, replay

USUAL = 80  # requests before the slow one


def usual(actor: Actor, count: int = USUAL) -> Actor:
    for _ in range(count):
        actor.serve(wait_ns=2 * MS)
    return actor


def the_outlier(*actors: Actor) -> RequestRecord:
    found = [record for record in replay(*actors) if record.outlier and record.pid == actors[0].tgid]
    assert len(found) == 1
    (record,) = found
    assert record.excess_ns is not None
    assert sum(contribution.ns for contribution in record.contributions) == record.excess_ns
    assert [c.ns for c in record.contributions] == sorted((c.ns for c in record.contributions), reverse=True)
    assert record.cause == record.contributions[0].cause
    return record


def with_slow(slow: Callable[[Actor], object], *others: Callable[[int], Actor]) -> RequestRecord:
    """The verdict on one slow request between usual ones; others act from when it begins."""
    victim = usual(Actor())
    begin = victim.now_ns
    slow(victim)
    usual(victim.rest(2 * MS), 20)
    return the_outlier(victim, *(other(begin) for other in others))


def slow_wait(actor: Actor) -> None:
    actor.htod().sync().rest(90 * US).launch(20).dtoh(duration_ns=12 * MS).sync()


def test_a_long_wait_that_nothing_explains_is_unknown() -> None:
    record = with_slow(slow_wait)
    assert (record.cause, record.confidence) == ("unknown", 0.0)


def test_a_long_own_kernel_is_own_work_and_not_a_slow_sync() -> None:
    def slow(actor: Actor) -> None:
        actor.htod().sync().rest(90 * US).launch(20).dtoh(duration_ns=2 * MS).sync(duration_ns=10 * MS)

    (only,) = with_slow(slow).contributions
    assert (only.cause, only.culprit) == ("unknown", "own GPU work")


def test_a_slow_graph_is_one_launch_and_told_to_be_inside_the_graph() -> None:
    actor = Actor()
    for number in range(120):
        actor.htod().call("cuGraphLaunch", 30 * US, handle=0x9A).rest(5 * US).sync(duration_ns=14 * MS if number == 90 else 2 * MS).rest(
            2 * MS
        )
    record = the_outlier(actor)
    assert record.launches == 1
    assert (record.cause, record.contributions[0].culprit) == ("unknown", "own GPU work, inside graph 0x9a")


def other_process(begin: int) -> Actor:
    other = Actor(tgid=900, at_ns=begin - 10 * MS)
    return other.launch(10, grid=100_000).call("cuCtxSynchronize", 60 * MS)


def test_kernels_of_another_process_are_named_with_its_pid() -> None:
    record = with_slow(slow_wait, other_process)
    (first, *_) = record.contributions
    assert (first.cause, first.culprit_pid) == ("foreign_kernel", 900)
    assert first.culprit == "kernel 0xabc"
    assert record.confidence is not None and record.confidence > 0.9


def test_another_process_that_is_always_there_is_usual_and_not_blamed() -> None:
    def always(begin: int) -> Actor:
        other = Actor(tgid=900, at_ns=begin - 400 * MS)
        for _ in range(100):
            other.launch(4, grid=1000).sync(duration_ns=6 * MS)
        return other

    assert with_slow(slow_wait, always).cause == "unknown"


def test_another_process_that_is_always_there_is_blamed_where_it_does_far_more() -> None:
    def more(begin: int) -> Actor:
        other = Actor(tgid=900, at_ns=begin - 400 * MS)
        while other.now_ns < begin + 100 * MS:
            burst = begin - MS <= other.now_ns < begin + 8 * MS
            other.launch(4, grid=100_000 if burst else 1000).sync(duration_ns=12 * MS if burst else MS)
        return other

    (first, *_) = with_slow(slow_wait, more).contributions
    assert (first.cause, first.culprit_pid) == ("foreign_kernel", 900)


def test_what_is_proven_to_have_held_the_gpu_comes_before_what_may_have() -> None:
    def never_waits(begin: int) -> Actor:  # a small kernel, and a look for it long after
        return Actor(tgid=800, at_ns=begin - MS).launch(1, grid=1).rest(100 * MS).sync()

    assert with_slow(slow_wait, other_process, never_waits).contributions[0].culprit_pid == 900
    assert with_slow(slow_wait, never_waits).contributions[0].culprit_pid == 800


def test_two_processes_that_held_the_gpu_share_the_excess() -> None:
    def third(begin: int) -> Actor:
        return Actor(tgid=901, at_ns=begin - 10 * MS).launch(10, grid=100_000).call("cuCtxSynchronize", 60 * MS)

    contributions = with_slow(slow_wait, other_process, third).contributions
    assert {c.culprit_pid for c in contributions[:2]} == {900, 901}
    assert contributions[0].ns - contributions[1].ns <= 2


@pytest.mark.parametrize("flags, cause", [(0, "blocking_sync"), (1, "sibling_kernel"), (None, "sibling_kernel")])
def test_the_default_stream_waits_for_blocking_streams_only(flags: int | None, cause: str) -> None:
    victim = Actor()
    if flags is not None:
        victim.call("cuStreamCreate", US, handle=0x77, size=flags)
    usual(victim)
    victim.launch(8, stream=0x77, grid=50_000).rest(50 * US)
    slow_wait(victim)
    usual(victim.rest(2 * MS), 20)
    first = the_outlier(victim).contributions[0]
    assert first.cause == cause
    if cause == "blocking_sync":
        assert first.culprit == "cuMemcpyDtoHAsync on the default stream waited for stream 0x77 (tid 100, kernel 0xabc)"


def test_another_process_that_was_done_before_is_not_blamed() -> None:
    def done(begin: int) -> Actor:
        return Actor(tgid=900, at_ns=begin - 100 * MS).launch(10, grid=100_000).call("cuCtxSynchronize", 90 * MS)

    assert with_slow(slow_wait, done).cause == "unknown"


def test_another_process_that_began_after_is_not_blamed() -> None:
    def later(begin: int) -> Actor:
        return Actor(tgid=900, at_ns=begin + 100 * MS).launch(10, grid=100_000).call("cuCtxSynchronize", 90 * MS)

    assert with_slow(slow_wait, later).cause == "unknown"


def test_only_what_ended_within_the_verdicts_delay_counts() -> None:
    def slow_after_a_rest(actor: Actor) -> None:
        slow_wait(actor.rest(900 * MS))

    def waits(ns: int) -> Callable[[int], Actor]:
        return lambda begin: Actor(tgid=900, at_ns=begin + 50 * MS).call("cuCtxSynchronize", ns)

    # The launches are too long ago to be looked at; the wait alone tells, if it ends in time.
    assert with_slow(slow_after_a_rest, waits(850 * MS + VERDICT_DELAY_NS)).cause == "foreign_kernel"
    assert with_slow(slow_after_a_rest, waits(900 * MS + VERDICT_DELAY_NS)).cause == "unknown"


def test_copies_of_another_process_are_named_with_its_pid() -> None:
    def copying(begin: int) -> Actor:
        other = Actor(tgid=900, at_ns=begin - MS)
        for _ in range(8):
            other.htod(size=256 << 20)
        return other.sync(duration_ns=40 * MS)

    record = with_slow(slow_wait, copying)
    assert (record.contributions[0].cause, record.contributions[0].culprit_pid) == ("foreign_copy", 900)


def test_another_stream_of_the_process_is_named() -> None:
    victim = usual(Actor())
    victim.launch(8, stream=0x77, grid=50_000).rest(50 * US)
    slow_wait(victim)
    usual(victim.rest(2 * MS), 20)
    record = the_outlier(victim)
    assert record.contributions[0].cause == "sibling_kernel"
    assert record.contributions[0].culprit == "tid 100, stream 0x77, kernel 0xabc"


def test_another_thread_of_the_process_is_a_sibling_with_its_tid() -> None:
    def sibling(begin: int) -> Actor:
        return Actor(tgid=100, tid=101, at_ns=begin).launch(8, stream=0x77, grid=50_000).sync(stream=0x77, duration_ns=30 * MS)

    record = with_slow(slow_wait, sibling)
    assert record.contributions[0].cause == "sibling_kernel"
    assert record.contributions[0].culprit == "tid 101, stream 0x77, kernel 0xabc"


def test_a_context_wide_wait_for_another_stream_is_a_blocking_sync() -> None:
    victim = usual(Actor())
    victim.launch(8, stream=0x77, grid=50_000).rest(50 * US)
    victim.htod().sync().rest(90 * US).launch(19).call("cuCtxSynchronize", 12 * MS).rest(30 * US).launch(1).dtoh(duration_ns=2 * MS).sync()
    usual(victim.rest(2 * MS), 20)
    record = the_outlier(victim)
    assert record.contributions[0].cause == "blocking_sync"
    assert record.contributions[0].culprit == "cuCtxSynchronize waited for stream 0x77 (tid 100, kernel 0xabc)"


def test_a_context_wide_wait_for_own_work_is_no_blocking_sync() -> None:
    def slow(actor: Actor) -> None:
        actor.htod().sync().rest(90 * US).launch(20).call("cuCtxSynchronize", 12 * MS).rest(9 * US).dtoh(duration_ns=2 * MS).sync()

    assert with_slow(slow).cause == "unknown"


@pytest.mark.parametrize("waiting", ["cuEventSynchronize", "cuCtxSynchronize", "cuStreamSynchronize"])
def test_a_long_wait_for_own_work_on_a_stream_of_its_own_is_no_siblings(waiting: str) -> None:
    actor = Actor()
    for number in range(120):
        actor.launch(20, stream=0x55).call("cuEventRecord", US, handle=1, stream=0x55)
        actor.call(waiting, 14 * MS if number == 90 else 2 * MS, stream=0x55 if waiting == "cuStreamSynchronize" else 0).rest(2 * MS)
    assert the_outlier(actor).cause == "unknown"


def test_another_thread_that_works_on_the_requests_own_stream_is_no_sibling() -> None:
    """Autograd launches the backward pass from a thread of its own."""
    victim, helper = Actor(), Actor(tid=101)
    for number in range(120):
        victim.htod().launch(20)
        helper.now_ns = victim.now_ns
        helper.launch(20)
        victim.rest(300 * US).dtoh(duration_ns=14 * MS if number == 90 else 2 * MS).sync().rest(2 * MS)
    assert the_outlier(victim, helper).cause == "unknown"


def test_larger_own_kernels_are_more_work_with_their_copies() -> None:
    def slow(actor: Actor) -> None:
        actor.htod(size=64 << 20, duration_ns=5 * MS).sync().rest(90 * US).launch(20, grid=64 * 40).dtoh(duration_ns=9 * MS).sync()

    assert with_slow(slow, other_process).cause == "more_work"


def test_more_own_launches_are_more_work() -> None:
    record = with_slow(lambda actor: actor.serve(launches=600, wait_ns=2 * MS, rest_ns=0))
    assert record.cause == "more_work"
    assert record.contributions[0].culprit is not None and record.contributions[0].culprit.startswith("600 launches against 20")


def test_a_larger_own_copy_is_memcpy() -> None:
    def slow(actor: Actor) -> None:
        actor.htod(size=192 << 20, duration_ns=20 * MS).sync().rest(MS)
        actor.serve(wait_ns=2 * MS, rest_ns=0)

    record = with_slow(slow)
    assert record.cause == "memcpy"
    assert record.contributions[0].culprit == f"{(192 << 20) + 4096} bytes HtoD against 4096"


def pageable_server(slow_number: int, slow: Callable[[Actor], object]) -> Actor:
    actor = Actor()
    for number in range(120):
        if number == slow_number:
            slow(actor)
        else:
            actor.htod(size=8 << 20, duration_ns=20 * US)
        actor.rest(90 * US).launch(20).dtoh(duration_ns=2 * MS).sync().rest(2 * MS)
    return actor


def test_a_copy_of_the_same_bytes_out_of_pageable_memory_is_memcpy() -> None:
    record = the_outlier(pageable_server(90, lambda actor: actor.htod(size=8 << 20, duration_ns=4 * MS)))
    assert (record.cause, record.contributions[0].culprit) == ("memcpy", f"{8 << 20} bytes HtoD blocked for 4.0 ms: pageable memory")


def test_a_pageable_copy_behind_another_streams_work_has_waited_and_not_copied() -> None:
    def behind(actor: Actor) -> None:
        actor.launch(8, stream=0x77, grid=50_000).htod(size=8 << 20, duration_ns=12 * MS)

    assert the_outlier(pageable_server(90, behind)).cause == "sibling_kernel"


def test_a_pinned_copy_of_as_many_bytes_is_nothing() -> None:
    actor = pageable_server(90, lambda actor: actor.htod(size=192 << 20, duration_ns=20 * US))
    assert not [record for record in replay(actor) if record.outlier]


def test_a_quick_free_beside_a_stall_is_not_blamed() -> None:
    def slow(actor: Actor) -> None:
        actor.htod().sync().call("cuMemFree", 20 * US).launch(20).dtoh(duration_ns=12 * MS).sync()

    assert with_slow(slow).cause == "unknown"


def test_what_other_threads_of_the_process_suffered_is_not_blamed() -> None:
    def beside(begin: int) -> Actor:
        other = Actor(tgid=100, tid=107, at_ns=begin)
        return other.preempted(5 * MS, stream=4321).sleep(9 * MS).call("cuModuleLoadData", 9 * MS).call("cuMemAlloc", 9 * MS)

    assert with_slow(slow_wait, beside).cause == "unknown"


def test_a_cpu_that_slows_every_call_is_a_host_cause() -> None:
    def slow(actor: Actor) -> None:
        actor.htod().rest(9 * US).sync().rest(500 * US)
        for _ in range(20):
            actor.launch(1, duration_ns=60 * US).rest(60 * US)
        actor.dtoh(duration_ns=2 * MS).sync()

    assert with_slow(slow, other_process).cause == "host_compute"


def test_two_causes_at_once_each_have_their_share() -> None:
    def slow(actor: Actor) -> None:
        actor.htod().sync().launch(10).rest(6 * MS).launch(10).dtoh(duration_ns=10 * MS).sync()

    shares = {c.cause: c.ns for c in with_slow(slow, other_process).contributions}
    assert shares["foreign_kernel"] == pytest.approx(8 * MS, rel=0.02)
    assert shares["host_compute"] == pytest.approx(6 * MS, rel=0.02)


def test_a_loud_event_on_the_host_during_anothers_kernels_is_not_blamed() -> None:
    def slow(actor: Actor) -> None:
        actor.htod().sync().launch(10).preempted(200 * US, stream=4321).call("cuMemAlloc", 200 * US, size=1 << 30)
        actor.launch(10).dtoh(duration_ns=12 * MS).sync()

    record = with_slow(slow, other_process)
    assert record.cause == "foreign_kernel"
    assert record.confidence is not None and record.confidence > 0.8


def test_as_many_launches_into_a_drained_queue_are_nothing() -> None:
    actor = usual(Actor(), 120)
    assert not [record for record in replay(actor) if record.outlier]


def test_allocation_is_named_with_its_function() -> None:
    def slow(actor: Actor) -> None:
        actor.htod().sync().call("cuMemAlloc", 4 * MS, size=1 << 30).call("cuMemFree", 8 * MS).launch(20).dtoh(duration_ns=2 * MS).sync()

    record = with_slow(slow)
    assert record.cause == "memory_alloc"
    assert record.contributions[0].culprit == f"cuMemFree, {1 << 30} bytes in 2 calls"


def test_loading_a_module_is_named_for_the_request_that_did_it_only() -> None:
    def slow(actor: Actor) -> None:
        actor.htod().sync().call("cuModuleLoadDataEx", 700 * MS).launch(20).dtoh(duration_ns=2 * MS).sync()

    record = with_slow(slow)
    assert (record.cause, record.contributions[0].culprit) == ("module_load", "cuModuleLoadDataEx")


def test_a_preempted_thread_names_who_ran() -> None:
    def slow(actor: Actor) -> None:
        actor.htod().sync().launch(10).preempted(12 * MS, stream=4321, cpu=3).launch(10).dtoh(duration_ns=2 * MS).sync()

    record = with_slow(slow)
    assert (record.cause, record.contributions[0].culprit_pid) == ("cpu_preempted", 4321)
    assert record.contributions[0].culprit == "tid 4321 ran on cpu 3"


def test_preemption_inside_a_wait_is_preemption_too() -> None:
    def slow(actor: Actor) -> None:
        actor.htod().sync().launch(20)
        begin = actor.now_ns
        actor.row(200, begin + MS, 12 * MS, handle=0, stream=4321).row(63, begin, 14 * MS, size=1024).sync()

    assert with_slow(slow, other_process).cause == "cpu_preempted"


def test_sleep_in_the_program_is_host_blocked_with_its_waker() -> None:
    def slow(actor: Actor) -> None:
        actor.htod().sync().launch(10).sleep(12 * MS, block=77).launch(10).dtoh(duration_ns=2 * MS).sync()

    record = with_slow(slow)
    assert (record.cause, record.contributions[0].culprit) == ("host_blocked", "sleep (lock, I/O or timer), woken by tid 77")


def test_a_collection_between_launches_is_host_compute_whatever_others_did() -> None:
    def slow(actor: Actor) -> None:
        actor.htod().sync().launch(10).rest(12 * MS).launch(10).dtoh(duration_ns=2 * MS).sync()

    assert with_slow(slow, other_process).cause == "host_compute"


def test_a_late_collective_is_named_with_its_communicator() -> None:
    def slow(actor: Actor) -> None:
        actor.htod().sync().launch(20).call("ncclAllReduce", 12 * MS, handle=0x51, size=4096).dtoh(duration_ns=2 * MS).sync()

    record = with_slow(slow)
    assert (record.cause, record.contributions[0].culprit) == ("collective_wait", "communicator 0x51")


def test_launches_that_blocked_are_backpressure() -> None:
    def slow(actor: Actor) -> None:
        actor.htod().sync().launch(10, stream=0).launch(1, duration_ns=12 * MS).launch(9).dtoh(duration_ns=2 * MS).sync()

    assert with_slow(slow).cause == "launch_backpressure"


def test_launches_that_blocked_while_others_held_the_gpu_are_no_backpressure() -> None:
    """The GPU takes longer to get through the queue, whichever call then waits for room in it."""

    def slow(actor: Actor) -> None:
        actor.htod().sync().launch(10, stream=0).launch(1, duration_ns=12 * MS).launch(9).dtoh(duration_ns=2 * MS).sync()

    record = with_slow(slow, other_process)
    assert (record.cause, record.contributions[0].culprit_pid) == ("foreign_kernel", 900)


def test_a_sibling_thread_that_is_always_busy_is_not_blamed_for_what_another_process_did() -> None:
    def with_sibling(*others: Callable[[int], Actor]) -> RequestRecord:
        victim = usual(Actor())
        begin = victim.now_ns
        slow_wait(victim)
        usual(victim.rest(2 * MS), 20)
        sibling = Actor(tgid=100, tid=101)
        while sibling.now_ns < victim.now_ns:
            sibling.launch(4, stream=9, grid=50_000).sync(duration_ns=3 * MS, stream=9)
        return next(
            record for record in replay(victim, sibling, *(other(begin) for other in others)) if record.tid == 100 and record.outlier
        )

    record = with_sibling(other_process)
    assert (record.cause, record.contributions[0].culprit_pid) == ("foreign_kernel", 900)
    assert record.contributions[0].ns > 0.9 * record.excess_ns
    assert with_sibling().cause == "unknown"


def test_per_thread_streams_of_two_threads_are_two_streams() -> None:
    """Stream 2 is CU_STREAM_PER_THREAD: another thread's wait for its own does not end this thread's work."""
    from gputail.attribution.outstanding import gpu_work
    from tests.unit.streams import stream

    one = Actor(tgid=100, tid=101).launch(1, stream=2).rest(20 * MS).sync(stream=2)
    two = Actor(tgid=100, tid=102).launch(1, stream=2).sync(stream=2)
    spans = gpu_work(stream(one, two), 0, 1 << 60)
    assert sorted((span.tid, span.end_ns) for span in spans) == [(101, one.now_ns), (102, two.now_ns)]


@pytest.mark.parametrize("covering, ends", [("cuStreamSynchronize", True), ("cuCtxSynchronize", True), ("cuEventSynchronize", True)])
def test_waits_end_what_they_cover(covering: str, ends: bool) -> None:
    from gputail.attribution.outstanding import OPEN_NS, gpu_work
    from tests.unit.streams import stream

    actor = Actor().launch(3, stream=5)
    last = actor.now_ns - 10 * US
    actor.call(covering, 4 * MS, stream=5)
    (span,) = gpu_work(stream(actor), 0, 1 << 60)
    assert span.end_ns == actor.now_ns
    (open_span,) = gpu_work(stream(actor)[:3], 0, 1 << 60)
    assert open_span.end_ns == last + OPEN_NS
    assert (open_span.launches, open_span.block_threads) == (3, 3 * 64 * 128)
