"""Which processes have a CUDA or NCCL library mapped: a scan of /proc whose cost stays flat.

In: /proc, and hints about processes that just did something. Out: a `Scan`, a whole picture with what changed since the one
before. When to scan is the caller's choice. Attaching, and how long to keep probes on a library that vanished, is left to the probes.

A scan reads one short file per process, stat. A process's maps are read only when that shows news: a new process
(pid and start time), an exec (code and stack begin elsewhere), or another size of its address space, which mapping a
library changes; besides that rarely, and when a hint asks for it.
"""

from __future__ import annotations

import errno
import os
from collections import defaultdict, deque
from collections.abc import Iterable
from collections.abc import Mapping as MappingOf
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from gputail.discovery import describe, elf, libraries, maps
from gputail.discovery.libraries import PATH_LIMIT, Identity, Library
from gputail.discovery.maps import Mapping
from gputail.discovery.sanitize import printable
from gputail.events import Process

# Every process is read anew once in so many scans, a part of them in each: a library can replace a mapping of its own size.
REREAD_SCANS = 64
# A process waits one more scan between two reads for each such piece of text in its maps.
_BYTES_PER_WAIT = 256 << 10
_MAX_WAIT_SCANS = 8
_MAX_HINTS = 1 << 16
_PF_KTHREAD = 0x00200000


class Refused(NamedTuple):
    """A library that a process has mapped and that cannot be traced, and why."""

    pid: int
    path: str
    reason: str


@dataclass(frozen=True)
class Scan:
    """What is mapped now, and what changed since the scan before.

    libraries: one for each file; processes: those that map one of them, by pid; appeared, vanished: libraries by identity (a file
    rewritten in place is in both: detach first); started, ended: pids that came to and left `processes` (in both where the
    pid was used again or the process executed another program); refused: sorted; capped: pids whose maps were too long to read
    whole; hidden: how many processes do not show us their maps.
    """

    libraries: tuple[Library, ...] = ()
    processes: MappingOf[int, Process] = field(default_factory=dict)
    appeared: tuple[Library, ...] = ()
    vanished: tuple[Library, ...] = ()
    started: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()
    refused: tuple[Refused, ...] = ()
    capped: tuple[int, ...] = ()
    hidden: int = 0


class Stat(NamedTuple):
    """The fields of /proc/PID/stat that tell news from none."""

    comm: bytes
    kernel_thread: bool
    start_ticks: int
    address_space_bytes: int
    start_code: int
    start_stack: int

    @property
    def program(self) -> tuple[int, int, int]:
        """Changes when the pid is used again, and at an exec: both places are random. Without ptrace access they read as 0 or 1."""
        return self.start_ticks, self.start_code, self.start_stack


def parse_stat(text: bytes) -> Stat | None:
    """The text of /proc/PID/stat; None where it is not whole. The comm may hold anything, parentheses and newlines included."""
    comm, closed, rest = text.partition(b"(")[2].rpartition(b")")
    fields = rest.split()
    if not closed or len(fields) < 26:
        return None
    flags, start, size, code, stack = (int(fields[number]) for number in (6, 19, 20, 23, 25))
    return Stat(comm, bool(flags & _PF_KTHREAD), start, size, code, stack)


@dataclass(slots=True)
class _Known:
    """What the scanner remembers of a process."""

    stat: Stat
    process: Process | None = None  # described only where it maps a library
    mappings: tuple[Mapping, ...] = ()
    capped: bool = False
    hidden: bool = False
    next_read: int = 0  # the number of the scan that may read its maps again


class Scanner:
    """Scans again and again, remembering what it read. Not for several threads, except `rescan`."""

    def __init__(self, proc: str = "/proc") -> None:
        """proc: where the proc file system is mounted; pids are those of its pid namespace. Raises OSError."""
        self._proc = proc
        self._proc_fd = os.open(proc, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._hints: deque[int] = deque(maxlen=_MAX_HINTS)
        self._number = 0
        self._known: dict[int, _Known] = {}
        self._refusals: dict[Identity, str | None] = {}
        self._libraries: dict[Identity, Library] = {}
        self._programs: dict[int, tuple[int, int, int]] = {}

    def close(self) -> None:
        os.close(self._proc_fd)

    def rescan(self, tgids: Iterable[int]) -> None:
        """Have the next scan read these processes whatever is known of them: they mapped, forked or executed something.

        May be called from any thread. Threads' own ids must not be given.
        """
        self._hints.extend(tgids)

    def scan(self, hinted_only: bool = False) -> Scan:
        """Look at all processes, or with hinted_only just at those that `rescan` named since the last scan.

        Never raises for a process: one that ended, is hidden or odd is a normal thing.
        """
        hinted = set()
        while self._hints:
            hinted.add(self._hints.popleft())
        if hinted_only:
            pids = hinted
        else:
            self._number += 1
            pids = {int(name) for name in os.listdir(self._proc_fd) if name.isdigit()}
            for pid in self._known.keys() - pids:
                del self._known[pid]
        for pid in pids:
            self._look(pid, pid in hinted)
        return self._compare()

    def describe(self, pid: int) -> Process | None:
        """What a process is called now, whether or not a scan has seen it; None when it has ended."""
        stat = self._stat(pid)
        return None if stat is None else describe.describe(pid, self._proc_fd, stat.comm, stat.start_ticks)

    def _look(self, pid: int, hinted: bool) -> None:
        """Bring what is known of a process up to date."""
        stat = self._stat(pid)
        if stat is None or stat.kernel_thread:
            self._known.pop(pid, None)
            return
        known = self._known.get(pid)
        if known is None or known.stat.program != stat.program:
            known = self._known[pid] = _Known(stat)
            due = True
        else:
            changed = known.stat.address_space_bytes != stat.address_space_bytes or known.stat.comm != stat.comm
            due = hinted or (changed and self._number >= known.next_read) or self._number % REREAD_SCANS == pid % REREAD_SCANS
        if due:
            known.stat = stat
            self._read_maps(pid, known)

    def _read_maps(self, pid: int, known: _Known) -> None:
        # A library mapped after stat was read changes the next stat: nothing is missed between the two.
        try:
            found = maps.read(pid, self._proc_fd)
        except OSError as error:
            known.hidden = error.errno in (errno.EACCES, errno.EPERM)
            known.mappings, known.capped = (), False
            return
        known.mappings, known.capped, known.hidden = found.mappings, found.capped, False
        known.next_read = self._number + min(_MAX_WAIT_SCANS, found.size_bytes // _BYTES_PER_WAIT) + 1
        known.process = describe.describe(pid, self._proc_fd, known.stat.comm, known.stat.start_ticks) if found.mappings else None

    def _stat(self, pid: int) -> Stat | None:
        try:
            fd = os.open(f"{pid}/stat", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc_fd)
        except OSError:
            return None
        try:
            return parse_stat(os.read(fd, 4096))
        except (OSError, ValueError):
            return None
        finally:
            os.close(fd)

    def _compare(self) -> Scan:
        """The picture that what is known makes, against the one before."""
        found, refused = self._identify()
        traced = {pid for library in found.values() for pid in library.pids}
        processes = {pid: self._known[pid].process or Process(pid) for pid in sorted(traced)}
        programs = {pid: self._known[pid].stat.program for pid in processes}
        before, self._libraries = self._libraries, found
        programs_before, self._programs = self._programs, programs
        return Scan(
            libraries=tuple(found.values()),
            processes=processes,
            appeared=tuple(library for key, library in found.items() if key not in before),
            vanished=tuple(library for key, library in before.items() if key not in found),
            started=tuple(pid for pid, program in programs.items() if programs_before.get(pid) != program),
            ended=tuple(pid for pid, program in programs_before.items() if programs.get(pid) != program),
            refused=tuple(sorted(refused)),
            capped=tuple(sorted(pid for pid, known in self._known.items() if known.capped)),
            hidden=sum(known.hidden for known in self._known.values()),
        )

    def _identify(self) -> tuple[dict[Identity, Library], list[Refused]]:
        """The files behind all mappings known: each opened once, and its ELF header looked at when it is new."""
        by_inode: dict[tuple[str, int, int, int], list[Mapping]] = defaultdict(list)
        for _, known in sorted(self._known.items()):
            for mapping in known.mappings:
                by_inode[mapping.kind, mapping.major, mapping.minor, mapping.inode].append(mapping)
        found: dict[Identity, Library] = {}
        refusals: dict[Identity, str | None] = {}
        refused: set[Refused] = set()
        for mappings in by_inode.values():
            library, reason = self._verify(mappings, refusals)
            if reason is not None:
                refused.update(Refused(mapping.pid, printable(mapping.path, PATH_LIMIT), reason) for mapping in mappings)
            elif library is not None:
                same = found.get(library.identity)
                found[library.identity] = library if same is None else libraries.merge(same, library)
        self._refusals = refusals
        return found, list(refused)

    def _verify(self, mappings: list[Mapping], refusals: dict[Identity, str | None]) -> tuple[Library | None, str | None]:
        """The library of one inode's mappings, or why it is refused; neither where every process has unmapped it meanwhile."""
        reason: str | None = None
        ways = libraries.ways_of(mappings)
        for mapping in ways:
            try:
                fd = libraries.open_mapping(mapping, self._proc)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ESRCH):
                    self._hints.append(mapping.pid)  # it unmapped the library or ended since its maps were read
                else:
                    reason = error.strerror
                continue
            try:
                library = libraries.library(fd, mapping, self._proc)
                reason = self._refusal(fd, library.identity)
                refusals[library.identity] = reason
                return replace(library, pids=frozenset(mapping.pid for mapping in mappings), ways=ways), reason
            finally:
                os.close(fd)
        return None, reason

    def _refusal(self, fd: int, identity: Identity) -> str | None:
        if identity in self._refusals:
            return self._refusals[identity]
        try:
            readable = libraries.reopen(fd)
            try:
                elf.check(readable)
            finally:
                os.close(readable)
        except elf.ElfRefused as error:
            return str(error)
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        return None
