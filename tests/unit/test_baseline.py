import random

import pytest

from gputail.baseline import Baseline
from gputail.budget import COPY, HOST, PARTS
from gputail.requests import Request
from gputail.tail import Contribution, RequestRecord
from tests.unit.streams import MS, START_NS, S


def request(number: int, duration_ns: int, copy_ns: int = 0, incomplete: bool = False, every_ns: int = 10 * MS) -> Request:
    parts = [0] * len(PARTS)
    parts[COPY], parts[HOST] = copy_ns, duration_ns - copy_ns
    end = START_NS + number * every_ns
    return Request(
        tgid=1, tid=1, start_ns=end - duration_ns, end_ns=end, release_ns=end, boundary="sync", shape="HtoD..sync", calls=3, launches=1,
        parts=tuple(parts), block_threads=100, htod_bytes=1, dtoh_bytes=1, copy_bytes=0, stream=0, incomplete=incomplete,
    )  # fmt: skip


def judged(durations: list[int], baseline: Baseline | None = None, first: int = 0) -> tuple[list[bool], list[tuple[int, int]]]:
    baseline = baseline or Baseline()
    verdicts = [baseline.judge(request(first + number, duration)) for number, duration in enumerate(durations)]
    return [outlier for outlier, _, _ in verdicts], [shift for _, _, shift in verdicts if shift]


def noisy(count: int, median_ns: int, noise: float = 0.02, seed: int = 1) -> list[int]:
    chance = random.Random(seed)
    return [int(median_ns * chance.gauss(1, noise)) for _ in range(count)]


def test_a_quiet_program_has_no_outliers() -> None:
    outliers, shifts = judged(noisy(5000, 5 * MS))
    assert sum(outliers) == 0 and shifts == []


def test_nothing_is_an_outlier_before_enough_is_known() -> None:
    outliers, _ = judged([5 * MS] * 10 + [500 * MS] + [5 * MS] * 10)
    assert sum(outliers) == 0


def test_requests_well_above_the_baseline_are_outliers_and_do_not_move_it() -> None:
    durations = noisy(400, 5 * MS)
    slow = list(range(100, 400, 10))
    for number in slow:
        durations[number] = 9 * MS
    outliers, shifts = judged(durations)
    assert [number for number, outlier in enumerate(outliers) if outlier] == slow
    assert shifts == []


def test_a_wide_program_needs_more_than_a_narrow_one_to_be_slow() -> None:
    assert not any(judged(noisy(600, 5 * MS, noise=0.25) + [7 * MS])[0][-1:])
    assert judged(noisy(600, 5 * MS) + [7 * MS])[0][-1]


def test_a_part_that_never_took_long_tells_even_in_a_wide_program() -> None:
    baseline = Baseline()
    for number, duration in enumerate(noisy(600, 5 * MS, noise=0.2)):
        baseline.judge(request(number, duration, copy_ns=100_000))
    assert baseline.judge(request(600, 7 * MS, copy_ns=3 * MS))[0]
    assert not baseline.judge(request(601, 7 * MS, copy_ns=100_000))[0]


@pytest.mark.parametrize("after_ms", [12, 2])
def test_a_shift_that_lasts_is_one_regime_change_and_a_new_baseline(after_ms: int) -> None:
    baseline = Baseline()
    judged(noisy(300, 5 * MS), baseline)
    outliers, shifts = judged(noisy(1000, after_ms * MS), baseline, first=300)
    assert len(shifts) == 1
    before, after = shifts[0]
    assert before == pytest.approx(5 * MS, rel=0.03) and after == pytest.approx(after_ms * MS, rel=0.03)
    assert sum(outliers[200:]) == 0
    assert baseline.usual is not None and baseline.usual.duration_ns == pytest.approx(after_ms * MS, rel=0.03)


def test_a_short_burst_is_no_regime_change() -> None:
    baseline = Baseline()
    judged(noisy(300, 5 * MS), baseline)
    outliers, shifts = judged(([12 * MS] * 40 + [5 * MS] * 60) * 10, baseline, first=300)
    assert shifts == [] and sum(outliers) == 400


def test_a_return_to_a_level_of_the_cpu_known_from_lately_is_not_slow() -> None:
    baseline = Baseline()
    judged(noisy(300, 4 * MS), baseline)
    judged(noisy(600, 6 * MS), baseline, first=300)
    judged(noisy(600, 4 * MS), baseline, first=900)
    outliers, _ = judged(noisy(100, 6 * MS), baseline, first=1500)
    assert not any(outliers[2:])  # the first two may as well be slow by themselves


def test_a_request_that_computed_longer_is_slow_though_the_cpu_has_lately_been_as_slow() -> None:
    baseline = Baseline()
    for level in (4, 6, 4):
        judged(noisy(600, level * MS), baseline)
    for number in range(20):
        outlier, usual, _ = baseline.judge(request(2000 + 10 * number, 6 * MS))
        assert outlier and usual is not None and usual.duration_ns == pytest.approx(4 * MS, rel=0.03)
        assert not any(judged(noisy(9, 4 * MS, seed=number), baseline, first=2001 + 10 * number)[0])


def test_incomplete_requests_are_not_judged_and_teach_nothing() -> None:
    baseline = Baseline()
    judged(noisy(100, 5 * MS), baseline)
    usual = baseline.usual
    for number in range(200):
        outlier, _, shift = baseline.judge(request(100 + number, 50 * MS, incomplete=True))
        assert not outlier and shift is None
    assert baseline.usual == usual


def record(**fields: object) -> RequestRecord:
    base = dict(
        pid=1, tid=2, comm=None, workload="w", start_ns=10, end_ns=30, boundary="sync", calls=3, launches=1, incomplete=False,
        outlier=False,
        budget_ns=(5, 0, 0, 15, 0, 0, 0, 0, 0, 0),
    )  # fmt: skip
    return RequestRecord(**{**base, **fields})  # type: ignore[arg-type]


def test_a_record_has_the_fixed_fields() -> None:
    assert record().as_dict() == {
        "schema": 1, "pid": 1, "tid": 2, "comm": None, "workload": "w", "start_ns": 10, "end_ns": 30, "duration_ns": 20, "boundary": "sync",
        "calls": 3, "launches": 1, "incomplete": False, "outlier": False, "tier": "full", "gpu": None, "budget": {"host": 5, "launch": 15},
    }  # fmt: skip


def test_an_outliers_record_says_why() -> None:
    found = record(
        outlier=True, baseline_ns=8, excess_ns=12, cause="memcpy", confidence=0.75,
        contributions=(Contribution("memcpy", 9, None, "64 bytes"), Contribution("unknown", 3)),
    ).as_dict()  # fmt: skip
    assert (found["baseline_ns"], found["excess_ns"], found["cause"], found["confidence"]) == (8, 12, "memcpy", 0.75)
    assert found["contributions"] == [
        {"cause": "memcpy", "ns": 9, "culprit_pid": None, "culprit": "64 bytes"},
        {"cause": "unknown", "ns": 3, "culprit_pid": None, "culprit": None},
    ]


@pytest.mark.parametrize("share", [0.08, 0.12, 0.3])
def test_a_small_shift_that_lasts_is_one_regime_change(share: float) -> None:
    baseline = Baseline()
    judged(noisy(600, 5 * MS, noise=0.01), baseline)
    outliers, shifts = judged(noisy(1500, int((1 + share) * 5 * MS), noise=0.01), baseline, first=600)
    assert len(shifts) == 1
    assert shifts[0][1] / shifts[0][0] == pytest.approx(1 + share, rel=0.01)
    assert sum(outliers[300:]) == 0


def test_a_ramp_is_a_few_regime_changes_and_no_stream_of_outliers() -> None:
    baseline = Baseline()
    judged(noisy(600, 5 * MS, noise=0.01), baseline)
    ramp = [int(ns * (1 + 0.3 * number / 2000)) for number, ns in enumerate(noisy(2000, 5 * MS, noise=0.01))]
    outliers, shifts = judged(ramp, baseline, first=600)
    assert 1 <= len(shifts) <= 6
    assert sum(outliers) < 20


def test_what_is_all_slow_for_long_becomes_usual_even_if_it_is_no_other_regime() -> None:
    baseline = Baseline()
    judged(noisy(400, 5 * MS), baseline)
    baseline._regime._median_ns = int(6.3 * MS)  # it came from there, by a way on which each step was too small to tell
    outliers, shifts = judged(noisy(1000, int(6.5 * MS)), baseline, first=400)
    assert shifts == [] and sum(outliers) > 64 and sum(outliers[300:]) == 0


def test_a_neighbour_that_slows_every_other_request_is_no_regime_change() -> None:
    baseline = Baseline()
    judged(noisy(300, 5 * MS), baseline)
    chance = random.Random(5)
    durations = [8 * MS if chance.random() < 0.6 else quiet for quiet in noisy(1000, 5 * MS)]
    outliers, shifts = judged(durations, baseline, first=300)
    assert shifts == [] and outliers == [duration == 8 * MS for duration in durations]


def test_one_spike_is_no_regime_change() -> None:
    outliers, shifts = judged(noisy(600, 5 * MS) + [50 * MS] + noisy(600, 5 * MS, seed=2))
    assert shifts == [] and sum(outliers) == 1


def beside_a_slow_cpu(number: int, cpu_ns: int, copy_ns: int) -> Request:
    return request(number, cpu_ns + copy_ns, copy_ns=copy_ns)


def test_what_a_request_took_besides_the_cpu_is_told_at_every_speed_of_the_cpu() -> None:
    baseline = Baseline()
    chance = random.Random(3)
    for number in range(2000):  # it moves between two speeds every second
        cpu = (3 if number // 100 % 2 else 6) * MS
        baseline.judge(beside_a_slow_cpu(number, int(cpu * chance.gauss(1, 0.03)), int(MS * chance.gauss(1, 0.05))))
    for first, cpu in ((2000, 3 * MS), (2100, 6 * MS)):
        for number in range(first, first + 10):
            baseline.judge(beside_a_slow_cpu(number, cpu, MS))
        outlier, usual, _ = baseline.judge(beside_a_slow_cpu(first + 10, cpu, 3 * MS))
        assert outlier and usual is not None
        assert usual.duration_ns == pytest.approx(cpu + MS, rel=0.05)
        assert not baseline.judge(beside_a_slow_cpu(first + 11, cpu, MS))[0]


def test_a_cpu_that_has_just_become_slow_does_not_hide_what_else_was_slow() -> None:
    baseline = Baseline()
    for number, cpu in enumerate(noisy(600, 4 * MS)):
        baseline.judge(beside_a_slow_cpu(number, cpu, MS))
    for number in range(600, 610):
        assert baseline.judge(beside_a_slow_cpu(number, 7 * MS, MS))[0]  # slow, and the CPU is why
    outlier, usual, _ = baseline.judge(beside_a_slow_cpu(610, 7 * MS, 3 * MS))
    assert outlier and usual is not None
    assert usual.duration_ns == pytest.approx(8 * MS, rel=0.03)
    assert usual.parts[HOST] == pytest.approx(7 * MS, rel=0.03)


def test_a_regime_change_takes_time_as_well_as_requests() -> None:
    baseline = Baseline()
    for number, duration in enumerate([50_000] * 300):
        baseline.judge(request(number, duration, every_ns=100_000))
    shifts = []
    for number in range(300, 300 + 5000):  # half a second of it
        shifts.append(baseline.judge(request(number, 200_000, every_ns=100_000))[2])
    assert not any(shifts)
    assert 5000 * 100_000 < S
