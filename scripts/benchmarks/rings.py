"""Calls a second that reach numpy without loss, and whether loss beyond that is counted exactly.

A probed loop on one CPU calls the bare libcuda at several rates; the drain runs in this process. Then the rings are
made tiny and nobody drains them: what arrives plus what is counted lost must be what was called.

usage: scripts/bench rings [--json] [--seconds S]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

from call_cost import offset_of

from gputail.events import CALL
from gputail.probes.links import Site, make_attacher
from gputail.probes.rings import PerfRings
from gputail.probes.table import BY_SYMBOL, CUDA
from gputail.sim.build import build_bare

RATES = (20_000, 100_000, 300_000, 500_000, 0)


class Probed:
    """The bare library under probes, with rings of a given size."""

    def __init__(self, library: Path, ring_bytes: int) -> None:
        self.attacher = make_attacher(off_cpu=False, only_targets=False, max_threads=1024)
        self.rings = PerfRings(self.attacher.kernel.map_fd("calls_ring"), CALL, ring_bytes)
        sites = [Site(offset_of(library, symbol), BY_SYMBOL[symbol], symbol) for symbol in ("cuLaunchKernel",)]
        self.links = self.attacher.attach(CUDA, str(library), sites)

    def close(self) -> None:
        self.links.close()
        self.rings.close()


def lost_calls(probed: Probed) -> int:
    """Those for which a ring had no room, and those that are more than one thread may make."""
    counts = probed.attacher.kernel.counts()
    return counts["ring_full"] + counts["rate_bound"]


def run_round(program: Path, calls: int, rate: int) -> float:
    """Seconds that a round took."""
    command = ["taskset", "-c", str(max(os.sched_getaffinity(0))), str(program), "launch", str(calls), str(rate)]
    return int(subprocess.run(command, input="\n", capture_output=True, text=True, check=True).stdout) / 1e9


def drained(probed: Probed, program: Path, calls: int, rate: int) -> dict:
    received = 0
    over = threading.Event()

    def drain() -> None:
        nonlocal received
        while not over.is_set():
            probed.rings.wait(0.05)
            received += sum(map(len, probed.rings.drain()[0]))

    before = lost_calls(probed)
    thread = threading.Thread(target=drain)
    thread.start()
    seconds = run_round(program, calls, rate)
    over.set()
    thread.join()
    received += sum(map(len, probed.rings.drain()[0]))
    lost = lost_calls(probed) - before
    return {
        "asked": rate,
        "per_second": calls / seconds,
        "calls": calls,
        "received": received,
        "lost": lost,
        "exact": received + lost == calls,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--seconds", type=float, default=3, help="length of a round at each rate")
    options = parser.parse_args()
    library, program = build_bare()
    probed = Probed(library, 4 << 20)
    rounds = [drained(probed, program, int((rate or 1_000_000) * options.seconds), rate) for rate in RATES]
    probed.close()
    tiny = Probed(library, 64 << 10)
    calls = 200_000
    run_round(program, calls, 0)
    events, reported, _ = tiny.rings.drain()
    received, lost = sum(map(len, events)), lost_calls(tiny)
    tiny.close()
    overflow = {"calls": calls, "received": received, "lost": lost, "exact": received + lost == calls}
    exact = all(one["exact"] for one in [*rounds, overflow])
    if options.json:
        print(json.dumps({"rounds": rounds, "overflow": overflow}))
        return 0 if exact else 1
    print(f"{'asked/s':>9} {'calls/s':>9} {'calls':>9} {'received':>9} {'lost':>7}  exact")
    for one in rounds:
        print(f"{one['asked'] or 'most':>9} {one['per_second']:9.0f} {one['calls']:9} {one['received']:9} {one['lost']:7}  {one['exact']}")
    print(f"{'undrained':>9} {'':9} {calls:9} {received:9} {lost:7}  {overflow['exact']}")
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
