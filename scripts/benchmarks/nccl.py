"""NCCL's calls as traced, against NCCL's own log of them: a PyTorch job of one process a GPU (tests/gpu/rank.py).

NCCL, told so by NCCL_DEBUG, logs each collective that a program calls (count, datatype, communicator, stream) and each
communicator that it makes (rank, ranks). Beside it `gputail record` traces everything. Printed for each kind of job: calls logged, those
that were traced with the same function, bytes, communicator and stream, in the same order; communicators logged and those traced with the
same handle, rank and size; collectives that came out of a graph, against the program's replays.

With --late one rank is late at times, for the milliseconds of --delays, and the others' requests are judged as by `ranks`.
This takes two GPUs, at least. PyTorch must be importable by `python3`.

usage: scripts/bench nccl [--json] [--seconds S] [--ranks N] [--kinds calls,data,...] [--late copy,...] [--delays 5,20,50] [--record DIR]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import gpu
import numpy as np

from gputail.capture import CaptureReader
from gputail.communicators import COLLECTIVES, Communicators
from gputail.events import CALL
from gputail.pipeline import Pipeline
from gputail.probes import table
from gputail.sim.judge import SLACK_NS
from gputail.sim.ranks import JobJudgement, JobTruth, judge

KINDS = ("calls", "data", "tensor", "graph")
FIRST_CPU = 2
# What makes a rank late from outside, and the aggressor that does so: it chooses for how long itself.
BESIDE = {"hog": "cpuhog", "foreign": "xgemm"}
# As in nccl.h, by the number of an ncclDataType_t.
DATATYPE_BYTES = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)
_CALL = re.compile(r"NCCL INFO (\w+): opCount \w+ .*?count (\d+) datatype (\d+) op \d+ root \d+ comm (0x\w+) .*?stream (0x\w+|\(nil\))")
_MADE = re.compile(r"NCCL INFO \w+ comm (0x\w+) rank (\d+) n[rR]anks (\d+) .*Init COMPLETE")
_MAKES = {f.number for f in table.FUNCTIONS if f.name.startswith("ncclCommInit") or f.name == "ncclCommSplit"}


@dataclass(frozen=True)
class Logged:
    """What a rank's NCCL logged. calls: (function, bytes, communicator, stream); communicators: handle -> (rank, ranks)."""

    calls: list[tuple[str, int, int, int]]
    communicators: dict[int, tuple[int, int]]


@dataclass(frozen=True)
class Compared:
    """Counts over the ranks of a job. of_graphs: collectives captured, times replays; from_graphs: those traced. gpus: requests on
    the right GPU."""

    kind: str
    logged: int
    traced: int
    same: int
    communicators: int
    same_communicators: int
    replays: int
    captured: int
    from_graphs: int
    requests: int
    one_to_one: int
    gpus: int
    lost: int


def read_log(path: Path) -> Logged:
    calls, made = [], {}
    for line in path.read_text(errors="replace").splitlines():
        if match := _CALL.search(line):
            name, count, datatype, communicator, stream = match.groups()
            number = 0 if stream == "(nil)" else int(stream, 16)
            calls.append((f"nccl{name}", int(count) * DATATYPE_BYTES[int(datatype)], int(communicator, 16), number))
        elif match := _MADE.search(line):
            made[int(match[1], 16)] = (int(match[2]), int(match[3]))
    return Logged(calls, made)


def run(kind: str, ranks: int, seconds: float, folder: Path, late: tuple[int, str, float] | None = None) -> None:
    """One job beside `gputail record`; late: the rank, what makes it late and for how long (ms). All files lie in the folder."""
    environment = {**gpu.plain_environment(), "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,COLL", "NCCL_NVLS_ENABLE": "0"}
    processes = []
    try:
        for rank in range(ranks):
            command = ["python3", "-m", "tests.gpu.rank", "--kind", kind, "--rank", str(rank), "--ranks", str(ranks)]
            command += ["--meet", str(folder / "meet"), "--truth", str(folder / f"rank-{rank}.npz"), "--seconds", str(seconds)]
            command += ["--cpu", str(FIRST_CPU + 2 * rank)]
            if late and late[0] == rank and late[1] not in BESIDE:
                command += ["--late", late[1], "--delay", str(late[2])]
            processes.append(start(command, environment | {"NCCL_DEBUG_FILE": str(folder / f"rank-{rank}.nccl")}))
        if late and late[1] in BESIDE:
            rank, what, _ = late
            command = ["python3", "-m", "tests.gpu.aggressor", "--kind", BESIDE[what], "--truth", str(folder / "aggressor.npz"), "--varied"]
            command += ["--seconds", str(seconds), "--cpu", str(FIRST_CPU + 2 * rank + (what == "foreign"))]
            processes.append(start(command, environment | {"CUDA_VISIBLE_DEVICES": str(rank)}))
        for process in processes:
            assert process.stdout
            if process.stdout.readline().strip() != "ready":
                raise SystemExit(f"a rank of {kind!r} did not start (status {process.wait()})")
        with gpu.gputail(folder, "job", ("record", "-o", str(folder / "job.gpt"), "--tier", "full")):
            for process in processes:
                assert process.stdin
                process.stdin.write("go\n")
                process.stdin.flush()
            for process in processes:
                if process.wait():
                    raise SystemExit(f"a rank of {kind!r} failed with status {process.returncode}")
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def start(command: list[str], environment: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen(command, cwd=gpu.ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def compare(kind: str, ranks: int, folder: Path) -> Compared:
    """What a job's ranks and their NCCL logged, against its recording."""
    pipeline, watched = Pipeline(), Communicators()
    rows, records = [], []
    with CaptureReader(str(folder / "job.gpt")) as reader:
        for batch in reader:
            rows.append(batch.calls)
            pipeline.feed(batch)
            watched.learn(batch.calls)
            records += [record.as_dict() for record in pipeline.take_records()]
    pipeline.finish()
    records += [record.as_dict() for record in pipeline.take_records()]
    calls = np.concatenate([np.empty(0, CALL), *rows])
    sums: Counter[str] = Counter()
    for rank in range(ranks):
        with np.load(folder / f"rank-{rank}.npz") as truth:
            sums.update(compare_rank(calls[calls["tgid"] == int(truth["pid"])], read_log(folder / f"rank-{rank}.nccl")))
            mine = [record for record in records if record["pid"] == int(truth["pid"])]
            requests = truth["requests"]
            sums["requests"] += len(requests)
            sums["one_to_one"] += sum(one_to_one(mine, requests))
            sums["gpus"] += sum(record.get("gpu") == str(int(truth["device"])) for record in mine)
            sums["replays"] += int(truth["replays"])
    sums["lost"] = sum(pipeline.snapshot().lost.values())
    return Compared(kind, **{name: sums[name] for name in Compared.__dataclass_fields__ if name != "kind"})


def compare_rank(calls: np.ndarray, logged: Logged) -> Counter[str]:
    collectives = calls[np.isin(calls["call"], list(COLLECTIVES)) & (calls["depth"] == 0)]
    collectives = collectives[np.argsort(collectives["start_ns"], kind="stable")]
    traced = [(table.BY_NUMBER[int(row["call"])].name, int(row["size"]), int(row["handle"]), int(row["stream"])) for row in collectives]
    makes = calls[np.isin(calls["call"], list(_MAKES)) & (calls["result"] == 0)]
    communicators = {int(row["handle"]): (int(row["block"]), int(row["size"])) for row in makes}
    return Counter(
        logged=len(logged.calls),
        traced=len(traced),
        same=sum(one == other for one, other in zip(logged.calls, traced, strict=False)),
        communicators=len(logged.communicators),
        same_communicators=sum(communicators.get(handle) == made for handle, made in logged.communicators.items()),
    )


def one_to_one(records: list[dict], requests: np.ndarray) -> Iterator[bool]:
    for begin, end in requests.tolist():
        inside = [record for record in records if record["end_ns"] > begin and record["start_ns"] < end]
        yield len(inside) == 1 and inside[0]["start_ns"] >= begin - SLACK_NS and inside[0]["end_ns"] <= end + SLACK_NS


def judge_late(label: str, ranks: int, late: int, folder: Path) -> JobJudgement:
    truths = [np.load(folder / f"rank-{rank}.npz") for rank in range(ranks)]
    come = tuple(np.stack([truth["come"], truth["come"]], axis=1) for truth in truths)
    pids = tuple(int(truth["pid"]) for truth in truths)
    beside = folder / "aggressor.npz"
    faults = np.load(beside)["bursts"] if beside.exists() else truths[late]["faults"]
    truth = JobTruth(label, late, pids, tuple(truth["requests"] for truth in truths), come, faults, beside.exists())
    pipeline, records = Pipeline(), []
    with CaptureReader(str(folder / "job.gpt")) as reader:
        for batch in reader:
            pipeline.feed(batch)
    pipeline.finish()
    records += [record.as_dict() for record in pipeline.take_records()]
    return judge(records, truth)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object per job")
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--late", default="", help="of sleep, compute, copy, larger, hog, foreign")
    parser.add_argument("--delays", default="5,20,50", help="milliseconds")
    parser.add_argument("--record", type=Path, metavar="DIR", help="keep recordings and logs there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = (options.record or Path(temporary)).resolve()
        for kind in options.kinds.split(","):
            folder = root / kind
            folder.mkdir(parents=True)
            run(kind, options.ranks, options.seconds, folder)
            print(json.dumps(asdict(compare(kind, options.ranks, folder))), flush=True)
            for what in filter(None, options.late.split(",") if kind != "calls" else ()):
                for delay in map(float, options.delays.split(",") if what not in BESIDE else ("0",)):
                    late = (options.ranks - 1, what, delay)
                    folder = root / f"{kind}-{what}-{delay:g}"
                    folder.mkdir()
                    run(kind, options.ranks, options.seconds, folder, late)
                    print(json.dumps(asdict(judge_late(folder.name, options.ranks, late[0], folder))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
