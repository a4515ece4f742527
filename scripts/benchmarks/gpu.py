"""gputail beside PyTorch on a real GPU: requests that it cut against those that the program itself logged.

Each victim of tests/gpu/victim.py runs while `gputail run --jsonl` watches; with --aggressor a second process multiplies
matrices in bursts, and the verdicts on the requests it hit are counted. PyTorch must be importable by `python3`.

usage: scripts/bench gpu [--json] [--seconds S] [--modes eager,gpu,graph,events] [--out DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
SLACK_NS = 1000
SLOW = 1.25  # a hit request counts as slow when it took this many times the clean median


@dataclass
class Result:
    mode: str
    requests: int  # logged by the program while it was watched
    records: int  # requests that gputail cut of its main thread in that time
    one_to_one: int
    incomplete: int
    lost: str
    median_ms: float
    slow: int | None = None
    named: int | None = None  # of the slow ones: foreign_kernel first, and the aggressor's pid
    blamed_clean: int | None = None  # clean requests with foreign_kernel as their cause


def plain_environment() -> dict[str, str]:
    """Without what gputail's own python may need to find its libraries: CUDA programs must not inherit it."""
    return {key: value for key, value in os.environ.items() if key not in ("LD_LIBRARY_PATH", "PYTHONPATH")}


def start(module: str, *arguments: str) -> subprocess.Popen:
    """A PyTorch program, warmed up."""
    process = subprocess.Popen(["python3", "-m", module, *arguments], cwd=ROOT, env=plain_environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout
    if process.stdout.readline().strip() != "ready":
        raise SystemExit(f"{module} did not start: status {process.wait()}")
    return process


def watch(mode: str, seconds: float, folder: Path, with_aggressor: bool) -> Result:
    records_file, truth_file, burst_file = folder / f"{mode}.jsonl", folder / f"{mode}.npz", folder / f"{mode}-bursts.npz"
    records_file.unlink(missing_ok=True)
    aggressor = start("tests.gpu.aggressor", "--seconds", str(seconds), "--truth", str(burst_file)) if with_aggressor else None
    victim = start("tests.gpu.victim", "--mode", mode, "--seconds", str(seconds), "--truth", str(truth_file))
    with (folder / f"{mode}.log").open("w+") as log:
        tracer = subprocess.Popen(
            [sys.executable, "-m", "gputail", "run", "--jsonl", str(records_file), "--listen", "off"], cwd=ROOT, stderr=log
        )
        for program in (victim, aggressor):
            if program:
                program.wait()
        tracer.send_signal(signal.SIGTERM)
        if tracer.wait():
            log.seek(0)
            raise SystemExit(f"gputail ended with {tracer.returncode}: {log.read()[-500:]}")
        log.seek(0)
        lost = " ".join(line.split("lost: ")[1].strip() for line in log.read().splitlines() if "lost: " in line)
    return compare(mode, truth_file, burst_file if with_aggressor else None, records_file, lost)


def compare(mode: str, truth_file: Path, burst_file: Path | None, records_file: Path, lost: str) -> Result:
    truth = np.load(truth_file)
    pid, logged = int(truth["pid"]), truth["requests"]
    records = [json.loads(line) for line in records_file.read_text().splitlines()]
    mine = sorted((r for r in records if r["tid"] == pid), key=lambda r: r["start_ns"])
    starts, ends = (np.array([r[key] for r in mine], np.int64) for key in ("start_ns", "end_ns"))
    # Watching began in the middle of the program, at the latest with the first record that was cut.
    watched = logged[logged[:, 0] >= (starts[0] if len(starts) else 0) - SLACK_NS]
    result = Result(
        mode=mode,
        requests=len(watched),
        records=len(mine),
        one_to_one=0,
        incomplete=sum(r["incomplete"] for r in mine),
        lost=lost or "nothing",
        median_ms=float(np.median(logged[:, 1] - logged[:, 0])) / 1e6,
    )
    bursts = np.load(burst_file) if burst_file else None
    if bursts is not None:
        result.slow = result.named = result.blamed_clean = 0
    hit = np.zeros(len(watched), bool)
    for begin, end in bursts["bursts"] if bursts is not None else ():
        hit |= (watched[:, 0] < end) & (watched[:, 1] > begin)
    took = watched[:, 1] - watched[:, 0]
    usual = np.median(took[~hit])
    for (begin, end), is_hit, duration in zip(watched, hit, took, strict=True):
        inside = mine[np.searchsorted(ends, begin) : np.searchsorted(starts, end)]
        result.one_to_one += len(inside) == 1 and inside[0]["start_ns"] >= begin - SLACK_NS and inside[0]["end_ns"] <= end + SLACK_NS
        if bursts is None:
            continue
        verdicts = [r for r in inside if r["outlier"] and r["cause"] == "foreign_kernel"]
        if is_hit and duration > SLOW * usual:
            result.slow += 1
            result.named += any(c["culprit_pid"] == int(bursts["pid"]) for r in verdicts for c in r["contributions"])
        elif not is_hit:
            result.blamed_clean += bool(verdicts)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--modes", default="eager,gpu,graph,events")
    parser.add_argument("--aggressor", default="gpu,graph", help="modes to run once more beside another tenant's bursts")
    parser.add_argument("--out", type=Path, help="keep the records and truths there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        results = [watch(mode, options.seconds, folder, with_aggressor=False) for mode in filter(None, options.modes.split(","))]
        results += [watch(mode, options.seconds, folder, with_aggressor=True) for mode in filter(None, options.aggressor.split(","))]
    if options.json:
        print(json.dumps([asdict(result) for result in results]))
        return 0
    columns = ("victim", "median", "requests", "records", "one to one", "incomplete", "named/slow", "blamed", "lost")
    rows = [columns]
    for r in results:
        share = f"{100 * r.one_to_one / r.requests:.1f}%" if r.requests else "-"
        named = "-" if r.slow is None else f"{r.named}/{r.slow}"
        blamed = "-" if r.blamed_clean is None else str(r.blamed_clean)
        rows.append((r.mode, f"{r.median_ms:.1f} ms", str(r.requests), str(r.records), share, str(r.incomplete), named, blamed, r.lost))
    for row in rows:
        print("".join(f"{cell:>12}" for cell in row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
