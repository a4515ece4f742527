"""Recordings of a real GPU (tests/data/h200), judged: floors below which no change may fall."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from gputail.capture import CaptureReader
from gputail.sim.scenario import Truth

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "benchmarks"))
import accuracy

DATA = Path(__file__).resolve().parents[1] / "data" / "h200"
LABELS = sorted(path.stem for path in DATA.glob("*.npz"))
HAS_CULPRIT = ("graph+xgemm", "two+xgemm", "gpu+xcopy")


@pytest.fixture(scope="module")
def tallies() -> dict[str, accuracy.Tally]:
    found = {}
    for label in LABELS:
        with np.load(DATA / f"{label}.npz") as kept:
            truth = Truth(label, int(kept["victim"]), int(kept["aggressor"]), kept["requests"], kept["faults"], kept["bursts"])
        with CaptureReader(str(DATA / f"{label}.gpt")) as reader:
            found[label] = accuracy.Tally(label)
            accuracy.tally_batches(found[label], list(reader), truth)
    return found


@pytest.mark.parametrize("label", LABELS)
def test_every_request_of_the_program_is_one_request(tallies: dict[str, accuracy.Tally], label: str) -> None:
    assert tallies[label].requests > 200
    assert tallies[label].one_to_one >= tallies[label].requests - 1  # the recording may begin or end within one


@pytest.mark.parametrize("label", LABELS)
def test_what_was_injected_is_named_and_silence_is_rare(tallies: dict[str, accuracy.Tally], label: str) -> None:
    one = tallies[label]
    of, right = (sum(count) for count in zip(*((one.by_dose[d].total(), one.rights[d]) for d in ("middle", "large")), strict=True))
    assert of >= 5
    assert right >= 0.95 * of
    if label in HAS_CULPRIT:
        assert one.named == sum(one.rights[dose] for dose in accuracy.DOSES)


@pytest.mark.parametrize("label", LABELS)
def test_clean_requests_are_let_alone(tallies: dict[str, accuracy.Tally], label: str) -> None:
    assert sum(tallies[label].blamed.values()) <= 0.01 * tallies[label].clean


@pytest.mark.parametrize("label", LABELS)
def test_the_excess_is_explained(tallies: dict[str, accuracy.Tally], label: str) -> None:
    assert np.median(tallies[label].explained) >= 0.9
