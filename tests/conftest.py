"""Live tests need root and eBPF, those of tests/fleet Prometheus: without they are skipped, or fail if GPUTAIL_LIVE_TESTS=1."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import platform
import shutil
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

# A shell that starts the tests in the background has it ignored, and so would the programs that they interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

LIVE = Path(__file__).parent / "live"
FLEET = Path(__file__).parent / "fleet"
MUST_RUN = os.environ.get("GPUTAIL_LIVE_TESTS") == "1"
BPF_SYSCALL = {"x86_64": 321, "aarch64": 280}
BPF_MAP_CREATE, BPF_MAP_TYPE_ARRAY = 0, 2


@functools.cache
def missing_for_live() -> str:
    """What this machine lacks for tracing with eBPF, or ""."""
    if os.geteuid() != 0:
        return "not root"
    if importlib.util.find_spec("bcc") is None:
        return "no bcc for this python (distribution package python3-bpfcc)"
    if shutil.which("cc") is None:
        return "no C compiler (package gcc)"
    if not Path("/sys/bus/event_source/devices/uprobe").exists():
        return "this kernel has no uprobes (CONFIG_UPROBE_EVENTS)"
    number = BPF_SYSCALL.get(platform.machine())
    if number is not None:
        libc = ctypes.CDLL(None, use_errno=True)
        attributes = (ctypes.c_uint32 * 16)(BPF_MAP_TYPE_ARRAY, 4, 8, 1)
        descriptor = libc.syscall(number, BPF_MAP_CREATE, attributes, ctypes.sizeof(attributes))
        if descriptor < 0:
            return f"bpf(2) is refused: {os.strerror(ctypes.get_errno())}"
        os.close(descriptor)
    return ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    if LIVE in item.path.parents and (missing := missing_for_live()):
        pytest.skip(f"live test: {missing}")


def _fail_if_skipped(report: pytest.TestReport | pytest.CollectReport, path: Path) -> None:
    if MUST_RUN and report.skipped and not hasattr(report, "wasxfail") and {LIVE, FLEET} & set(path.parents):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"GPUTAIL_LIVE_TESTS=1 and yet not run: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _fail_if_skipped(report, item.path)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if isinstance(collector, pytest.File):
        _fail_if_skipped(report, collector.path)
    return report
