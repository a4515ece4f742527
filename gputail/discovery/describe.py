"""What a process is called, its command, cgroup and container, and which GPUs it has open.

In: a pid. Out: an `events.Process` of printable, bounded text; None for what could not be learned. Never raises for a process
that is hidden, ended or odd. The container is a guess from the cgroup's path, which its runtime chose.
"""

from __future__ import annotations

import os
import re
import time

from gputail.discovery.sanitize import printable
from gputail.events import Process

COMM_LIMIT = 64  # 15 bytes, but each may need escaping
COMMAND_LIMIT = 256
CGROUP_LIMIT = 512
CONTAINER_LIMIT = 64
_CGROUP_BYTES = 16 << 10
MAX_FDS = 4096  # looked at for GPUs
MAX_GPUS = 64
_DEVICE_FILE = re.compile(r"/nvidia([0-9]{1,4})")

_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")

# Of version 1's hierarchies, those that container runtimes and Slurm place a process in, best first.
_CONTROLLERS = ("memory", "pids", "cpuset", "devices", "cpu,cpuacct", "cpuacct,cpu", "cpu", "name=systemd", "freezer")

_CONTAINERS = (
    # docker-ID.scope, /docker/ID, cri-containerd-ID.scope, ...:cri-containerd:ID, crio-ID.scope, libpod-ID.scope, pod.../ID. The last one
    # counts: in a nested container it is the inner one.
    re.compile(r".*(?:^|[/:-])([0-9a-f]{64})(?:\.scope)?(?:/|$)", re.DOTALL),
    re.compile(r".*/(job_[0-9]+)(?:/|$)", re.DOTALL),  # Slurm
    re.compile(r".*/(?:lxc\.payload[./]|lxc/|machine\.slice/(?:machine-|systemd-nspawn@))([^/]+?)(?:\.scope|\.service)?(?:/|$)", re.DOTALL),
    re.compile(r".*/system\.slice/(?:.*/)?([^/]+\.service)(?:/|$)", re.DOTALL),
)


def container_of(cgroup: str) -> str | None:
    """The container that a cgroup path names, or None.

    The first 12 digits of its id, as the runtimes' own tools print it, for Docker, containerd, CRI-O and Podman; job_N for Slurm;
    the machine's name for LXC and systemd-nspawn; the unit for a systemd service.
    """
    for pattern in _CONTAINERS:
        if match := pattern.match(cgroup):
            name = match[1]
            return name[:12] if len(name) == 64 and pattern is _CONTAINERS[0] else printable(name, CONTAINER_LIMIT)
    return None


def cgroup_path(text: bytes) -> str | None:
    """The telling path in the text of /proc/PID/cgroup: version 2's, or where that is the root the best of version 1's."""
    paths: dict[str, str] = {}
    for line in text.split(b"\n"):
        _, controllers, path = (line.split(b":", 2) + [b"", b""])[:3]
        paths.setdefault(printable(controllers, 64), printable(path, CGROUP_LIMIT))
    for hierarchy in ("", *_CONTROLLERS):
        if paths.get(hierarchy, "/") not in ("/", ""):
            return paths[hierarchy]
    return "/" if any(path == "/" for path in paths.values()) else None


def describe(pid: int, proc_fd: int, comm: bytes | None = None, start_ticks: int | None = None) -> Process:
    """What can be learned of process `pid` of the proc file system open as `proc_fd`; comm and start_ticks are of its stat."""
    command = _read(pid, "cmdline", COMMAND_LIMIT * 4, proc_fd)
    cgroup_text = _read(pid, "cgroup", _CGROUP_BYTES, proc_fd)
    cgroup = cgroup_path(cgroup_text) if cgroup_text else None
    return Process(
        tgid=pid,
        comm=None if comm is None else printable(comm, COMM_LIMIT),
        command=printable(command.rstrip(b"\0").replace(b"\0", b" "), COMMAND_LIMIT) if command else None,
        cgroup=cgroup,
        container=container_of(cgroup) if cgroup else None,
        start_ns=None if start_ticks is None else monotonic_ns(start_ticks),
        gpus=gpus_open(pid, proc_fd),
    )


def gpus_open(pid: int, proc_fd: int) -> tuple[str, ...] | None:
    """The numbers N of the device files nvidiaN that process `pid` has open, ascending; None where it cannot be seen.

    Only the names are read: a look at the file itself could wait for whoever serves it, so a process can give itself a GPU.
    """
    found: set[str] = set()
    try:
        fd = os.open(f"{pid}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc_fd)
    except OSError:
        return None
    try:
        with os.scandir(fd) as entries:
            for entry, _ in zip(entries, range(MAX_FDS), strict=False):
                if match := _DEVICE_FILE.fullmatch(_file_name(fd, entry.name)):
                    found.add(match[1])
    except OSError:
        return None
    finally:
        os.close(fd)
    return tuple(sorted(found, key=int)[:MAX_GPUS])


def _file_name(fd: int, name: str) -> str:
    """The last part, with its slash, of what a descriptor has open; "" for one that was closed."""
    try:
        target = os.readlink(name, dir_fd=fd)
    except OSError:
        return ""
    return target[target.rfind("/") :] if "/" in target else ""


def monotonic_ns(start_ticks: int) -> int:
    """A start time from stat (ticks of CLOCK_BOOTTIME) on CLOCK_MONOTONIC, which stands still in suspend."""
    suspended_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    return start_ticks * 1_000_000_000 // _CLOCK_TICKS - suspended_ns


def namespace_pid(pid: int, proc_fd: int) -> int | None:
    """The pid by which `pid` knows itself, in its innermost pid namespace; None where that cannot be read."""
    for line in (_read(pid, "status", 8192, proc_fd) or b"").split(b"\n"):
        if line.startswith(b"NSpid:"):
            return int(line.split()[-1])
    return None


def _read(pid: int, name: str, limit_bytes: int, proc_fd: int) -> bytes | None:
    try:
        fd = os.open(f"{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc_fd)
    except OSError:
        return None
    try:
        return os.read(fd, limit_bytes)
    except OSError:
        return None
    finally:
        os.close(fd)
