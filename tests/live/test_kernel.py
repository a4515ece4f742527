"""The BPF program compiles, loads and says what is wrong where it cannot: field cases 1 to 3, and 45."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gputail import paths
from gputail.errors import GputailError
from gputail.probes import kernel as kernel_module
from gputail.probes import syscalls
from gputail.probes.kernel import Kernel, KernelOptions

PROGRAMS = {
    "cuda_enter": "uprobe_multi",
    "nccl_enter": "uprobe_multi",
    "leave": "uprobe_multi",
    "sched_switch": "tracepoint",
    "sched_wakeup": "tracepoint",
    "sched_process_exit": "tracepoint",
    "sched_process_exec": "tracepoint",
    "sched_process_fork": "tracepoint",
}
# With this much stack a program gets a per-CPU "private" one since Linux 6.13, which a preempted uprobe would share.
PRIVATE_STACK_BYTES = 64


def stack_bytes(program: bytes) -> int:
    """How deep a program's instructions reach below r10, the frame pointer: stores, loads, and addresses taken."""
    deepest = 0
    for at in range(0, len(program), 8):
        code, registers = program[at], program[at + 1]
        offset = int.from_bytes(program[at + 2 : at + 4], "little", signed=True)
        constant = int.from_bytes(program[at + 4 : at + 8], "little", signed=True)
        kind, destination, source = code & 7, registers & 15, registers >> 4
        if (kind in (2, 3) and destination == 10) or (kind == 1 and source == 10):
            deepest = max(deepest, -offset)
        if code == 0x07 and -512 <= constant < 0:  # rN += constant, as in "address of a variable on the stack"
            deepest = max(deepest, -constant)
    return deepest


@pytest.mark.parametrize("only_targets", [False, True])
def test_every_program_loads_and_needs_less_stack_than_makes_it_private(only_targets):
    kernel = Kernel(KernelOptions(only_targets=only_targets))
    for name, kind in PROGRAMS.items():
        if name == "sched_process_fork" and not only_targets:
            continue
        assert kernel.program(name, kind) > 0
        start = kernel._bcc.lib.bpf_function_start(kernel._bpf.module, name.encode())
        size = kernel._bcc.lib.bpf_function_size(kernel._bpf.module, name.encode())
        assert 0 < stack_bytes(ctypes.string_at(start, size)) < PRIVATE_STACK_BYTES, name
    kernel.close()


def test_why_the_verifier_refuses_a_program_is_in_the_error():
    exit_without_a_result = bytes([0x95, 0, 0, 0, 0, 0, 0, 0])
    with pytest.raises(OSError, match="(?s)cannot load a BPF program.*R0 !read_ok"):
        syscalls.load_uprobe_multi(b"no_result", exit_without_a_result)


def test_a_closed_kernel_leaves_no_descriptor_behind():
    before = set(os.listdir("/proc/self/fd"))
    kernel = Kernel(KernelOptions(max_threads=64))
    kernel.program("leave", "uprobe_multi")
    assert set(os.listdir("/proc/self/fd")) > before
    kernel.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_it_compiles_where_no_kernel_headers_are_to_be_found(monkeypatch):
    monkeypatch.setenv("BCC_KERNEL_SOURCE", "/nonexistent")
    kernel = Kernel(KernelOptions())
    assert os.environ["BCC_KERNEL_SOURCE"] == str(paths.bpf_sources() / "kernel")
    assert kernel.counts() == dict.fromkeys(kernel_module.KERNEL_STAGES, 0)
    kernel.close()


def test_a_compiler_error_names_both_versions_and_keeps_the_messages(monkeypatch, tmp_path):
    broken = tmp_path / "bpf"
    shutil.copytree(paths.bpf_sources(), broken)
    with (broken / "nccl.c").open("a") as source:
        source.write("\nthis is no C;\n")
    monkeypatch.setattr(kernel_module, "bpf_sources", lambda: broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(GputailError) as caught:
        Kernel(KernelOptions())
    assert f"BCC {kernel_module.bcc_version()}" in caught.value.problem
    assert f"Linux {os.uname().release}" in caught.value.problem
    log = re.search(r"/\S+\.log", caught.value.problem)
    assert log and "this is no C" in Path(log[0]).read_text()


def test_what_the_compiler_says_does_not_end_up_in_our_output(tmp_path):
    (tmp_path / "bpf").mkdir()
    for name in kernel_module.PARTS:
        (tmp_path / "bpf" / name).write_text("this is no C;")
    code = f"""if True:
        from pathlib import Path
        from gputail.errors import GputailError
        from gputail.probes import kernel
        kernel.bpf_sources = lambda: Path({str(tmp_path / "bpf")!r})
        try:
            kernel.Kernel(kernel.KernelOptions())
        except GputailError as error:
            print(error.problem)
    """
    ran = run_python(code)
    assert re.fullmatch(r"BCC .* cannot compile .*\.log\n", ran.stdout), ran.stdout
    assert ran.stderr == ""


def run_python(code: str, *folders: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": ":".join(map(str, [*folders, Path(paths.__file__).parent.parent]))}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_an_unrelated_bcc_is_told_apart_and_named(tmp_path):
    (tmp_path / "bcc.py").write_text("x = 1\n")
    done = run_python("from gputail.cli import main; raise SystemExit(main(['run', '--listen', 'off']))", tmp_path)
    assert done.returncode == 1
    assert str(tmp_path / "bcc.py") in done.stderr
    assert "python3-bpfcc" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_bcc_one_line_says_which_package_to_install(tmp_path):
    code = "import sys; sys.modules['bcc'] = None; from gputail.cli import main; raise SystemExit(main(['run', '--listen', 'off']))"
    done = run_python(code)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 2  # the problem and the hint
    assert "python3-bpfcc" in done.stderr
