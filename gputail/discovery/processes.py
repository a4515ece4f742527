"""Processes: which have a traced library, and what each is called.

In: /proc. Out: `Scan`s, and `Process` descriptions. A process that vanishes while it is looked at is normal.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass

from gputail.discovery.libraries import Library, MapsTooLong, mapped_libraries
from gputail.discovery.sanitize import printable
from gputail.events import Process

_TICKS = os.sysconf("SC_CLK_TCK")
_KERNEL_THREAD = 0x00200000  # PF_KTHREAD in the flags field of /proc/PID/stat
_CONTAINER = re.compile(r"[0-9a-f]{64}")
MAX_TEXT = 4096
# A process that loads its libraries late is looked at again, ever less often: after a second, two, four ... and a minute.
FIRST_RELOOK_S, LAST_RELOOK_S = 1.0, 60.0


@dataclass(frozen=True)
class Refused:
    """A library in use that is not traced, and why."""

    tgid: int
    path: str
    reason: str


@dataclass(frozen=True)
class Scan:
    libraries: tuple[Library, ...]
    refused: tuple[Refused, ...]
    vanished: frozenset[int]  # tgids that were there at the scan before


@dataclass
class _Seen:
    start: int  # ticks since boot: tells a reused pid
    executable: tuple[int, int] | None  # tells an exec
    libraries: list[Library]
    refused: list[Refused]
    look_again: float
    interval: float = FIRST_RELOOK_S


class Scanner:
    """Looks through all processes again and again; a look at one that has not changed costs one read of its stat."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def scan(self) -> Scan:
        now = time.monotonic()
        present = set()
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            tgid = int(name)
            try:
                start = _start_ticks(tgid)
                if start is None:
                    continue
                present.add(tgid)
                seen = self._seen.get(tgid)
                executable = _executable(tgid)
                changed = seen is None or seen.start != start or seen.executable != executable
                if not changed and seen is not None and now < seen.look_again:
                    continue
                interval = FIRST_RELOOK_S if changed or seen is None else min(2 * seen.interval, LAST_RELOOK_S)
                self._seen[tgid] = self._look(tgid, start, executable, now, interval)
            except (OSError, ValueError):  # it has ended, or is hidden from us
                continue
        vanished = frozenset(self._seen.keys() - present)
        for tgid in vanished:
            del self._seen[tgid]
        libraries = {library.key: library for seen in self._seen.values() for library in seen.libraries}
        refused = tuple(refused for seen in self._seen.values() for refused in seen.refused)
        return Scan(tuple(libraries.values()), refused, vanished)

    def _look(self, tgid: int, start: int, executable: tuple[int, int] | None, now: float, interval: float) -> _Seen:
        refused = []
        try:
            libraries = mapped_libraries(tgid)
        except MapsTooLong:
            libraries = []
            refused.append(Refused(tgid, f"/proc/{tgid}/maps", "more mappings than are read"))
        return _Seen(start, executable, libraries, refused, now + interval, interval)


def _start_ticks(tgid: int) -> int | None:
    """When a process began (ticks since boot); None for a kernel thread."""
    with open(f"/proc/{tgid}/stat", "rb", buffering=0) as stat:
        fields = stat.read(1024).rpartition(b")")[2].split()
    return None if int(fields[6]) & _KERNEL_THREAD else int(fields[19])


def _executable(tgid: int) -> tuple[int, int] | None:
    try:
        status = os.stat(f"/proc/{tgid}/exe")
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _read(tgid: int, name: str) -> bytes | None:
    try:
        with open(f"/proc/{tgid}/{name}", "rb", buffering=0) as file:
            return file.read(MAX_TEXT)
    except OSError:
        return None


def describe(tgid: int) -> Process | None:
    """What a process is called; None when it has ended."""
    comm = _read(tgid, "comm")
    if comm is None:
        return None
    command = _read(tgid, "cmdline") or b""
    cgroup = printable((_read(tgid, "cgroup") or b"").rstrip(b"\n").rpartition(b"\n")[2].rpartition(b":")[2], 1024) or None
    container = _CONTAINER.search(cgroup or "")
    try:
        start = _start_ticks(tgid)
    except (OSError, ValueError):
        start = None
    return Process(
        tgid=tgid,
        comm=printable(comm.rstrip(b"\n"), 16),
        command=printable(command.rstrip(b"\0").replace(b"\0", b" "), 1024) or None,
        cgroup=cgroup,
        container=container.group(0)[:12] if container else None,
        start_ns=None if start is None else start * (10**9 // _TICKS),
    )
