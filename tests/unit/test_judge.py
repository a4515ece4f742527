"""Records against the truth of a run."""

from types import SimpleNamespace

import numpy as np

from gputail.sim.judge import judge


def pairs(*spans):
    return np.array(spans, np.int64).reshape(-1, 2)


def truth(label="gpu+xgemm", requests=(), faults=(), bursts=()):
    return SimpleNamespace(label=label, victim=7, aggressor=9, requests=pairs(*requests), faults=pairs(*faults), bursts=pairs(*bursts))


def record(start, end, cause=None, pid=None, tid=7):
    contributions = [{"cause": cause, "ns": 1, "culprit_pid": pid, "culprit": None}] if cause else []
    return {
        "tid": tid, "start_ns": start, "end_ns": end, "outlier": cause is not None, "cause": cause,
        "excess_ns": 5 if cause else None, "contributions": contributions,
    }  # fmt: skip


MS = 1_000_000
CLEAN = [(0, 10 * MS), (20 * MS, 30 * MS), (40 * MS, 50 * MS)]
HIT = (60 * MS, 90 * MS)


def test_a_request_cut_in_two_is_not_one_to_one():
    result = judge([record(0, 4 * MS), record(5 * MS, 10 * MS), record(20 * MS, 30 * MS)], truth(requests=CLEAN[:2]))
    assert (result.requests, result.one_to_one) == (2, 1)


def test_a_record_that_reaches_out_of_its_request_is_not_one_to_one():
    assert judge([record(0, 12 * MS)], truth(requests=CLEAN[:1])).one_to_one == 0


def test_the_injected_cause_with_the_right_process_counts_as_named():
    logged = truth(requests=[*CLEAN, HIT], bursts=[HIT])
    result = judge([record(*HIT, "foreign_kernel", 9)], logged)
    assert (result.slow, result.flagged, result.right, result.named) == (1, 1, 1, 1)
    result = judge([record(*HIT, "foreign_kernel", 8)], logged)
    assert (result.right, result.named) == (1, 0)


def test_another_cause_is_wrong_and_none_is_not_flagged():
    logged = truth(requests=[*CLEAN, HIT], bursts=[HIT])
    assert judge([record(*HIT, "host_compute")], logged).wrong == {"host_compute": 1}
    assert judge([record(*HIT)], logged).wrong == {"not flagged": 1}


def test_a_blamed_clean_request_counts_and_one_of_more_work_does_not():
    logged = truth(requests=CLEAN)
    records = [record(*CLEAN[0], "foreign_kernel", 9), record(*CLEAN[1], "more_work")]
    result = judge(records, logged)
    assert (result.clean, result.blamed, result.slow) == (3, 1, 0)


def test_records_of_other_threads_do_not_count():
    assert judge([record(0, 10 * MS, tid=8)], truth(requests=CLEAN[:1])).one_to_one == 0
