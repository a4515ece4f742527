"""What a traced call costs beside an empty entry-and-return probe, BCC's funclatency and bpftrace on the same function.

The bare libcuda's calls do nothing, so a round's time over its calls is the cost of the probe. Every way is measured in
turn, several rounds each, in one run; the figures that count are the ratios.

usage: scripts/bench call-cost [--json] [--rounds N] [--calls N]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gputail.events import CALL
from gputail.paths import bpf_sources
from gputail.probes import syscalls
from gputail.probes.kernel import import_bcc, program_bytes
from gputail.probes.links import Site, make_attacher
from gputail.probes.rings import PerfRings
from gputail.probes.table import BY_SYMBOL, CUDA
from gputail.sim.build import build_bare

SYMBOLS = {"launch": "cuLaunchKernel", "sync": "cuStreamSynchronize"}
PEER_START_S = 30


class Caller:
    """The calling program, pinned to one CPU: a round of calls at a time."""

    def __init__(self, program: Path, what: str, calls: int, cpu: int) -> None:
        self.calls = calls
        pin = ["taskset", "-c", str(cpu)] if shutil.which("taskset") else []
        self._process = subprocess.Popen(
            [*pin, str(program), what, str(calls)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.round()

    def round(self) -> float:
        """Nanoseconds a call took in one round."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write("\n")
        return int(self._process.stdout.readline()) / self.calls

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def offset_of(library: Path, symbol: str) -> int:
    from gputail.discovery.elf import read_symbols

    with library.open("rb") as file:
        symbols = read_symbols(file, frozenset([symbol]))
    return next(offset for offset, site in symbols.sites.items() if symbol in site.symbols)


class Ways:
    """Each way of probing, as a context manager that is on while entered."""

    def __init__(self, library: Path, symbol: str) -> None:
        self.library, self.symbol = str(library), symbol
        self.offset = offset_of(library, symbol)
        self._attacher = make_attacher(off_cpu=False, only_targets=False, max_threads=1024)
        self._rings = PerfRings(self._attacher.kernel.map_fd("calls_ring"), CALL, 4 << 20)
        self.events = 0
        self._drain_until = threading.Event()
        os.environ["BCC_KERNEL_SOURCE"] = str(bpf_sources() / "kernel")
        self._empty_module = import_bcc().BPF(text="int empty(void *ctx) { return 0; }")
        self._empty = syscalls.load_uprobe_multi(b"empty", program_bytes(import_bcc(), self._empty_module, b"empty"))

    @contextmanager
    def untraced(self, caller: Caller) -> Iterator[None]:
        yield

    @contextmanager
    def empty(self, caller: Caller) -> Iterator[None]:
        links = [syscalls.link_uprobe_multi(self._empty, self.library, [self.offset], [0], is_return) for is_return in (True, False)]
        yield
        for link in links:
            os.close(link)

    @contextmanager
    def gputail(self, caller: Caller) -> Iterator[None]:
        links = self._attacher.attach(CUDA, self.library, [Site(self.offset, BY_SYMBOL[self.symbol], self.symbol)])
        over = threading.Event()

        def drain() -> None:
            while not over.is_set():
                self._rings.wait(0.05)
                self.events += sum(map(len, self._rings.drain()[0]))

        thread = threading.Thread(target=drain)
        thread.start()
        yield
        links.close()
        over.set()
        thread.join()
        self.events += sum(map(len, self._rings.drain()[0]))

    @contextmanager
    def funclatency(self, caller: Caller) -> Iterator[None]:
        with self._peer([shutil.which("funclatency-bpfcc") or "funclatency", f"{self.library}:{self.symbol}"], caller):
            yield

    @contextmanager
    def bpftrace(self, caller: Caller) -> Iterator[None]:
        at = f"{self.library}:{self.symbol}"
        entry = f"uprobe:{at} {{ @start[tid] = nsecs; }}"
        script = f"{entry} uretprobe:{at} /@start[tid]/ {{ @ns = hist(nsecs - @start[tid]); delete(@start[tid]); }}"
        with self._peer(["bpftrace", "-e", script], caller):
            yield

    @contextmanager
    def _peer(self, command: list[str], caller: Caller) -> Iterator[None]:
        """A program that probes by itself: on once a call has become clearly dearer than an unprobed one."""
        plain = caller.round()
        with tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                deadline = time.monotonic() + PEER_START_S
                while caller.round() < 5 * plain + 20:
                    if process.poll() is not None or time.monotonic() > deadline:
                        log.seek(0)
                        raise RuntimeError(f"{command[0]} does not trace here: {log.read()[-300:].strip()}")
                    time.sleep(0.1)
                yield
            finally:
                process.terminate()
                process.wait()


def measure(what: str, rounds: int, calls: int, notes: list[str]) -> dict[str, float]:
    """Median added nanoseconds a call by way of probing, in one run of interleaved rounds."""
    library, program = build_bare()
    ways = Ways(library, SYMBOLS[what])
    caller = Caller(program, what, calls, cpu=max(os.sched_getaffinity(0)))
    names = ["untraced", "empty", "gputail"]
    for peer, binary in (("funclatency", "funclatency-bpfcc"), ("bpftrace", "bpftrace")):
        if shutil.which(binary):
            names.append(peer)
        else:
            notes.append(f"{peer} is not installed and was not measured")
    times: dict[str, list[float]] = {name: [] for name in names}
    traced_rounds = 0
    for _ in range(rounds):
        for name in list(names):
            try:
                with getattr(ways, name)(caller):
                    caller.round()
                    times[name].append(caller.round())
                    traced_rounds += 2 * (name == "gputail")
            except RuntimeError as error:
                notes.append(str(error))
                names.remove(name)
    caller.close()
    lost = traced_rounds * calls - ways.events
    notes.append(f"{what}: {ways.events} events of {traced_rounds * calls} calls, {lost} missing")
    plain = statistics.median(times["untraced"])
    return {name: statistics.median(values) - plain for name, values in times.items() if values and name != "untraced"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=100_000, help="calls a round")
    options = parser.parse_args()
    notes: list[str] = []
    figures = {what: measure(what, options.rounds, options.calls, notes) for what in SYMBOLS}
    if options.json:
        print(json.dumps({"added_ns_per_call": figures, "notes": notes}))
        return 0
    print(f"{'call':8} {'way':12} {'added ns/call':>14} {'to empty pair':>14}")
    for what, added in figures.items():
        for name, ns in added.items():
            print(f"{what:8} {name:12} {ns:14.0f} {ns / added['empty']:13.2f}x")
    for note in notes:
        print(note, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
