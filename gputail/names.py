"""What is known by name: processes, threads, kernels. Bounded, since all of it comes from traced processes."""

from __future__ import annotations

from collections import OrderedDict

from gputail import events
from gputail.bounded import put
from gputail.demangle import short

MAX_PROCESSES = 4096
MAX_THREADS = 16384
MAX_KERNELS = 65536


class Names:
    """Names learned from batches; the oldest are forgotten beyond the bounds."""

    def __init__(self) -> None:
        self._processes: OrderedDict[int, events.Process] = OrderedDict()
        self._threads: OrderedDict[tuple[int, int], str] = OrderedDict()
        self._kernels: OrderedDict[tuple[int, int], str] = OrderedDict()

    def learn(self, batch: events.Batch) -> None:
        """Take in a batch's news."""
        for process in batch.processes:
            put(self._processes, process.tgid, process, MAX_PROCESSES)
        for row in batch.names:
            text = bytes(row["text"])[: int(row["length"])].decode(errors="replace")
            if row["kind"] == events.NAME_KERNEL:
                put(self._kernels, (int(row["tgid"]), int(row["handle"])), text, MAX_KERNELS)
            elif row["kind"] == events.NAME_THREAD:
                put(self._threads, (int(row["tgid"]), int(row["tid"])), text, MAX_THREADS)

    def process(self, tgid: int) -> events.Process:
        """What is known of a process; a Process of nothing but its tgid if nothing is."""
        return self._processes.get(tgid) or events.Process(tgid)

    def thread(self, tgid: int, tid: int) -> str | None:
        """The comm of a thread, that of its process if its own is not known, or None."""
        name = self._threads.get((tgid, tid)) or self.process(tgid).comm or self._threads.get((tgid, tgid))
        return printable(name) if name is not None else None

    def kernel(self, tgid: int, handle: int) -> str | None:
        """The name of a kernel, demangled and short, or None."""
        name = self._kernels.get((tgid, handle))
        return printable(short(name)) if name is not None else None

    def label(self, tgid: int) -> str:
        """A process's comm for use in a workload's name; "unknown" if it is not known."""
        name = self.thread(tgid, tgid) or "unknown"
        return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in name)[:32]


def printable(text: str) -> str:
    """Text that a traced process chose, with what a terminal would obey replaced."""
    return "".join(c if c.isprintable() else "?" for c in text)
