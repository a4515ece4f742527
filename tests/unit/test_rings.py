"""Ring bytes to events, and events of several CPUs to one order."""

import numpy as np
import pytest

from gputail.events import CALL, NAME, end_ns
from gputail.probes.rings import Merger, concatenated_names, decode, sample_dtype, summed

SAMPLE = sample_dtype(CALL)


def samples(*starts: int) -> np.ndarray:
    rows = np.zeros(len(starts), SAMPLE)
    rows["type"], rows["size"], rows["raw_size"] = 9, SAMPLE.itemsize, SAMPLE.itemsize - 12
    rows["event"]["start_ns"] = starts
    return rows.view(np.uint8)


def lost_record(number: int) -> np.ndarray:
    header = np.zeros(1, [("type", "<u4"), ("misc", "<u2"), ("size", "<u2"), ("id", "<u8"), ("lost", "<u8")])
    header["type"], header["size"], header["lost"] = 2, 24, number
    return header.view(np.uint8)


def starts_of(arrays: list[np.ndarray]) -> list[int]:
    return [int(start) for array in arrays for start in array["start_ns"]]


def test_a_sample_record_is_as_long_as_the_kernel_makes_it():
    # header 8, raw size 4, then the event; the kernel pads what follows the header to 8 bytes
    assert SAMPLE.itemsize == 80
    assert sample_dtype(NAME).itemsize == 272


def test_samples_decode_in_order_with_nothing_lost():
    out = decode(samples(1, 2, 3), SAMPLE)
    assert starts_of(out.events) == [1, 2, 3]
    assert (out.lost, out.malformed) == (0, 0)


def test_a_lost_record_between_samples_is_counted_and_hides_none_of_them():
    out = decode(np.concatenate([samples(1, 2), lost_record(17), samples(3), lost_record(5)]), SAMPLE)
    assert starts_of(out.events) == [1, 2, 3]
    assert out.lost == 22


def test_a_record_of_another_kind_is_counted_as_malformed_and_skipped():
    other = np.zeros(16, np.uint8)
    other.view("<u4")[0] = 7
    other[6:8].view("<u2")[0] = 16
    out = decode(np.concatenate([samples(1), other, samples(2)]), SAMPLE)
    assert starts_of(out.events) == [1, 2]
    assert out.malformed == 16


@pytest.mark.parametrize("size", [0, 4, 60000])
def test_a_record_with_an_impossible_size_ends_the_stretch_and_is_counted(size):
    broken = np.zeros(24, np.uint8)
    broken.view("<u4")[0] = 2
    broken[6:8].view("<u2")[0] = size
    out = decode(np.concatenate([samples(1), broken]), SAMPLE)
    assert starts_of(out.events) == [1]
    assert out.malformed == 24


def rows(*spans: tuple[int, int]) -> np.ndarray:
    calls = np.zeros(len(spans), CALL)
    for row, (start, end) in zip(calls, spans, strict=True):
        row["start_ns"], row["duration_ns"] = start, end - start
    return calls


def test_calls_of_two_cpus_come_out_in_order_of_their_ends():
    merged, late = Merger(hold_ns=0).merge([rows((0, 10), (11, 30)), rows((5, 20), (21, 25))], drain_began_ns=100)
    assert end_ns(merged).tolist() == [10, 20, 25, 30]
    assert late == 0


def test_young_calls_are_held_until_no_older_one_can_come():
    merger = Merger(hold_ns=10)
    first, _ = merger.merge([rows((0, 85), (0, 95))], drain_began_ns=100)
    assert end_ns(first).tolist() == [85]
    second, late = merger.merge([rows((0, 93))], drain_began_ns=120)
    assert end_ns(second).tolist() == [93, 95]
    assert late == 0


def test_a_call_older_than_those_handed_on_is_handed_on_and_counted_late():
    merger = Merger(hold_ns=10)
    merger.merge([rows((0, 85))], drain_began_ns=100)
    merged, late = merger.merge([rows((0, 50), (0, 95))], drain_began_ns=110)
    assert end_ns(merged).tolist() == [50, 95]
    assert late == 1


def test_at_the_end_all_that_was_held_comes_out():
    merger = Merger(hold_ns=10)
    merger.merge([rows((0, 95))], drain_began_ns=100)
    assert end_ns(merger.flush()).tolist() == [95]
    assert len(merger.flush()) == 0


def test_the_result_does_not_depend_on_which_cpu_a_call_came_from():
    rng = np.random.default_rng(1)
    spans = sorted(
        ((int(s), int(s + d)) for s, d in zip(rng.integers(0, 10**6, 500), rng.integers(1, 10**4, 500), strict=True)),
        key=lambda span: span[1],
    )
    whole = rows(*spans)
    orders = []
    for seed in range(3):
        cpu = np.random.default_rng(seed).integers(0, 4, len(whole))
        merged, _ = Merger(0).merge([whole[cpu == number] for number in range(4)], 10**9)
        orders.append(end_ns(merged).tolist())
    assert orders[0] == orders[1] == orders[2] == sorted(orders[0])


def test_only_what_was_added_to_a_total_is_reported():
    assert summed({"ring_full": 5, "late": 2}, {"ring_full": 3, "late": 2}) == {"ring_full": 2}


def test_a_comm_is_as_long_as_its_text_and_not_as_its_field():
    names = np.zeros(2, NAME)
    names["length"] = (16, 8)
    names["text"] = [b"main".ljust(224, b"\0"), b"_Z3fooPf".ljust(224, b"\0")]
    assert concatenated_names([names])["length"].tolist() == [4, 8]
