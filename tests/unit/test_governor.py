"""The governor decides by counts: calls, CPU time and what a probe costs; nothing here waits."""

from __future__ import annotations

import os

import numpy as np
import pytest

from gputail import events
from gputail.probes.cpu_time import cpu_time_ns
from gputail.probes.governor import ARMED_FOR_S, FIRST_LOOK_S, HALF_LIFE_S, MOST_SAVED_S, Costs, Governor
from gputail.probes.table import BY_SYMBOL, OFF_CPU_CALL
from gputail.tiers import FULL, LAUNCH, LIGHT

S = 1_000_000_000
FIRST_LOOK = int(FIRST_LOOK_S)
COSTS = Costs(pair_ns=1000.0, entry_ns=500.0, trap_ns=800.0)
LAUNCH_CALL, SYNC_CALL = BY_SYMBOL["cuLaunchKernel"].number, BY_SYMBOL["cuStreamSynchronize"].number


def rows(tgid: int, launches: int = 0, syncs: int = 0, entries: int = 0, off_cpu: int = 0) -> np.ndarray:
    made = np.zeros(launches + syncs + entries + off_cpu, events.CALL)
    made["tgid"] = tgid
    made["call"] = [LAUNCH_CALL] * (launches + entries) + [SYNC_CALL] * syncs + [OFF_CPU_CALL] * off_cpu
    made["flags"][launches : launches + entries] = events.ENTRY_ONLY
    return made


class Program:
    """A program that uses a CPU whole and launches and waits so often a second, traced at the tier that it is given."""

    def __init__(self, governor: Governor, tgid: int, launches: int, syncs: int = 0) -> None:
        self.governor, self.tgid, self.launches, self.syncs = governor, tgid, launches, syncs
        self.tier, self.cpu_ns = FULL, 0
        self.costs_ns: list[float] = []
        self.tiers: list[int] = []
        governor.count(rows(tgid, 1))
        governor.tick(1.0, {tgid: 0})

    def second(self) -> None:
        full, entries = (self.launches if self.tier == tier else 0 for tier in (FULL, LAUNCH))
        self.governor.count(rows(self.tgid, full, self.syncs, entries))
        self.costs_ns.append((full + self.syncs) * COSTS.pair_ns + entries * COSTS.entry_ns)
        self.tiers.append(self.tier)
        self.cpu_ns += S
        self.tier = self.governor.tick(1.0, {self.tgid: self.cpu_ns}).get(self.tgid, self.tier)


def test_a_process_within_its_budget_is_traced_in_full() -> None:
    program = Program(Governor(COSTS, 0.01), 7, launches=7000, syncs=500)
    for _ in range(30):
        program.second()
    assert set(program.tiers) == {FULL}
    assert program.governor.ratio == pytest.approx(0.0075)
    assert program.governor.processes[7].shed_s == 0


def test_entries_are_what_a_process_gets_whose_budget_pays_for_no_more_and_the_rest_is_spent_on_looks_in_full() -> None:
    program = Program(Governor(COSTS, 0.01), 7, launches=12_000, syncs=500)
    for _ in range(120):
        program.second()
    assert set(program.tiers[1:]) == {LAUNCH, FULL}
    assert sum(program.costs_ns[20:]) / 100 == pytest.approx(0.01 * S, rel=0.1)


@pytest.mark.parametrize("launches", [12_000, 20_000, 30_000, 60_000, 100_000, 1_000_000])
def test_no_ten_seconds_cost_more_than_twice_the_budget_once_five_have_passed(launches: int) -> None:
    program = Program(Governor(COSTS, 0.01), 7, launches, syncs=200)
    for second in range(200):
        if second % 7 == 0:
            program.governor.arm(7)
        program.second()
    costs = program.costs_ns
    assert max(sum(costs[first : first + 10]) for first in range(5, 190)) <= 2 * 0.01 * 10 * S
    assert sum(costs[5:]) / 195 <= 1.05 * 0.01 * S


def test_a_process_far_above_any_budget_keeps_its_waits_and_loses_its_launches() -> None:
    program = Program(Governor(COSTS, 0.01), 7, launches=100_000, syncs=1000)
    for _ in range(60):
        program.second()
    assert set(program.tiers[FIRST_LOOK:40]) == {LIGHT}
    assert program.tiers[FIRST_LOOK:].count(FULL) <= 1  # to see whether it still is
    assert program.governor.processes[7].shed_s == pytest.approx(60 - FIRST_LOOK, abs=2)


def test_the_first_look_is_in_full_whatever_it_costs_and_is_not_charged() -> None:
    program = Program(Governor(COSTS, 0.01), 7, launches=30_000)
    for _ in range(20):
        program.second()
    assert program.tiers[:FIRST_LOOK] == [FULL] * FIRST_LOOK and program.tiers[FIRST_LOOK] == LIGHT
    assert program.governor.processes[7].saved_ns > 0


def test_a_process_that_calls_nothing_keeps_its_first_look() -> None:
    governor = Governor(COSTS, 0.01)
    governor.count(rows(7, 1))
    for second in range(20):
        assert not governor.tick(1.0, {7: second * S})
    for second in range(20, 30):
        governor.count(rows(7, 30_000))
        if governor.tick(1.0, {7: second * S}):
            break
    assert second == 20 + FIRST_LOOK - 1


def test_outliers_bring_a_look_in_full_sooner() -> None:
    def first_look(arm: bool) -> int:
        program = Program(Governor(COSTS, 0.01), 7, launches=30_000)
        for _ in range(100):
            if arm:
                program.governor.arm(7)
            program.second()
        return program.tiers.index(FULL, FIRST_LOOK)

    assert first_look(True) < first_look(False)


def test_a_look_goes_on_no_longer_than_what_was_saved_pays_for() -> None:
    program = Program(Governor(COSTS, 0.01), 7, launches=30_000)
    for _ in range(200):
        program.second()
    looks = "".join("F" if tier == FULL else "-" for tier in program.tiers).split("-")
    assert max(map(len, looks)) <= MOST_SAVED_S * 0.01 / (0.03 - 0.01) + 1
    assert looks.count("") < len(looks)


def test_a_process_that_calls_less_is_looked_at_again_and_gets_the_full_tier_back() -> None:
    program = Program(Governor(COSTS, 0.01), 7, launches=100_000)
    for _ in range(5):
        program.second()
    assert program.tier == LIGHT
    program.launches = 1000
    for _ in range(int(HALF_LIFE_S)):
        program.second()
    assert program.tier == FULL and program.tiers[-20:] == [FULL] * 20


def test_being_armed_wears_off() -> None:
    governor = Governor(COSTS, 0.01)
    governor.count(rows(7, 1))
    governor.tick(1.0, {7: 0})
    governor.arm(7)
    for second in range(1, int(ARMED_FOR_S) + 1):
        assert governor.processes[7].armed_s > 0
        governor.tick(1.0, {7: second * S})
    assert governor.processes[7].armed_s == 0


def test_the_cost_counts_every_kind_of_hit_at_its_price_and_processes_that_have_ended_are_left_out() -> None:
    governor = Governor(COSTS, 0.01)
    governor.count(rows(7, 1))
    governor.count(rows(8, 1))
    governor.tick(1.0, {7: 0, 8: 0})
    governor.count(rows(7, launches=3, syncs=5, entries=4, off_cpu=2))
    governor.count(rows(8, launches=1000))
    governor.tick(1.0, {7: S})
    assert governor.processes[7].share == pytest.approx(((3 + 5) * 1000 + 4 * 500 + 2 * 400) / S)
    assert governor.ratio == governor.processes[7].share


def test_a_process_that_fell_silent_counts_with_its_cpu_time() -> None:
    governor = Governor(COSTS, 0.01)
    governor.count(rows(7, 1))
    governor.count(rows(8, 1))
    governor.tick(1.0, {7: 0, 8: 0})
    governor.count(rows(7, 20_000))
    governor.tick(1.0, {7: S, 8: S})
    assert governor.ratio == pytest.approx(0.01)


def test_cpu_time_is_that_of_the_process_and_none_once_it_is_gone() -> None:
    assert cpu_time_ns(os.getpid()) == pytest.approx(sum(os.times()[:2]) * S, abs=2 * S)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert cpu_time_ns(child) is None
