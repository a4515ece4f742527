"""The scanner over a made-up proc file system: what it reads, how often, and what it makes of odd text."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gputail.discovery import maps
from gputail.discovery.processes import REREAD_SCANS, Scanner, parse_stat

LINE = b"7f0000000000-7f0000001000 r-xp 00001000 08:01 %d    %s\n"


class Proc:
    """A directory with the files of /proc that the scanner reads."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def put(
        self, pid: int, text: bytes = b"", comm: bytes = b"python3", flags: int = 0, start: int = 100, size: int = 4096, code: int = 1
    ) -> None:
        directory = self.root / str(pid)
        directory.mkdir(exist_ok=True)
        fields = [0] * 50
        fields[6], fields[19], fields[20], fields[23] = flags, start, size, code
        (directory / "stat").write_bytes(b"%d (%s) S " % (pid, comm) + " ".join(map(str, fields[1:])).encode() + b"\n")
        (directory / "maps").write_bytes(text)


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pids whose maps were read, in turn."""
    made: list[int] = []
    read = maps.read

    def counted(pid: int, proc_fd: int) -> maps.Maps:
        made.append(pid)
        return read(pid, proc_fd)

    monkeypatch.setattr(maps, "read", counted)
    return made


@pytest.fixture
def scanner(proc: Proc) -> Iterator[Scanner]:
    scanner = Scanner(str(proc.root))
    yield scanner
    scanner.close()


def scans(scanner: Scanner, count: int, reads: list[int]) -> list[int]:
    """What `count` more scans read."""
    reads.clear()
    for _ in range(count):
        scanner.scan()
    return list(reads)


def test_unchanged_processes_are_read_once_and_then_once_in_64_scans(proc: Proc, scanner: Scanner, reads: list[int]) -> None:
    for pid in range(1, 129):
        proc.put(pid)
    assert sorted(scans(scanner, 1, reads)) == sorted([*range(1, 129)])
    per_scan = [len(scans(scanner, 1, reads)) for _ in range(REREAD_SCANS)]
    assert per_scan == [2] * REREAD_SCANS


@pytest.mark.parametrize(
    "news", [{"size": 8192}, {"start": 101}, {"code": 2}, {"comm": b"other"}], ids=["mapped something", "pid used again", "exec", "renamed"]
)
def test_a_process_with_news_is_read_again_at_once(proc: Proc, scanner: Scanner, reads: list[int], news: dict) -> None:
    proc.put(70)
    proc.put(71)
    scans(scanner, 1, reads)
    proc.put(70, **news)
    assert scans(scanner, 1, reads) == [70]
    assert scans(scanner, 1, reads) == []


def test_a_hint_has_a_process_read_and_with_hinted_only_no_other(proc: Proc, scanner: Scanner, reads: list[int]) -> None:
    proc.put(70)
    scans(scanner, 1, reads)
    proc.put(71)
    scanner.rescan([70, 70, 999])
    reads.clear()
    scanner.scan(hinted_only=True)
    assert reads == [70]
    assert scans(scanner, 1, reads) == [71]


def test_long_maps_are_read_less_often_while_they_keep_changing(proc: Proc, scanner: Scanner, reads: list[int]) -> None:
    text = b"7f0000000000-7f0000001000 rw-p 00000000 00:00 0\n" * 20_000  # 960,000 bytes: 3 whole pieces of 256 KiB
    counts = []
    for size in range(16):
        proc.put(90, text, size=size + 1)
        counts.append(len(scans(scanner, 1, reads)))
    assert counts == [1, 0, 0, 0] * 4


def test_kernel_threads_and_what_is_no_process_are_skipped(proc: Proc, scanner: Scanner, reads: list[int]) -> None:
    proc.put(2, flags=0x00200000)
    (proc.root / "self").mkdir()
    (proc.root / "77").mkdir()
    (proc.root / "78").mkdir()
    (proc.root / "78" / "stat").write_bytes(b"78 (cut off")
    (proc.root / "79").mkdir()
    (proc.root / "79" / "stat").write_bytes(b"79 (x) " + b"nonsense " * 60)
    assert scans(scanner, 2, reads) == []


def test_a_process_that_vanishes_between_listing_and_reading_is_no_error(
    proc: Proc, scanner: Scanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc.put(70)
    proc.put(71)
    list_all = os.listdir
    monkeypatch.setattr(os, "listdir", lambda fd: [*list_all(fd), "72"])
    assert scanner.scan().libraries == ()
    (proc.root / "71" / "maps").unlink()
    scanner.rescan([71, 72])
    assert scanner.scan().hidden == 0


@pytest.mark.parametrize(
    ("comm", "whole"),
    [(b"a) S 1 1 (", b"a) S 1 1 ("), (b"new\nline", b"new\nline"), (b"", b""), (b"\xff(\xc3", b"\xff(\xc3")],
)
def test_a_comm_may_hold_anything(proc: Proc, comm: bytes, whole: bytes) -> None:
    proc.put(5, comm=comm, start=7, size=9, code=11)
    stat = parse_stat((proc.root / "5" / "stat").read_bytes())
    assert stat is not None
    assert (stat.comm, stat.start_ticks, stat.address_space_bytes, stat.start_code) == (whole, 7, 9, 11)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        (b"/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04", "cuda"),
        (b"/usr/lib/libcuda.so", "cuda"),
        (b"/libcuda.so.1", "cuda"),
        (b"/a b/libcuda.so.1 (deleted)", "cuda"),
        (b"/x/site-packages/nvidia/nccl/lib/libnccl.so.2", "nccl"),
        (b"/x/cupy.libs/libnccl-1a2b3c4d.so.2.18.3", "nccl"),
        (b"/opt/libnccl-net.so", None),
        (b"/opt/libnccl-tuner.so.1", None),
        (b"/usr/lib/libcudart.so.13", None),
        (b"/usr/lib/libcudadebugger.so.1", None),
        (b"/usr/lib/libcuda.so.1/other", None),
        (b"/memfd:libcuda.so.1 (deleted)", None),
        (b"libcuda.so.1", None),
        (b"/usr/lib/xlibcuda.so.1", None),
    ],
)
def test_a_library_is_known_by_the_name_of_its_file(path: bytes, kind: str | None) -> None:
    found = maps.parse(9, b"00400000-00452000 r--p 00000000 08:02 5 /x\n" + LINE % (77, path))
    assert [(mapping.kind, mapping.path, mapping.inode, mapping.major, mapping.minor) for mapping in found] == (
        [(kind, path, 77, 8, 1)] if kind else []
    )


@pytest.mark.parametrize("line", [
    b"7f0000000000-7f0000001000 r--p 00001000 08:01 7 /libcuda.so.1\n",
    b"7f0000000000-7f0000001000 rw-p 00001000 08:01 7 /libcuda.so.1\n",
    b"7f0000000000-7f0000001000 r-xp 00001000 00:00 0 /libcuda.so.1\n",
])  # fmt: skip
def test_a_mapping_without_code_or_without_a_file_does_not_count(line: bytes) -> None:
    assert maps.parse(9, line) == []


def test_a_hundred_thousand_mappings_are_read_whole(proc: Proc, scanner: Scanner) -> None:
    text = b"7f0000000000-7f0000001000 rw-p 00000000 00:00 0                          [anon:some name]\n" * 100_000
    proc.put(70, text + LINE % (7, b"/libcuda.so.1"))
    fd = os.open(proc.root, os.O_RDONLY)
    try:
        found = maps.read(70, fd)
    finally:
        os.close(fd)
    assert (len(found.mappings), found.size_bytes, found.capped) == (1, len(text) + len(LINE % (7, b"/libcuda.so.1")), False)


def test_maps_beyond_the_bound_are_cut_and_reported(proc: Proc, scanner: Scanner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maps, "MAX_MAPS_BYTES", 1 << 20)
    proc.put(70, b"7f0000000000-7f0000001000 rw-p 00000000 00:00 0\n" * 60_000)
    proc.put(71)
    assert scanner.scan().capped == (70,)


def test_a_line_split_between_two_pieces_is_read_whole(proc: Proc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maps, "_CHUNK_BYTES", 97)
    proc.put(70, b"".join(LINE % (number, b"/lib/libcuda.so.1") for number in range(1, 101)))
    fd = os.open(proc.root, os.O_RDONLY)
    try:
        assert [mapping.inode for mapping in maps.read(70, fd).mappings] == [*range(1, 101)]
    finally:
        os.close(fd)
