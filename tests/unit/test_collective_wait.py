"""Whom a slow request blames for a collective that waited: the rank that was late, what it did instead, and nobody without evidence."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gputail.tail import RequestRecord
from tests.unit.streams import MS, START_NS, US, Actor, replay

WORLD = 0xABCDEF0100000000
STEPS = 80
SLOW = 60  # the step in which something happens

Before = Callable[[Actor], object]


class World:
    """Ranks that make steps together: input, launches, an all-reduce, and a copy back that waits for all of them."""

    def __init__(self, ranks: int = 3, size: int | None = None) -> None:
        self.actors = [
            Actor(tgid=500 + rank).call("ncclCommInitRank", MS, handle=0x70 + rank, stream=WORLD, size=size or ranks, block=rank)
            for rank in range(ranks)
        ]

    def step(
        self, before: dict[int, Before] | None = None, gpu_ns: dict[int, int] | None = None, launches: dict[int, int] | None = None
    ) -> None:
        """before: what a rank does ahead of its launches; gpu_ns: how long its GPU has to do before the collective."""
        ready = []
        for rank, actor in enumerate(self.actors):
            actor.htod(4096)
            if before and rank in before:
                before[rank](actor)
            actor.launch((launches or {}).get(rank, 10))
            ready.append(actor.now_ns + (gpu_ns or {}).get(rank, MS))
            actor.call("ncclAllReduce", 10 * US, handle=0x70 + rank, size=4096, stream=7)
        done = max(ready) + 50 * US
        for actor in self.actors:
            actor.dtoh(duration_ns=done - actor.now_ns).rest(3 * US).sync().rest(2 * MS)

    def run(self, slow: Callable[[World], None]) -> World:
        for number in range(STEPS):
            if number == SLOW:
                slow(self)
            else:
                self.step()
        return self

    def outliers(self, leaving_out: int | None = None) -> dict[int, RequestRecord]:
        """By rank, of those traced."""
        records = replay(*(actor for rank, actor in enumerate(self.actors) if rank != leaving_out))
        found = {record.pid - 500: record for record in records if record.outlier}
        assert len(found) == sum(record.outlier for record in records)
        return found


@pytest.mark.parametrize(
    "before, instead",
    [
        (lambda actor: actor.htod(64 << 20, duration_ns=8 * MS), "copying"),
        (lambda actor: actor.rest(2 * MS).preempted(8 * MS, stream=99), "preempted"),
        (lambda actor: actor.sleep(8 * MS), "blocked in the host"),
        (lambda actor: actor.rest(8 * MS), "computing"),
        (lambda actor: actor.call("cuMemAlloc", 8 * MS, size=1 << 30), "allocating"),
        (lambda actor: actor.call("cuModuleLoadData", 8 * MS), "loading kernels"),
    ],
)
def test_ranks_that_waited_name_the_late_one_and_what_it_did_instead(before: Before, instead: str) -> None:
    found = World().run(lambda world: world.step({2: before})).outliers()
    for rank in (0, 1):
        first = found[rank].contributions[0]
        assert (first.cause, first.culprit_pid) == ("collective_wait", 502)
        assert first.culprit is not None
        assert first.culprit.startswith("rank 2 of communicator abcdef01 (pid 502), ") and first.culprit.endswith(f" ms late: {instead}")
        assert 7.9 * MS <= first.ns <= 8.2 * MS or instead == "preempted"
    assert found[2].cause != "collective_wait"


def test_a_rank_whose_gpu_had_more_to_do_is_named_by_its_launches() -> None:
    found = World().run(lambda world: world.step(launches={2: 80}, gpu_ns={2: 8 * MS})).outliers()
    for rank in (0, 1):
        first = found[rank].contributions[0]
        assert (first.cause, first.culprit_pid) == ("collective_wait", 502)
        assert first.culprit is not None and first.culprit.endswith("ms late: 80 launches against 10")
    assert found[2].cause == "more_work"


def test_a_rank_whose_gpu_copied_first_is_named_though_its_host_was_in_time() -> None:
    found = World().run(lambda world: world.step({1: lambda actor: actor.htod(200 << 20)}, gpu_ns={1: 8 * MS})).outliers()
    assert {rank: found[rank].contributions[0].culprit_pid for rank in (0, 2)} == {0: 501, 2: 501}
    assert str(found[0].contributions[0].culprit).endswith("copying")


def test_without_the_late_ranks_data_nobody_is_blamed() -> None:
    slow = World().run(lambda world: world.step({2: lambda actor: actor.htod(64 << 20, duration_ns=8 * MS)}))
    for record in slow.outliers(leaving_out=2).values():
        assert [(c.cause, c.culprit_pid) for c in record.contributions][0] == ("unknown", None)
        assert record.contributions[0].culprit == "a collective of communicator abcdef01, of which 1 of 3 ranks is not traced"
        assert all(c.cause != "collective_wait" for c in record.contributions)


def test_where_one_not_traced_was_later_still_no_traced_one_is_blamed() -> None:
    late: dict[int, Before] = {1: lambda actor: actor.rest(2 * MS), 2: lambda actor: actor.rest(8 * MS)}
    found = World().run(lambda world: world.step(late)).outliers(leaving_out=2)
    assert [(c.cause, c.culprit_pid) for c in found[0].contributions] == [("unknown", None)]


def test_where_a_traced_one_was_late_it_is_blamed_though_others_are_not_traced() -> None:
    found = World(ranks=2, size=8).run(lambda world: world.step({1: lambda actor: actor.rest(8 * MS)})).outliers()
    assert (found[0].cause, found[0].contributions[0].culprit_pid) == ("collective_wait", 501)


def test_a_gpu_that_was_slow_for_no_visible_reason_leaves_it_unknown() -> None:
    found = World().run(lambda world: world.step(gpu_ns={2: 8 * MS})).outliers()
    assert {record.cause for record in found.values()} == {"unknown"}


def test_a_rank_that_is_slow_after_the_collective_makes_nobody_wait() -> None:
    def slow(world: World) -> None:
        world.step()
        for rank, actor in enumerate(world.actors):
            actor.rest(10 * MS) if rank != 2 else actor.htod(64 << 20, duration_ns=8 * MS).sync().rest(2 * MS - 40 * US)

    found = World().run(slow).outliers()
    assert all(c.cause != "collective_wait" for record in found.values() for c in record.contributions if c.ns > MS)


def test_a_rank_that_is_always_last_is_not_what_made_one_request_slow() -> None:
    always: dict[int, Before] = {2: lambda actor: actor.rest(3 * MS)}
    world = World()
    for number in range(STEPS):
        world.step(always | ({0: lambda actor: actor.rest(2 * MS), 1: lambda actor: actor.rest(9 * MS)} if number == SLOW else {}))
    found = world.outliers()
    first = found[0].contributions[0]
    assert (first.cause, first.culprit_pid) == ("collective_wait", 501)
    assert 5 * MS <= first.ns <= 6.5 * MS


def test_a_rank_late_itself_blames_itself() -> None:
    found = World().run(lambda world: world.step({2: lambda actor: actor.rest(8 * MS)})).outliers()
    assert (found[2].cause, found[2].contributions[0].culprit) == ("host_compute", "tid 502")


def test_time_lost_while_another_was_later_still_is_not_what_cost_it() -> None:
    late: dict[int, Before] = {
        0: lambda actor: actor.preempted(4 * MS, stream=99),
        2: lambda actor: actor.htod(64 << 20, duration_ns=8 * MS),
    }
    found = World().run(lambda world: world.step(late)).outliers()
    parts = {c.cause: c.ns for c in found[0].contributions}
    assert found[0].cause == "collective_wait" and found[0].contributions[0].culprit_pid == 502
    assert 5.9 * MS < parts["collective_wait"] < 6.2 * MS and 1.9 * MS < parts["cpu_preempted"] < 2.2 * MS


def test_kernels_of_other_ranks_held_other_gpus() -> None:
    """What a peer has outstanding meanwhile is never what a rank waited for: NCCL refuses two ranks on one GPU."""
    world = World(ranks=2, size=3)
    for number in range(STEPS):
        world.step(gpu_ns={0: 9 * MS, 1: 9 * MS} if number == SLOW else None)
    assert {c.cause for record in world.outliers().values() for c in record.contributions}.isdisjoint({"foreign_kernel", "foreign_copy"})


def test_a_communicator_of_one_rank_waits_for_nobody() -> None:
    world = World(ranks=1)
    for number in range(STEPS):
        actor = world.actors[0].htod().launch(10).call("ncclAllReduce", 9 * MS if number == SLOW else 10 * US, handle=0x70, stream=7)
        actor.dtoh(duration_ns=MS).sync().rest(2 * MS)
    assert {record.cause for record in world.outliers().values()}.isdisjoint({"collective_wait"})


def test_a_rank_that_was_late_since_it_waited_itself_leads_to_whom_it_waited_for() -> None:
    """Two communicators: 500 and 501 in one, 501 and 502 in another; 501 waits for 502 before it comes to 500."""
    first, middle, last = World(ranks=3).actors
    inner = 0x1111111100000000
    for rank, actor in ((0, middle), (1, last)):
        actor.call("ncclCommInitRank", MS, handle=0x90, stream=inner, size=2, block=rank)
    outer = {first: 0x70, middle: 0x71}
    for number in range(STEPS):
        for actor in (middle, last):
            actor.htod()
        if number == SLOW:
            last.htod(64 << 20, duration_ns=8 * MS)
        for actor in (middle, last):
            actor.launch(5).call("ncclAllReduce", 10 * US, handle=0x90, stream=7)
        done = max(middle.now_ns, last.now_ns) + 100 * US
        for actor in (middle, last):
            actor.sync(done - actor.now_ns)
        first.htod().launch(10)
        for actor, handle in outer.items():
            actor.launch(2).call("ncclBroadcast", 10 * US, handle=handle, stream=7)
        done = max(actor.now_ns for actor in outer) + MS
        for actor in outer:
            actor.dtoh(duration_ns=done - actor.now_ns).rest(3 * US).sync().rest(2 * MS)
        last.rest(middle.now_ns - last.now_ns)
    (found,) = [record for record in replay(first, middle, last) if record.outlier and record.pid == 500]
    assert (found.cause, found.contributions[0].culprit_pid) == ("collective_wait", 502)
    assert found.contributions[0].culprit == (
        "rank 1 of communicator 11111111 (pid 502), 8.0 ms late: copying; rank 1 of communicator abcdef01 (pid 501) waited for it"
    )


def test_times_are_those_of_the_stream() -> None:
    assert World().actors[0].now_ns == START_NS + MS
