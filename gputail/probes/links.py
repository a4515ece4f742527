"""Attaching the program's probes to one library, and taking them off again.

In: an open library and the functions found in it. Out: an object that holds the probes until it is closed. Which
libraries there are is left to discovery, what the probes do to bpf/.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from gputail.errors import GputailError
from gputail.probes import syscalls
from gputail.probes.kernel import Kernel, KernelOptions
from gputail.probes.table import CUDA, FUNCTIONS, NCCL, Function, cookie


@dataclass(frozen=True)
class Site:
    """One address to probe: where it lies in the file and the function and symbol it is."""

    offset: int
    function: Function
    symbol: str


_ENDBR64 = b"\xf3\x0f\x1e\xfa"


def probe_offset(offset: int, code: bytes) -> int:
    """Where to put the probe of a function that begins at file offset `offset` with the bytes `code`.

    The kernel emulates a `push` of a register (arch/x86/kernel/uprobes.c, push_setup_xol_ops) but single-steps an
    `endbr64`, which makes a hit more than ten times dearer. As functions compiled for indirect branch tracking, NCCL's among
    them, begin with one and then a push, they are probed at the push: no argument has moved by then, nor the stack pointer.
    """
    if code[:4] == _ENDBR64:
        rest = code[5:] if code[4:5] == b"\x41" else code[4:]  # REX.B: r8 to r15
        if rest and 0x50 <= rest[0] <= 0x57:
            return offset + len(_ENDBR64)
    return offset


class Links(Protocol):
    """Probes that are attached until closed."""

    def close(self) -> None: ...


class Attacher(Protocol):
    """One way of attaching, chosen once at start by `make_attacher`."""

    kernel: Kernel

    def attach(self, kind: str, path: str, sites: list[Site]) -> Links: ...


def make_attacher(*, off_cpu: bool, only_targets: bool, max_threads: int, use_multi: bool | None = None) -> Attacher:
    """Compile the program for the best way of attaching that the kernel offers (`use_multi` overrides the choice)."""
    options = KernelOptions(off_cpu=off_cpu, only_targets=only_targets, max_threads=max_threads)
    if use_multi is not False and syscalls.has_uprobe_multi():
        return MultiAttacher(Kernel(options))
    if use_multi:
        raise GputailError("uprobe_multi links are not available here", "they need Linux 6.6")
    return SingleAttacher(options)


class MultiAttacher:
    """uprobe_multi links: all functions of a library at once, each with its cookie."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._entries = {kind: kernel.program(f"{kind}_enter", "uprobe_multi") for kind in (CUDA, NCCL)}
        self._return = kernel.program("leave", "uprobe_multi")
        self._pass = kernel.program("cuda_pass", "uprobe_multi")
        self._nothing = kernel.program("nothing", "uprobe_multi")

    def attach(self, kind: str, path: str, sites: list[Site], pid: int = 0) -> _Descriptors:
        """Attach entry and return probes to every site of a library reached by `path`; in one process only, if `pid` is given.

        Returns first: a return whose entry was not probed yet is recognized, whereas an entry whose return is not
        would look like a call that never ends and make those after it look nested.
        """
        return self._link(((self._return, True), (self._entries[kind], False)), path, sites, pid)

    def attach_entries(self, kind: str, path: str, sites: list[Site], pid: int = 0) -> _Descriptors:
        """Attach entry probes alone, to sites of libcuda: their records say nothing of how long a call took."""
        assert kind == CUDA
        return self._link(((self._pass, False),), path, sites, pid)

    def attach_nothing(self, kind: str, path: str, sites: list[Site], pid: int = 0) -> _Descriptors:
        """Attach entry and return probes that record nothing."""
        return self._link(((self._nothing, True), (self._nothing, False)), path, sites, pid)

    def _link(self, programs: tuple[tuple[int, bool], ...], path: str, sites: list[Site], pid: int) -> _Descriptors:
        offsets = [site.offset for site in sites]
        cookies = [cookie(site.function, site.symbol) for site in sites]
        descriptors: list[int] = []
        try:
            for program, is_return in programs:
                descriptors.append(syscalls.link_uprobe_multi(program, path, offsets, cookies, is_return, pid))
        except OSError as error:
            _Descriptors(descriptors).close()
            raise attach_error(path, error) from error
        return _Descriptors(descriptors)


class SingleAttacher:
    """BCC's own uprobes, one perf event each and no cookies: an entry program for every function and variant."""

    def __init__(self, options: KernelOptions) -> None:
        self._cookies = {
            kind: sorted({cookie(function, symbol) for function in FUNCTIONS if function.library == kind for symbol in function.symbols})
            for kind in (CUDA, NCCL)
        }
        self.kernel = Kernel(options, per_symbol=self._cookies)
        self._return = self.kernel.program("leave", "uprobe")

    def attach(self, kind: str, path: str, sites: list[Site]) -> _Descriptors:
        descriptors: list[int] = []
        try:
            for site in sites:
                index = self._cookies[kind].index(cookie(site.function, site.symbol))
                entry = self.kernel.program(f"{kind}_enter_{index}", "uprobe")
                descriptors.append(self.kernel.attach_uprobe(self._return, path, site.offset, is_return=True))
                descriptors.append(self.kernel.attach_uprobe(entry, path, site.offset, is_return=False))
        except OSError as error:
            _Descriptors(descriptors, in_background=True).close()
            raise attach_error(path, error) from error
        return _Descriptors(descriptors, in_background=True)


class _Descriptors:
    """Probes that live as long as their descriptors; the youngest, so the entries, are closed first."""

    def __init__(self, descriptors: Iterable[int], in_background: bool = False) -> None:
        self._descriptors = list(descriptors)
        self._in_background = in_background

    def close(self) -> None:
        descriptors, self._descriptors = self._descriptors, []
        # Closing the last descriptor of a perf event takes about 100 ms, one after another. A child that holds them
        # too takes that on, so that neither the drain nor the exit waits for it.
        if self._in_background and descriptors and os.fork() == 0:
            _close_others(descriptors)  # our port, and the pipe that somebody reads to its end, are not to outlive us
            for fd in reversed(descriptors):
                os.close(fd)
            os._exit(0)
        for fd in reversed(descriptors):
            os.close(fd)


def _close_others(kept: list[int]) -> None:
    """Close every descriptor of this process but those."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with suppress(OSError):  # the one that lists them is closed by now
                os.close(int(name))


def attach_error(path: str, error: OSError) -> GputailError:
    if error.errno in (errno.EPERM, errno.EACCES):
        return GputailError(
            f"cannot attach probes to {path}: permission denied", "run as root, or grant CAP_BPF, CAP_PERFMON and CAP_SYS_ADMIN"
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return GputailError(f"cannot attach probes to {path}: too many open files", "raise LimitNOFILE of the service, or ulimit -n")
    if error.errno == errno.EOPNOTSUPP:
        return GputailError(
            f"cannot attach probes to {path}: the kernel has no uprobes", "use a kernel with CONFIG_UPROBE_EVENTS and CONFIG_BPF_EVENTS"
        )
    return GputailError(f"cannot attach probes to {path}: {os.strerror(error.errno or 0)}")
