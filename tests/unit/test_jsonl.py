"""Request records as JSON lines: strict, whole lines, and honest where they cannot be written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gputail.errors import GputailError
from gputail.surfaces.jsonl import BackgroundWriter, JsonlWriter, line


class Record:
    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def as_dict(self) -> dict[str, Any]:
        return self.fields


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_what_is_not_a_number_is_null() -> None:
    record = {"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": -float("inf")}, "e": None}
    assert strict(line(record)) == {"a": None, "b": [None, 1.5], "c": {"d": None}, "e": None}


def test_numpy_numbers_are_numbers() -> None:
    record = {"a": np.int64(2**62), "b": np.float64(0.5), "c": np.bool_(True), "d": np.uint64(2**64 - 1), "e": np.float32("nan")}
    assert strict(line(record)) == {"a": 2**62, "b": 0.5, "c": True, "d": 2**64 - 1, "e": None}


def test_any_name_stays_on_its_line() -> None:
    name = 'a"\\\n\r\u2028\udcff\x00'
    text = line({"comm": name})
    assert text.isascii() and len(text.splitlines()) == 1
    assert strict(text)["comm"] == name


def test_records_are_readable_as_soon_as_they_are_written(tmp_path: Path) -> None:
    writer = JsonlWriter(str(tmp_path / "out"))
    writer.write([Record(n=1), Record(n=2)])  # type: ignore[list-item]
    assert [strict(text) for text in (tmp_path / "out").read_text().splitlines()] == [{"n": 1}, {"n": 2}]
    writer.close()


@pytest.mark.parametrize(("append", "left"), [(True, 2), (False, 1)])
def test_a_file_is_added_to_or_replaced(tmp_path: Path, append: bool, left: int) -> None:
    for _ in range(2):
        writer = JsonlWriter(str(tmp_path / "out"), append=append)
        writer.write([Record(n=1)])  # type: ignore[list-item]
        writer.close()
    assert len((tmp_path / "out").read_text().splitlines()) == left


def test_a_file_that_cannot_be_opened_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(GputailError, match="cannot write request records to .*: is a directory"):
        JsonlWriter(str(tmp_path))


def test_a_full_disk_is_one_clear_error_and_closing_is_not_another() -> None:
    writer = JsonlWriter("/dev/full")
    with pytest.raises(GputailError, match="cannot write request records to /dev/full: no space left on device"):
        writer.write([Record(n=1)])  # type: ignore[list-item]
    writer.close()


@pytest.mark.parametrize("close_reader", [True, False])
def test_stdout_full_or_closed_leaves_no_traceback(close_reader: bool) -> None:
    code = (
        "from gputail.errors import GputailError\nfrom gputail.surfaces.jsonl import JsonlWriter\n"
        "class Record:\n    def as_dict(self): return {'n': 1}\n"
        "import sys, os\n"
        "try: JsonlWriter('-').write([Record()])\n"
        "except BrokenPipeError: os.dup2(os.open(os.devnull, os.O_WRONLY), 1); sys.exit(7)\n"
        "except GputailError as error: sys.exit(8)\n"
    )
    read, write = os.pipe()
    os.close(read)
    with open("/dev/full", "wb") as full:
        stdout = write if close_reader else full.fileno()
        done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], stdout=stdout, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (7 if close_reader else 8, "")


def test_a_reader_that_stops_reading_holds_nobody_up_and_what_is_lost_is_counted(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    writer = BackgroundWriter(JsonlWriter(str(pipe)), max_records=1000)
    for _ in range(100):  # far more than a pipe holds
        writer.write([Record(text="x" * 1000)] * 100)  # type: ignore[list-item]
    assert 0 < writer.lost < 10_000
    assert not writer.close(within_s=0.1)
    os.set_blocking(reader, True)
    with open(reader) as lines:
        assert sum(1 for _ in zip(range(10_000 - writer.lost), lines, strict=False)) == 10_000 - writer.lost
    assert writer.close()


def test_what_goes_wrong_in_the_background_is_raised_in_front() -> None:
    writer = BackgroundWriter(JsonlWriter("/dev/full"))
    with pytest.raises(GputailError, match="no space left on device"):
        for _ in range(10_000):
            writer.write([Record(n=1)])  # type: ignore[list-item]
            time.sleep(0.001)


def test_all_that_waits_is_written_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    writer = BackgroundWriter(JsonlWriter(str(path)))
    for number in range(1000):
        writer.write([Record(n=number)])  # type: ignore[list-item]
    assert writer.close() and writer.lost == 0
    assert [strict(text)["n"] for text in path.read_text().splitlines()] == list(range(1000))
