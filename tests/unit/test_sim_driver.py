"""The simulated driver: what its timeline says happened, as logged by itself.

Each test has a GPU of its own; programs are short Python scripts that call the libraries through ctypes, in processes of
their own. Assertions are on the logged times of the simulated GPU and on their order with what the callers saw.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gputail.discovery.elf import read_symbols
from gputail.errors import GputailError
from gputail.probes.table import CUDA, FUNCTIONS, NCCL
from gputail.sim import build as sim_build
from gputail.sim.build import Built, build, build_bare

MS = 1_000_000
INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, NOT_READY = 1, 2, 3, 600

PRELUDE = """
import ctypes, os, sys, threading, time
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
LIBRARIES = os.environ["LIBRARIES"]
cuda = ctypes.CDLL(LIBRARIES + "/libcuda.so.1")
MS, MB = 1_000_000, 1 << 20
now = time.monotonic_ns

def ok(result):
    assert result == 0, result

class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]

def load_nccl():
    nccl = ctypes.CDLL(LIBRARIES + "/libnccl.so.2")
    nccl.ncclCommInitRank.argtypes = [c_void_p, c_int, UniqueId, c_int]
    nccl.ncclAllReduce.argtypes = [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p]
    nccl.ncclSend.argtypes = nccl.ncclRecv.argtypes = [c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p]
    return nccl

def gate():  # tell the test, and wait for its word
    print("ready", flush=True)
    sys.stdin.readline()

def stream(nonblocking=True):
    handle = c_void_p()
    ok(cuda.cuStreamCreate(byref(handle), int(nonblocking)))
    return handle

def event():
    handle = c_void_p()
    ok(cuda.cuEventCreate(byref(handle), 0))
    return handle

def kernel(ns, on=None, share=1.0, name="cuLaunchKernel"):
    cost = c_uint64(int(ns))
    params = (c_void_p * 1)(ctypes.addressof(cost))
    blocks = max(1, round(132 * 2048 * share / 64))
    ok(getattr(cuda, name)(function, blocks, 1, 1, 64, 1, 1, 0, on, params, None))

def allocate(size):
    address = c_uint64()
    ok(cuda.cuMemAlloc_v2(byref(address), c_size_t(size)))
    return address

def pinned(size):
    address = c_void_p()
    ok(cuda.cuMemHostAlloc(byref(address), c_size_t(size), 0))
    return address

def init():
    global function
    ok(cuda.cuInit(0))
    module, function = c_void_p(), c_void_p()
    ok(cuda.cuModuleLoadData(byref(module), b"image"))
    ok(cuda.cuModuleGetFunction(byref(function), module, b"_Z4stepPf"))
"""


@dataclass(frozen=True)
class Op:
    """A line of the simulated GPU's log."""

    pid: int
    stream: int
    kind: str
    queued_ns: int
    start_ns: int
    end_ns: int
    work: int


class Gpu:
    """A simulated GPU of a test's own, its log, and the programs that use it."""

    def __init__(self, libraries: Path, folder: Path) -> None:
        self.log_file = folder / "log"
        self.environment = {
            **os.environ,
            "LIBRARIES": str(libraries),
            "GPUTAIL_SIM_GPU": str(folder / "gpu"),
            "GPUTAIL_SIM_LOG": str(self.log_file),
        }
        self.programs: list[subprocess.Popen[str]] = []

    def start(self, body: str) -> subprocess.Popen[str]:
        """A program that has initialised the driver; `body` goes on."""
        program = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + body], env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.programs.append(program)
        return program

    def run(self, body: str) -> list[str]:
        """Run a program to its end; the lines it printed."""
        return self.finish(self.start("init()\n" + body))

    def finish(self, program: subprocess.Popen[str]) -> list[str]:
        output, _ = program.communicate(timeout=60)
        assert program.returncode == 0
        return output.splitlines()

    def ops(self, kind: str = "kernel") -> list[Op]:
        """What ended so far, in the order of queueing."""
        lines = [line.split() for line in self.log_file.read_text().splitlines()]
        ops = [Op(int(pid), int(stream, 16), kind_, *map(int, numbers)) for pid, stream, kind_, *numbers in lines]
        return sorted((op for op in ops if op.kind == kind), key=lambda op: op.queued_ns)


def reach_gate(program: subprocess.Popen[str]) -> None:
    assert program.stdout and program.stdout.readline() == "ready\n"


def open_gate(program: subprocess.Popen[str]) -> None:
    assert program.stdin
    program.stdin.write("\n")
    program.stdin.flush()


@pytest.fixture(scope="module")
def built() -> Built:
    return build()


@pytest.fixture
def gpu(built: Built, tmp_path: Path) -> Iterator[Gpu]:
    gpu = Gpu(built.libraries, tmp_path)
    yield gpu
    for program in gpu.programs:
        program.kill()
        program.wait()


def offsets(library: Path, wanted: set[str]) -> dict[str, int]:
    """Where in the file each of the symbols that it exports begins."""
    with library.open("rb") as file:
        sites = read_symbols(file, frozenset(wanted)).sites
    return {symbol: offset for offset, site in sites.items() for symbol in site.symbols}


CASES = [(CUDA, "libcuda.so.1", bytes.fromhex("554889e5")), (NCCL, "libnccl.so.2", bytes.fromhex("f30f1efa554889e5"))]


@pytest.mark.parametrize("library, file, prologue", CASES)
def test_every_symbol_of_the_table_is_an_address_of_its_own_that_begins_as_the_real_ones_do(built, library, file, prologue):
    wanted = {symbol for function in FUNCTIONS if function.library == library for symbol in function.symbols}
    exported = offsets(built.libraries / file, wanted)
    assert wanted - set(exported) == set()
    assert len(set(exported.values())) == len(wanted)
    image = (built.libraries / file).read_bytes()
    assert {symbol for symbol in wanted if not image.startswith(prologue, exported[symbol])} == set()


def test_the_bare_libcuda_begins_as_the_real_one_does():
    library, caller = build_bare()
    image, exported = library.read_bytes(), offsets(library, {"cuLaunchKernel", "cuStreamSynchronize"})
    assert [image.startswith(bytes.fromhex("554889e5"), offset) for offset in exported.values()] == [True, True]
    assert os.access(caller, os.X_OK)


def test_the_libraries_compile_without_a_warning():
    driver = sim_build.SOURCES / "driver"
    sources = [path for path in driver.rglob("*.c")]
    command = ["cc", "-fsyntax-only", "-Werror", "-Wall", "-Wextra", f"-I{driver}", *sources]
    assert subprocess.run(command, capture_output=True, text=True).stderr == ""


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(GputailError) as error:
        build()
    assert "gcc" in error.value.hint


def test_nothing_works_before_initialisation_or_in_a_forked_child(gpu):
    lines = gpu.finish(
        gpu.start("""
handle = c_void_p()
print(cuda.cuStreamCreate(byref(handle), 0), flush=True)
init()
if os.fork() == 0:
    print(cuda.cuCtxSynchronize(), flush=True)
    os._exit(0)
os.wait()
print(cuda.cuCtxSynchronize())
""")
    )
    assert lines == [str(NOT_INITIALIZED), str(NOT_INITIALIZED), "0"]


def test_entry_points_found_by_name_are_the_exported_ones(gpu):
    lines = gpu.run("""
def find(name, version, flags=0):
    found, status = c_void_p(), c_int()
    result = cuda.cuGetProcAddress_v2(name, byref(found), version, c_uint64(flags), byref(status))
    return found.value, result, status.value

def exported(name):
    return ctypes.cast(getattr(cuda, name), c_void_p).value

print(find(b"cuLaunchKernel", 12000)[0] == exported("cuLaunchKernel"))
print(find(b"cuLaunchKernel", 12000, 2)[0] == exported("cuLaunchKernel_ptsz"))
print(find(b"cuMemcpyHtoD", 12000, 2)[0] == exported("cuMemcpyHtoD_v2_ptds"))
print(find(b"cuCtxSynchronize", 12000)[0] == exported("cuCtxSynchronize"))
print(find(b"cuCtxSynchronize", 13000)[0] == exported("cuCtxSynchronize_v2"))
print(find(b"cuNoSuchCall", 12000))
""")
    assert lines == ["True"] * 5 + ["(None, 500, 1)"]


def test_a_stream_runs_its_kernels_one_after_another_in_the_order_of_launching(gpu):
    gpu.run("""
s = stream()
for ns in (3 * MS, 1 * MS, 2 * MS):
    kernel(ns, s, share=0.1)
ok(cuda.cuStreamSynchronize(s))
""")
    first, second, third = gpu.ops()
    assert [op.end_ns - op.start_ns for op in (first, second, third)] == [3 * MS, 1 * MS, 2 * MS]
    assert (second.start_ns, third.start_ns) == (first.end_ns, second.end_ns)


TWO_STREAMS = """
a, b = stream(), stream()
kernel(20 * MS, a, share={share})
kernel(20 * MS, b, share={share})
ok(cuda.cuCtxSynchronize())
"""


def test_streams_of_one_process_overlap_when_their_shares_fit(gpu):
    gpu.run(TWO_STREAMS.format(share=0.5))
    first, second = gpu.ops()
    assert second.start_ns == second.queued_ns < first.end_ns
    assert [op.end_ns - op.start_ns for op in (first, second)] == [20 * MS, 20 * MS]


def test_streams_of_one_process_take_turns_when_their_shares_do_not_fit(gpu):
    gpu.run(TWO_STREAMS.format(share=0.6))
    first, second = gpu.ops()
    assert second.start_ns == first.end_ns


def test_kernels_of_two_processes_slow_each_other_about_twofold(gpu):
    body = "init(); gate(); kernel(60 * MS); ok(cuda.cuCtxSynchronize())"
    programs = [gpu.start(body), gpu.start(body)]
    for program in programs:
        reach_gate(program)
    for program in programs:
        open_gate(program)
    for program in programs:
        gpu.finish(program)
    first, second = gpu.ops()
    assert first.pid != second.pid
    alone_ns = second.queued_ns - first.queued_ns
    assert alone_ns < 60 * MS  # so that they met
    assert max(first.end_ns, second.end_ns) - first.start_ns == 120 * MS
    # From then on each has half the GPU, give or take the slices at both ends.
    assert first.end_ns - second.queued_ns == pytest.approx(2 * (60 * MS - alone_ns), abs=4 * MS)


def test_a_killed_process_frees_the_gpu_and_its_work_never_ends(gpu):
    hog = gpu.start("init(); kernel(100_000 * MS); gate()")
    reach_gate(hog)
    work = "kernel(10 * MS); ok(cuda.cuCtxSynchronize())"
    gpu.run(work)
    hog.kill()
    hog.wait()
    gpu.run(work)
    contended, free = gpu.ops()
    assert contended.end_ns - contended.start_ns >= 18 * MS
    assert free.end_ns - free.start_ns == 10 * MS
    assert hog.pid not in (contended.pid, free.pid)


def test_a_process_killed_at_any_moment_leaves_the_gpu_usable(gpu):
    lines = gpu.finish(
        gpu.start("""
import signal
for i in range(40):
    child = os.fork()
    if child == 0:
        init()
        while True:
            kernel(1000, share=0.01)
            ok(cuda.cuStreamQuery(None) % 600)
    time.sleep(0.003 + i * 0.0001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
init()
kernel(10 * MS)
ok(cuda.cuCtxSynchronize())
print(os.getpid())
""")
    )
    (own,) = [op for op in gpu.ops() if op.pid == int(lines[0])]
    assert own.end_ns - own.start_ns >= 10 * MS  # longer where the last of the killed had left something on the GPU


def test_lines_of_the_log_that_could_not_be_written_whole_leave_nothing_of_themselves(gpu):
    few = "for _ in range(30): kernel(1000)\nok(cuda.cuCtxSynchronize())"
    gpu.run(few)
    size = gpu.log_file.stat().st_size
    gpu.run(f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({size + 10}, {size + 10}))
{few}""")
    assert gpu.log_file.stat().st_size == size
    gpu.run(few)
    assert len(gpu.ops()) == 60


def test_the_legacy_default_stream_waits_for_blocking_streams_and_they_for_it(gpu):
    lines = gpu.run("""
a, b, free = stream(False), stream(False), stream()
for s in (a, None, b, free):
    kernel(10 * MS, s, share=0.1)
ok(cuda.cuCtxSynchronize())
print(a.value, b.value, free.value)
""")
    a, b, free = map(int, lines[0].split())
    by_stream = {op.stream: op for op in gpu.ops()}
    assert by_stream[0].start_ns == by_stream[a].end_ns
    assert by_stream[b].start_ns == by_stream[0].end_ns
    assert by_stream[free].start_ns == by_stream[free].queued_ns


def test_stream_0_of_the_per_thread_symbols_is_the_threads_own(gpu):
    gpu.run("""
kernel(10 * MS, None, 0.1, "cuLaunchKernel_ptsz")
thread = threading.Thread(target=lambda: (kernel(10 * MS, None, 0.1, "cuLaunchKernel_ptsz"), ok(cuda.cuStreamSynchronize_ptsz(None))))
thread.start()
thread.join()
ok(cuda.cuStreamSynchronize_ptsz(None))
""")
    first, second = gpu.ops()
    assert 0 != first.stream != second.stream != 0
    assert second.start_ns == second.queued_ns


@pytest.mark.parametrize("call", ["cuCtxSynchronize()", "cuCtxSynchronize_v2(None)", "cuMemFree_v2(memory)"])
def test_device_wide_calls_wait_for_all_streams(gpu, call):
    lines = gpu.run(f"""
memory = allocate(MB)
for ns in (5, 30, 10):
    kernel(ns * MS, stream(), share=0.2)
ok(cuda.{call})
print(now())
""")
    assert len(gpu.ops()) == 3
    assert int(lines[0]) >= max(op.end_ns for op in gpu.ops())


def test_a_stream_is_waited_for_alone(gpu):
    lines = gpu.run("""
long, short = stream(), stream()
kernel(2000 * MS, long, share=0.2)
kernel(1 * MS, short, share=0.2)
ok(cuda.cuStreamSynchronize(short))
print(cuda.cuStreamQuery(short), cuda.cuStreamQuery(long))
""")
    assert lines == [f"0 {NOT_READY}"]


def test_a_launch_blocks_while_its_streams_queue_is_full(gpu):
    gpu.run("""
s = stream()
kernel(30 * MS, s)
for _ in range(1024):
    kernel(1000, s)
ok(cuda.cuStreamSynchronize(s))
""")
    ops = gpu.ops()
    assert len(ops) == 1025
    assert ops[1023].queued_ns < ops[0].end_ns <= ops[1024].queued_ns


def test_pinned_copies_go_at_the_buss_speed_and_pageable_ones_at_the_staging_buffers(gpu):
    gpu.run("""
device, host, buffer = allocate(64 * MB), pinned(64 * MB), ctypes.create_string_buffer(8 * MB)
ok(cuda.cuMemcpyHtoD_v2(device, host, c_size_t(8_000_000)))
ok(cuda.cuMemcpyHtoD_v2(device, buffer, c_size_t(8_000_000)))
ok(cuda.cuMemcpyDtoH_v2(host, device, c_size_t(8_000_000)))
ok(cuda.cuMemcpyDtoH_v2(buffer, device, c_size_t(8_000_000)))
ok(cuda.cuMemHostRegister_v2(buffer, c_size_t(8_000_000), 0))
ok(cuda.cuMemcpyDtoH_v2(buffer, device, c_size_t(8_000_000)))
ok(cuda.cuCtxSynchronize())
""")
    times_ns = [[op.end_ns - op.start_ns for op in gpu.ops(kind)] for kind in ("HtoD", "DtoH")]
    assert times_ns == [[320_000, 1_000_000], [320_000, 1_000_000, 320_000]]


def test_copies_of_one_direction_share_the_bus_and_those_of_the_other_do_not(gpu):
    gpu.run("""
device, host, streams = allocate(64 * MB), pinned(64 * MB), [stream() for _ in range(3)]
ready = event()
kernel(20 * MS, streams[0])
ok(cuda.cuEventRecord(ready, streams[0]))
for s in streams:
    ok(cuda.cuStreamWaitEvent(s, ready, 0))
for s in streams[:2]:
    ok(cuda.cuMemcpyHtoDAsync_v2(device, host, c_size_t(25_000_000), s))
ok(cuda.cuMemcpyDtoHAsync_v2(host, device, c_size_t(25_000_000), streams[2]))
ok(cuda.cuCtxSynchronize())
""")
    ready_ns = gpu.ops()[0].end_ns
    spans = [[(op.start_ns - ready_ns, op.end_ns - ready_ns) for op in gpu.ops(kind)] for kind in ("HtoD", "DtoH")]
    assert spans == [[(0, 2 * MS), (0, 2 * MS)], [(0, 1 * MS)]]


def test_only_pageable_copies_block_the_caller_and_small_ones_to_the_device_do_not(gpu):
    lines = gpu.run("""
device, host, buffer, s = allocate(64 * MB), pinned(MB), ctypes.create_string_buffer(MB), stream()
def copy(name, *arguments):
    kernel(40 * MS, s)
    ok(getattr(cuda, name)(*arguments, s))
    print(name, cuda.cuStreamQuery(s))
    ok(cuda.cuStreamSynchronize(s))
copy("cuMemcpyHtoDAsync_v2", device, host, c_size_t(MB))
copy("cuMemcpyDtoHAsync_v2", host, device, c_size_t(MB))
copy("cuMemcpyHtoDAsync_v2", device, buffer, c_size_t(65536))
copy("cuMemcpyDtoHAsync_v2", buffer, device, c_size_t(65536))
kernel(40 * MS, s)
ok(cuda.cuMemcpyHtoDAsync_v2(device, buffer, c_size_t(MB), s))
print(now())
""")
    assert lines[:4] == [
        f"cuMemcpyHtoDAsync_v2 {NOT_READY}", f"cuMemcpyDtoHAsync_v2 {NOT_READY}", f"cuMemcpyHtoDAsync_v2 {NOT_READY}",
        "cuMemcpyDtoHAsync_v2 0",
    ]  # fmt: skip
    assert int(lines[4]) >= gpu.ops()[-1].end_ns  # the last copy had to wait for a buffer


def test_copies_within_the_device_and_memsets_run_as_kernels(gpu):
    gpu.run("""
device, s = allocate(64 * MB), stream()
kernel(20 * MS, stream())
ok(cuda.cuMemcpyDtoDAsync_v2(device, device, c_size_t(32_000_000), s))
ok(cuda.cuMemsetD32Async(device, 0, c_size_t(8_000_000), s))
ok(cuda.cuCtxSynchronize())
""")
    kernel, copy, memset = gpu.ops()[0], gpu.ops("DtoD")[0], gpu.ops("memset")[0]
    assert (copy.start_ns, memset.start_ns) == (kernel.end_ns, copy.end_ns)
    assert [op.end_ns - op.start_ns for op in (copy, memset)] == [17_000, 17_000]


def test_events_order_streams_and_tell_the_time_between_them(gpu):
    lines = gpu.run("""
a, b, start, end = stream(), stream(), event(), event()
print(cuda.cuEventQuery(start))
ok(cuda.cuEventRecord(start, a))
kernel(20 * MS, a, share=0.2)
ok(cuda.cuEventRecordWithFlags(end, a, 0))
ok(cuda.cuStreamWaitEvent(b, end, 0))
kernel(1 * MS, b, share=0.2)
print(cuda.cuEventQuery(end))
ok(cuda.cuEventSynchronize(end))
print(cuda.cuEventQuery(end))
elapsed = ctypes.c_float()
ok(cuda.cuEventElapsedTime(byref(elapsed), start, end))
print(elapsed.value >= 20)
ok(cuda.cuCtxSynchronize())
""")
    first, second = gpu.ops()
    assert second.start_ns == first.end_ns
    assert lines == ["0", str(NOT_READY), "0", "True"]


def test_a_recorded_graph_runs_only_when_launched_and_takes_the_sum_of_its_nodes(gpu):
    gpu.run("""
s, side, fork, join = stream(), stream(), event(), event()
graph, executable = c_void_p(), c_void_p()
ok(cuda.cuStreamBeginCapture_v2(s, 0))
kernel(2 * MS, s)
ok(cuda.cuEventRecord(fork, s))
ok(cuda.cuStreamWaitEvent(side, fork, 0))
kernel(3 * MS, side)
ok(cuda.cuEventRecord(join, side))
ok(cuda.cuStreamWaitEvent(s, join, 0))
ok(cuda.cuStreamEndCapture(s, byref(graph)))
ok(cuda.cuGraphInstantiateWithFlags(byref(executable), graph, c_uint64(0)))
for _ in range(2):
    ok(cuda.cuGraphLaunch(executable, s))
kernel(1 * MS, side)
ok(cuda.cuCtxSynchronize())
""")
    assert [op.end_ns - op.start_ns for op in gpu.ops("graph")] == [5 * MS, 5 * MS]
    assert len(gpu.ops()) == 1


def test_a_graph_of_kernel_nodes_takes_the_sum_of_its_nodes(gpu):
    gpu.run("""
class Node(ctypes.Structure):
    _fields_ = [("function", c_void_p), ("shape", ctypes.c_uint * 7), ("params", c_void_p), ("extra", c_void_p)]
graph, executable, node = c_void_p(), c_void_p(), c_void_p()
ok(cuda.cuGraphCreate(byref(graph), 0))
for ns in (2 * MS, 4 * MS):
    cost = c_uint64(ns)
    params = (c_void_p * 1)(ctypes.addressof(cost))
    about = Node(function, (ctypes.c_uint * 7)(1, 1, 1, 32, 1, 1, 0), ctypes.addressof(params))
    ok(cuda.cuGraphAddKernelNode_v2(byref(node), graph, None, c_size_t(0), byref(about)))
ok(cuda.cuGraphInstantiate_v2(byref(executable), graph, None, None, c_size_t(0)))
ok(cuda.cuGraphLaunch(executable, None))
ok(cuda.cuCtxSynchronize())
""")
    assert [op.end_ns - op.start_ns for op in gpu.ops("graph")] == [6 * MS]


def test_memory_runs_out_and_is_freed_only_once(gpu):
    lines = gpu.run("""
address, small = c_uint64(), allocate(MB)
print(cuda.cuMemAlloc_v2(byref(address), c_size_t(80 << 30)))
print(cuda.cuMemFree_v2(small), cuda.cuMemFree_v2(small))
""")
    assert lines == [str(OUT_OF_MEMORY), f"0 {INVALID_VALUE}"]


def test_a_function_has_one_handle_by_name_and_carries_the_name_at_offset_8(gpu):
    lines = gpu.run("""
library, again, other = c_void_p(), c_void_p(), c_void_p()
ok(cuda.cuLibraryLoadData(byref(library), b"image", None, None, 0, None, None, 0))
handles = [c_void_p() for _ in range(3)]
for handle, name in zip(handles, (b"_Z1av", b"_Z1av", b"_Z1bv")):
    ok(cuda.cuLibraryGetKernel(byref(handle), library, name))
print(handles[0].value == handles[1].value, handles[0].value == handles[2].value)
print(ctypes.c_char_p.from_address(handles[2].value + 8).value.decode())
""")
    assert lines == ["True False", "_Z1bv"]


RANK = """
init()
nccl, comm, unique = load_nccl(), c_void_p(), UniqueId.from_buffer_copy(b"{id}".ljust(128, b"x"))
ok(nccl.ncclCommInitRank(byref(comm), 2, unique, {rank}))
s = stream()
{body}
ok(cuda.cuStreamSynchronize(s))
ok(nccl.ncclCommDestroy(comm))
"""


def run_ranks(gpu: Gpu, *bodies: str) -> list[int]:
    """Run both ranks of a communicator to their end; their pids."""
    programs = [gpu.start(RANK.format(id="ranks", rank=rank, body=body)) for rank, body in enumerate(bodies)]
    for program in programs:
        gpu.finish(program)
    return [program.pid for program in programs]


def test_a_collective_waits_for_the_late_rank(gpu):
    reduce = "ok(nccl.ncclAllReduce(None, None, 250_000, 7, 0, comm, s))\n"
    _, late = run_ranks(gpu, reduce, "kernel(40 * MS, s)\n" + reduce)
    first, second = gpu.ops("collective")
    (kernel,) = gpu.ops()
    assert kernel.pid == late
    assert first.start_ns == second.start_ns >= kernel.end_ns
    # 250,000 floats at 100 GB/s and the 20 us of a start
    assert [op.end_ns - op.start_ns for op in (first, second)] == [30_000, 30_000]


def test_collectives_match_in_the_order_of_calling(gpu):
    run_ranks(gpu, *["for count in (25_000, 50_000, 75_000):\n    ok(nccl.ncclAllReduce(None, None, count, 7, 0, comm, s))\n"] * 2)
    times_ns: dict[int, list[int]] = {}
    for op in gpu.ops("collective"):
        times_ns.setdefault(op.pid, []).append(op.end_ns - op.start_ns)
    assert list(times_ns.values()) == [[21_000, 22_000, 23_000]] * 2


def test_sends_and_receives_of_a_group_do_not_wait_for_each_other_in_turn(gpu):
    exchange = """
ok(nccl.ncclGroupStart())
ok(nccl.ncclSend(None, 1000, 0, {peer}, comm, s))
ok(nccl.ncclRecv(None, 1000, 0, {peer}, comm, s))
ok(nccl.ncclGroupEnd())
"""
    run_ranks(gpu, exchange.format(peer=1), exchange.format(peer=0))
    assert (len(gpu.ops("send")), len(gpu.ops("recv"))) == (2, 2)


def test_an_aborted_communicator_lets_its_work_end(gpu):
    abort = """
ok(nccl.ncclAllReduce(None, None, 1, 7, 0, comm, s))
ok(nccl.ncclCommAbort(comm))
ok(cuda.cuStreamSynchronize(s))
os._exit(0)
"""
    run_ranks(gpu, abort, "os._exit(0)")
    assert len(gpu.ops("collective")) == 1


def test_a_split_communicator_holds_the_ranks_of_one_colour(gpu):
    split = """
part, rank = c_void_p(), c_int()
ok(nccl.ncclCommSplit(comm, 0, {key}, byref(part), None))
ok(nccl.ncclCommUserRank(part, byref(rank)))
assert rank.value == {rank}
ok(nccl.ncclAllReduce(None, None, 1, 7, 0, part, s))
alone = c_void_p()
ok(nccl.ncclCommSplit(comm, {key}, 0, byref(alone), None))
ok(nccl.ncclAllReduce(None, None, 1, 7, 0, alone, s))
"""
    run_ranks(gpu, split.format(key=7, rank=1), split.format(key=5, rank=0))
    assert len(gpu.ops("collective")) == 4
