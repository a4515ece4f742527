"""The windows of a workload's last minutes."""

from __future__ import annotations

import numpy as np

from gputail.histogram import Histogram
from gputail.pipeline import Pipeline
from gputail.trend import DETAILED, KEPT, WINDOW_NS, Trend, Window, recent
from tests.unit.streams import MS, Actor, S, batches, random_cuts, stream


def plain(window: Window) -> tuple:
    return (window.start_ns, window.requests, window.outliers, window.tail_ns, window.buckets.tolist(), window.counts.tolist())


def filled(trend: Trend, histogram: Histogram, windows: int, each: int) -> None:
    """So many windows of so many requests of 5 ms each, the last still open."""
    for number in range(windows):
        trend.roll(number * WINDOW_NS + 7, histogram)
        histogram.add(np.full(each, 5 * MS))


def test_each_window_counts_the_requests_of_its_own_and_the_open_one_is_the_last() -> None:
    trend, histogram = Trend(), Histogram()
    assert trend.windows(histogram) == ()
    filled(trend, histogram, 3, 23)
    trend.outliers = 2
    windows = trend.windows(histogram)
    assert [(window.start_ns, window.requests, window.outliers) for window in windows] == [
        (0, 23, 0), (WINDOW_NS, 23, 0), (2 * WINDOW_NS, 23, 2),
    ]  # fmt: skip
    assert all(window.counts.sum() == 23 for window in windows)


def test_windows_and_their_distributions_are_bounded() -> None:
    trend, histogram = Trend(), Histogram()
    filled(trend, histogram, KEPT + 50, 10)
    windows = trend.windows(histogram)
    assert len(windows) == KEPT
    assert [len(window.counts) > 0 for window in windows] == [False] * (KEPT - DETAILED) + [True] * DETAILED
    assert {window.requests for window in windows} == {10}


def test_a_silent_stretch_has_no_windows_and_is_not_recent() -> None:
    trend, histogram = Trend(), Histogram()
    filled(trend, histogram, 2, 10)
    trend.roll(100 * WINDOW_NS, histogram)
    histogram.add(np.full(3, 9 * MS))
    windows = trend.windows(histogram)
    assert [window.start_ns // WINDOW_NS for window in windows] == [0, 1, 100]
    latest, outliers, since_ns = recent(windows, 100 * WINDOW_NS + 1)
    assert (latest.count, outliers, since_ns) == (3, 0, (100 - DETAILED + 1) * WINDOW_NS)


def test_windows_of_a_stream_are_the_same_however_it_is_cut_and_count_every_request() -> None:
    actor = Actor()
    for number in range(3600):
        actor.serve(wait_ns=9 * MS if number % 100 == 99 else 1 * MS)
    calls = stream(actor)
    assert actor.now_ns - 1000 * S > 2 * WINDOW_NS

    def windows(cuts: list[int]) -> tuple:
        pipeline = Pipeline()
        for batch in batches(calls, cuts):
            pipeline.feed(batch)
        pipeline.finish()
        (view,) = pipeline.snapshot().workloads
        assert sum(window.requests for window in view.windows) == view.requests
        assert sum(window.outliers for window in view.windows) == sum(view.outliers.values()) > 20
        assert len(view.recent_outliers) == 32
        return tuple(plain(window) for window in view.windows)

    whole = windows([])
    assert len(whole) == 3
    for seed in range(3):
        assert windows(random_cuts(calls, seed)) == whole
