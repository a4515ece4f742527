"""Which libraries processes have mapped: libcuda and libnccl, one entry an inode, opened so that nobody can swap them.

In: /proc/PID/maps. Out: `Library` values and safely opened descriptors. What is in a library is left to `elf`.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from typing import BinaryIO

MAX_MAPS_BYTES = 16 << 20  # of one process; a line is 100 bytes, so far more than any real one
_CHUNK = 1 << 20

# An executable mapping of a file whose name is that of a driver or NCCL library, whatever its version and folder. A
# deleted file, as an upgrade leaves it, has " (deleted)" behind its name.
_LINE = re.compile(
    rb"^([0-9a-f]+-[0-9a-f]+) ..x. [0-9a-f]+ ([0-9a-f]+):([0-9a-f]+) (\d+) +(/[^\n]*/lib(cuda|nccl)\.so(?:\.[0-9.]+)?(?: \(deleted\))?)$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Library:
    """A library that processes use; the same file through other paths and containers is the same library."""

    kind: str  # cuda or nccl
    path: str  # as the first process found sees it
    device: tuple[int, int]
    inode: int
    tgid: int  # a process that has it mapped
    span: str  # and where: the name under /proc/PID/map_files

    @property
    def key(self) -> tuple:
        return (self.device, self.inode)


class MapsTooLong(Exception):
    """A process has more mappings than are read."""


def mapped_libraries(tgid: int) -> list[Library]:
    """Libraries that a process has mapped. OSError when it has vanished or is hidden; MapsTooLong."""
    with open(f"/proc/{tgid}/maps", "rb", buffering=0) as maps:
        text = bytearray()
        while chunk := maps.read(_CHUNK):
            text += chunk
            if len(text) > MAX_MAPS_BYTES:
                raise MapsTooLong
    found: dict[tuple, Library] = {}
    for match in _LINE.finditer(text):
        span, major, minor, inode, path, kind = match.groups()
        library = Library(
            kind=kind.decode(),
            path=os.fsdecode(path).removesuffix(" (deleted)"),
            device=(int(major, 16), int(minor, 16)),
            inode=int(inode),
            tgid=tgid,
            span=span.decode(),
        )
        found.setdefault(library.key, library)
    return list(found.values())


def open_library(library: Library) -> BinaryIO:
    """Open exactly the file that is mapped. OSError when that is not possible any more.

    /proc/PID/map_files leads to the mapped file itself, also when it was deleted or replaced, or lies in another mount
    namespace. Where it may not be read, the path below /proc/PID/root does, if what lies there now is still that inode.
    Never blocks: what is not a regular file is refused.
    """
    last: OSError = FileNotFoundError(library.path)
    for path in (f"/proc/{library.tgid}/map_files/{library.span}", f"/proc/{library.tgid}/root{library.path}"):
        try:
            return _open_regular(path, library.inode)
        except OSError as error:
            last = error
    raise last


def _open_regular(path: str, inode: int | None = None) -> BinaryIO:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    status = os.fstat(fd)
    # The device is not compared: overlayfs and btrfs show another one in maps than stat does.
    if not stat.S_ISREG(status.st_mode) or (inode is not None and status.st_ino != inode):
        os.close(fd)
        raise FileNotFoundError(f"{path} is not the mapped file")
    return os.fdopen(fd, "rb", buffering=0)


def library_at(path: str) -> tuple[Library, BinaryIO]:
    """A library named by its path, mapped by nobody yet. OSError when it cannot be opened."""
    file = _open_regular(path)
    status = os.fstat(file.fileno())
    kind = "nccl" if "nccl" in os.path.basename(path) else "cuda"
    device = (os.major(status.st_dev), os.minor(status.st_dev))
    return Library(kind, os.path.realpath(path), device, status.st_ino, os.getpid(), ""), file
