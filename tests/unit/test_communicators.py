"""Who is in which communicator, and when each rank came to each collective."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gputail.capture import CaptureReader, CaptureWriter
from gputail.cli import main
from gputail.communicators import MAX_COMMUNICATORS, MAX_MEMBERS, Communicators
from gputail.drift import RECENT, SPAN_NS, Lateness
from gputail.events import AFTER_GAP, Batch
from gputail.members import OPEN_NS
from gputail.pipeline import Pipeline
from gputail.probes.table import EXIT_CALL, MEMBER_CALL
from tests.unit.streams import MS, START_NS, US, Actor, S, batches, stream

WORLD = 0x1234567800000000
LATER = START_NS + 3600 * S


def rank(number: int, ranks: int = 2, identity: int = WORLD, handle: int = 0x70, at_ns: int = START_NS) -> Actor:
    """A process that has become that rank."""
    return Actor(tgid=500 + number, at_ns=at_ns).call("ncclCommInitRank", MS, handle=handle, stream=identity, size=ranks, block=number)


def reduce(actor: Actor, handle: int = 0x70, **fields: int) -> Actor:
    return actor.call("ncclAllReduce", 10 * US, handle=handle, stream=7, **fields).rest(MS)


def learned(*actors: Actor, cuts: int = 1) -> Communicators:
    communicators = Communicators()
    for part in np.array_split(stream(*actors), cuts):
        communicators.learn(part)
    return communicators


def test_ranks_with_one_identity_are_in_one_communicator() -> None:
    (view,) = learned(rank(0), rank(1)).views(LATER)
    assert (view.name, view.size, view.untraced) == ("12345678", 2, 0)
    assert [(one.rank, one.tgid) for one in view.ranks] == [(0, 500), (1, 501)]


def test_ranks_that_are_not_traced_are_counted() -> None:
    (view,) = learned(rank(0, ranks=8), rank(5, ranks=8)).views(LATER)
    assert (view.untraced, [one.rank for one in view.ranks]) == (6, [0, 5])


@pytest.mark.parametrize("fields", [{"stream": 0}, {"block": 2}, {"size": 0}])
def test_a_communicator_that_makes_no_sense_is_none(fields: dict[str, int]) -> None:
    values = {"handle": 0x70, "stream": WORLD, "size": 2, "block": 0} | fields
    assert learned(Actor().call("ncclCommInitRank", MS, **values)).views(LATER) == ()


def test_a_failed_communicator_is_none_and_one_in_the_making_is_one() -> None:
    for result, count in ((0, 1), (7, 1), (5, 0)):
        actor = Actor().call("ncclCommInitRankConfig", MS, handle=0x70, stream=WORLD, size=2, block=0, result=result)
        assert len(learned(actor).views(LATER)) == count


def test_all_ranks_of_one_process_are_told_apart_by_their_handles() -> None:
    actor = Actor().call("ncclCommInitAll", MS, handle=0x70, stream=WORLD, size=2)
    actor.row(MEMBER_CALL, actor.now_ns, 0, handle=0x80, stream=WORLD, size=2, block=1, depth=1)
    (view,) = learned(actor).views(LATER)
    assert [(one.rank, one.tgid) for one in view.ranks] == [(0, 100), (1, 100)]


def test_a_split_orders_ranks_by_key_once_all_have_told_theirs() -> None:
    actors = [rank(number, ranks=4) for number in range(4)]
    for actor, colour, key in zip(actors, (0, 1, 0, 0xFFFFFFFF), (5, 0, 2, 0), strict=True):
        actor.call("ncclCommSplit", MS, handle=0x90 if colour < 2 else 0, stream=0x70, size=colour, block=key)
    views = {tuple(one.tgid for one in view.ranks): view for view in learned(*actors).views(LATER)}
    assert set(views) == {(500, 501, 502, 503), (502, 500), (501,)}
    assert [(one.rank, one.tgid) for one in views[502, 500].ranks] == [(0, 502), (1, 500)]
    assert (views[502, 500].size, views[501,].size) == (2, 1)


def test_a_split_not_all_of_which_is_traced_has_no_ranks_and_no_size() -> None:
    actors = [rank(number, ranks=3) for number in range(2)]
    for actor in actors:
        actor.call("ncclCommSplit", MS, handle=0x90, stream=0x70, size=0, block=0)
    _, part = learned(*actors).views(LATER)
    assert (part.size, part.untraced, [one.rank for one in part.ranks]) == (None, None, [None, None])


def test_collectives_are_matched_by_number_of_each_function() -> None:
    one, two = rank(0), rank(1)
    reduce(one).call("ncclBroadcast", 10 * US, handle=0x70).rest(MS)
    two.rest(5 * MS)
    reduce(two).call("ncclBroadcast", 10 * US, handle=0x70)
    communicators = learned(one, two)
    rounds = communicators.rounds(500, 500, START_NS, LATER, LATER)
    assert [(of.number, [(m.rank, e.come_ns - of.entry.come_ns) for m, e in of.others.items()]) for of in rounds] == [
        (0, [(1, 5 * MS)]), (0, [(1, 5 * MS)]),
    ]  # fmt: skip
    assert [of.last.rank for of in rounds if of.last] == [1, 1]
    assert [of.last for of in communicators.rounds(501, 501, START_NS, LATER, LATER)] == [None, None]


def test_a_round_is_counted_once_though_a_rank_was_seen_to_join_after_it() -> None:
    one, two, three = rank(0, 3), rank(1, 3), Actor(tgid=502)
    three.call("ncclCommInitRank", 3 * MS, handle=0x70, stream=WORLD, size=3, block=2)
    for actor in (one, two, three):
        reduce(reduce(actor))
    (view,) = learned(one, two, three).views(START_NS)
    assert (view.rounds, view.untraced) == (2, 0)


def test_in_a_group_a_rank_comes_with_the_end_of_the_outermost() -> None:
    actor = rank(0).call("ncclGroupStart", US).call("ncclGroupStart", US)
    reduce(actor).call("ncclGroupEnd", US)
    reduce(actor)
    end = actor.now_ns
    actor.call("ncclGroupEnd", 40 * US)
    rounds = learned(actor).rounds(500, 500, START_NS, LATER, LATER)
    assert [of.entry.come_ns for of in rounds] == [end, end]


def test_a_collective_inside_another_call_is_not_counted_twice() -> None:
    actor = rank(0)
    reduce(actor, depth=1)
    assert learned(actor).views(LATER)[0].ranks[0].collectives == 0


def captured(actor: Actor, instantiate: bool = True) -> Actor:
    actor.call("cuStreamBeginCapture", US, stream=7)
    reduce(actor)
    actor.call("cuStreamEndCapture", US, stream=7, handle=0xA0)
    if instantiate:
        actor.call("cuGraphInstantiateWithFlags", US, handle=0xB0, stream=0xA0)
    return actor


def test_what_is_captured_is_counted_and_comes_with_each_launch_of_its_graph() -> None:
    actors = [captured(rank(number)) for number in range(2)]
    for lateness, actor in zip((0, 4 * MS), actors, strict=True):
        for _ in range(3):
            actor.rest(lateness).call("cuGraphLaunch", 10 * US, handle=0xB0, stream=7).rest(10 * MS - lateness)
    communicators = learned(*actors)
    (view,) = communicators.views(START_NS)
    assert [(one.captured, one.replayed, one.collectives) for one in view.ranks] == [(1, 3, 3)] * 2
    assert view.rounds == 3
    assert [of.late_ns for of in communicators.rounds(500, 500, START_NS, LATER, LATER)] == [4 * MS] * 3


def test_launches_of_a_graph_whose_making_was_not_seen_are_not_counted() -> None:
    actor = captured(rank(0), instantiate=False).call("cuGraphLaunch", US, handle=0xB0, stream=7)
    (view,) = learned(actor).views(LATER)
    assert [(one.captured, one.replayed, one.collectives) for one in view.ranks] == [(1, 0, 0)]


def test_a_collective_that_a_rank_has_not_come_to_is_open_and_ages() -> None:
    one, two = rank(0), rank(1)
    reduce(reduce(one).sync())
    reduce(two).sync()
    communicators = learned(one, two)
    for age in (OPEN_NS, 60 * S):
        (view,) = communicators.views(START_NS + 2020 * US + age)
        (hanging,) = view.open
        assert (hanging.function, hanging.number, hanging.came, hanging.missing) == ("ncclAllReduce", 2, ((0, 500),), ((1, 501),))
        assert hanging.since_ns == START_NS + 2020 * US
    assert communicators.views(START_NS + 2020 * US + OPEN_NS - 1)[0].open == ()


def test_where_all_came_it_is_open_until_a_wait_behind_it_has_returned() -> None:
    one, two = reduce(rank(0)), reduce(rank(1))
    assert [hanging.missing for hanging in learned(one, two).views(LATER)[0].open] == [()]
    one.sync()
    two.sync()
    assert learned(one, two).views(LATER)[0].open == ()


def test_a_job_that_has_ended_leaves_nothing_open() -> None:
    communicators = learned(reduce(rank(0)), rank(1))
    for tgid in (500, 501):
        communicators.end_process(tgid, LATER)
    communicators.forget(LATER + OPEN_NS + 1)
    assert communicators.views(LATER) == ()


def test_a_process_that_ended_is_told_by_its_row() -> None:
    actors = [reduce(rank(0)), rank(1)]
    for actor in actors:
        actor.row(EXIT_CALL, actor.now_ns + 5 * S, 0)
    pipeline = Pipeline()
    for batch in batches(stream(*actors)):
        pipeline.feed(batch)
    (view,) = pipeline.snapshot().communicators
    assert len(view.open) == 1
    pipeline.feed(Batch(watermark_ns=LATER))
    assert pipeline.snapshot().communicators == ()


def test_rows_that_are_no_calls_are_not_counted_as_such() -> None:
    actor = Actor().call("ncclCommInitAll", MS, handle=0x70, stream=WORLD, size=2)
    actor.row(MEMBER_CALL, actor.now_ns, 0, handle=0x80, stream=WORLD, size=2, block=1, depth=1).row(EXIT_CALL, actor.now_ns + MS, 0)
    pipeline = Pipeline()
    for batch in batches(stream(actor)):
        pipeline.feed(batch)
    assert set(pipeline.snapshot().calls) == {"ncclCommInitAll"}


def test_a_recording_with_them_can_be_reported_on(tmp_path: Path) -> None:
    actor = rank(0, ranks=1)
    for _ in range(60):
        reduce(actor.launch(5)).sync(MS).rest(3 * MS)
    actor.row(MEMBER_CALL, actor.now_ns, 0, handle=0x80, stream=WORLD, size=2, block=1).row(EXIT_CALL, actor.now_ns + MS, 0)
    path = str(tmp_path / "ranks.gpt")
    with CaptureWriter(path) as writer:
        for batch in batches(stream(actor), [7, 100]):
            writer.write(batch)
    assert main(["report", path]) == 0
    again = Pipeline()
    for batch in CaptureReader(path):
        again.feed(batch)
    (view,) = again.snapshot().communicators
    assert [(one.rank, one.collectives) for one in view.ranks] == [(0, 60)]


def test_a_rank_whose_rows_were_lost_is_not_counted_on() -> None:
    one, two = rank(0), rank(1)
    for _ in range(4):
        reduce(one)
    reduce(two)
    two.rest(2 * MS)
    reduce(two, flags=AFTER_GAP)
    communicators = learned(one, two)
    assert all(not of.others for of in communicators.rounds(500, 500, START_NS, LATER, LATER))
    assert communicators.views(START_NS)[0].untraced == 1


def steps(actors: list[Actor], count: int, late: dict[int, int] | None = None, **fields: int) -> None:
    """Steps of 5 ms with two collectives each."""
    for _ in range(count):
        for number, actor in enumerate(actors):
            start = actor.now_ns
            actor.rest((late or {}).get(number, 0))
            reduce(reduce(actor, **(fields if number == 1 else {})))
            actor.rest(start + 5 * MS - actor.now_ns)
        fields = {}


@pytest.mark.parametrize("missed", [1, 2, 3])
def test_after_a_gap_a_rank_is_counted_on_by_the_times_of_another(missed: int) -> None:
    actors = [rank(0), rank(1)]
    steps(actors, 10)
    del actors[1].rows[-missed:]
    steps(actors, 40, flags=AFTER_GAP)
    begin = actors[0].now_ns
    steps(actors, 10, late={1: MS})
    communicators = learned(*actors)
    rounds = communicators.rounds(500, 500, begin, LATER, LATER)
    assert len(rounds) == 20 and {of.late_ns for of in rounds} == {MS}
    assert communicators.views(START_NS)[0].untraced == 0


def test_where_every_rank_had_a_gap_they_are_counted_from_there() -> None:
    actors = [rank(0), rank(1)]
    steps(actors, 3)
    del actors[0].rows[-2:]
    del actors[1].rows[-5:]
    for number, actor in enumerate(actors):
        actor.rest(100 * US * number)
        reduce(actor, flags=AFTER_GAP).rest(4 * MS - 10 * US - 100 * US * number)
    steps(actors, 70)
    begin = actors[0].now_ns
    steps(actors, 10, late={0: MS})
    rounds = learned(*actors).rounds(501, 501, begin, LATER, LATER)
    assert len(rounds) == 20 and {of.late_ns for of in rounds} == {MS}


def test_a_process_that_makes_communicators_without_end_pushes_out_the_oldest() -> None:
    actor = Actor()
    for number in range(MAX_COMMUNICATORS + 10):
        actor.call("ncclCommInitRank", US, handle=0x1000 + number, stream=(number + 1) << 32, size=1, block=0)
    views = learned(actor).views(START_NS)
    assert len(views) == MAX_COMMUNICATORS and views[0].name == f"{11:08x}"
    crowd = Actor()
    for number in range(MAX_MEMBERS + 10):
        crowd.call("ncclCommInitRank", US, handle=0x1000 + number, stream=WORLD, size=1000, block=number)
    (view,) = learned(crowd).views(START_NS)
    assert len(view.ranks) == MAX_MEMBERS


def test_what_is_captured_without_end_is_bounded() -> None:
    actor = rank(0).call("cuStreamBeginCapture", US, stream=7)
    for _ in range(5000):
        actor.call("ncclAllReduce", US, handle=0x70, stream=7)
    actor.call("cuStreamEndCapture", US, stream=7, handle=0xA0).call("cuGraphInstantiate", US, handle=0xB0, stream=0xA0)
    actor.call("cuGraphLaunch", US, handle=0xB0)
    (one,) = learned(actor).views(START_NS)[0].ranks
    assert (one.captured, one.replayed) == (5000, 1)


def test_graphs_of_programs_without_collectives_are_not_looked_at() -> None:
    actor = Actor()
    for _ in range(3):
        actor.call("cuGraphLaunch", US, handle=0xB0)
    assert learned(actor, reduce(rank(0))).views(START_NS)[0].ranks[0].replayed == 0


def test_it_does_not_matter_how_the_rows_are_cut() -> None:
    one, two = captured(rank(0)), captured(rank(1))
    for actor in (one, two):
        for _ in range(20):
            reduce(actor).call("cuGraphLaunch", 10 * US, handle=0xB0, stream=7)
    assert learned(one, two).views(LATER) == learned(one, two, cuts=17).views(LATER)


def test_how_often_and_by_how_much_each_rank_came_last() -> None:
    one, two = rank(0), rank(1)
    for late in (0, 3, 0, 5):
        reduce(one).rest(9 * MS)
        reduce(two.rest(late * MS)).rest((9 - late) * MS)
    (view,) = learned(one, two).views(START_NS)
    assert [(one.last_times, one.late_ns) for one in view.ranks][1] == (2, 8 * MS)


def test_the_rank_that_the_others_wait_for_waits_least_itself_whatever_its_clock_says() -> None:
    """As two nodes see it that know nothing of each other, one of them an hour ahead."""
    waited = []
    for number in (0, 1):
        actor = rank(number, at_ns=START_NS + number * 3600 * S)
        for late_ms in (0, 3, 0, 5):  # of rank 1; rank 0 waits for it
            begin = actor.now_ns
            reduce(actor.rest(late_ms * MS * number))
            actor.sync(duration_ns=begin + 9 * MS - actor.now_ns, stream=7).rest(MS)
            actor.sync(duration_ns=US, stream=7)  # finds it done: no other wait
        (view,) = learned(actor, cuts=5).views(LATER)
        (one,) = view.ranks
        assert one.waits == 4
        waited.append(one.waited_ns)
    assert waited == [36 * MS, 28 * MS]


def test_a_wait_is_for_the_last_collective_enqueued_before_it_began() -> None:
    actor = rank(0)
    second = reduce(actor).now_ns
    begin = reduce(actor).now_ns
    actor.sync(duration_ns=5 * MS, stream=7)
    other = Actor(tgid=500, tid=501, at_ns=begin + MS)  # meanwhile, from another thread
    third = other.now_ns
    reduce(other)
    actor.sync(duration_ns=MS, stream=7)
    (view,) = learned(actor, other).views(LATER)
    assert (view.ranks[0].waits, view.ranks[0].waited_ns) == (2, (begin + 5 * MS - second) + (begin + 6 * MS - third))


def shifts(late_ns: list[int], every_ns: int = 50 * MS) -> list[tuple[int, int]]:
    """Number and size of the shifts found."""
    lateness = Lateness()
    found = [(number, lateness.add(number * every_ns, late)) for number, late in enumerate(late_ns)]
    return [(number, shift[1] - shift[0]) for number, shift in found if shift]


def test_a_lasting_shift_is_found_once_and_its_end_too() -> None:
    late = [50_000 + 10_000 * (n % 5) for n in range(200)]
    found = shifts(late + [one + 3 * MS for one in late] + late)
    assert [ns for _, ns in found] == [3 * MS, -3 * MS]
    assert 200 < found[0][0] < 200 + RECENT + 8 and 400 < found[1][0] < 400 + RECENT + 8


def test_outliers_however_many_short_of_half_are_no_shift() -> None:
    assert shifts([20 * MS if n % 3 == 0 else 50_000 + 10_000 * (n % 5) for n in range(1000)]) == []


def test_a_burst_is_no_shift() -> None:
    quiet = [50_000] * 2000
    burst = SPAN_NS // MS // 2
    assert shifts(quiet[:10_000] * 3 + [3 * MS] * burst + quiet * 3, every_ns=MS) == []


def test_a_creeping_rank_is_found() -> None:
    assert len(shifts([50_000 + 5_000 * n for n in range(1000)])) >= 2
