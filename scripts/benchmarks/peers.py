"""What tracing with gputail costs a program beside other tools on the same functions, and what each sees.

A simulated program runs all the time, alone on one CPU; each tool in turn is started beside it, and taken off again, several times
over. Printed are the change of the median request while it traced against the time just before (median and range over the rounds),
that change for each call that it saw, and what its output tells. funclatency is BCC's, one pattern for all functions; bpftrace runs
the same as a script, a histogram a function.

usage: scripts/bench peers [--json] [--kind cpu|gpu|graph] [--rounds N] [--seconds S]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from overhead import _requests, program

from gputail.paths import bpf_sources
from gputail.sim.build import build

ROOT = Path(__file__).resolve().parent.parent.parent
FUNCTIONS = ("cuLaunchKernel", "cuGraphLaunch", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuStreamSynchronize")
SEES = {
    "gputail, all": "each call, request and verdict: cause, culprit, ms",
    "gputail": "the same, as far as 1% of the program's CPU time pays for",
    "funclatency": "a histogram of all calls together",
    "bpftrace": "a histogram of each function's calls",
}
START_S = 60.0
STEADY_S = 1.0


def commands(library: str) -> dict[str, list[str]]:
    gputail = [sys.executable, "-m", "gputail", "run", "--library", library, "--listen", "off", "--socket", "off"]
    found = {"gputail, all": [*gputail, "--tier", "full"], "gputail": gputail}
    if funclatency := shutil.which("funclatency-bpfcc"):
        found["funclatency"] = [funclatency, "-r", f"{library}:^({'|'.join(FUNCTIONS)})$"]
    if shutil.which("bpftrace"):
        script = "".join(
            f"uprobe:{library}:{name} {{ @s[tid] = nsecs; }} "
            f"uretprobe:{library}:{name} /@s[tid]/ {{ @{name} = hist(nsecs - @s[tid]); delete(@s[tid]); }} "
            for name in FUNCTIONS
        )
        found["bpftrace"] = ["bpftrace", "-e", script]
    return found


@contextmanager
def running(command: list[str]) -> Iterator[None]:
    """A tool, once it has attached: when it holds as many descriptors as it did STEADY_S before, and more than at first."""
    with tempfile.TemporaryFile("w+") as log:
        environment = {**os.environ, "BCC_KERNEL_SOURCE": str(bpf_sources() / "kernel")}  # BCC's tools find no headers by themselves
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        try:
            deadline, steady, before = time.monotonic() + START_S, time.monotonic(), -1
            while before < 8 or time.monotonic() - steady < STEADY_S:
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise SystemExit(f"{command[0]} does not trace here: {log.read()[-500:].strip()}")
                held = len(os.listdir(f"/proc/{process.pid}/fd"))
                if held != before:
                    steady, before = time.monotonic(), held
                time.sleep(0.05)
            yield
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


def measure(tools: dict[str, list[str]], kind: str, rounds: int, seconds: float) -> dict[str, list[tuple[float, float]]]:
    """For each tool (change of the median request in percent, ns added a call) of each round."""
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus[:-1] or cpus)
    spans: dict[str, list[tuple[int, int, int, int]]] = {name: [] for name in tools}
    # Long enough for the slowest tool to start and stop; it is ended when all have been measured.
    total = rounds * len(tools) * (2 * seconds + 30)
    with tempfile.TemporaryDirectory() as folder, program(kind, total, False, Path(folder) / "truth.npz", cpus[-1]) as process:
        for _ in range(rounds):
            for name, command in tools.items():
                begin = time.monotonic_ns()
                time.sleep(seconds)
                middle = time.monotonic_ns()
                with running(command):
                    on = time.monotonic_ns()
                    time.sleep(seconds)
                    spans[name].append((begin, middle, on, time.monotonic_ns()))
                print(".", end="", file=sys.stderr, flush=True)
        process.send_signal(signal.SIGTERM)
        process.wait()
        requests = _requests(Path(folder) / "truth.npz", False)
    print(file=sys.stderr)
    start, end = requests.T
    found = {}
    for name, windows in spans.items():
        found[name] = []
        for begin, middle, on, off in windows:
            plain, traced = (np.median((end - start)[(start >= first) & (end <= last)]) for first, last in ((begin, middle), (on, off)))
            found[name].append((100 * float(traced / plain - 1), float(traced - plain)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--kind", choices=("cpu", "gpu", "graph"), default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4)
    options = parser.parse_args()
    library = str(build().libraries / "libcuda.so.1")
    found = measure(commands(library), options.kind, options.rounds, options.seconds)
    if options.json:
        print(json.dumps(found))
        return 0
    print(f"{'tool':16}{'median':>9}{'range':>20}{'a request':>12}  sees")
    for name, rounds in found.items():
        changes = [change for change, _ in rounds]
        added = np.median([ns for _, ns in rounds])
        span = f"{min(changes):+.2f} to {max(changes):+.2f}%"
        print(f"{name:16}{np.median(changes):+8.2f}%{span:>20}{added / 1000:9.1f} us  {SEES[name]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
