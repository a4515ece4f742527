"""What the daemon itself takes: CPU and memory against the rate of events, the number of processes, and over time.

`gputail run --tier full` on some CPUs, beside a program of the bare libcuda on another that calls it at a steady rate, a request in
every thousand calls, and idle ones that have but loaded it.
Each row is a run of its own: a warm-up, then --seconds in which the daemon's CPU time, as a share of one core, and its resident
memory at the end are taken; growth is that of memory from the first second measured to the last.

usage: scripts/bench daemon [--json] [--seconds S] [--rates N,...] [--processes N,...] [--minutes M]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from gputail.sim.build import build_bare

ROOT = Path(__file__).resolve().parent.parent.parent
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
WARM_UP_S = 4.0
ROUND = 1000  # calls, the last of them a wait


@contextmanager
def caller(rate: int) -> Iterator[int]:
    """A program that makes so many calls a second; 0: none, it has but loaded the library. Its pid."""
    library, program = build_bare()
    command = ["taskset", "-c", str(max(os.sched_getaffinity(0))), str(program), "request", str(ROUND - 1), str(rate)]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library.parent)}
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stdin
    try:
        if rate:
            os.set_blocking(process.stdin.fileno(), False)
            os.write(process.stdin.fileno(), b"\n" * 60_000)  # a round for each line
        yield process.pid
    finally:
        process.kill()
        process.wait()


def usage(pid: int) -> tuple[float, int]:
    """(CPU seconds, resident bytes) of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S, int(fields[21]) * PAGE


def measure(rate: int, processes: int, seconds: float) -> dict[str, float]:
    """rate: events a second of the one program that calls; the others are idle."""
    cpus = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        pids = [stack.enter_context(caller(0 if number else rate)) for number in range(processes)]
        log = stack.enter_context(tempfile.TemporaryFile("w+"))
        library = str(build_bare()[0])
        command = [sys.executable, "-m", "gputail", "run", "--tier", "full", "--library", library, "--listen", "off", "--socket", "off"]
        command = ["taskset", "-c", ",".join(map(str, cpus[:-1] or cpus)), *command]
        command += [word for pid in pids for word in ("-p", str(pid))]  # whatever else runs on the node is not measured
        daemon = subprocess.Popen(command, cwd=ROOT, stderr=log, stdout=log)
        time.sleep(WARM_UP_S)
        begin, (cpu, memory) = time.monotonic(), usage(daemon.pid)
        time.sleep(seconds)
        took, (cpu_after, memory_after) = time.monotonic() - begin, usage(daemon.pid)
        daemon.terminate()
        daemon.wait()
        log.seek(0)
        summary = next(line for line in log.read().splitlines() if "events" in line)
    return {
        "rate": rate, "processes": processes, "cpu_percent": 100 * (cpu_after - cpu) / took, "memory_mb": memory_after / 2**20,
        "growth_percent": 100 * (memory_after / memory - 1), "said": summary.removeprefix("gputail: "),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object a row")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rates", default="0,20000,200000")
    parser.add_argument("--processes", default="4,100,400")
    parser.add_argument("--minutes", type=float, default=0, help="one more row of this length, at 20,000 events a second")
    options = parser.parse_args()
    rates, counts = ([int(text) for text in given.split(",")] for given in (options.rates, options.processes))
    rows = [(rate, counts[0], options.seconds) for rate in rates] + [(20_000, count, options.seconds) for count in counts[1:]]
    if options.minutes:
        rows.append((20_000, counts[0], 60 * options.minutes))
    if not options.json:
        print(f"{'events/s':>9}{'processes':>11}{'seconds':>9}{'CPU':>8}{'memory':>9}{'growth':>8}")
    for rate, processes, seconds in rows:
        f = measure(rate, processes, seconds)
        if options.json:
            print(json.dumps(f), flush=True)
        else:
            cells = (f"{f['cpu_percent']:.1f}%", f"{f['memory_mb']:.0f} MB", f"{f['growth_percent']:+.1f}%")
            print(f"{rate:9}{processes:11}{seconds:9.0f}{cells[0]:>8}{cells[1]:>9}{cells[2]:>8}  {f['said']}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
