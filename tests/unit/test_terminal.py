"""Plain text for people fits its columns and says no more than is known."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gputail.histogram import Histogram
from gputail.snapshot import Snapshot, WorkloadView
from gputail.surfaces import terminal

MS = 1_000_000


def histogram(durations_ns: list[int]) -> Histogram:
    made = Histogram()
    made.add(np.array(durations_ns, np.int64))
    return made


def view(name: str, durations_ns: list[int], **changes: Any) -> WorkloadView:
    fields: dict[str, Any] = dict(
        name=name, tgid=7, comm="python3", command=None, container=None, shape="", histogram=histogram(durations_ns),
        requests=len(durations_ns), incomplete=0, outliers={}, excess_ns={}, baseline_ns=None, last_end_ns=0,
    )  # fmt: skip
    return WorkloadView(**fields | changes)


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 ns"), (999, "999 ns"), (1000, "1.00 us"), (9994, "9.99 us"), (9995, "10.0 us"), (99_950, "100 us"), (999_499, "999 us"),
        (999_500, "1.00 ms"), (12_500_000, "12.5 ms"), (1_000_000_000, "1.00 s"), (95_000_000_000, "95.0 s"), (10**13, "10000 s"),
        (-1500, "-1.50 us"), (None, "-"),
    ],
)  # fmt: skip
def test_a_duration_is_three_digits_and_a_unit(ns: int | None, text: str) -> None:
    assert terminal.duration(ns) == text


def test_a_quantile_needs_enough_requests() -> None:
    assert terminal.quantile(histogram([5 * MS] * 99), 0.99) == "-"
    assert terminal.quantile(histogram([5 * MS] * 100), 0.99).endswith(" ms")
    assert terminal.quantile(histogram([]), 0.5) == "-"


def test_text_of_other_processes_cannot_steer_the_terminal() -> None:
    assert terminal.clean("a\x1b[2J\n\r\u202eb") == "a?[2J???b"
    assert len(terminal.clean("x" * 1000)) == terminal.MAX_NAME


@pytest.mark.parametrize("durations", [[5 * MS], [5 * MS] * 900 + [50 * MS], [0, 1, 2], list(range(1, 10**9, 10**6)), [2**60, 1]])
def test_bars_count_every_request(durations: list[int]) -> None:
    lines = terminal.bars(histogram(durations)).splitlines()
    assert sum(int(line.split()[-1]) for line in lines) == len(durations)
    assert all(("#" in line) == (line.split()[-1] != "0") for line in lines)
    assert len(lines) <= terminal.MAX_BARS


def test_a_summary_fits_100_columns_and_is_ascii() -> None:
    views = [
        view(f"w{number}" * 40, [5 * MS] * (number + 1000), outliers={"foreign_kernel": 2}, baseline_ns=5 * MS) for number in range(30)
    ]
    contribution = SimpleNamespace(cause="launch_backpressure", ns=7 * MS, culprit_pid=4194304, culprit="k" * 5000)
    record = SimpleNamespace(
        pid=4194304, duration_ns=12 * MS, baseline_ns=5 * MS, excess_ns=7 * MS, cause="launch_backpressure", contributions=(contribution,)
    )
    text = terminal.summary(Snapshot(1, tuple(views), events=10**9, lost={"ring_full": 3, "late": 0}, recent_outliers=(record,)))  # type: ignore[arg-type]
    assert text.isascii()
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "and 10 more workloads" in text
    assert "lost: ring_full 3\n" in text
    assert re.search(r"^foreign_kernel +60 ", text, re.MULTILINE)


def test_an_empty_recording_has_a_summary() -> None:
    assert terminal.summary(Snapshot(0)) == "0 events, 0 requests (0 incomplete) of 0 workloads, 0 outliers; lost: nothing\n"


def test_largest_outliers_of_each_cause_are_shown() -> None:
    def record(cause: str, excess_ms: int) -> Any:
        return SimpleNamespace(pid=1, duration_ns=0, baseline_ns=None, excess_ns=excess_ms * MS, cause=cause, contributions=())

    text = terminal.outliers([record("a", 1), record("a", 3), record("b", 9), record("a", 2), record("a", 4)], per_cause=2)
    assert [line.split()[-4:-2] for line in text.splitlines()[1:]] == [["ms", "a"], ["ms", "a"], ["ms", "b"]]
    assert [float(line.split()[4]) for line in text.splitlines()[1:]] == [4, 3, 9]
