"""Sums of what culprits cost others: bounded, never falling, and of others alone."""

from __future__ import annotations

from collections import Counter

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from gputail.blame import MAX_CULPRITS, Blame, CulpritView
from gputail.events import Batch, Process
from gputail.names import Names
from gputail.surfaces.metrics import SnapshotCollector
from gputail.tail import Contribution
from tests.unit.snapshots import MS, outlier, snapshot


@pytest.fixture
def names() -> Names:
    made = Names()
    made.learn(Batch(processes=(Process(556, "bully"),)))
    return made


def total(views: tuple[CulpritView, ...]) -> Counter[str]:
    return sum((Counter(view.excess_ns) for view in views), Counter())


def test_time_is_summed_by_culprit_and_cause_and_what_has_no_culprit_is_left_out(names: Names) -> None:
    blame = Blame()
    three = (Contribution("foreign_kernel", 7 * MS, 556), Contribution("foreign_copy", 2 * MS, 556), Contribution("unknown", MS))
    blame.add(outlier(contributions=three))
    blame.add(outlier(contributions=three[:1]))
    assert blame.views(names) == (CulpritView(556, "bully", {"foreign_kernel": 14 * MS, "foreign_copy": 2 * MS}),)


def test_what_a_process_did_to_itself_is_no_blame(names: Names) -> None:
    blame = Blame()
    blame.add(outlier(pid=7, contributions=(Contribution("cpu_preempted", MS, 7),)))
    assert blame.views(names) == ()


def test_culprits_are_bounded_and_no_total_falls_when_one_is_forgotten_or_ends(names: Names) -> None:
    blame, before = Blame(), 0
    for pid in range(1, 10 * MAX_CULPRITS):
        blame.add(outlier(pid=10**6, contributions=(Contribution("foreign_kernel", pid, pid),)))
        if pid % 3 == 0:
            blame.end_process(pid)
        views = blame.views(names)
        assert len(views) <= MAX_CULPRITS + 1
        assert total(views)["foreign_kernel"] == before + pid
        before += pid


def test_a_scrape_says_who_cost_others_how_much() -> None:
    collector = SnapshotCollector()
    culprits = (CulpritView(None, None, {"foreign_copy": 3 * MS}), CulpritView(556, 'bu"lly', {"foreign_kernel": 7 * MS}))
    collector.publish(snapshot(culprits=culprits))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    lines = [line for line in generate_latest(registry).decode().splitlines() if line.startswith("gputail_culprit_")]
    assert lines == [
        'gputail_culprit_excess_seconds_total{cause="foreign_copy",comm="other",pid=""} 0.003',
        'gputail_culprit_excess_seconds_total{cause="foreign_kernel",comm="bu\\"lly",pid="556"} 0.007',
    ]
