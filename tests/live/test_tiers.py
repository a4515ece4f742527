"""Tiers of probes change under running programs: what each tier sees is exact, and nobody else's events are lost meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from gputail.events import CALL, ENTRY_ONLY
from gputail.probes.table import BY_SYMBOL, TIER_CALL
from gputail.probes.tracer import TraceOptions, Tracer
from gputail.tiers import CHANGING, FULL, LAUNCH, LIGHT
from tests.live.conftest import Caller, wait_until

LAUNCH_CALL, SYNC_CALL = BY_SYMBOL["cuLaunchKernel"].number, BY_SYMBOL["cuStreamSynchronize"].number
START = Callable[..., Caller]


class Traced:
    """A tracer on the bare library, and all that it has handed on."""

    def __init__(self, library: Path, **options) -> None:
        self.tracer = Tracer(TraceOptions(libraries=(str(library),), off_cpu=False, **options))
        self._batches: list[np.ndarray] = []
        self.lost: Counter[str] = Counter()

    def poll(self) -> None:
        self._take(self.tracer.poll())

    def _take(self, batch) -> None:
        self._batches.append(batch.calls)
        self.lost.update(batch.lost)

    def end(self) -> None:
        self._take(self.tracer.finish())

    def rows(self, number: int, pid: int | None = None) -> np.ndarray:
        rows = np.concatenate([np.empty(0, CALL), *self._batches])
        return rows[(rows["call"] == number) & ((rows["tgid"] == pid) if pid else True)]

    def change(self, wanted: dict[int, int]) -> None:
        """Give processes other tiers, and go on reading until they have them."""
        self.tracer._tiering.change(wanted, list(self.tracer._described))
        self.tracer._tiering.settle()
        self.poll()


@pytest.fixture
def trace(bare: tuple[Path, Path]) -> Iterator[Callable[..., Traced]]:
    started: list[Traced] = []

    def start(**options) -> Traced:
        started.append(Traced(bare[0], **options))
        return started[-1]

    yield start
    for one in started:
        one.tracer.close()


@pytest.mark.parametrize(("tier", "launches"), [(LIGHT, 0), (LAUNCH, 23), (FULL, 23)])
def test_a_tier_sees_what_it_is_for_and_waits_always(trace, caller: START, tier: int, launches: int) -> None:
    traced = trace(tier=tier)
    launching, waiting = caller("launch", 23), caller("sync", 29)
    for program in (launching, waiting):
        program.call()
    traced.end()
    rows = traced.rows(LAUNCH_CALL, launching.pid)
    assert len(rows) == launches
    assert ((rows["flags"] & ENTRY_ONLY != 0) == (tier == LAUNCH)).all()
    assert ((rows["duration_ns"] == 0) == (tier == LAUNCH)).all()
    assert len(traced.rows(SYNC_CALL, waiting.pid)) == 29
    assert len(traced.rows(TIER_CALL)) == (tier != FULL)
    assert not traced.lost


def test_one_process_loses_its_launches_and_gets_them_back_and_the_others_never_lose_any(trace, caller: START) -> None:
    traced = trace()
    one, other = caller("request", 23), caller("launch", 29)

    def both() -> None:
        one.call()
        other.call()
        traced.poll()

    both()
    for tier in (LIGHT, FULL, LAUNCH, LIGHT, LAUNCH, FULL):
        traced.change({one.pid: tier})
        both()
    traced.end()
    launches = traced.rows(LAUNCH_CALL, one.pid)
    # Between one wait and the next: none at the light tier, each with or without its return at the others.
    assert np.diff(np.searchsorted(launches["start_ns"], traced.rows(SYNC_CALL, one.pid)["start_ns"]), prepend=0).tolist() == [
        23, 0, 23, 23, 0, 23, 23,
    ]  # fmt: skip
    assert (launches["flags"] & ENTRY_ONLY > 0).reshape(5, 23).all(axis=1).tolist() == [False, False, True, True, False]
    assert len(traced.rows(LAUNCH_CALL, other.pid)) == 7 * 29
    assert not traced.lost


def test_what_runs_while_links_change_is_counted_once_and_none_of_it_is_lost(trace, caller: START) -> None:
    traced = trace()
    busy, shed = caller("launch", 40_000, rate=40_000), caller("launch", 7)
    shed.call()
    traced.poll()
    busy.process.stdin.write("\n")
    wait_until(lambda: traced.poll() or len(traced.rows(LAUNCH_CALL, busy.pid)) > 0, "calls of the busy program")
    for tier in (LIGHT, FULL, LAUNCH, FULL):
        traced.change({shed.pid: tier})
    assert busy.process.stdout.readline().strip().isdigit()
    traced.end()
    assert len(traced.rows(LAUNCH_CALL, busy.pid)) == 40_000
    assert not traced.lost


def test_the_stream_says_from_when_on_which_tier_held(trace, caller: START) -> None:
    traced = trace()
    program = caller("launch", 7)
    program.call()
    traced.poll()
    traced.change({program.pid: LIGHT})
    traced.change({program.pid: FULL})
    traced.end()
    assert traced.rows(TIER_CALL, program.pid)["handle"].tolist() == [CHANGING, LIGHT, CHANGING, FULL]


def test_a_process_that_comes_while_others_have_less_is_traced_in_full(trace, caller: START) -> None:
    traced = trace()
    shed = caller("launch", 7)
    shed.call()
    traced.poll()
    traced.change({shed.pid: LIGHT})
    late = caller("request", 23)
    late.call()  # its waits are seen, and with them that it is there
    wait_until(lambda: traced.poll() or FULL in traced.rows(TIER_CALL, late.pid)["handle"], "its tier")
    before = len(traced.rows(LAUNCH_CALL, late.pid))
    late.call()
    traced.end()
    assert len(traced.rows(LAUNCH_CALL, late.pid)) == before + 23
    assert len(traced.rows(LAUNCH_CALL, shed.pid)) == 7


def test_a_process_that_has_ended_is_no_reason_to_fail(trace, caller: START) -> None:
    traced = trace()
    gone, there = caller("launch", 7), caller("launch", 5)
    for program in (gone, there):
        program.call()
    traced.poll()
    gone.close()
    traced.change({gone.pid: LIGHT})
    traced.change({gone.pid: FULL})
    there.call()
    traced.end()
    assert len(traced.rows(LAUNCH_CALL, there.pid)) == 10
    assert not traced.tracer._tiering.failed


def test_the_governor_takes_launches_from_who_makes_too_many(trace, caller: START) -> None:
    traced = trace(budget=0.01)
    flood = caller("launch", 10**9)
    flood.process.stdin.write("\n")
    try:
        wait_until(lambda: traced.poll() or LIGHT in traced.rows(TIER_CALL, flood.pid)["handle"] & 7, "less than the full tier")
        assert traced.tracer.health().costs[0].tier == "light"
    finally:
        flood.process.kill()
