from __future__ import annotations

import os

import numpy as np
import pytest

from gputail import events
from gputail.probes import overhead
from gputail.probes.overhead import EVERY_S, Overhead, cpu_time_ns
from gputail.probes.table import BY_SYMBOL, OFF_CPU_CALL

S = 1_000_000_000


def calls(*made: tuple[int, int], off_cpu: int = 0) -> np.ndarray:
    """Rows: so many calls of each process, and stretches off the CPU of the first."""
    tgids = [tgid for tgid, count in made for _ in range(count)] + [made[0][0]] * off_cpu
    rows = np.zeros(len(tgids), events.CALL)
    rows["tgid"], rows["call"] = tgids, BY_SYMBOL["cuLaunchKernel"].number
    rows["call"][len(tgids) - off_cpu :] = OFF_CPU_CALL
    return rows


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """CPU time by process, to be set by the test."""
    times: dict[int, int] = {}
    monkeypatch.setattr(overhead, "cpu_time_ns", lambda tgid: times.get(tgid))
    return times


def test_the_share_is_calls_times_their_cost_of_the_cpu_time_since_the_last_look(used: dict[int, int]) -> None:
    estimate = Overhead(1000.0)
    used[7] = 50 * S
    estimate.count(calls((7, 5)), 100.0)
    assert estimate.ratio is None  # of what came before it is not known how long it took
    estimate.count(calls((7, 3000), off_cpu=500), 100.5)
    assert estimate.ratio is None
    used[7] = 51 * S
    estimate.count(calls((7, 7000)), 100.0 + EVERY_S)
    assert estimate.ratio == pytest.approx(10_000 * 1000 / S)


def test_processes_that_have_ended_and_such_that_are_new_are_left_out(used: dict[int, int]) -> None:
    estimate = Overhead(1000.0)
    used |= {7: 0, 8: 0}
    estimate.count(calls((7, 1), (8, 1)), 100.0)
    used |= {7: S, 9: 5 * S}
    del used[8]
    estimate.count(calls((7, 20_000), (8, 1000), (9, 1000)), 100.0 + EVERY_S)
    assert estimate.ratio == pytest.approx(0.02)


def test_a_process_that_fell_silent_counts_with_its_cpu_time(used: dict[int, int]) -> None:
    estimate = Overhead(1000.0)
    used |= {7: 0, 8: 0}
    estimate.count(calls((7, 1), (8, 1)), 100.0)
    used |= {7: S, 8: S}
    estimate.count(calls((7, 20_000)), 100.0 + EVERY_S)
    assert estimate.ratio == pytest.approx(0.01)


def test_without_a_measured_cost_nothing_is_said(used: dict[int, int]) -> None:
    estimate = Overhead(None)
    used[7] = S
    for second in range(10):
        estimate.count(calls((7, 1000)), float(second))
    assert estimate.ratio is None


def test_cpu_time_is_that_of_the_process_and_none_once_it_is_gone() -> None:
    assert cpu_time_ns(os.getpid()) == pytest.approx(sum(os.times()[:2]) * S, abs=2 * S)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert cpu_time_ns(child) is None
