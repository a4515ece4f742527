"""The late rank of simulated jobs, named live: injected on one rank of three, judged by what all ranks logged.

For each label of gputail/sim/ranks.py and each seed (which also says which rank is the late one) a traced run. Printed are the
requests of the ranks that waited: cut as logged, slow by the injection, named a collective_wait, with the right rank; what that
rank was said to do; and requests in which a rank was blamed that had not come last, or not by nearly as much. With --untraced
the late rank's events are left out: then nobody may be named.

usage: scripts/bench ranks [--json] [--seconds S] [--seeds N] [--labels latecopy,...] [--untraced]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from dataclasses import asdict

from gputail.events import Batch
from gputail.pipeline import Pipeline
from gputail.probes.tracer import TraceOptions, Tracer
from gputail.sim.build import build
from gputail.sim.ranks import LABELS, JobJudgement, job, judge

SUMS = ("requests", "one_to_one", "injections", "slow", "flagged", "right", "named", "false")


def run(label: str, seconds: float, seed: int, untraced: bool) -> tuple[JobJudgement, list[bool], int]:
    """The judgement, for each shift found whether it named the late rank, and how many ranks were blamed at all for anything."""
    libraries = build().libraries
    tracer = Tracer(
        TraceOptions(pids=frozenset([os.getpid()]), libraries=tuple(str(libraries / name) for name in ("libcuda.so.1", "libnccl.so.2")))
    )
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus[:-1] or cpus)  # the late rank has the last one
    pipeline = Pipeline()
    try:
        with job(label, seconds, seed, cpus) as running:
            late = running.pids[running.late] if untraced else None
            while running.is_running():
                pipeline.feed(without(tracer.poll(), late))
            pipeline.feed(without(tracer.finish(), late))
            truth = running.truth()
    finally:
        tracer.close()
        os.sched_setaffinity(0, cpus)
    pipeline.finish()
    records = [record.as_dict() for record in pipeline.take_records()]
    named_late = sum(c["culprit_pid"] == truth.pids[truth.late] for r in records if r["outlier"] for c in r["contributions"])
    return judge(records, truth), [drift.rank == truth.late for drift in pipeline.snapshot().drifts], named_late


def without(batch: Batch, tgid: int | None) -> Batch:
    """The batch without a process's rows."""
    if tgid is None:
        return batch
    calls, names = batch.calls, batch.names
    return Batch(calls[calls["tgid"] != tgid], names[names["tgid"] != tgid], batch.processes, batch.lost, batch.watermark_ns)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object per label")
    parser.add_argument("--seconds", type=float, default=9)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--labels", default=",".join(LABELS))
    parser.add_argument("--untraced", action="store_true", help="leave the late rank's events out")
    options = parser.parse_args()
    labels = options.labels.split(",")
    if unknown := set(labels) - set(LABELS):
        parser.error(f"no such label: {', '.join(sorted(unknown))}")
    if not options.json:
        print("| label | requests | one to one | slow | collective_wait | late rank | falsely blamed | shifts | what it did instead |")
        print("|---|---|---|---|---|---|---|---|---|")
    for label in labels:
        total = JobJudgement(label)
        texts: Counter[str] = Counter()
        wrong: Counter[str] = Counter()
        drifts: list[bool] = []
        named_late = 0
        for seed in range(1, options.seeds + 1):
            print(f"{label} seed {seed}", file=sys.stderr, flush=True)
            one, found, named = run(label, options.seconds, seed, options.untraced)
            for name in SUMS:
                setattr(total, name, getattr(total, name) + getattr(one, name))
            texts.update(one.texts)
            wrong.update(one.wrong)
            drifts += found
            named_late += named
        total.texts, total.wrong = dict(texts.most_common(3)), dict(wrong.most_common(3))
        if options.json:
            print(json.dumps({**asdict(total), "shifts": drifts, "late_rank_named": named_late}))
        else:
            cut = f"{total.one_to_one / max(total.requests, 1):.1%}"
            shifts = f"{sum(drifts)} of {len(drifts)} right" if drifts else "0"
            did = ", ".join(f"{text} {count}" for text, count in total.texts.items())
            wrongly = "".join(f"; {cause} {count}" for cause, count in total.wrong.items())
            print(
                f"| {label}{' (untraced)' if options.untraced else ''} | {total.requests} | {cut} "
                f"| {total.slow} | {total.right}{wrongly} | {total.named} | {total.false} | {shifts} | {did} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
