"""How long gputail takes to trace and to end, and what it keeps resident, beside a program that makes calls all the time.

usage: scripts/bench start [--json] [--rounds N] [-- COMMAND ...]
COMMAND is what runs beside it, ready once it has printed a line; by default a simulated GPU-bound program.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def beside(command: list[str]) -> subprocess.Popen:
    environment = {key: value for key, value in os.environ.items() if key not in ("LD_LIBRARY_PATH", "PYTHONPATH")}
    if not command:
        from gputail.sim.build import build

        command = [str(build().programs["victim"]), "--kind", "gpu", "--seconds", "600", "--truth", "/dev/null"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    process.stdout.readline()
    return process


def round_trip(folder: Path) -> dict[str, float]:
    """Seconds to the first line that says what is traced and from SIGTERM to the exit; resident MB in between."""
    with (folder / "log").open("w+") as log:
        start = time.monotonic()
        process = subprocess.Popen([sys.executable, "-m", "gputail", "run", "--listen", "127.0.0.1:0"], cwd=ROOT, stderr=log)
        while "tracing" not in (folder / "log").read_text():
            if process.poll() is not None or time.monotonic() - start > 60:
                raise SystemExit((folder / "log").read_text())
            time.sleep(0.005)
        tracing = time.monotonic() - start
        time.sleep(3)
        status = Path(f"/proc/{process.pid}/status").read_text()
        resident = int(status.split("VmRSS:")[1].split()[0]) / 1024
        start = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait()
        return {"start_s": tracing, "end_s": time.monotonic() - start, "resident_mb": resident}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("command", nargs="*")
    options = parser.parse_args()
    program = beside(options.command)
    with tempfile.TemporaryDirectory() as folder:
        rounds = [round_trip(Path(folder)) for _ in range(options.rounds)]
    program.kill()
    figures = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    worst = {name: max(one[name] for one in rounds) for name in rounds[0]}
    if options.json:
        print(json.dumps({"median": figures, "worst": worst}))
    else:
        for name in figures:
            print(f"{name:12} median {figures[name]:8.2f}   worst {worst[name]:8.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
