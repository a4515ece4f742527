import numpy as np
import pytest

from gputail import events
from gputail.budget import COPY, HOST, LAUNCH, OFF_CPU, PARTS, RUN_QUEUE, SYNC
from gputail.fragmenter import MAX_PENDING, MAX_THREADS
from gputail.fragments import SILENCE_NS
from gputail.requests import Request, Requests
from tests.unit.streams import MS, NOT_READY, START_NS, US, Actor, S, random_cuts, requests_of, stream


def spans(requests: list[Request]) -> list[tuple[int, int]]:
    return [(request.start_ns, request.end_ns) for request in requests]


def served(actor: Actor, count: int, **fields: int) -> list[tuple[int, int]]:
    """Serve `count` requests; where each begins and ends."""
    out = []
    for _ in range(count):
        begin = actor.now_ns
        actor.serve(**fields)
        out.append((begin, actor.now_ns - fields.get("rest_ns", 2 * MS)))
    return out


def assert_sums(requests: list[Request]) -> None:
    for request in requests:
        assert sum(request.parts) == request.end_ns - request.start_ns
        assert min(request.parts) >= 0


def test_requests_begin_at_the_first_call_and_end_with_the_wait_before_the_rest() -> None:
    actor = Actor()
    truth = served(actor, 100)
    requests = requests_of(actor)
    assert spans(requests) == truth
    assert {(r.calls, r.launches, r.boundary, r.shape, r.incomplete) for r in requests} == {(24, 20, "sync", "HtoD..sync", False)}
    assert_sums(requests)


def test_the_sync_of_a_pageable_copy_does_not_cut_even_if_the_thread_stalls_right_there() -> None:
    actor = Actor()
    truth = served(actor, 80)
    for stall_ns in (20 * MS, 250 * MS, 20 * MS):
        begin = actor.now_ns
        actor.htod().rest(3 * US).sync().sleep(stall_ns).launch(20).dtoh(duration_ns=MS).sync()
        truth.append((begin, actor.now_ns))
        actor.rest(2 * MS)
        truth += served(actor, 10)
    assert spans(requests_of(actor)) == truth


def test_a_larger_pageable_copy_before_the_usual_one_belongs_to_the_request() -> None:
    actor = Actor()
    truth = served(actor, 60)
    begin = actor.now_ns
    actor.htod(size=200 << 20, duration_ns=30 * MS).sync().rest(5 * MS)
    actor.serve()
    truth.append((begin, actor.now_ns - 2 * MS))
    truth += served(actor, 60)
    assert spans(requests_of(actor)) == truth


def test_requests_back_to_back_are_cut_once_the_structure_is_known() -> None:
    actor = Actor()
    truth = served(actor, 60)
    truth += served(actor, 300, rest_ns=40 * US)
    truth += served(actor, 20)
    assert spans(requests_of(actor)) == truth


def test_a_server_that_was_never_idle_is_cut_too() -> None:
    actor = Actor()
    truth = served(actor, 200, rest_ns=60 * US)
    assert spans(requests_of(actor)) == truth


def test_graph_replay_is_one_launch_and_one_wait() -> None:
    actor, truth = Actor(), []
    for _ in range(100):
        begin = actor.now_ns
        actor.htod().call("cuGraphLaunch", 20 * US, handle=7).sync(duration_ns=4 * MS)
        truth.append((begin, actor.now_ns))
        actor.rest(3 * MS)
    requests = requests_of(actor)
    assert spans(requests) == truth
    assert {(r.calls, r.launches, r.shape) for r in requests} == {(3, 1, "HtoD..sync")}


def test_a_graph_launch_and_a_sync_alone_are_a_request() -> None:
    actor, truth = Actor(), []
    for _ in range(100):
        begin = actor.now_ns
        actor.call("cuGraphLaunch", 20 * US, handle=7).sync(duration_ns=4 * MS)
        truth.append((begin, actor.now_ns))
        actor.rest(20 * US)
    assert spans(requests_of(actor)) == truth


def test_an_asynchronous_program_is_cut_by_its_event_waits() -> None:
    actor, truth = Actor(), []
    for _ in range(100):
        begin = actor.now_ns
        actor.launch(10, stream=9).call("cuEventRecord", 2 * US, handle=5, stream=9).call("cuEventSynchronize", 2 * MS, handle=5)
        truth.append((begin, actor.now_ns))
        actor.rest(1 * MS)
    requests = requests_of(actor)
    assert spans(requests) == truth
    assert {r.boundary for r in requests} == {"event"}


def poll(actor: Actor, total_ns: int, queries: int) -> None:
    step = total_ns // queries
    for number in range(queries):
        actor.call("cuEventQuery", step // 2, handle=5, result=0 if number == queries - 1 else NOT_READY)
        if number < queries - 1:
            actor.rest(step - step // 2)


def test_one_wait_of_5_ms_by_15000_queries_is_one_wait() -> None:
    actor = Actor()
    for _ in range(3):
        actor.launch(10).call("cuEventRecord", 2 * US, handle=5)
        poll(actor, 5 * MS, 15_000)
        actor.rest(3 * MS)
    requests = requests_of(actor)
    assert len(requests) == 3
    for request in requests:
        assert request.boundary == "poll"
        assert request.calls == 10 + 1 + 15_000
        assert request.parts[SYNC] == pytest.approx(5 * MS, rel=0.02)
        assert request.duration_ns == pytest.approx(5 * MS + 10 * 10 * US, rel=0.03)
    assert_sums(requests)


def test_a_query_that_finds_work_unfinished_and_goes_on_is_no_wait() -> None:
    actor, truth = Actor(), []
    for _ in range(80):
        begin = actor.now_ns
        actor.launch(5).call("cuEventQuery", 2 * US, handle=9, result=NOT_READY).launch(5).dtoh().sync(duration_ns=MS)
        truth.append((begin, actor.now_ns))
        actor.rest(2 * MS)
    assert spans(requests_of(actor)) == truth


def test_a_training_loop_without_idleness_is_cut_once_an_iteration() -> None:
    actor, ends = Actor(), []
    for _ in range(200):
        actor.htod().sync().rest(50 * US).launch(30).dtoh(size=4, duration_ns=2 * MS).sync()  # loss.item()
        ends.append(actor.now_ns)
        actor.rest(40 * US).launch(10)  # the optimizer
    requests = requests_of(actor)
    assert [request.end_ns for request in requests] == ends
    assert all(request.start_ns == end + 40 * US for request, end in zip(requests[1:], ends, strict=False))


def test_tokens_of_one_answer_are_one_request_if_its_first_stretch_is_another() -> None:
    actor, truth = Actor(), []
    for number in range(60):
        begin = actor.now_ns
        actor.htod(size=65536).launch(60)
        for _ in range(8 + number % 3):
            actor.launch(20).dtoh(size=8, duration_ns=500 * US).sync().rest(60 * US)
        truth.append((begin, actor.now_ns - 60 * US))
        actor.rest(30 * MS)
    requests = requests_of(actor)
    # Cut right from the first one on, which came before anything was known.
    assert spans(requests) == truth


def test_a_thread_that_only_launches_and_one_that_only_waits_have_no_requests() -> None:
    launcher, waiter = Actor(tgid=100, tid=101), Actor(tgid=100, tid=102)
    for _ in range(200):
        launcher.launch(10).rest(3 * MS)
        waiter.call("cuEventSynchronize", 2 * MS, handle=5).rest(1 * MS)
    assert requests_of(launcher, waiter) == []


def test_threads_are_cut_each_on_its_own() -> None:
    actors = [Actor(tgid=100, tid=100 + n, at_ns=START_NS + n * 777 * US) for n in range(5)]
    truth = [served(actor, 40 + n, launches=5 + n, rest_ns=(n + 1) * MS) for n, actor in enumerate(actors)]
    requests = requests_of(*actors)
    for actor, expected in zip(actors, truth, strict=True):
        assert spans([r for r in requests if r.tid == actor.tid]) == expected


def test_work_queued_beside_the_request_on_another_stream_is_no_part_of_it() -> None:
    actor = Actor()
    truth = served(actor, 60)
    for _ in range(5):
        actor.launch(8, stream=0x77).rest(100 * US)
        truth += served(actor, 10)
    requests = requests_of(actor)
    assert spans(requests) == truth
    assert {request.launches for request in requests} == {20}


def test_requests_that_always_begin_on_another_stream_begin_there() -> None:
    actor, truth = Actor(), []
    for _ in range(80):
        begin = actor.now_ns
        actor.htod(stream=0x11).call("cuEventRecord", US, stream=0x11).call("cuStreamWaitEvent", US, stream=0x22)
        actor.launch(10, stream=0x22).dtoh(stream=0x22, duration_ns=MS).sync(stream=0x22)
        truth.append((begin, actor.now_ns))
        actor.rest(2 * MS)
    assert spans(requests_of(actor)) == truth


def test_a_new_shape_is_learned() -> None:
    actor = Actor()
    truth = served(actor, 100)
    changed = []
    for _ in range(200):
        begin = actor.now_ns
        actor.launch(3).call("cuEventRecord", US, handle=1).call("cuEventSynchronize", MS, handle=1)
        changed.append((begin, actor.now_ns))
        actor.rest(500 * US)
    requests = requests_of(actor)
    assert spans(requests)[:100] == truth
    assert spans(requests)[-100:] == changed[-100:]


def test_calls_inside_another_call_are_counted_and_their_time_is_not() -> None:
    actor = Actor()
    for _ in range(60):
        begin = actor.now_ns
        for inner in range(2):
            actor.row(1, begin + (1 + inner) * MS, MS, size=8, block=32, depth=1)
        actor.row(20, begin, 10 * MS)  # the sync that contains both
        actor.rest(MS)
        actor.htod().sync(duration_ns=2 * MS).rest(5 * MS)
    for request in requests_of(actor):
        assert request.parts[LAUNCH] == 0
        assert request.calls in (3, 5, 2)
    totals = np.sum([request.parts for request in requests_of(actor)], axis=0)
    assert totals[LAUNCH] == 0
    assert_sums(requests_of(actor))


def test_a_nested_launch_counts_as_a_launch_of_its_request() -> None:
    actor = Actor()
    for _ in range(60):
        begin = actor.now_ns
        actor.row(1, begin + 10 * US, 20 * US, size=8, block=32, depth=1)
        actor.row(300, begin, 50 * US, size=4096)  # ncclAllReduce launches from within
        actor.sync(duration_ns=MS).rest(2 * MS)
    requests = requests_of(actor)
    assert len(requests) == 60
    assert {(r.launches, r.block_threads, r.calls, r.parts[LAUNCH]) for r in requests} == {(1, 256, 3, 0)}


def one_with(*steps: str) -> Request:
    """The last of 60 usual requests and one that has something off the CPU in it."""
    actor = Actor()
    served(actor, 60)
    for step in steps:
        if step == "sleep in sync":
            begin = actor.now_ns
            actor.launch().row(200, begin + 100 * US, 3 * MS, handle=1, size=begin + 100 * US + 2 * MS)
            actor.row(20, begin + 50 * US, 4 * MS)
        elif step == "preempted in sync":
            begin = actor.now_ns
            actor.launch().row(200, begin + 100 * US, 3 * MS, handle=256).row(20, begin + 50 * US, 4 * MS)
        elif step == "sleep outside":
            actor.launch().sleep(5 * MS, run_queue_ns=2 * MS).launch().sync()
        elif step == "preempted outside":
            actor.launch().preempted(5 * MS).launch().sync()
    actor.rest(2 * MS)
    served(actor, 1)
    requests = requests_of(actor)
    assert_sums(requests)
    return requests[-2]


@pytest.mark.parametrize(
    "step, sync, run_queue, off_cpu",
    [
        ("sleep in sync", 3 * MS, 1 * MS, 0),  # asleep until woken is the wait's own way of waiting
        ("preempted in sync", 1 * MS, 3 * MS, 0),
        ("sleep outside", 10 * US, 2 * MS, 3 * MS),
        ("preempted outside", 10 * US, 5 * MS, 0),
    ],
)
def test_time_off_the_cpu_goes_to_the_wait_the_run_queue_or_off_cpu(step: str, sync: int, run_queue: int, off_cpu: int) -> None:
    parts = one_with(step).parts
    assert (parts[SYNC], parts[RUN_QUEUE], parts[OFF_CPU]) == (sync, run_queue, off_cpu)


def test_rest_between_requests_is_in_no_budget() -> None:
    actor = Actor()
    for _ in range(100):
        actor.serve(rest_ns=0).sleep(50 * MS, run_queue_ns=MS)
    for request in requests_of(actor):
        assert request.parts[OFF_CPU] == request.parts[RUN_QUEUE] == 0


def test_sleep_before_a_later_stretch_of_the_same_request_is_in_its_budget() -> None:
    actor = Actor()
    for _ in range(100):
        actor.htod().sync().sleep(4 * MS, run_queue_ns=MS).launch(10).dtoh(duration_ns=2 * MS).sync().rest(20 * MS)
    requests = requests_of(actor)
    assert len(requests) == 100
    assert {(r.parts[OFF_CPU], r.parts[RUN_QUEUE], r.parts[COPY]) for r in requests} == {(3 * MS, MS, 2 * MS + 30 * US)}


def test_requests_with_lost_rows_are_incomplete_and_so_is_the_one_before_the_gap() -> None:
    actor = Actor()
    served(actor, 70)
    actor.call("cuMemcpyHtoDAsync", 30 * US, size=4096, flags=events.AFTER_GAP)
    actor.sync().launch(20).dtoh().sync().rest(2 * MS)
    served(actor, 10)
    requests = requests_of(actor)
    assert [number for number, request in enumerate(requests) if request.incomplete] == [69, 70]


def test_rows_that_contradict_each_other_are_marked_and_the_parts_still_sum() -> None:
    actor = Actor()
    served(actor, 60)
    begin = actor.now_ns
    for number in range(3):  # three calls of one thread at the same time
        actor.row(1, begin + number, 5 * MS, size=8, block=32)
    actor.dtoh().sync().rest(2 * MS)
    served(actor, 5)
    requests = requests_of(actor)
    assert_sums(requests)
    assert [number for number, request in enumerate(requests) if request.incomplete] == [60]


@pytest.mark.parametrize("seed", range(8))
def test_cutting_the_stream_into_batches_changes_nothing(seed: int) -> None:
    chance = np.random.default_rng(seed)
    actors = [Actor(tgid=100 + n // 2, tid=100 + n, at_ns=START_NS + n * 1234 * US) for n in range(4)]
    for actor in actors:
        for _ in range(60):
            step = chance.integers(9)
            if step < 4:
                actor.serve(rest_ns=int(chance.choice([50 * US, 2 * MS, 20 * MS])), launches=int(chance.integers(1, 9)))
            elif step == 4:
                actor.launch(3, stream=0x77).rest(100 * US)
            elif step == 5:
                actor.sleep(int(chance.integers(MS, 400 * MS)), run_queue_ns=100 * US)
            elif step == 6:
                actor.launch(2).call("cuEventRecord", US, handle=5)
                poll(actor, 2 * MS, int(chance.integers(1, 30)))
                actor.rest(int(chance.choice([10 * US, 3 * MS, 500 * MS])))
            elif step == 7:
                begin = actor.now_ns
                actor.row(1, begin + US, 5 * US, size=4, block=32, depth=1).row(200, begin + 10 * US, 5 * US, handle=0)
                actor.row(300, begin, 30 * US)
            else:
                actor.launch(1, stream=0x11).launch(1, stream=0x22).launch(1, stream=0x11)
    whole = requests_of(*actors)
    assert len(whole) > 20
    assert_sums(whole)
    rows = stream(*actors)
    for attempt in range(6):
        assert requests_of(*actors, cuts=random_cuts(rows, 100 * seed + attempt)) == whole
    assert requests_of(*actors, cuts=list(range(1, len(rows)))) == whole


def test_a_thread_that_ends_in_the_middle_of_a_request_leaves_the_finished_ones() -> None:
    actor = Actor()
    truth = served(actor, 10)
    actor.htod().launch(5)
    other = Actor(tgid=200, at_ns=actor.now_ns)
    served(other, 600)
    requests = requests_of(actor, other)
    assert spans([r for r in requests if r.tid == 100]) == truth


def test_what_is_held_back_comes_out_when_the_time_for_learning_is_over() -> None:
    actor = Actor()
    truth = served(actor, 3)
    requests = Requests()
    calls = stream(actor)
    assert requests.feed(calls, int(events.end_ns(calls)[-1])) == []
    assert spans(requests.feed(events.no_calls(), START_NS + 2 * S + 1)) == truth


def test_a_request_is_known_once_its_thread_was_silent_for_a_while() -> None:
    actor = Actor()
    served(actor, 100)
    calls = stream(actor)
    requests = Requests()
    end = int(events.end_ns(calls)[-1])
    assert len(requests.feed(calls, end)) == 99
    assert requests.feed(events.no_calls(), end + SILENCE_NS) == []
    (last,) = requests.feed(events.no_calls(), end + SILENCE_NS + 1)
    assert last.end_ns == end and last.release_ns == end + SILENCE_NS


def test_threads_without_end_and_rows_without_a_call_take_bounded_memory() -> None:
    requests = Requests()
    for round_number in range(20):
        calls = np.zeros(5000, events.CALL)
        calls["start_ns"] = START_NS + np.arange(5000) + round_number * 5000
        calls["tgid"] = calls["tid"] = 1000 + np.arange(5000) + round_number * 5000
        calls["call"] = 1
        requests.feed(calls, int(calls["start_ns"][-1]))
    assert len(requests._fragmenter.threads) <= MAX_THREADS
    assert len(requests._lanes) <= MAX_THREADS
    sleeper = Actor()
    for _ in range(10 * MAX_PENDING):
        sleeper.sleep(MS)
    requests.feed(stream(sleeper), sleeper.now_ns)
    assert len(requests._fragmenter._pending) == MAX_PENDING


def test_a_thread_that_never_stops_launching_is_one_open_fragment() -> None:
    requests = Requests()
    actor = Actor()
    for _ in range(50):
        actor.rows.clear()
        actor.launch(1000)
        calls = stream(actor)
        assert requests.feed(calls, int(events.end_ns(calls)[-1])) == []
    (lane,) = requests._lanes.values()
    assert lane.waiting == lane.held == lane.current == []


def test_host_time_is_what_remains() -> None:
    actor = Actor()
    served(actor, 100, launches=20, wait_ns=MS)
    for request in requests_of(actor):
        assert request.parts[LAUNCH] == 20 * 5 * US
        assert request.parts[COPY] == 30 * US + MS
        assert request.parts[SYNC] == 2 * 10 * US
        assert request.parts[HOST] == 3 * US + 90 * US + 20 * 5 * US + 3 * US
        assert sum(request.parts) == request.duration_ns
        assert len(request.parts) == len(PARTS)


def test_a_wait_long_after_a_request_belongs_to_no_request() -> None:
    actor = Actor()
    spans = []
    for number in range(400):
        begin = actor.now_ns
        actor.serve(rest_ns=0)
        spans.append((begin, actor.now_ns))
        actor.rest(2 * MS)
        if number % 10 == 9:
            actor.sync(stream=0x77).rest(2 * MS)
    assert [(request.start_ns, request.end_ns) for request in requests_of(actor)] == spans
