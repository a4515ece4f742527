"""What tracing costs the traced program: its requests in windows with and without probes, which alternate in one run.

Each workload runs alone, the tracer beside it on another CPU. First the tiers in turn, a window without probes between any two,
and then the default budget, whose windows are as long as the governor's tick. Printed for each tier are, over pairs of a traced
window and the untraced one before it: the change of the median request (median, its 95% confidence interval by bootstrap, and
quartiles), that of the 99th percentile of all traced requests against all untraced ones, and of requests a second; calls a second
as recorded; and the governor's estimate.

On the simulated driver, or with --gpu on a real one (PyTorch must be importable by `python3`).

usage: scripts/bench overhead [--json] [--gpu] [--pairs N] [--workloads W,...] [--tiers T,...]
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
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gputail.probes.tracer import TraceOptions, Tracer
from gputail.sim.build import build
from gputail.tiers import TIERS

WORKLOADS = {"cpu": "eager, CPU-bound", "gpu": "eager, GPU-bound", "graph": "CUDA graph", "loop": "tight launch loop"}
SIMULATED = ("cpu", "gpu", "graph")
FIXED = TIERS[:3]
BUDGET = "budget"
WINDOW_S, GOVERNED_S, REST_S = 0.25, 1.2, 0.5
SETTLE_S = 12.0
DEFAULT_BUDGET = 0.01


@dataclass
class Windows:
    """of one tier: (start, end) of traced windows and of the untraced ones just before them, in ns."""

    traced: list[tuple[int, int]] = field(default_factory=list)
    plain: list[tuple[int, int]] = field(default_factory=list)
    events: int = 0
    lost: int = 0
    tiers: dict[str, int] = field(default_factory=dict)
    estimate: list[float] = field(default_factory=list)


@contextmanager
def program(kind: str, seconds: float, is_gpu: bool, truth: Path, cpu: int) -> Iterator[subprocess.Popen]:
    """A victim, warmed up and running."""
    common = ["--kind", kind, "--seconds", str(seconds), "--truth", str(truth)]
    environment = {key: value for key, value in os.environ.items() if key not in ("LD_LIBRARY_PATH", "PYTHONPATH")}
    if is_gpu:
        command = ["python3", "-m", "tests.gpu.victim", "--cpu", str(cpu), *common]
    else:
        command = ["taskset", "-c", str(cpu), str(build().programs["victim"]), *common]
        environment["GPUTAIL_SIM_GPU"] = str(truth.parent / "gpu")
    root = Path(__file__).resolve().parent.parent.parent
    process = subprocess.Popen(command, cwd=root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin and process.stdout
    try:
        if process.stdout.readline().strip() != "ready":
            raise SystemExit(f"the program of {kind!r} did not start (status {process.wait()})")
        if is_gpu:
            process.stdin.write("go\n")
            process.stdin.flush()
        yield process
    finally:
        process.kill()
        process.wait()


class Run:
    """The tracer beside one program."""

    def __init__(self, tracer: Tracer, pid: int) -> None:
        self.tracer, self.pid = tracer, pid

    def window(self, seconds: float, into: Windows | None = None, *, is_traced: bool = True) -> None:
        """Let so much time pass, reading what is recorded; into: where it counts."""
        begin = time.monotonic_ns()
        while time.monotonic_ns() < begin + seconds * 1e9:
            batch = self.tracer.poll()
            if into and is_traced:
                into.events += int((batch.calls["tgid"] == self.pid).sum())
                into.lost += sum(batch.lost.values())
        if into:
            (into.traced if is_traced else into.plain).append((begin, time.monotonic_ns()))

    def pair(self, into: Windows, tier: int | None, seconds: float) -> None:
        self.tracer.suspend()
        self.window(WINDOW_S if tier is not None else REST_S, into, is_traced=False)
        self.tracer.resume(tier)
        self.window(seconds, into)
        costs = [cost for cost in self.tracer.health().costs if cost.tgid == self.pid]
        for cost in costs:
            into.tiers[cost.tier] = into.tiers.get(cost.tier, 0) + 1
            if cost.share is not None:
                into.estimate.append(cost.share)


def measure(kind: str, pairs: int, tiers: list[str], is_gpu: bool) -> tuple[dict[str, Windows], np.ndarray]:
    """The windows of each tier, and the program's requests (start, end)."""
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus[:-1] or cpus)
    fixed = [tier for tier in tiers if tier != BUDGET]
    seconds = 2 + pairs * len(fixed) * (2 * WINDOW_S + 0.25)
    if BUDGET in tiers:
        seconds += SETTLE_S + pairs * (REST_S + GOVERNED_S + 0.3)
    found = {tier: Windows() for tier in tiers}
    with tempfile.TemporaryDirectory() as temporary, program(kind, seconds, is_gpu, Path(temporary) / "truth.npz", cpus[-1]) as process:
        libraries = () if is_gpu else (str(build().libraries / "libcuda.so.1"),)
        if fixed:
            run = Run(Tracer(TraceOptions(libraries=libraries)), process.pid)
            run.window(0.5)
            for _ in range(pairs):
                for tier in fixed:
                    run.pair(found[tier], TIERS.index(tier), WINDOW_S)
            run.tracer.close()
        if BUDGET in tiers:
            run = Run(Tracer(TraceOptions(libraries=libraries, budget=DEFAULT_BUDGET)), process.pid)
            run.window(SETTLE_S)
            for _ in range(pairs):
                run.pair(found[BUDGET], None, GOVERNED_S)
            run.tracer.close()
        process.wait()
        return found, _requests(Path(temporary) / "truth.npz", is_gpu)


def _requests(truth: Path, is_gpu: bool) -> np.ndarray:
    if is_gpu:
        with np.load(truth) as logged:
            return np.array(logged["requests"])
    lines = [line.split() for line in truth.read_text().splitlines()]
    return np.array([(int(line[1]), int(line[2])) for line in lines if line[0] == "request"], np.int64)


def figures(windows: Windows, requests: np.ndarray) -> dict[str, float]:
    """Changes by tracing, in percent."""
    start, end = requests.T
    changes, rates, traced, plain = [], [], [], []
    for on, off in zip(windows.traced, windows.plain, strict=True):
        inside = [(end - start)[(start >= begin) & (end <= until)] for begin, until in (on, off)]
        if min(map(len, inside)) < 3:
            continue
        changes.append(100 * (np.median(inside[0]) / np.median(inside[1]) - 1))
        busy = [np.sum(durations) / len(durations) for durations in inside]
        rates.append(100 * (busy[1] / busy[0] - 1))
        traced.append(inside[0])
        plain.append(inside[1])
    low, middle, high = np.percentile(changes, (25, 50, 75))
    drawn = np.random.default_rng(1).choice(changes, (2000, len(changes)))
    surely = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
    tails = [np.percentile(np.concatenate(some), 99) for some in (traced, plain)]
    seconds = sum(until - begin for begin, until in windows.traced) / 1e9
    estimate = 100 * float(np.mean(windows.estimate)) if windows.estimate else float("nan")
    return {
        "pairs": len(changes), "median": middle, "low": low,
        "high": high,
        "from": float(surely[0]),
        "to": float(surely[1]), "p99": 100 * (tails[0] / tails[1] - 1),
        "throughput": float(np.median(rates)), "events_per_s": windows.events / seconds, "estimate": estimate, "lost": windows.lost,
        "request_ms": float(np.median(np.concatenate(plain))) / 1e6,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object a workload and tier")
    parser.add_argument("--gpu", action="store_true", help="on a real GPU; needs PyTorch")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--workloads")
    parser.add_argument("--tiers", default=",".join((*FIXED, BUDGET)))
    options = parser.parse_args()
    known = tuple(WORKLOADS) if options.gpu else SIMULATED
    workloads = options.workloads.split(",") if options.workloads else list(known)
    tiers = options.tiers.split(",")
    if unknown := (set(workloads) - set(known)) | (set(tiers) - {*FIXED, BUDGET}):
        parser.error(f"no such workload or tier: {', '.join(sorted(unknown))}")
    if not options.json:
        heads = ("request", "pairs", "median", "95% sure", "quartiles", "p99", "throughput", "calls/s", "estimate", "lost")
        print(
            f"{'workload':20}{'tier':8}" + "".join(f"{head:>{18 if head in ('95% sure', 'quartiles') else 11}}" for head in heads),
            flush=True,
        )
    for kind in workloads:
        found, requests = measure(kind, options.pairs, tiers, options.gpu)
        for tier, windows in found.items():
            f = figures(windows, requests)
            if options.json:
                print(json.dumps({"workload": kind, "tier": tier, **f, "tiers": windows.tiers}), flush=True)
                continue
            quartiles = f"{f['low']:+.2f} to {f['high']:+.2f}%"
            sure = f"{f['from']:+.2f} to {f['to']:+.2f}%"
            cells = (f"{f['request_ms']:.2f} ms", f"{f['pairs']}", f"{f['median']:+.2f}%", sure, quartiles, f"{f['p99']:+.1f}%",
                     f"{f['throughput']:+.2f}%", f"{f['events_per_s']:.0f}", f"{f['estimate']:.2f}%", f"{f['lost']}")  # fmt: skip
            text = "".join(f"{cell:>{18 if number in (3, 4) else 11}}" for number, cell in enumerate(cells))
            at = f"  {windows.tiers}" if tier == BUDGET else ""
            print(f"{WORKLOADS[kind]:20}{tier:8}{text}{at}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
