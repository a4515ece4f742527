"""What `gputail top` takes: seconds to its first picture with rows, CPU time at one look a second, and resident memory.

usage: scripts/bench top [--json] [--workloads N] [--seconds S] [--rounds N]
It looks at made-up workloads whose figures all change with every snapshot, from a terminal of 160 by 50 cells.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
TICKS = os.sysconf("SC_CLK_TCK")


def serve(path: str, workloads: int) -> None:
    """A daemon of made-up workloads, until it is killed."""
    sys.path.insert(0, str(ROOT))
    from gputail.surfaces.control import ControlServer
    from tests.unit.snapshots import snapshot, view

    start = now = time.monotonic_ns()
    server = ControlServer(path, {"pid": os.getpid(), "version": "0", "start_ns": start})
    number = 0
    while True:
        now = time.monotonic_ns()
        server.publish(snapshot(*[view(1000 + pid, pid % 5 * (pid % 7 == 0), now, number) for pid in range(workloads)], now_ns=now))
        number += 1
        time.sleep(1)


def look(path: str, seconds: float) -> dict[str, float]:
    terminal, theirs = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "gputail", "top", "--socket", path],
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        env={**os.environ, "TERM": "xterm"},
    )

    def read_until(end: float, wanted: bytes) -> bool:
        written = b""
        while (left := end - time.monotonic()) > 0:
            if select.select([terminal], [], [], left)[0]:
                written += os.read(terminal, 1 << 16)
                if wanted and wanted in written:
                    return True
        return False

    def cpu_s() -> float:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    if not read_until(start + 30, b"serve.py"):
        raise SystemExit("no picture within 30 s")
    painted = time.monotonic() - start
    read_until(time.monotonic() + 3, b"")
    before, began = cpu_s(), time.monotonic()
    read_until(began + seconds, b"")
    share = (cpu_s() - before) / (time.monotonic() - began)
    if process.poll() is not None:
        raise SystemExit(f"top ended with status {process.returncode} while it was looked at")
    resident = int(Path(f"/proc/{process.pid}/status").read_text().split("VmRSS:")[1].split()[0]) / 1024
    os.write(terminal, b"q")
    while process.poll() is None:
        read_until(time.monotonic() + 0.05, b"")
    return {"first_picture_s": painted, "cpu_share": share, "resident_mb": resident}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--workloads", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.workloads)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/socket"
        daemon = subprocess.Popen([sys.executable, __file__, "--serve", path, "--workloads", str(options.workloads)])
        try:
            while not os.path.exists(path):
                time.sleep(0.05)
            time.sleep(3)
            rounds = [look(path, options.seconds) for _ in range(options.rounds)]
        finally:
            daemon.kill()
            daemon.wait()
    result = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    if options.json:
        print(json.dumps({"workloads": options.workloads, **result}))
    else:
        print(
            f"{options.workloads} workloads: first picture after {result['first_picture_s']:.2f} s, "
            f"{100 * result['cpu_share']:.2f}% of a core, {result['resident_mb']:.0f} MB resident"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
