"""The mapped CUDA and NCCL libraries of a process, as /proc/PID/maps tells them.

In: a directory of a proc file system. Out: `Mapping`s. Which file is behind one, and whether it can be traced, is
left to `libraries`.

A file counts by its name: libcuda.so*, libnccl.so* and what auditwheel makes of them (libnccl-1a2b3c4d.so.2). Not
libcudart, nor the plugins libnccl-net and libnccl-tuner. A program or framework that has NCCL linked in statically
has no such file; finding those means looking at symbols instead of names, and would add a pattern to _LINE here and a
kind to `Mapping`.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

# 100,000 mappings are about 10 MB. The kernel's default limit (vm.max_map_count) is 65,530.
MAX_MAPS_BYTES = 16 << 20
_CHUNK_BYTES = 1 << 18

_LINE = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) ..x. [0-9a-f]+ ([0-9a-f]+):([0-9a-f]+) ([0-9]+) +"
    rb"((?:/[^\n]*)?/lib(cuda|nccl)(?:-[0-9a-f]{8})?\.so[^/\n]*)$",
    re.MULTILINE,
)


class Mapping(NamedTuple):
    """One executable mapping of a library in one process.

    start, end: the addresses; major, minor, inode: of the file as the kernel prints them in maps, which on overlayfs and btrfs
    need not be what fstat says; path: as the process sees it, raw, with " (deleted)" behind it where that is so.
    """

    pid: int
    kind: str  # "cuda" or "nccl"
    start: int
    end: int
    major: int
    minor: int
    inode: int
    path: bytes


class Maps(NamedTuple):
    """What was read of a maps file; capped: it was longer than MAX_MAPS_BYTES and the rest was not looked at."""

    mappings: tuple[Mapping, ...]
    size_bytes: int
    capped: bool


def parse(pid: int, text: bytes) -> list[Mapping]:
    """The libraries among whole lines of a maps file."""
    if b"/libcuda" not in text and b"/libnccl" not in text:  # most processes: spares them the regular expression
        return []
    return [
        Mapping(pid, kind.decode(), int(start, 16), int(end, 16), int(major, 16), int(minor, 16), int(inode), path)
        for start, end, major, minor, inode, path, kind in _LINE.findall(text)
        if inode != b"0"
    ]


def read(pid: int, proc_fd: int) -> Maps:
    """The libraries that process `pid` of the proc file system open as `proc_fd` has mapped.

    Raises OSError: the process ended, or belongs to somebody else. An ended process can also read as empty.
    """
    fd = os.open(f"{pid}/maps", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc_fd)
    try:
        mappings: list[Mapping] = []
        size_bytes = 0
        rest = b""
        while size_bytes < MAX_MAPS_BYTES:
            # The kernel hands out about a page at a time, in whole lines; parsed in larger pieces for speed.
            pieces = [rest]
            piece_bytes = 0
            while piece_bytes < _CHUNK_BYTES and (data := os.read(fd, _CHUNK_BYTES)):
                pieces.append(data)
                piece_bytes += len(data)
            if not piece_bytes:
                return Maps(tuple(mappings), size_bytes, False)
            size_bytes += piece_bytes
            lines, newline, rest = b"".join(pieces).rpartition(b"\n")
            mappings += parse(pid, lines + newline)
        return Maps(tuple(mappings), size_bytes, True)
    finally:
        os.close(fd)
