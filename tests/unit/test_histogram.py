import numpy as np
import pytest

from gputail.histogram import BUCKETS, MAX_NS, Histogram, bucket_of, lower_bounds


def test_every_value_is_within_one_percent_of_its_buckets_middle() -> None:
    lower = lower_bounds()
    middle = (lower[:-1] + lower[1:] - 1) // 2
    values = np.unique(np.concatenate([np.arange(2000), np.geomspace(1000, MAX_NS, 200_000).astype(np.int64), lower[:-1], lower[1:-1] - 1]))
    error = np.abs(middle[bucket_of(values)] - values)
    assert (error <= 0.01 * values).all()


def test_buckets_hold_exactly_the_values_between_their_bounds() -> None:
    lower = lower_bounds()
    assert (bucket_of(lower[:-1]) == np.arange(BUCKETS)).all()
    assert (bucket_of(lower[1:] - 1) == np.arange(BUCKETS)).all()
    assert lower[BUCKETS] == MAX_NS + 1


def test_the_range_reaches_from_a_microsecond_to_a_thousand_seconds() -> None:
    histogram = Histogram()
    histogram.add(np.array([1_000, 1_000_000_000_000, 1_000_000_000_000]))
    assert histogram.overflow == 0
    assert histogram.quantile(0.0) == pytest.approx(1_000, rel=0.01)
    assert histogram.quantile(1.0) == pytest.approx(1_000_000_000_000, rel=0.01)


def test_what_is_beyond_the_range_is_counted_and_visible() -> None:
    histogram = Histogram()
    histogram.add(np.array([5, MAX_NS, MAX_NS + 1, 1 << 62]))
    assert (histogram.count, histogram.overflow) == (4, 2)
    assert histogram.quantile(1.0) == MAX_NS + 1
    assert histogram.cumulative(np.array([1 << 62])).tolist() == [2]


@pytest.mark.parametrize("q", [0.01, 0.5, 0.9, 0.99, 0.999])
def test_quantiles_are_those_of_the_values_within_one_percent(q: float) -> None:
    values = np.random.default_rng(1).lognormal(15, 1.5, 100_000).astype(np.int64)
    histogram = Histogram()
    for part in np.array_split(values, 7):
        histogram.add(part)
    assert histogram.count == 100_000
    assert histogram.sum_ns == values.sum()
    assert histogram.quantile(q) == pytest.approx(np.quantile(values, q, method="inverted_cdf"), rel=0.01)


def test_an_empty_histogram_has_no_quantile() -> None:
    histogram = Histogram()
    histogram.add(np.empty(0, np.int64))
    assert histogram.quantile(0.5) is None
    assert (histogram.count, histogram.sum_ns) == (0, 0)


def test_merging_is_adding_and_copies_are_independent() -> None:
    values = np.random.default_rng(2).integers(1, 10**9, 1000)
    whole, one, other = Histogram(), Histogram(), Histogram()
    whole.add(values)
    one.add(values[:300])
    other.add(values[300:])
    one.merge(other)
    assert (one.counts == whole.counts).all() and one.sum_ns == whole.sum_ns
    twin = one.copy()
    twin.add(values)
    assert (one.count, twin.count) == (1000, 2000)


def test_cumulative_counts_never_fall_and_end_with_all() -> None:
    values = np.random.default_rng(3).integers(1, 10**9, 1000)
    histogram = Histogram()
    histogram.add(values)
    bounds = np.array([1, 1_000_000, 100_000_000, 500_000_000, 2_000_000_000])
    counts = histogram.cumulative(bounds)
    assert (np.diff(counts) >= 0).all() and counts[-1] == 1000
    assert counts[3] == pytest.approx((values <= bounds[3]).sum(), abs=10)


def test_unsigned_durations_of_records_are_taken_as_they_are() -> None:
    histogram = Histogram()
    histogram.add(np.array([3_000, 5_000], np.uint64))
    assert (histogram.count, histogram.sum_ns) == (2, 8_000)
