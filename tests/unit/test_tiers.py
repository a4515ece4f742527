"""What analysis makes of programs whose launches, returns or time off the CPU were not seen all the time."""

from __future__ import annotations

import numpy as np
import pytest

from gputail import events
from gputail.budget import HOST, LAUNCH
from gputail.pipeline import Pipeline
from gputail.probes.table import BY_NUMBER, OFF_CPU_CALL, PER_KERNEL, TIER_CALL
from gputail.requests import UNSEEN
from gputail.tail import RequestRecord
from gputail.tiers import CHANGING, FULL, LIGHT, MAX_CHANGES, Tiers, without
from gputail.tiers import LAUNCH as LAUNCH_TIER
from tests.unit.streams import MS, NUMBER, START_NS, US, Actor, S, batches, random_cuts, stream

_PER_KERNEL = [function.number for function in BY_NUMBER.values() if function.category in PER_KERNEL]


def change(time_ns: int, tgid: int, state: int) -> np.ndarray:
    row = np.zeros(1, events.CALL)
    row["start_ns"], row["tgid"], row["handle"], row["call"] = time_ns, tgid, state, TIER_CALL
    return row


def seen(calls: np.ndarray, *changes: tuple[int, int], tgid: int = 100) -> np.ndarray:
    """What the probes would have seen of calls with a process at those states from those times on."""
    kept, now = [], FULL
    edges = [*changes, (1 << 62, FULL)]
    is_per_kernel = np.isin(calls["call"], _PER_KERNEL)
    ends = events.end_ns(calls)
    begin = 0
    for time_ns, state in edges:
        part = (ends >= begin) & (ends < time_ns)
        unseen = is_per_kernel if now & 7 == LIGHT else np.zeros(len(calls), bool)
        if now & 8:
            unseen = unseen | (calls["call"] == OFF_CPU_CALL)
        rows = calls[part & ~unseen]
        if now & 7 == LAUNCH_TIER:  # a row at their entry
            rows["duration_ns"][np.isin(rows["call"], _PER_KERNEL)] = 0
            rows = rows[np.argsort(events.end_ns(rows), kind="stable")]
        kept.append(rows)
        if time_ns < 1 << 62:
            kept.append(change(time_ns, tgid, state))
        begin, now = time_ns, state
    return np.concatenate(kept)


def records_of(calls: np.ndarray, cuts: list[int] | None = None) -> list[RequestRecord]:
    pipeline = Pipeline()
    for batch in batches(calls, cuts):
        pipeline.feed(batch)
    pipeline.finish()
    return pipeline.take_records()


def served(count: int, **fields: int) -> tuple[Actor, list[tuple[int, int]]]:
    actor, spans = Actor(), []
    for _ in range(count):
        begin = actor.now_ns
        actor.serve(**fields)
        spans.append((begin, actor.now_ns - 2 * MS))
    return actor, spans


def test_the_tier_of_a_time_is_the_one_that_held_throughout_or_none() -> None:
    tiers = Tiers()
    tiers.learn(np.concatenate([change(100, 7, CHANGING), change(120, 7, LIGHT), change(200, 7, FULL)]))
    cases = ((0, 90, FULL), (50, 110, CHANGING), (105, 110, CHANGING), (125, 190, LIGHT), (130, 210, CHANGING), (200, 300, FULL))
    for start, end, tier in cases:
        assert tiers.between(7, start, end) == tier, (start, end)
        assert tiers.between(8, start, end) == FULL


def test_what_holds_for_all_holds_for_whom_nothing_else_is_said() -> None:
    tiers = Tiers()
    tiers.learn(np.concatenate([change(0, 0, LIGHT), change(50, 7, FULL)]))
    assert (tiers.between(8, 10, 20), tiers.between(7, 60, 70), tiers.between(7, 10, 20)) == (LIGHT, FULL, LIGHT)


def test_a_state_that_nobody_knows_changes_nothing() -> None:
    tiers = Tiers()
    tiers.learn(np.concatenate([change(0, 7, 6), change(0, 7, 1 << 40)]))
    assert tiers.between(7, 10, 20) == FULL


def test_of_many_changes_the_latest_are_remembered() -> None:
    tiers = Tiers()
    tiers.learn(np.concatenate([change(10 * n, 7, n % 3) for n in range(10 * MAX_CHANGES)]))
    last = 10 * MAX_CHANGES - 1
    assert tiers.between(7, 10 * last, 10 * last + 5) == last % 3
    assert tiers.between(7, 10 * last - 5, 10 * last - 2) == (last - 1) % 3


@pytest.mark.parametrize("seed", range(4))
def test_requests_are_whole_while_launches_are_not_seen_however_the_stream_is_cut(seed: int) -> None:
    actor, spans = served(300)
    calls = seen(stream(actor), (spans[100][0] - MS, CHANGING), (spans[110][0] - MS, LIGHT), (spans[200][0] - MS, FULL))
    records = records_of(calls, random_cuts(calls, seed))
    assert [(r.start_ns, r.end_ns) for r in records] == spans
    tiers = ["full"] * 100 + ["changing"] * 10 + ["light"] * 90 + ["full"] * 100
    assert [r.tier for r in records] == tiers
    assert [r.launches for r in records] == [20 if tier == "full" else None for tier in tiers]
    assert [r.incomplete for r in records] == [tier == "changing" for tier in tiers]
    assert len({r.workload for r in records}) == 1
    for record in records:
        assert sum(record.budget_ns) == record.duration_ns
        assert (record.budget_ns[LAUNCH] > 0) == (record.tier != "light")
        assert record.budget_ns[HOST] > 0


def test_a_wait_that_requests_do_not_usually_have_cuts_none_before_its_results_are_fetched() -> None:
    """While launches are not seen, the rest of them after such a wait looks like idleness."""
    actor, spans = Actor(), []
    for number in range(80):
        begin = actor.now_ns
        actor.htod().rest(3 * US).sync().rest(90 * US).launch(100)
        if number in (40, 60):
            actor.call("cuCtxSynchronize", 3 * MS)
        actor.launch(500).dtoh(duration_ns=1 * MS).rest(3 * US).sync()
        spans.append((begin, actor.now_ns))
        actor.rest(2 * MS)
    for calls in (stream(actor), seen(stream(actor), (0, LIGHT))):
        assert [(record.start_ns, record.end_ns) for record in records_of(calls)] == spans


def test_a_request_that_begins_with_a_launch_is_another_workload_while_only_its_wait_is_seen() -> None:
    actor = Actor()
    for _ in range(200):
        actor.launch(20).sync(3 * MS).rest(2 * MS)
    calls = seen(stream(actor), (START_NS + 505 * MS, LIGHT))
    records = records_of(calls)
    shapes = [record.workload.rpartition("/")[2] for record in records]
    assert set(shapes) == {"launch..sync", f"{UNSEEN}..sync"}
    assert all(record.duration_ns == 3 * MS for record in records if record.tier == "light")
    assert len(records) == 200


def test_a_thread_that_only_waits_has_no_requests_at_the_light_tier_either() -> None:
    worker, watchdog = Actor(), Actor(tid=101)
    for _ in range(300):
        worker.serve()
        watchdog.sync(MS).rest(3 * MS)
    calls = seen(stream(worker, watchdog), (START_NS + S, LIGHT))
    assert {record.tid for record in records_of(calls)} == {100}


def usual_and_slow(*changes: tuple[int, int], **slow: int) -> RequestRecord:
    """300 usual requests at those tiers (from which request on), and then a slow one."""
    actor, spans = served(300)
    actor.serve(**slow)
    calls = seen(stream(actor), *((spans[number][0] - MS, state) for number, state in changes))
    return records_of(calls)[-1]


def test_host_time_is_not_blamed_where_more_launches_may_be_in_it() -> None:
    more = {"launches": 600, "wait_ns": 30 * MS}
    assert usual_and_slow(**more).cause == "more_work"
    light = usual_and_slow((100, LIGHT), **more)
    assert (light.outlier, light.cause, light.contributions[0].culprit) == (True, "unknown", "launches not seen")


def test_host_time_is_blamed_at_the_light_tier_where_a_program_that_waits_for_the_gpu_did_not_wait_longer() -> None:
    actor, spans = served(300)
    actor.htod().rest(3 * US).sync().rest(9 * MS).launch(20).dtoh(duration_ns=MS).rest(3 * US).sync().rest(2 * MS)
    assert records_of(seen(stream(actor), (spans[100][0] - MS, LIGHT)))[-1].cause == "host_compute"


def test_a_wait_for_the_whole_device_is_blamed_at_the_light_tier_unless_usual_requests_have_it_too() -> None:
    def slow(usual_ns: int) -> RequestRecord:
        actor = Actor()
        for number in range(301):
            begin = actor.now_ns
            if number == 100:
                light_ns = begin - MS
            actor.htod().rest(3 * US).sync()
            if wide_ns := 9 * MS if number == 300 else usual_ns:
                actor.call("cuCtxSynchronize", wide_ns)
            actor.launch(20).dtoh(duration_ns=MS).rest(3 * US).sync().rest(2 * MS)
        return records_of(seen(stream(actor), (light_ns, LIGHT)))[-1]

    assert slow(usual_ns=0).cause == "blocking_sync"
    assert slow(usual_ns=MS).cause == "unknown"


@pytest.mark.parametrize("state", [LAUNCH_TIER, without(LAUNCH_TIER)])
def test_host_time_is_blamed_where_only_the_length_of_launches_is_unknown_unless_it_may_have_been_asleep(state: int) -> None:
    actor, spans = served(300)
    actor.htod().rest(3 * US).sync().rest(9 * MS).launch(20).dtoh(duration_ns=MS).rest(3 * US).sync().rest(2 * MS)
    record = records_of(seen(stream(actor), (spans[100][0] - MS, state)))[-1]
    assert record.outlier
    assert record.cause == ("host_compute" if state == LAUNCH_TIER else "unknown")
    if state != LAUNCH_TIER:
        assert record.contributions[0].culprit == "time off the CPU not seen"


def test_what_is_usual_is_learned_for_each_tier() -> None:
    actor, spans = served(120)
    calls = seen(stream(actor), (spans[100][0] - MS, LIGHT))
    assert not any(record.outlier for record in records_of(calls))


def with_precedents(before: list[dict[str, int]], then: dict[str, int], state: int = LIGHT) -> RequestRecord:
    """Usual requests seen whole with slow ones of those kinds among them; then, launches unseen, some usual ones and a slow one."""
    actor, spans = served(100)
    for slow in before:
        actor.serve(**slow)
        for _ in range(5):
            actor.serve()
    light_ns = actor.now_ns
    for _ in range(40):
        actor.serve()
    actor.serve(**then)
    return records_of(seen(stream(actor), (light_ns - MS, state)))[-1]


MORE = {"launches": 400, "wait_ns": 9 * MS}


@pytest.mark.parametrize("state", [LIGHT, without(LIGHT)])
def test_what_slow_requests_were_that_were_seen_whole_tells_what_one_like_them_is(state: int) -> None:
    record = with_precedents([MORE] * 4, MORE, state)
    assert (record.cause, record.tier, record.contributions[0].culprit) == ("more_work", "light", "as 4 of 4 like it that were seen whole")
    assert record.confidence == pytest.approx(5 / 6, abs=0.02)
    assert sum(contribution.ns for contribution in record.contributions) == record.excess_ns


def test_precedents_that_are_few_or_of_another_look_or_size_tell_nothing() -> None:
    other_look, larger = {"wait_ns": 12 * MS, "launches": 22}, {"launches": 6000, "wait_ns": 130 * MS}
    for before in ([MORE] * 2, [other_look] * 6, [larger] * 6):
        record = with_precedents(before, MORE)
        assert (record.outlier, record.cause, record.confidence) == (True, "unknown", 0.0)


def test_precedents_that_disagree_tell_nothing() -> None:
    """Neither does what one believes without any: that a program which waits for the GPU would have waited for more work."""

    def request(actor: Actor, launches: int = 20, compute_ns: int = 0) -> None:
        actor.htod().rest(3 * US).sync().rest(90 * US + compute_ns).launch(launches).dtoh(duration_ns=100 * US).sync().rest(2 * MS)

    more, longer = {"launches": 220}, {"compute_ns": 2 * MS}
    for kinds, cause in (
        ([], "host_compute"),
        ([more] * 6, "more_work"),
        ([longer] * 6, "host_compute"),
        ([more, longer] * 3, "unknown"),
    ):
        actor = Actor()
        for slow in [{}] * 20 + kinds:
            request(actor, **slow)
            for _ in range(4):
                request(actor)
        light_ns = actor.now_ns - MS
        for _ in range(40):
            request(actor)
        request(actor, **more)
        record = records_of(seen(stream(actor), (light_ns, LIGHT)))[-1]
        assert (record.cause, record.tier) == (cause, "light"), kinds


def test_sleep_is_not_blamed_where_slow_requests_slept_inside_of_launches() -> None:
    def request(actor: Actor, blocked_ns: int = 0) -> None:
        actor.htod().rest(3 * US).sync().rest(90 * US).launch(19)
        if blocked_ns:
            begin = actor.now_ns
            actor.sleep(blocked_ns)
            actor.row(NUMBER["cuLaunchKernel"], begin, blocked_ns + 5 * US, size=64, block=128, handle=0xABC)
        else:
            actor.launch(1)
        actor.dtoh(duration_ns=MS).rest(3 * US).sync().rest(2 * MS)

    for before, cause in ((0, "host_blocked"), (4, "launch_backpressure")):
        actor = Actor()
        for _ in range(60):
            request(actor)
        for _ in range(before):
            request(actor, 9 * MS)
            for _ in range(5):
                request(actor)
        light_ns = actor.now_ns - MS
        for _ in range(40):
            request(actor)
        request(actor, 9 * MS)
        assert records_of(seen(stream(actor), (light_ns, LIGHT)))[-1].cause == cause


def test_what_was_usual_while_more_was_seen_is_usual_from_the_first_request_on_while_less_is() -> None:
    for state in (LAUNCH_TIER, LIGHT, without(LIGHT)):
        actor, spans = served(100)
        actor.serve(wait_ns=9 * MS)
        record = records_of(seen(stream(actor), (spans[99][0] - MS, state)))[-1]
        assert (record.outlier, record.baseline_ns) == (True, spans[50][1] - spans[50][0])


def test_where_less_was_seen_nothing_is_known_of_what_is_usual_while_more_is() -> None:
    actor, spans = served(100)
    actor.serve(wait_ns=9 * MS)
    assert not records_of(seen(stream(actor), (0, LIGHT), (spans[99][0] - MS, FULL)))[-1].outlier


def test_waits_that_end_requests_are_told_from_others_while_launches_are_not_seen_by_what_was_learned_before() -> None:
    """A server that is never idle: without launches, the longest gap is in the middle of its requests."""
    actor, spans = Actor(), []
    for _ in range(200):
        begin = actor.now_ns
        actor.htod().rest(3 * US).sync().rest(90 * US).launch(800).dtoh(duration_ns=MS).rest(3 * US).sync()
        spans.append((begin, actor.now_ns))
        actor.rest(30 * US)
    calls = seen(stream(actor), (spans[100][0] - 10 * US, LIGHT))
    assert [(record.start_ns, record.end_ns) for record in records_of(calls)] == spans


@pytest.mark.parametrize("state", [LIGHT, LAUNCH_TIER, FULL])
@pytest.mark.parametrize("is_foreign", [True, False])
def test_sleep_in_launches_is_no_block_in_the_host_though_launches_are_not_seen_whole(state: int, is_foreign: bool) -> None:
    """A thread whose launch waits for the driver sleeps, and a sibling wakes it, as with a lock of the program's own."""
    actor, _ = served(100)
    other = Actor(tgid=900)

    def slow() -> None:
        if is_foreign:
            other.rest(actor.now_ns - 10 * MS - other.now_ns).launch(10, grid=100_000).call("cuCtxSynchronize", 30 * MS)
        actor.htod().rest(3 * US).sync().rest(90 * US).launch(10)
        actor.row(OFF_CPU_CALL, actor.now_ns + 10 * US, 9 * MS, handle=1, size=actor.now_ns + 9 * MS, block=77)
        actor.now_ns -= 9 * MS + 10 * US
        actor.launch(1, duration_ns=10 * MS).launch(9).dtoh(duration_ns=1 * MS).rest(3 * US).sync().rest(2 * MS)

    for _ in range(4):
        slow()
        for _ in range(20):
            actor.serve()
    changed_ns = actor.now_ns
    for _ in range(40):
        actor.serve()
    slow()
    records = [record for record in records_of(seen(stream(actor, other), (changed_ns - MS, state))) if record.pid == actor.tgid]
    record = records[-1]
    assert record.outlier and record.tier == ("light", "launch", "full")[state]
    expected = ("foreign_kernel", 900) if is_foreign else ("launch_backpressure", None)
    assert (record.cause, record.contributions[0].culprit_pid) == expected
