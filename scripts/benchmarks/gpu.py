"""gputail beside PyTorch on a real GPU, against what the programs logged of themselves.

For each label a victim of tests/gpu/victim.py, and what disturbs it, run while `gputail run --jsonl` watches the whole
node. Printed are the requests seen as exactly one record, the slow ones flagged, named by the right cause and with the
right culprit, and clean ones blamed. With --record the events are kept as well (`gputail record`, then a replay), to be
judged again anywhere with --judge. PyTorch must be importable by `python3`.

usage: scripts/bench gpu [--json] [--seconds S] [--labels none,gpu,graph,...] [--record DIR | --judge DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np

from gputail.sim.judge import Judgement, judge
from gputail.sim.scenario import LABELS, Truth

ROOT = Path(__file__).resolve().parent.parent.parent
# As the simulated ones, and two that are of interest where the CPU is real.
GPU_LABELS = {
    **LABELS,
    "async+xgemm": ("async", "none", "xgemm"),
    "threads+xgemm": ("threads", "none", "xgemm"),
    "two+xgemm": ("graph", "none", "xgemm"),
    **{f"g{fault}": ("gpu", fault, "") for fault in ("compute", "sleep", "gil", "alloc", "ptxjit", "pageable")},
    "ghog": ("gpu", "none", "cpuhog"),
}
DEFAULT = "none,gpu,graph,async,gpu+xgemm,graph+xgemm"
VICTIM_CPU, OTHER_CPU, SECOND_CPU = 9, 5, 12


def plain_environment() -> dict[str, str]:
    """Without what gputail's own python may need to find its libraries: CUDA programs must not inherit it."""
    return {key: value for key, value in os.environ.items() if key not in ("LD_LIBRARY_PATH", "PYTHONPATH")}


class Programs:
    """The victim and the aggressor of a label: started at once, warmed up once `is_ready`, held until `run`."""

    def __init__(self, label: str, seconds: float, folder: Path, varied: bool) -> None:
        kind, fault, aggressor = GPU_LABELS[label]
        self.label, self.folder = label, folder
        common = ("--seconds", str(seconds), *(["--varied"] if varied else []))
        victim = ("--kind", kind, "--fault", fault, "--cpu", str(VICTIM_CPU), "--truth", str(folder / f"{label}-victim.npz"))
        self._processes = [self._start("tests.gpu.victim", *victim, *common)]
        if label.startswith("two"):  # another one that answers beside it
            beside = ("--kind", "graph", "--cpu", str(SECOND_CPU), "--truth", str(folder / f"{label}-second.npz"))
            self._processes.append(self._start("tests.gpu.victim", *beside, *common))
        if aggressor:
            cpu = VICTIM_CPU if aggressor == "cpuhog" else OTHER_CPU
            other = ("--kind", aggressor, "--cpu", str(cpu), "--truth", str(folder / f"{label}-aggressor.npz"))
            self._processes.append(self._start("tests.gpu.aggressor", *other, *common))

    @staticmethod
    def _start(module: str, *arguments: str) -> subprocess.Popen:
        command = ["python3", "-m", module, *arguments]
        return subprocess.Popen(command, cwd=ROOT, env=plain_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def is_ready(self) -> bool:
        """Wait until both are warmed up; False, and said, when one has failed."""
        for process in self._processes:
            assert process.stdout
            if process.stdout.readline().strip() != "ready":
                print(f"{self.label} is left out: a program did not start (status {process.wait()})", file=sys.stderr)
                return False
        return True

    def run(self) -> None:
        for process in self._processes:
            assert process.stdin
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in self._processes:
            if process.wait():
                raise SystemExit(f"a program of {self.label!r} failed with status {process.returncode}")

    def stop(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()


@contextmanager
def gputail(folder: Path, label: str, verb: Sequence[str]) -> Iterator[None]:
    """`gputail VERB` on the whole node, tracing while this is entered; its messages are kept in LABEL.log."""
    process = subprocess.Popen([sys.executable, "-m", "gputail", *verb], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr
    said = process.stderr.readline()
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        said += process.communicate()[1]
        (folder / f"{label}.log").write_text(said)
    if process.returncode:
        raise SystemExit(f"gputail {verb[0]} ended with status {process.returncode}: {said[-500:]}")


def truth_of(folder: Path, label: str) -> Truth:
    """What the programs of a label logged."""
    victim = np.load(folder / f"{label}-victim.npz")
    aggressor_file = folder / f"{label}-aggressor.npz"
    aggressor = np.load(aggressor_file) if aggressor_file.exists() else {"pid": 0, "bursts": np.zeros((0, 2), np.int64)}
    return Truth(label, int(victim["pid"]), int(aggressor["pid"]), victim["requests"], victim["faults"], aggressor["bursts"])


def judged(folder: Path, label: str) -> tuple[Judgement, str]:
    """The judgement of a label's records, or of its recording's replay; and what was lost, in gputail's words."""
    records_file, recording = folder / f"{label}.jsonl", folder / f"{label}.gpt"
    if recording.exists():
        replay = [sys.executable, "-m", "gputail", "replay", str(recording), "--jsonl", str(records_file)]
        subprocess.run(replay, cwd=ROOT, check=True)
    records = [json.loads(line) for line in records_file.read_text().splitlines()]
    log = (folder / f"{label}.log").read_text()
    lost = " ".join(line.split("lost: ")[1].strip() for line in log.splitlines() if "lost: " in line)
    return judge(records, truth_of(folder, label)), lost or "?"


def watch(
    labels: Sequence[str], seconds: float, folder: Path, keep_events: bool, varied: bool = False, options: Sequence[str] = ()
) -> None:
    """Run the labels one after another; all programs are warmed up before the first, so that none disturbs another.

    options: further ones of gputail's.
    """
    programs = [Programs(label, seconds, folder, varied) for label in labels]
    try:
        ready = [each for each in programs if each.is_ready()]
        for each in ready:
            jsonl = folder / f"{each.label}.jsonl"
            jsonl.unlink(missing_ok=True)
            record = ("record", "-o", str(folder / f"{each.label}.gpt"))
            verb = record if keep_events else ("run", "--jsonl", str(jsonl), "--listen", "off", "--socket", "off")
            with gputail(folder, each.label, (*verb, *options)):
                each.run()
    finally:
        for each in programs:
            each.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object per label")
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--labels", default=DEFAULT, help=f"of {', '.join(GPU_LABELS)}; default {DEFAULT}")
    parser.add_argument("--record", type=Path, metavar="DIR", help="keep the events and truths there")
    parser.add_argument("--judge", type=Path, metavar="DIR", help="judge what --record kept, running nothing")
    options = parser.parse_args()
    labels = [label for label in options.labels.split(",") if label]
    if unknown := set(labels) - set(GPU_LABELS):
        parser.error(f"no such label: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.judge or options.record or Path(temporary)).resolve()
        if options.judge:
            labels = sorted(path.name.removesuffix("-victim.npz") for path in folder.glob("*-victim.npz"))
        else:
            folder.mkdir(parents=True, exist_ok=True)
            watch(labels, options.seconds, folder, keep_events=options.record is not None)
        results = [judged(folder, label) for label in labels if (folder / f"{label}.log").exists()]
    if options.json:
        for result, lost in results:
            print(json.dumps({**asdict(result), "lost": lost}))
        return 0
    columns = ("requests", "one to one", "slow", "flagged", "right", "culprit", "clean", "blamed")
    print(f"{'label':14}" + "".join(f"{column:>11}" for column in columns) + "  lost; wrong causes")
    for r, lost in results:
        share = f"{100 * r.one_to_one / r.requests:.1f}%" if r.requests else "-"
        named = "-" if r.named is None else r.named
        cells = (r.requests, share, r.slow, r.flagged, r.right, named, r.clean, r.blamed)
        print(f"{r.label:14}" + "".join(f"{cell!s:>11}" for cell in cells) + f"  {lost}; {r.wrong or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
