"""What a traced call costs on this machine: it differs tenfold between machines, with what a trap costs there.

In: the attacher, before anything else is attached. Out: nanoseconds. A function of our own is called with and without
the program's real probes on it; it lies in memory of this process, so nobody else's calls are slowed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from gputail.probes.governor import Costs
from gputail.probes.links import MultiAttacher, Site
from gputail.probes.table import BY_SYMBOL, CUDA

# A function that begins as the driver's do, with an instruction that the kernel emulates: push, or stp, and a return.
_CODE = {
    "x86_64": bytes.fromhex("55 4889e5 5d c3"),
    "aarch64": bytes.fromhex("fd7bbfa9 fd030091 fd7bc1a8 c0035fd6"),
}
_SYMBOL = "cuEventQuery"  # as which it is probed: a call that records one argument
CALLS, ROUNDS = 500, 7
GONE_WITHIN_S = 1.0


def probe_costs(attacher: MultiAttacher) -> Costs | None:
    """What the probes of one call cost; None on a machine for which there is no such function.

    The records that this makes are the caller's to throw away. It runs in a thread of its own, whose state in the
    kernel ends with it. OSError where memory cannot be had for it.
    """
    code = _CODE.get(platform.machine())
    if code is None:
        return None
    with _function(code) as (function, path):
        costs: list[float] = []
        tids: list[int] = []

        def measure() -> None:
            tids.append(threading.get_native_id())
            plain = _fastest_ns(function)
            sites = [Site(0, BY_SYMBOL[_SYMBOL], _SYMBOL)]
            for attach in (attacher.attach, attacher.attach_entries, attacher.attach_nothing):
                links = attach(CUDA, path, sites, pid=os.getpid())
                try:
                    costs.append(max(_fastest_ns(function) - plain, 0.0))
                finally:
                    links.close()

        thread = threading.Thread(target=measure)
        thread.start()
        thread.join()
        # Python is done with it a moment before the kernel is, which may still record that it was switched out.
        until = time.monotonic() + GONE_WITHIN_S
        while tids and os.path.exists(f"/proc/self/task/{tids[0]}") and time.monotonic() < until:
            time.sleep(0.0001)
    return Costs(*costs) if len(costs) == 3 else None


@contextmanager
def _function(code: bytes) -> Iterator[tuple[ctypes._CFunctionType, str]]:
    """The code as a callable, and the path by which its file can be probed."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    fd = os.memfd_create("gputail-calibration")
    try:
        os.write(fd, code.ljust(mmap.PAGESIZE, b"\0"))
        address = libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_PRIVATE, fd, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "cannot map the function that is probed for calibration")
        try:
            yield ctypes.CFUNCTYPE(None)(address), f"/proc/self/fd/{fd}"
        finally:
            libc.munmap(address, mmap.PAGESIZE)
    finally:
        os.close(fd)


def _fastest_ns(function: ctypes._CFunctionType) -> float:
    """Nanoseconds a call: the fastest round, which nothing disturbed."""
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter_ns()
        for _ in range(CALLS):
            function()
        rounds.append((time.perf_counter_ns() - start) / CALLS)
    return min(rounds)
