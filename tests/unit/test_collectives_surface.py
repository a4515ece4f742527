"""What is said of communicators: hanging collectives, late ranks, shifts; in words, in messages and in metrics."""

from __future__ import annotations

import json
from dataclasses import replace

from gputail.drift import Drift
from gputail.members import CommunicatorView, OpenCollective, RankView
from gputail.snapshot import Snapshot
from gputail.surfaces import collectives, messages, terminal
from gputail.surfaces.metrics import MAX_RANKS, SnapshotCollector

S = 1_000_000_000
RANKS = (RankView(0, 500, 90, 0, 0, 3, 4_000_000), RankView(1, 501, 89, 0, 0, 40, 320_000_000))
HANGING = OpenCollective("ncclAllReduce", 90, 88 * S, ((0, 500),), ((1, 501),))
VIEW = CommunicatorView("abcdef01", 4, 2, 89, RANKS, (HANGING,))
SHIFT = Drift("abcdef01", 1, 501, 80 * S, 100_000, 3_100_000, 4_000_000, 7_000_000)
SNAPSHOT = Snapshot(100 * S, communicators=(VIEW,), drifts=(SHIFT,))


def test_a_hanging_collective_is_said_with_its_age_and_who_has_not_come() -> None:
    assert collectives.lines(SNAPSHOT) == [
        "ncclAllReduce 90 of abcdef01 is open for 12.0 s: rank 1 (pid 501) has not come",
        "communicator abcdef01: 2 of 4 ranks traced, 89 collectives of all these",
        "  rank 1 (pid 501) came last 40 times, by 8.00 ms on average",
        "  rank 0 (pid 500) came last 3 times, by 1.33 ms on average",
        "rank 1 (pid 501) of communicator abcdef01 comes 3.00 ms later than it did, lastingly:",
        "  from one collective to the next 7.00 ms, before 4.00 ms",
    ]


def test_what_only_untraced_ranks_can_hold_up_is_said_so() -> None:
    everyone = replace(HANGING, came=((0, 500), (1, 501)), missing=())
    assert collectives.hanging(VIEW, everyone, 100 * S).endswith("all traced ranks came, 2 are not traced")
    assert collectives.hanging(replace(VIEW, untraced=0), everyone, 100 * S).endswith("all ranks came")


def test_what_is_captured_and_not_seen_again_is_called_invisible() -> None:
    ranks = (RankView(0, 500, 0, 5, 0, 0, 0), RankView(1, 501, 0, 5, 0, 0, 0))
    view = replace(VIEW, ranks=ranks, open=(), rounds=0)
    assert collectives.lines(Snapshot(S, communicators=(view,)))[-1] == (
        "  10 calls were captured into graphs, whose launches are not seen: its collectives are invisible"
    )
    seen = replace(view, ranks=tuple(replace(one, replayed=7) for one in ranks))
    assert collectives.lines(Snapshot(S, communicators=(seen,)))[-1] == "  10 calls were captured into graphs, launched 14 times"


def test_the_summary_ends_with_it_in_100_columns() -> None:
    text = terminal.summary(SNAPSHOT)
    assert "has not come" in text and text.isascii()
    assert max(map(len, text.splitlines())) <= 100


def test_a_message_has_all_of_it() -> None:
    sent = json.loads(json.dumps(messages.snapshot(SNAPSHOT, {})))
    (known,) = sent["communicators"]
    assert (known["name"], known["size"], known["untraced"], known["rounds"]) == ("abcdef01", 4, 2, 89)
    assert known["open"] == [
        {
            "function": "ncclAllReduce",
            "number": 90,
            "age_ns": 12 * S,
            "came": [{"rank": 0, "pid": 500}],
            "missing": [{"rank": 1, "pid": 501}],
        }
    ]
    assert known["ranks"][1] == {
        "rank": 1, "pid": 501, "collectives": 89, "captured": 0, "replayed": 0, "last_times": 40, "late_ns": 320_000_000,
        "waits": 0, "waited_ns": 0,
    }  # fmt: skip
    assert sent["drifts"][0]["after_ns"] == 3_100_000


def test_a_hundred_communicators_of_a_hundred_ranks_make_a_bounded_message() -> None:
    many = tuple(replace(VIEW, ranks=RANKS * 50) for _ in range(100))
    sent = messages.snapshot(Snapshot(S, communicators=many, drifts=(SHIFT,) * 64), {})
    assert len(sent["communicators"]) == collectives.MAX_COMMUNICATORS
    assert {len(known["ranks"]) for known in sent["communicators"]} == {collectives.MAX_RANKS}
    assert len(sent["drifts"]) == collectives.MAX_DRIFTS


def test_the_age_of_what_hangs_is_a_metric() -> None:
    collector = SnapshotCollector()
    for snapshot, count, age in ((SNAPSHOT, 1, 12), (Snapshot(S), 0, 0)):
        collector.publish(snapshot)
        values = {family.name: family.samples[0].value for family in collector.collect() if "open_collective" in family.name}
        assert values == {"gputail_open_collectives": count, "gputail_open_collective_age_seconds": age}


def samples(snapshot: Snapshot, name: str) -> dict[tuple[str, str], float]:
    collector = SnapshotCollector()
    collector.publish(snapshot)
    return {
        (sample.labels["communicator"], sample.labels["rank"]): sample.value
        for metric in collector.collect()
        for sample in metric.samples
        if sample.name == name
    }


def test_how_long_each_rank_waited_is_a_metric_where_there_are_others_to_wait_for() -> None:
    ranks = (RankView(4, 500, 90, 0, 0, 0, 0, waits=30, waited_ns=3 * S), RankView(None, 501, 90, 0, 0, 0, 0, waits=9, waited_ns=S))
    alone = replace(VIEW, name="00000001", size=1)
    snapshot = Snapshot(100 * S, communicators=(replace(VIEW, ranks=ranks), alone))
    assert samples(snapshot, "gputail_collective_waits_total") == {("abcdef01", "4"): 30}
    assert samples(snapshot, "gputail_collective_wait_seconds_total") == {("abcdef01", "4"): 3}


def test_of_many_ranks_those_of_the_communicators_used_last_have_series_and_the_rest_is_counted() -> None:
    views = tuple(
        replace(VIEW, name=f"{number:08x}", ranks=tuple(RankView(rank, 500 + rank, 1, 0, 0, 0, 0) for rank in range(8)))
        for number in range(40)
    )
    snapshot = Snapshot(100 * S, communicators=views)
    found = samples(snapshot, "gputail_collective_waits_total")
    assert len(found) == MAX_RANKS and ("00000027", "0") in found and ("00000000", "0") not in found
    collector = SnapshotCollector()
    collector.publish(snapshot)
    (folded,) = [metric for metric in collector.collect() if metric.name == "gputail_folded_ranks"]
    assert folded.samples[0].value == 40 * 8 - MAX_RANKS
