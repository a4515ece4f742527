"""Which communicator a handle is, as real probes read it: the same identity in every process, with rank and size."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from gputail.events import CALL
from gputail.pipeline import Pipeline
from gputail.probes import kernel, links, table
from gputail.probes.kernel import Kernel, KernelOptions
from gputail.probes.table import BY_NUMBER
from gputail.probes.tracer import TraceOptions, Tracer
from gputail.sim.build import build
from gputail.sim.caller import Caller

MASK = (1 << 64) - 1
LIBRARIES = tuple(str(build().libraries / name) for name in ("libcuda.so.1", "libnccl.so.2"))


def identity(unique_id: bytes) -> int:
    """What bpf/nccl.c makes of an id."""
    value = 0
    for word in np.frombuffer(unique_id.ljust(128, b"\0"), "<u8").tolist():
        value = ((value ^ word) * 0x9E3779B97F4A7C15) & MASK
        value ^= value >> 29
    return value


def rows_of(tracer: Tracer, *names: str) -> list[tuple]:
    """(function, pid, handle, identity, ranks, rank) of each row of these functions; ends the trace."""
    rows = np.concatenate([np.empty(0, CALL), tracer.poll().calls, tracer.finish().calls])
    rows = rows[[BY_NUMBER[int(number)].name in names for number in rows["call"]]]
    return [
        (BY_NUMBER[int(r["call"])].name, int(r["tgid"]), int(r["handle"]), int(r["stream"]), int(r["size"]), int(r["block"])) for r in rows
    ]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Caller]]:
    callers: list[Caller] = []

    def one() -> Caller:
        callers.append(Caller(tmp_path / "gpu"))
        callers[-1].do("load", "libnccl.so.2")
        return callers[-1]

    yield one
    for caller in callers:
        caller.close()


def follow(callers: list[Caller]) -> Tracer:
    return Tracer(TraceOptions(pids=frozenset(caller.pid for caller in callers), libraries=LIBRARIES, off_cpu=False))


def call_all(callers: list[Caller], *commands: str) -> list[dict]:
    """A command to each, at once: ranks wait for each other."""
    for caller, command in zip(callers, commands, strict=True):
        caller.send(command)
    answers = [caller.receive() for caller in callers]
    assert [one["failed"] for answer in answers for one in answer["by"]] == [0] * len(callers), answers
    return answers


def test_two_processes_have_one_identity_and_each_its_rank(start: Callable[[], Caller]) -> None:
    ranks = [start(), start()]
    tracer = follow(ranks)
    try:
        call_all(ranks, *(f"call ncclCommInitRank 1 &one 2 id:one {rank}" for rank in (0, 1)))
        call_all(ranks, *(f"call ncclCommInitRankConfig 1 &two 2 id:two {rank} 0" for rank in (1, 0)))
        seen = rows_of(tracer, "ncclCommInitRank", "ncclCommInitRankConfig")
    finally:
        tracer.close()
    one, two = identity(b"one"), identity(b"two")
    assert one != two
    assert sorted(seen) == sorted(
        [("ncclCommInitRank", caller.pid, caller.get("one"), one, 2, rank) for caller, rank in zip(ranks, (0, 1), strict=True)]
        + [("ncclCommInitRankConfig", caller.pid, caller.get("two"), two, 2, rank) for caller, rank in zip(ranks, (1, 0), strict=True)]
    )


def test_all_ranks_that_one_call_makes_are_known(start: Callable[[], Caller]) -> None:
    caller = start()
    tracer = follow([caller])
    try:
        (answer,) = call_all([caller], "call ncclCommInitAll 1 buf:64 4 0")
        seen = rows_of(tracer, "ncclCommInitAll", "member")
    finally:
        tracer.close()
    with open(f"/proc/{caller.pid}/mem", "rb") as memory:
        memory.seek(answer["args"][0])
        handles = np.frombuffer(memory.read(32), "<u8").tolist()
    assert [(name, handle, ranks, rank) for name, _, handle, _, ranks, rank in seen] == [
        ("ncclCommInitAll", handles[0], 4, 0), *(("member", handles[rank], 4, rank) for rank in (1, 2, 3)),
    ]  # fmt: skip
    assert len({row[3] for row in seen}) == 1 and seen[0][3] != 0


def test_a_split_tells_its_parent_colour_and_key(start: Callable[[], Caller]) -> None:
    ranks = [start(), start()]
    tracer = follow(ranks)
    try:
        call_all(ranks, *(f"call ncclCommInitRank 1 &comm 2 id:parent {rank}" for rank in (0, 1)))
        call_all(ranks, *(f"call ncclCommSplit 1 $comm 3 {key} &part 0" for key in (9, 4)))
        seen = rows_of(tracer, "ncclCommSplit")
    finally:
        tracer.close()
    assert sorted(seen) == sorted(
        ("ncclCommSplit", caller.pid, caller.get("part"), caller.get("comm"), 3, key) for caller, key in zip(ranks, (9, 4), strict=True)
    )


def test_an_id_in_a_list_of_ids_is_read_through_its_pointer(start: Callable[[], Caller]) -> None:
    caller = start()
    tracer = follow([caller])
    try:
        call_all([caller], "call ncclCommInitRankScalable 1 &comm 1 0 1 'one-of-a-list 0")
        ((name, _, handle, seen, ranks, rank),) = rows_of(tracer, "ncclCommInitRankScalable")
    finally:
        tracer.close()
    assert (name, handle, ranks, rank) == ("ncclCommInitRankScalable", caller.get("comm"), 1, 0)
    assert seen != 0


def test_collectives_captured_into_a_graph_are_seen_again_with_each_launch_of_it(start: Callable[[], Caller]) -> None:
    caller = start()
    tracer, pipeline = follow([caller]), Pipeline()
    try:
        caller.start_gpu()
        for command in (
            "ncclCommInitRank 1 &comm 1 id:graph 0",
            "cuStreamCreate 1 &s 1",
            "cuStreamBeginCapture_v2 1 $s 0",
            "ncclAllReduce 3 0 0 1024 7 0 $comm $s",
            "cuStreamEndCapture 1 $s &graph",
            "cuGraphInstantiateWithFlags 1 &exec $graph 0",
            "cuGraphLaunch 5 $exec $s",
            "cuStreamSynchronize 1 $s",
        ):
            call_all([caller], f"call {command}")
        pipeline.feed(tracer.poll())
        pipeline.feed(tracer.finish())
    finally:
        tracer.close()
    (view,) = pipeline.snapshot().communicators
    (one,) = view.ranks
    assert (one.captured, one.replayed, one.collectives) == (3, 5, 5)


POINTER_LIBRARY = """
int ncclCommInitRank(void **comm, int ranks, const char *id, int rank) { *comm = (void *)0x5150; return !(ranks && id && rank >= 0); }
"""
POINTER_PROGRAM = """
import ctypes, sys
library, comm = ctypes.CDLL(sys.argv[1]), ctypes.c_void_p()
print("ready", flush=True)
sys.stdin.readline()
assert library.ncclCommInitRank(ctypes.byref(comm), 7, b"by pointer".ljust(128, b"\\0"), 5) == 0
print("called", flush=True)
sys.stdin.readline()
"""


def test_an_id_behind_a_pointer_is_read_as_arm64_passes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library whose function takes a pointer, probed with the cookie for arm64: what differs there but for the registers' names."""
    monkeypatch.setattr(links, "cookie", lambda function, symbol: table.cookie(function, symbol, "aarch64"))
    source, library = tmp_path / "nccl.c", tmp_path / "libnccl.so.2"
    source.write_text(POINTER_LIBRARY)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-fno-omit-frame-pointer", "-o", library, source], check=True)
    program = subprocess.Popen(
        [sys.executable, "-c", POINTER_PROGRAM, str(library)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert program.stdin and program.stdout
    assert program.stdout.readline() == "ready\n"
    tracer = Tracer(TraceOptions(pids=frozenset([program.pid]), libraries=(str(library),), off_cpu=False))
    try:
        program.stdin.write("\n")
        assert program.stdout.readline() == "called\n"
        assert rows_of(tracer, "ncclCommInitRank") == [("ncclCommInitRank", program.pid, 0x5150, identity(b"by pointer"), 7, 5)]
    finally:
        program.communicate("\n")
        tracer.close()


def test_the_program_compiles_for_arm64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its registers are others: the id's address is x2, at offset 16 of pt_regs, and never the stack's."""
    monkeypatch.setattr(kernel.platform, "machine", lambda: "aarch64")
    compiled = Kernel(KernelOptions(off_cpu=False))
    program = kernel.program_bytes(compiled._bcc, compiled._bpf, b"nccl_enter")
    compiled.close()
    # ldx dst, [src + offset]: the context is kept in a register that is loaded from at 8-byte steps up to x7, and at sp (248)
    offsets = {int.from_bytes(program[at + 2 : at + 4], "little", signed=True) for at in range(0, len(program), 8) if program[at] == 0x79}
    assert {0, 8, 16, 24, 32, 40, 48, 56, 248} <= offsets
