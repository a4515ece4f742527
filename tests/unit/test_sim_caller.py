"""The caller makes exactly the calls that it is told to, and says which; the static runtime reaches the driver by name only."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from gputail.sim.build import build
from gputail.sim.caller import Caller

NOT_INITIALIZED = 3


@pytest.fixture
def gpu(tmp_path: Path) -> Path:
    return tmp_path / "gpu"


@pytest.fixture
def caller(gpu: Path) -> Iterator[Caller]:
    with Caller(gpu) as running:
        running.start_gpu()
        yield running


def has_mapped(pid: int, name: str) -> bool:
    return name in Path(f"/proc/{pid}/maps").read_text()


def test_calls_are_made_as_often_and_with_the_arguments_that_were_asked_for(caller):
    function = caller.kernel("_Z5saxpyv")
    answer = caller.do("call cuLaunchKernel 23 $f 3 5 7 2 11 13 0 0 params:1000 0")
    assert answer["args"][:9] == [function, 3, 5, 7, 2, 11, 13, 0, 0]
    assert [by["made"] for by in answer["by"]] == [23]
    assert answer["by"][0]["failed"] == 0
    assert answer["by"][0]["tid"] == answer["by"][0]["pid"] == caller.pid


@pytest.mark.parametrize("what", ["copy2d:1,2,300,7", "copy3d:1,2,300,7,3"])
def test_a_copy_struct_is_read_by_the_driver_as_it_was_written(gpu, tmp_path, what, monkeypatch):
    monkeypatch.setenv("GPUTAIL_SIM_LOG", str(tmp_path / "log"))
    with Caller(gpu) as caller:
        caller.start_gpu()
        planes = 3 if what.startswith("copy3d") else 1
        symbol = "cuMemcpy3D" if planes == 3 else "cuMemcpy2D"
        for name, struct in ((f"{symbol}_v2", what), (symbol, what.replace(":", "1:"))):
            assert caller.do(f"call {name} 1 {struct}")["by"][0]["failed"] == 0
        caller.do("call cuCtxSynchronize 1")
    copies = [line.split() for line in (tmp_path / "log").read_text().splitlines() if " HtoD " in line]
    assert [int(copy[6]) for copy in copies] == [300 * 7 * planes] * 2


def test_threads_and_children_call_as_themselves(caller):
    threads = caller.do("threads 4 cuStreamQuery 5 0")["by"]
    assert [by["made"] for by in threads] == [5] * 4
    assert len({by["tid"] for by in threads}) == 4 and {by["pid"] for by in threads} == {caller.pid}
    children = caller.do("fork 3 cuStreamQuery 5 0")["by"]
    assert [by["made"] for by in children] == [5] * 3
    assert len({by["pid"] for by in children} - {caller.pid}) == 3
    executed = caller.do("exec cuStreamQuery 5 0")["by"]
    assert [by["made"] for by in executed] == [5]
    assert executed[0]["pid"] != caller.pid and executed[0]["result"] == NOT_INITIALIZED


def test_a_call_can_hold_another_one_inside(caller):
    outer = caller.do("nest 3 1000000 cuStreamSynchronize 0 / cuStreamQuery 0")["by"][0]
    assert outer["made"] == 3 and outer["failed"] == 0
    assert outer["end_ns"] - outer["start_ns"] >= 3_000_000  # what it computes for inside is CPU time at the least


def test_calls_left_by_longjmp_or_by_the_threads_end_do_no_harm_to_later_ones(caller):
    assert caller.do("longjmp cuStreamSynchronize 1000 0")["by"][0]["made"] == 1000
    assert caller.do("threadexit 20 cuStreamSynchronize 0")["by"][0]["made"] == 20
    assert caller.do("call cuStreamSynchronize 1 0")["by"][0]["failed"] == 0


def test_a_held_call_returns_only_when_released(caller):
    held = caller.do("hold cuStreamSynchronize 1 0")
    during = caller.do("call cuStreamQuery 1 0")["by"][0]
    released = caller.do("release")["by"][0]
    assert released["tid"] == held["tid"] != caller.pid
    assert released["start_ns"] < during["start_ns"] < during["end_ns"] < released["end_ns"]


def test_the_library_is_opened_only_when_it_is_told_to(gpu):
    with Caller(gpu, load=False) as caller:
        assert not has_mapped(caller.pid, "libcuda.so.1")
        caller.do("load")
        assert has_mapped(caller.pid, "libcuda.so.1")


def test_what_it_cannot_do_is_said_and_does_not_end_it(caller):
    with pytest.raises(ValueError, match="no loaded library has this symbol"):
        caller.do("call cuNoSuchFunction 1")
    with pytest.raises(ValueError, match="unknown command"):
        caller.do("jump")
    with pytest.raises(ValueError, match="nothing is held"):
        caller.do("release")
    assert caller.do("call cuStreamQuery 1 0")["by"][0]["made"] == 1


def test_a_collective_of_one_rank_goes_through_the_callers_id_by_value(caller):
    caller.do("load libnccl.so.2")
    assert caller.do("call ncclCommInitRank 1 &comm 1 id:only 0")["by"][0]["failed"] == 0
    assert caller.do("call ncclAllReduce 5 0 0 1024 7 0 $comm 0")["by"][0]["failed"] == 0
    assert caller.do("call cuStreamSynchronize 1 0")["by"][0]["failed"] == 0


@pytest.mark.parametrize("streams", [[], ["per-thread"]])
def test_a_static_runtime_names_no_library_and_no_symbol_of_cuda_and_launches_all_the_same(gpu, streams):
    program = build().programs["static_runtime"]
    with program.open("rb") as file:
        elf = ELFFile(file)
        needed = [tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")]
        symbols = [symbol.name for symbol in elf.get_section_by_name(".dynsym").iter_symbols()]
    assert not [name for name in needed if "cuda" in name]
    assert not [name for name in symbols if name.startswith("cu")]
    done = subprocess.run(
        [program, "1000", *streams], input="\n", capture_output=True, text=True, env={**os.environ, "GPUTAIL_SIM_GPU": str(gpu)}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "1000"
