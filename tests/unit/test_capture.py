"""Recordings give back exactly the batches that went in, and as much of them as possible when the file is damaged."""

from __future__ import annotations

import dataclasses
import os
import resource
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gputail import capture, events
from gputail.capture import CaptureReader, CaptureWriter
from gputail.errors import GputailError


def calls(count: int, seed: int = 1) -> np.ndarray:
    raw = np.random.default_rng(seed).bytes(count * events.CALL.itemsize)
    return np.frombuffer(raw, events.CALL)


def names(count: int) -> np.ndarray:
    raw = np.random.default_rng(2).bytes(count * events.NAME.itemsize)
    return np.frombuffer(raw, events.NAME)


BATCHES = [
    events.Batch(watermark_ns=5),
    events.Batch(calls(3), names(2), (events.Process(7, "python3", "python3 serve.py", None, "c" * 64, 99),), {"ring_full": 4}, 2**63),
    events.Batch(calls(1000, 3), watermark_ns=2**64 - 1),
    events.Batch(processes=(events.Process(8, "bad \udcff \U0001f600 \"',\n"), events.Process(9)), lost={"late": 1}),
]


def same(one: events.Batch, other: events.Batch) -> bool:
    return (
        one.calls.tobytes() == other.calls.tobytes()
        and one.names.tobytes() == other.names.tobytes()
        and (one.processes, dict(one.lost), one.watermark_ns) == (other.processes, dict(other.lost), other.watermark_ns)
    )


def record(path: Path, batches: list[events.Batch] = BATCHES) -> list[int]:
    """Write the batches; returns the file's size after the description, after each batch, and at the end."""
    with CaptureWriter(str(path)) as writer:
        sizes = [writer.size_bytes]
        for batch in batches:
            writer.write(batch)
            sizes.append(writer.size_bytes)
    return [*sizes, path.stat().st_size]


def read(path: Path) -> tuple[list[events.Batch], str | None]:
    with CaptureReader(str(path)) as reader:
        return list(reader), reader.damage


def test_a_recording_gives_back_the_same_batches(tmp_path: Path) -> None:
    record(tmp_path / "file")
    got, damage = read(tmp_path / "file")
    assert damage is None
    assert len(got) == len(BATCHES)
    assert all(same(one, other) for one, other in zip(got, BATCHES, strict=True))
    assert got[1].calls.dtype == events.CALL and got[1].names.dtype == events.NAME


def test_rows_of_a_strided_view_are_recorded_as_they_are(tmp_path: Path) -> None:
    rows = calls(10)[::2]
    record(tmp_path / "file", [events.Batch(rows)])
    assert read(tmp_path / "file")[0][0].calls.tolist() == rows.tolist()


def test_a_batch_too_large_for_a_block_comes_back_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "MAX_CALLS", 400)
    monkeypatch.setattr(capture, "MAX_NAMES", 1)
    first, large = events.Batch(watermark_ns=10), dataclasses.replace(BATCHES[1], calls=calls(1000), watermark_ns=20)
    record(tmp_path / "file", [first, large])
    _, *parts = read(tmp_path / "file")[0]
    assert np.concatenate([part.calls for part in parts]).tobytes() == large.calls.tobytes()
    assert np.concatenate([part.names for part in parts]).tobytes() == large.names.tobytes()
    assert [len(part.calls) for part in parts] == [400, 400, 200]
    assert [part.watermark_ns for part in parts] == [10, 10, 20]
    assert [dict(part.lost) for part in parts] == [{"ring_full": 4}, {}, {}]


def test_a_recording_describes_itself(tmp_path: Path) -> None:
    with CaptureWriter(str(tmp_path / "file"), {"tier": "full"}):
        pass
    with CaptureReader(str(tmp_path / "file")) as reader:
        assert reader.metadata["clock"] == "CLOCK_MONOTONIC"
        assert reader.metadata["functions"]["1"] == "cuLaunchKernel"  # type: ignore[index]
        assert reader.metadata["tier"] == "full"


def test_wherever_a_file_is_cut_off_the_batches_before_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    sizes = record(path, BATCHES[:2])
    whole = path.read_bytes()
    for size in range(sizes[0], sizes[-1]):
        path.write_bytes(whole[:size])
        got, damage = read(path)
        assert len(got) == sum(end <= size for end in sizes[1:3]), size
        assert damage is not None, size


def test_what_follows_a_flipped_bit_is_not_read_and_what_came_before_is(tmp_path: Path) -> None:
    path = tmp_path / "file"
    sizes = record(path)
    for position in (sizes[1], sizes[1] + 7, sizes[2] - 1):  # kind, length and content of the second batch
        flipped = bytearray(path.read_bytes())
        flipped[position] ^= 0x10
        (tmp_path / "flipped").write_bytes(flipped)
        got, damage = read(tmp_path / "flipped")
        assert len(got) == 1
        assert damage is not None and damage.startswith("block 3 of ")


def test_a_killed_recorder_leaves_a_readable_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    code = (
        "import os, sys, signal, numpy as np\n"
        "from gputail import capture, events\n"
        "writer = capture.CaptureWriter(sys.argv[1])\n"
        "for _ in range(23): writer.write(events.Batch(np.zeros(10, events.CALL)))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, path]).returncode == -9
    got, damage = read(path)
    assert [len(batch.calls) for batch in got] == [10] * 23
    assert damage is not None and "without having been closed" in damage


def test_a_full_disk_stops_the_recording_and_keeps_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "file"
    writer = CaptureWriter(str(path))
    writer.write(BATCHES[1])
    before = writer.size_bytes
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (before + 1000, hard))
    try:
        with pytest.raises(GputailError, match="file too large; recording stopped after 3 events"):
            writer.write(BATCHES[2])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.stat().st_size == before
    with pytest.raises(GputailError, match="an earlier write failed"):
        writer.write(BATCHES[1])
    writer.close()
    got, damage = read(path)
    assert len(got) == 1 and same(got[0], BATCHES[1])
    assert damage is not None


def test_a_device_without_room_is_one_clear_error() -> None:
    with pytest.raises(GputailError, match="cannot write to /dev/full: no space left on device"):
        CaptureWriter("/dev/full")


def test_an_existing_recording_is_replaced(tmp_path: Path) -> None:
    record(tmp_path / "file", BATCHES * 3)
    record(tmp_path / "file", BATCHES[:1])
    got, damage = read(tmp_path / "file")
    assert (len(got), damage) == (1, None)


def test_only_the_owner_can_read_a_recording(tmp_path: Path) -> None:
    record(tmp_path / "file")
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_a_directory_or_a_fifo_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(GputailError, match="FIFO"):
        CaptureWriter(str(tmp_path / "fifo"))
    with pytest.raises(GputailError, match="is a directory"):
        CaptureWriter(str(tmp_path))
    with pytest.raises(GputailError, match="is a directory"):
        CaptureReader(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"x", b"PK\x03\x04" + bytes(100), b"{}\n" * 100, capture.SIGNATURE], ids=repr)
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(GputailError, match="is empty|is not a recording"):
        CaptureReader(str(tmp_path / "file"))


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(capture.SIGNATURE + struct.pack("<HH", 2, 0))
    with pytest.raises(GputailError, match="format 2"):
        CaptureReader(str(tmp_path / "file"))


def test_a_recording_whose_numbers_mean_other_functions_is_refused(tmp_path: Path) -> None:
    with CaptureWriter(str(tmp_path / "file"), {"functions": {"1": "cuSomethingElse"}, "program": "gputail 9"}):
        pass
    with pytest.raises(GputailError, match="recorded by 'gputail 9'"):
        CaptureReader(str(tmp_path / "file"))


def test_a_block_that_expands_beyond_its_claim_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "file"
    described = record(path, [])[0]
    stored = zlib.compress(bytes(30 << 20), 9)
    for raw_bytes in (len(stored), capture.MAX_RAW_BYTES + 1):
        head = struct.pack("<BBHII", capture.BATCH, 1, 0, len(stored), raw_bytes)
        block = head + struct.pack("<I", zlib.crc32(stored, zlib.crc32(head))) + stored
        (tmp_path / "bomb").write_bytes(path.read_bytes()[:described] + block)
        got, damage = read(tmp_path / "bomb")
        assert got == [] and damage is not None


@settings(max_examples=200, deadline=None)
@given(kind=st.integers(0, 4), raw=st.binary(max_size=400))
def test_no_content_of_a_block_breaks_the_reader(kind: int, raw: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("hostile", numbered=True) / "file"
    size = record(path, [])[0]
    path.write_bytes(path.read_bytes()[:size] + capture._pack(kind, raw))
    read(path)


@settings(max_examples=100, deadline=None)
@given(news=st.binary(max_size=60) | st.sampled_from([b"[[],1]", b"[[[1]],{}]", b'[[],{"a":-1}]', b"[" * 5000, b"[[[1,2,3,4,5,6]],{}]"]))
def test_no_news_in_a_batch_break_the_reader(news: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("hostile", numbered=True) / "file"
    size = record(path, [])[0]
    path.write_bytes(path.read_bytes()[:size] + capture._pack(capture.BATCH, struct.pack("<QIII", 1, 0, 0, len(news)) + news))
    got, damage = read(path)
    assert damage is not None or got[0].processes == ()
