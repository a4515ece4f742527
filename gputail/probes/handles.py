"""Names of kernels that were loaded before tracing began, read from what their handles point at.

In: CALL rows and the NAME rows of look-ups that were seen. Out: NAME rows for handles not named yet. Read with
/proc/PID/mem, which neither stops nor changes the process.

At offset 8 of both a CUfunction and a CUkernel lies a pointer to its mangled name. That is undocumented (seen with driver
580 on an H200; the simulated driver keeps to it), so a process is believed only until a handle that was looked up under
one name points at another, and a name only where it reads as a symbol.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict

import numpy as np

from gputail import events
from gputail.probes import table

NAME_OFFSET = 8
MAX_HANDLES = 65536
READS_PER_BATCH = 64
CHECKS_PER_PROCESS = 8
MAX_PROCESSES = 4096
_SYMBOL = re.compile(rb"[A-Za-z_$.][A-Za-z0-9_$.@]{1,%d}" % (events.NAME_BYTES - 1))
_LAUNCHES = np.zeros(65536, bool)
_LAUNCHES[[function.number for function in table.FUNCTIONS if function.category == table.LAUNCH]] = True


class HandleNames:
    """Which handles have been named or given up on; the oldest are forgotten beyond the bound."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._checks: OrderedDict[int, int] = OrderedDict()  # look-ups that agreed, by process; -1: one did not

    def learn(self, calls: np.ndarray, names: np.ndarray) -> np.ndarray:
        """NAME rows for the launched handles that nothing has named; READS_PER_BATCH of them at most."""
        for row in names[names["kind"] == events.NAME_KERNEL]:
            self._looked_up(int(row["tgid"]), int(row["handle"]), bytes(row["text"])[: int(row["length"])])
        launches = calls[_LAUNCHES[calls["call"]]]
        found = []
        reads = 0
        for tgid, handle in _distinct(launches):
            if (tgid, handle) in self._known or self._checks.get(tgid) == -1:
                continue
            reads += 1
            if reads > READS_PER_BATCH:
                break
            self._remember(tgid, handle)
            if text := read_name(tgid, handle):
                found.append((tgid, handle, text))
        rows = np.zeros(len(found), events.NAME)
        for row, (tgid, handle, text) in zip(rows, found, strict=True):
            row["tgid"], row["tid"], row["handle"], row["kind"], row["length"] = tgid, tgid, handle, events.NAME_KERNEL, len(text)
            row["text"] = text.ljust(events.NAME_BYTES, b"\0")
        return rows

    def _looked_up(self, tgid: int, handle: int, name: bytes) -> None:
        self._remember(tgid, handle)
        agreed = self._checks.get(tgid, 0)
        if 0 <= agreed < CHECKS_PER_PROCESS and (text := read_name(tgid, handle)) is not None:
            length = min(len(text), len(name))
            self._checks[tgid] = agreed + 1 if text[:length] == name[:length] else -1
            if len(self._checks) > MAX_PROCESSES:
                self._checks.popitem(last=False)

    def _remember(self, tgid: int, handle: int) -> None:
        self._known[tgid, handle] = None
        if len(self._known) > MAX_HANDLES:
            self._known.popitem(last=False)


def _distinct(launches: np.ndarray) -> list[tuple[int, int]]:
    """The (process, handle) pairs in these rows."""
    key = launches["handle"] ^ (launches["tgid"].astype(np.uint64) << np.uint64(40))
    _, first = np.unique(key, return_index=True)
    return [(int(row["tgid"]), int(row["handle"])) for row in launches[first]]


def read_name(tgid: int, handle: int) -> bytes | None:
    """The name that a handle points at; None where the process is gone, the memory not there, or what is there no symbol."""
    try:
        memory = os.open(f"/proc/{tgid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        pointer = int.from_bytes(os.pread(memory, 8, handle + NAME_OFFSET), "little")
        text = os.pread(memory, events.NAME_BYTES, pointer)
    except (OSError, OverflowError):  # not mapped, or no address at all
        return None
    finally:
        os.close(memory)
    match = _SYMBOL.match(text)
    # A name that fills the room was cut off; any other ends where its string does.
    return match[0] if match and (match.end() == len(text) or text[match.end()] == 0) else None
