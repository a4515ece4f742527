"""What such tools have met in the field, each with the right behaviour: numbers 6, 9, 14, 18, 24 and 50 of the list."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gputail.budget import SYNC
from gputail.events import CALL, Batch, end_ns
from gputail.probes.table import BY_SYMBOL
from gputail.probes.tracer import TraceOptions, Tracer
from gputail.requests import Requests
from gputail.sim.build import build
from gputail.sim.caller import Caller
from tests.live.conftest import free_port, wait_until

KERNEL_NS = 5_000_000
QUERY = BY_SYMBOL["cuEventQuery"].number


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Caller]]:
    """Starts callers, and ends those that are left."""
    started: list[Caller] = []

    def make(**options) -> Caller:
        started.append(Caller(tmp_path / "gpu", **options))
        return started[-1]

    yield make
    for one in started:
        one.close()


@pytest.fixture
def tracing() -> Iterator[Callable[..., Tracer]]:
    started: list[Tracer] = []

    def make(**options) -> Tracer:
        started.append(Tracer(TraceOptions(off_cpu=False, **options)))
        return started[-1]

    yield make
    for tracer in started:
        tracer.close()


def queries(tracer: Tracer, *pids: int) -> list[int]:
    """How many cuEventQuery calls each of these processes was seen to make; ends the trace."""
    batches = [tracer.poll().calls, tracer.finish().calls]
    calls = np.concatenate([np.empty(0, CALL), *batches])
    return [int(((calls["tgid"] == pid) & (calls["call"] == QUERY)).sum()) for pid in pids]


def copy_of_the_libraries(folder: Path) -> Path:
    folder.mkdir()
    for name in ("libcuda.so.1", "libnccl.so.2"):
        shutil.copy(build().libraries / name, folder / name)
    return folder


def in_a_container(folder: Path) -> dict:
    """Options of a caller whose libraries lie where only its own mount namespace shows them, at `folder`."""
    folder.mkdir()
    script = f'mount -t tmpfs none {folder}; cp {build().libraries}/* {folder}; exec "$@"'
    return {"prefix": ["unshare", "-m", "sh", "-ec", script, "sh"], "libraries": folder}


def test_several_copies_of_a_library_under_many_names_are_probed_once_each(start, tracing, tmp_path):
    copies = [copy_of_the_libraries(tmp_path / name) for name in ("a", "b", "c")]
    linked, hard = tmp_path / "linked", tmp_path / "hard"
    linked.mkdir()
    (linked / "libcuda.so.1").symlink_to(copies[0] / "libcuda.so.1")
    hard.mkdir()
    os.link(copies[1] / "libcuda.so.1", hard / "libcuda.so.1")
    callers = [start(libraries=folder) for folder in (*copies, linked, hard)]
    tracer = tracing()
    for caller in callers:
        caller.do("call", "cuEventQuery", 23, 0)
    assert queries(tracer, *(caller.pid for caller in callers)) == [23] * 5


def test_a_library_that_only_a_container_shows_is_attached(start, tracing, tmp_path):
    inside = tmp_path / "inside"
    caller = start(**in_a_container(inside))
    assert not list(inside.iterdir())
    tracer = tracing()
    caller.do("call", "cuEventQuery", 23, 0)
    assert queries(tracer, caller.pid) == [23]


def test_processes_that_end_while_being_attached_harm_neither_the_tracer_nor_the_survivors(start, tracing, tmp_path):
    program = build().programs["caller"]
    containers = [in_a_container(tmp_path / f"inside{number}") for number in range(3)]
    tracer = tracing(scan_s=0.02, flush_s=0.01)
    gone: list[int] = []

    def churn() -> None:
        for number in range(60):
            container = containers[number % 3]
            environment = {**os.environ, "GPUTAIL_SIM_GPU": str(tmp_path / "gpu"), "LD_LIBRARY_PATH": str(container["libraries"])}
            command = [*container["prefix"], program, "call", "cuEventQuery", "3", "0"]
            with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
                gone.append(process.pid)
            assert process.returncode == 0

    storm = threading.Thread(target=churn)
    storm.start()
    batches = []
    while storm.is_alive():
        batches.append(tracer.poll())
    survivors = [start(**container) for container in containers]
    attached = tracer.health().libraries
    wait_until(lambda: batches.append(tracer.poll()) or tracer.health().libraries >= attached + 3, "the survivors' libraries")
    for survivor in survivors:
        survivor.do("call", "cuEventQuery", 23, 0)
    assert len(gone) == 60
    assert queries(tracer, *(survivor.pid for survivor in survivors)) == [23] * 3
    seen = np.concatenate([batch.calls for batch in batches])
    assert max((int(((seen["tgid"] == pid) & (seen["call"] == QUERY)).sum()) for pid in gone), default=0) <= 3


def test_workers_that_are_forked_all_the_time_are_covered_each_under_its_own_pid(start, tracing):
    caller = start()
    tracer = tracing(pids=frozenset([caller.pid]), libraries=(str(build().libraries / "libcuda.so.1"),))
    workers = [answer["pid"] for _ in range(10) for answer in caller.do("fork", 3, "cuEventQuery", 23, 0)["by"]]
    assert len(set(workers)) == 30
    assert queries(tracer, *workers) == [23] * 30


def test_a_name_that_ends_within_a_character_loses_neither_the_record_nor_the_scrape(start, gputail, tmp_path):
    program = tmp_path / ("a" * 14 + "é")  # 15 bytes are kept of a thread's name: the last is half an é
    shutil.copy(build().programs["caller"], program)
    caller = start(program=program)
    caller.start_gpu()
    caller.kernel("_Z5saxpyv")
    assert b"a\xc3\n" in Path(f"/proc/{caller.pid}/comm").read_bytes()
    lines, port = tmp_path / "records.jsonl", free_port()
    running = gputail("run", "--jsonl", str(lines), "--listen", f"127.0.0.1:{port}", "--flush-ms", "10")
    running.wait_for("metrics on")
    for _ in range(8):
        caller.do("call", "cuLaunchKernel", 3, *"$f 1 1 1 1 1 1 0 0 params:1000 0".split())
        caller.do("call", "cuStreamSynchronize", 1, 0)
    caller.close()

    def scraped() -> list[str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        families = list(text_string_to_metric_families(text))
        return [sample.labels["workload"] for family in families for sample in family.samples if "workload" in sample.labels]

    wait_until(lambda: any("a" * 14 in workload for workload in scraped()), "the workload in the metrics")
    assert running.end() == 0
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    mine = [record for record in records if record["pid"] == caller.pid]
    assert mine
    assert {record["comm"] for record in mine} == {"a" * 14 + "\ufffd"}


@pytest.mark.parametrize("wait", ["cuStreamSynchronize $s", "cuCtxSynchronize", "cuStreamQuery $s"])
def test_one_wait_of_five_ms_is_one_wait_however_it_is_made(start, tracing, wait):
    symbol, *arguments = wait.split()
    caller = start()
    caller.start_gpu()
    caller.kernel("_Z5saxpyv")
    caller.do("call", "cuStreamCreate", 1, "&s", 1)
    tracer = tracing(pids=frozenset([caller.pid]), libraries=(str(build().libraries / "libcuda.so.1"),))
    requests, found, rows = Requests(), [], []

    def feed(batch: Batch) -> None:
        rows.append(batch.calls)
        found.extend(requests.feed(batch.calls, batch.watermark_ns))

    for _ in range(6):
        caller.do("call", "cuLaunchKernel", 1, *f"$f 1 1 1 1 1 1 0 $s params:{KERNEL_NS} 0".split())
        result = 1
        while result:  # not ready: ask on
            result = caller.do("call", symbol, 100 if "Query" in symbol else 1, *arguments)["by"][-1]["result"]
        feed(tracer.poll())
    feed(tracer.finish())
    found.extend(requests.finish())
    cut = [request for request in found if request.launches]
    assert [request.launches for request in cut] == [1] * 6
    calls = np.concatenate(rows)
    for request in cut:
        within = calls[(calls["start_ns"] >= request.start_ns) & (end_ns(calls) <= request.end_ns)]
        (launch,), waits = (within[within["call"] == BY_SYMBOL[name].number] for name in ("cuLaunchKernel", symbol))
        begin_ns = int(waits["start_ns"].min())
        # The kernel cannot be done sooner: it was given to the GPU after the launch had begun.
        least_ns = int(launch["start_ns"]) + KERNEL_NS - begin_ns
        assert least_ns <= request.parts[SYNC] <= int(end_ns(waits).max()) - begin_ns
