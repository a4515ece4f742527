"""`gputail check`: can this node be traced, and what is missing.

Each finding is tried for real where that is cheap: the program is compiled and loaded, not guessed at from a version.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from gputail.discovery.processes import Scanner
from gputail.errors import GputailError
from gputail.probes import capabilities, syscalls
from gputail.probes.kernel import Kernel, KernelOptions, bcc_version, tracefs

OK, MISSING, NOTE = "ok", "missing", "note"


@dataclass(frozen=True)
class Finding:
    """One thing looked at: `state` is ok, missing (tracing cannot work) or note (it works with a limit)."""

    what: str
    state: str
    detail: str
    hint: str = ""


def run(as_json: bool) -> int:
    """Print the findings; 1 when something that tracing needs is missing."""
    findings = [finding for look in (_machine, _capabilities, _uprobes, _tracefs, _bcc, _program, _links, _processes) for finding in look()]
    fine = all(finding.state != MISSING for finding in findings)
    if as_json:
        print(json.dumps({"can_trace": fine, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        for finding in findings:
            print(f"{finding.state:8} {finding.what:14} {finding.detail}")
            if finding.hint:
                print(f"{'':8} {'':14} -> {finding.hint}")
        print("this node can be traced" if fine else "this node cannot be traced yet")
    sys.stdout.flush()
    return 0 if fine else 1


def _machine() -> list[Finding]:
    name = f"Linux {platform.release()} on {platform.machine()}"
    if platform.machine() in ("x86_64", "aarch64"):
        return [Finding("machine", OK, name)]
    return [Finding("machine", MISSING, f"{name}: only x86-64 and arm64 are supported")]


def _capabilities() -> list[Finding]:
    findings = [
        Finding("capabilities", NOTE, f"without {name}: {loss}", "run as root: sudo gputail check")
        for name, loss in capabilities.WITHOUT.items()
        if capabilities.missing((name,))
    ]
    if lacking := capabilities.missing(capabilities.NEEDED):
        findings.append(Finding("capabilities", MISSING, f"without {' and '.join(lacking)}", "run as root: sudo gputail check"))
    return findings or [Finding("capabilities", OK, "all that tracing needs" + (" (root)" if os.geteuid() == 0 else ""))]


def _uprobes() -> list[Finding]:
    if Path("/sys/bus/event_source/devices/uprobe").exists():
        return [Finding("uprobes", OK, "the kernel has them")]
    return [Finding("uprobes", MISSING, "this kernel was built without", "use a kernel with CONFIG_UPROBE_EVENTS and CONFIG_BPF_EVENTS")]


def _tracefs() -> list[Finding]:
    return _tried("tracefs", lambda: str(tracefs()))


def _bcc() -> list[Finding]:
    return _tried("bcc", lambda: f"version {bcc_version()}")


def _program() -> list[Finding]:
    def load() -> str:
        kernel = Kernel(KernelOptions(max_threads=64), per_symbol={"cuda": [1, 2], "nccl": [3]})
        try:
            for name in ("leave", "cuda_enter_0", "cuda_enter_1", "nccl_enter_0"):
                kernel.program(name, "uprobe")
        finally:
            kernel.close()
        return "compiled without kernel headers, and loaded"

    return _tried("BPF program", load)


def _links() -> list[Finding]:
    if syscalls.has_uprobe_multi():
        return [Finding("uprobe_multi", OK, "probes are attached and detached all at once")]
    detail = "not in this kernel: probes are attached one by one, and taking them off goes on in the background for a while"
    return [Finding("uprobe_multi", NOTE, detail, "Linux 6.6 or newer has it")]


def _processes() -> list[Finding]:
    scan = Scanner().scan()
    found = [Finding("library", OK, f"{library.path} ({_pids(library.pids)})") for library in scan.libraries]
    found += [Finding("library", NOTE, f"{refused.path} of pid {refused.pid} is not traced: {refused.reason}") for refused in scan.refused]
    return found or [Finding("library", NOTE, "no process has libcuda or libnccl mapped now; they are traced as they come")]


def _pids(pids: frozenset[int]) -> str:
    return f"pid {min(pids)}" + (f" and {len(pids) - 1} more" if len(pids) > 1 else "")


def _tried(what: str, attempt: Callable[[], str]) -> list[Finding]:
    try:
        return [Finding(what, OK, attempt())]
    except GputailError as error:
        return [Finding(what, MISSING, error.problem, error.hint)]
    except OSError as error:
        return [Finding(what, MISSING, str(error))]
