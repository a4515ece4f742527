"""How scripts/bench accuracy scores: hand-made requests, verdicts and rows."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from gputail import events
from gputail.probes.table import BY_SYMBOL
from gputail.sim.scenario import Truth

# The benchmarks are scripts, no package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "benchmarks"))
import accuracy
import baselines

MS = 1_000_000
VICTIM, AGGRESSOR = 100, 900
COSTS = {20: 1.01, 30: 1.05, 40: 1.15, 50: 1.5}  # injected requests and how long they took, of the usual 10 ms


def truth(label: str = "gpu+xgemm") -> Truth:
    begin = np.arange(100, dtype=np.int64) * 20 * MS + 1000 * MS
    took = np.array([10 * MS * COSTS.get(number, 1) for number in range(100)], np.int64)
    requests = np.column_stack([begin, begin + took])
    return Truth(label, VICTIM, AGGRESSOR, requests, np.zeros((0, 2), np.int64), requests[list(COSTS)])


def records(causes: dict[int, str]) -> list[dict]:
    """One record for each request; those with a cause are outliers."""
    out = []
    for number, (start, end) in enumerate(truth().requests.tolist()):
        record = {"tid": VICTIM, "start_ns": start, "end_ns": end, "outlier": number in causes, "excess_ns": end - start - 10 * MS}
        if number in causes:
            blame = {"cause": causes[number], "ns": record["excess_ns"], "culprit_pid": AGGRESSOR if "foreign" in causes[number] else None}
            record |= {"cause": causes[number], "confidence": 0.95, "contributions": [blame]}
        out.append(record)
    return out


def tallied(causes: dict[int, str], label: str = "gpu+xgemm") -> accuracy.Tally:
    into = accuracy.Tally(label)
    accuracy.tally(into, records(causes), truth(label), rows())
    return into


def rows() -> np.ndarray:
    """A launch of the aggressor in each burst, and the victim's first and last in each request."""
    spans = [(VICTIM, at) for start, end in truth().requests.tolist() for at in (start, end - 5000)]
    spans = sorted(spans + [(AGGRESSOR, start) for start, _ in truth().bursts.tolist()], key=lambda span: span[1])
    calls = np.zeros(len(spans), events.CALL)
    calls["call"] = BY_SYMBOL["cuLaunchKernel"].number
    calls["tgid"] = calls["tid"] = [pid for pid, _ in spans]
    calls["start_ns"] = [start for _, start in spans]
    calls["duration_ns"] = 5000
    return calls


def test_requests_count_in_the_dose_that_the_fault_really_cost() -> None:
    one = tallied({number: "foreign_kernel" for number in COSTS})
    assert {dose: one.by_dose[dose].total() for dose in accuracy.DOSES} == {"small": 1, "middle": 1, "large": 1}
    assert [one.rights[dose] for dose in accuracy.DOSES] == [1, 1, 1]
    assert one.unhurt == {"foreign_kernel": 1}
    assert (one.requests, one.one_to_one, one.clean, one.named) == (100, 100, 96, 3)


def test_what_came_before_the_first_driver_call_cost_the_request_nothing() -> None:
    late = rows()
    begin, end = truth().requests[50]
    first = np.flatnonzero((late["tid"] == VICTIM) & (late["start_ns"] == begin))
    late["start_ns"][first] += 4 * MS
    spans = accuracy.driver_spans(late, truth())
    assert spans[50] == end - begin - 4 * MS and spans[49] == 10 * MS


def test_a_clean_request_that_was_slow_by_its_own_cpu_is_not_blamed_for_saying_so() -> None:
    slow = truth()
    slow.requests[60, 1] += 3 * MS
    calls = rows()
    calls["start_ns"][(calls["tid"] == VICTIM) & (calls["start_ns"] == slow.requests[60, 1] - 3 * MS - 5000)] += 3 * MS
    flagged = records({60: "host_compute", 61: "host_compute"})
    flagged[60]["end_ns"] += 3 * MS
    one = accuracy.Tally("gpu+xgemm")
    accuracy.tally(one, flagged, slow, calls)
    assert +one.blamed == {"host_compute": 1}


def test_silence_and_wrong_causes_are_told_apart() -> None:
    one = tallied({40: "memcpy", 50: "unknown"})
    assert [dict(one.by_dose[dose]) for dose in accuracy.DOSES] == [{"": 1}, {"memcpy": 1}, {"": 1}]
    assert one.named == 0 and one.confidence == [(0.95, False)]


def test_causes_of_clean_requests_are_counted_by_name() -> None:
    assert +tallied({3: "foreign_kernel", 4: "unknown", 5: "memcpy"}).blamed == {"foreign_kernel": 1, "memcpy": 1}


def test_the_correlation_names_what_went_on_when_requests_were_slow() -> None:
    assert baselines.strongest_correlation(rows(), truth(), np.array([50])) == ["foreign_kernel"]


@pytest.mark.parametrize("switches, cause", [(4, ""), (5, "cpu_preempted")])
def test_the_contention_rule_asks_for_a_long_tail_and_five_switches(switches: int, cause: str) -> None:
    slow = truth()
    slow.requests[60:63, 1] += 35 * MS
    off = np.zeros(switches, events.CALL)
    off["call"], off["tid"], off["start_ns"] = 200, VICTIM, 1200 * MS
    assert baselines.contention_rule(off, slow, np.array([60])) == [cause]
