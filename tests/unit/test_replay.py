"""Replaying a file: its records or its summary, and what is said of a file that is damaged or something else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gputail import cli, events
from gputail.capture import CaptureWriter
from gputail.probes import table

COPY_IN, LAUNCH, COPY_OUT, SYNC = (
    table.BY_SYMBOL[name].number for name in ("cuMemcpyHtoDAsync_v2", "cuLaunchKernel", "cuMemcpyDtoHAsync_v2", "cuStreamSynchronize")
)


def requests(count: int, first_ns: int = 10**9) -> np.ndarray:
    """Calls of `count` alike requests of one thread: 5 ms each, 3 ms apart."""
    calls = np.zeros(count * 6, events.CALL)
    within = np.array([0, 100, 200, 300, 400, 500]) * 1000
    calls["start_ns"] = (first_ns + np.arange(count)[:, None] * 8_000_000 + within).ravel()
    calls["duration_ns"] = np.tile([50_000] * 5 + [4_500_000], count)
    calls["call"] = np.tile([COPY_IN, LAUNCH, LAUNCH, LAUNCH, COPY_OUT, SYNC], count)
    calls["tgid"] = calls["tid"] = 7
    calls["size"] = 4096
    return calls


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "slow.gpt"
    with CaptureWriter(str(path)) as writer:
        for number in range(10):
            calls = requests(20, 10**9 + number * 160_000_000)
            news = (events.Process(7, "python3", "python3 serve.py"),) if number == 0 else ()
            writer.write(events.Batch(calls, processes=news, watermark_ns=int(events.end_ns(calls)[-1]) + 1))
    return path


def lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_records_of_a_recording_go_to_stdout(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", str(recording), "--jsonl", "-"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    records = lines(out)
    assert len(records) == 200
    assert {record["pid"] for record in records} == {7}
    assert [record["end_ns"] for record in records] == sorted(record["end_ns"] for record in records)


def test_records_can_go_to_a_file(recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", str(recording), "--jsonl", str(tmp_path / "out")]) == 0
    assert capsys.readouterr() == ("", "")
    assert len(lines((tmp_path / "out").read_text())) == 200


def test_without_jsonl_a_summary_is_printed(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", str(recording)]) == 0
    assert capsys.readouterr().out.startswith("1200 events, 200 requests (0 incomplete) of 1 workloads, ")


def test_a_recording_can_come_through_a_pipe(recording: Path) -> None:
    with recording.open("rb") as file:
        done = subprocess.run([sys.executable, "-m", "gputail", "replay", "-", "--jsonl"], stdin=file, capture_output=True, text=True)
    assert (done.returncode, done.stderr, len(lines(done.stdout))) == (0, "", 200)


def test_a_cut_off_recording_is_replayed_as_far_as_it_goes(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording.write_bytes(recording.read_bytes()[:-60])
    assert cli.main(["replay", str(recording), "--jsonl"]) == 1
    out, err = capsys.readouterr()
    assert len(lines(out)) == 180
    assert err.count("gputail: ") == 1 and "is cut off" in err


@pytest.mark.parametrize("content", [None, b"", b"hello\n", b"PK\x03\x04 and no more"], ids=["missing", "empty", "text", "zip"])
def test_another_file_is_one_clear_error_and_no_output_is_touched(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "other", tmp_path / "out"
    if content is not None:
        path.write_bytes(content)
    out.write_text("kept")
    assert cli.main(["replay", str(path), "--jsonl", str(out)]) == 1
    assert out.read_text() == "kept"
    stdout, stderr = capsys.readouterr()
    assert stdout == "" and stderr.count("gputail: ") == 1 and str(path) in stderr


def test_a_reader_that_goes_away_ends_the_replay_quietly(recording: Path) -> None:
    command = f"'{sys.executable}' -m gputail replay '{recording}' --jsonl | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr, len(lines(done.stdout))) == (0, "", 1)
