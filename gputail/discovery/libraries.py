"""Library files behind mappings: which are one and the same, and how to open each safely.

In: mappings from `maps`. Out: `Library`, one for each inode however many paths, processes and containers show it. When to
look is left to `processes`; what is in the file, to `elf`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from gputail.discovery.maps import Mapping
from gputail.discovery.sanitize import printable

PATH_LIMIT = 512
MAX_WAYS = 8

_OVERLAYFS_SUPER_MAGIC = 0x794C7630
_DELETED = b" (deleted)"

Identity = tuple[int | str, ...]


@dataclass(frozen=True)
class Library:
    """A mapped library file.

    identity: equal for the same file content in the same inode, across scans; a file rewritten in place or an inode number
    used again gives another. kind: "cuda" or "nccl". path: as a process sees it, printable. device: (major, minor), and inode, as
    maps print them. pids: every process that maps it. ways: mappings of up to MAX_WAYS processes through which it can be
    opened; processes end, so one may fail and another work.
    """

    identity: Identity
    kind: str
    path: str
    deleted: bool
    device: tuple[int, int]
    inode: int
    size_bytes: int
    mtime_ns: int
    pids: frozenset[int]
    ways: tuple[Mapping, ...] = field(repr=False)
    proc: str = field(default="/proc", repr=False)

    @property
    def file_path(self) -> str:
        """A path that leads to the file from here whatever its mount namespace, while that process maps it; needs CAP_SYS_ADMIN."""
        return map_files_path(self.ways[0], self.proc)

    def open(self) -> int:
        """A descriptor of the file, open for reading and verified; the caller closes it.

        Pass f"/proc/self/fd/{fd}" to whatever wants a path: it cannot be swapped, nor end with the process. Raises OSError:
        FileNotFoundError when no process maps it any more.
        """
        error = OSError(errno.ENOENT, "no process maps it any more")
        for mapping in self.ways:
            try:
                fd = open_mapping(mapping, self.proc)
                try:
                    if identity_of(fd, mapping) == self.identity:
                        return reopen(fd)
                    error = OSError(errno.ESTALE, "the file has changed")
                finally:
                    os.close(fd)
            except OSError as failure:
                error = failure
        raise error


def at(path: str) -> tuple[Library, int]:
    """The library file named by a path of ours, which need not be mapped yet, and a descriptor of it that the caller closes.

    Its identity is the one that it will have once a process maps it. Raises OSError.
    """
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        kind = "nccl" if os.path.basename(path).startswith("libnccl") else "cuda"
        device = (os.major(found.st_dev), os.minor(found.st_dev))
        mapping = Mapping(os.getpid(), kind, 0, 0, *device, found.st_ino, os.fsencode(os.path.realpath(path)))
        return library(fd, mapping), reopen(fd)
    finally:
        os.close(fd)


def map_files_path(mapping: Mapping, proc: str = "/proc") -> str:
    return f"{proc}/{mapping.pid}/map_files/{mapping.start:x}-{mapping.end:x}"


def open_mapping(mapping: Mapping, proc: str = "/proc") -> int:
    """An O_PATH descriptor of the regular file behind `mapping`: no device is opened by that, and no FIFO waited for.

    Through map_files, which leads to the mapped file itself, deleted or hidden by a mount; without the capability for that
    (CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE) through the process's root. What is found must be the file that maps named.
    Raises OSError: ESTALE where it is another file, ENOENT where the process or the file is gone.
    """
    try:
        fd = os.open(map_files_path(mapping, proc), os.O_PATH | os.O_CLOEXEC)
    except PermissionError:
        if mapping.path.endswith(_DELETED):
            raise OSError(errno.EPERM, "a deleted file can be opened only with CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE") from None
        # The path is resolved already, so a symbolic link in its last place has been put there since.
        path = b"%s/%d/root%s" % (os.fsencode(proc), mapping.pid, mapping.path)
        fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        if not _is_mapped(found, mapping) and not _is_overlay(fd):
            raise OSError(errno.ESTALE, "another file has taken its place")
        return fd
    except BaseException:
        os.close(fd)
        raise


def reopen(fd: int) -> int:
    """The file of an O_PATH descriptor, opened for reading. Never blocks: neither for a FIFO's writer nor for a lease's end."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)


def identity_of(fd: int, mapping: Mapping) -> Identity:
    """What tells the file `fd` of `mapping` from every other one.

    The device and inode number that maps print, with size and modification time against rewriting in place. On
    overlayfs (where maps print the overlay's device since Linux 6.8) the same lower file has another device in every container, but
    is one inode to uprobes: probed for each, every event would count twice. There it is known by inode number, size and both times,
    which overlayfs passes on from the lower file and of which nobody can set the change time. This joins containers of one
    image when all layers lie on one file system, as they do with Docker, containerd, CRI-O and Podman.
    """
    found = os.fstat(fd)
    if _is_overlay(fd):
        return (mapping.kind, "overlay", found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return (mapping.kind, mapping.major, mapping.minor, mapping.inode, found.st_size, found.st_mtime_ns)


def library(fd: int, mapping: Mapping, proc: str = "/proc") -> Library:
    """The library of one verified mapping; `merge` joins those of one identity."""
    found = os.fstat(fd)
    path = mapping.path.removesuffix(_DELETED) if found.st_nlink == 0 else mapping.path
    return Library(
        identity=identity_of(fd, mapping),
        kind=mapping.kind,
        path=printable(path, PATH_LIMIT),
        deleted=found.st_nlink == 0,
        device=(mapping.major, mapping.minor),
        inode=mapping.inode,
        size_bytes=found.st_size,
        mtime_ns=found.st_mtime_ns,
        pids=frozenset([mapping.pid]),
        ways=(mapping,),
        proc=proc,
    )


def merge(one: Library, other: Library) -> Library:
    """One library of two with the same identity, found under different inodes or devices in maps."""
    return replace(one, pids=one.pids | other.pids, ways=ways_of(one.ways + other.ways))


def ways_of(mappings: Iterable[Mapping]) -> tuple[Mapping, ...]:
    """At most MAX_WAYS of `mappings`, each of another process, the first of each."""
    by_pid: dict[int, Mapping] = {}
    for mapping in mappings:
        by_pid.setdefault(mapping.pid, mapping)
        if len(by_pid) == MAX_WAYS:
            break
    return tuple(by_pid.values())


def _is_mapped(found: os.stat_result, mapping: Mapping) -> bool:
    """Whether fstat's answer can be for the mapped file.

    btrfs and overlayfs answer fstat with a device of their own making (major 0) that maps do not show, or the other way about.
    """
    major, minor = os.major(found.st_dev), os.minor(found.st_dev)
    return found.st_ino == mapping.inode and ((major, minor) == (mapping.major, mapping.minor) or 0 in (major, mapping.major))


_libc = ctypes.CDLL(None, use_errno=True)


def _is_overlay(fd: int) -> bool:
    """fstatfs(2), which os.statvfs does not replace: it leaves the type out. The type is the first word of struct statfs."""
    words = (ctypes.c_ulong * 32)()
    return _libc.fstatfs(fd, ctypes.byref(words)) == 0 and words[0] == _OVERLAYFS_SUPER_MAGIC
