"""What this process may do: the capabilities that tracing needs, and what each of them is needed for.

Read from /proc; nothing is tried here.
"""

from __future__ import annotations

from pathlib import Path

from gputail.errors import GputailError

# name -> bit, from include/uapi/linux/capability.h
BITS = {"CAP_DAC_READ_SEARCH": 2, "CAP_SYS_PTRACE": 19, "CAP_SYS_ADMIN": 21, "CAP_PERFMON": 38, "CAP_BPF": 39}
NEEDED = ("CAP_BPF", "CAP_PERFMON")
# What is lost without those that tracing can do without.
WITHOUT = {
    "CAP_SYS_ADMIN": "uprobes that are attached one by one are refused by some kernels (stable ones since July 2025)",
    "CAP_DAC_READ_SEARCH": "tracefs, where it is not our own, and libraries below folders that are closed to us cannot be read",
    "CAP_SYS_PTRACE": "libraries of other users' processes cannot be found",
}


def missing(names: tuple[str, ...]) -> list[str]:
    """Which of these this process lacks. CAP_SYS_ADMIN includes CAP_BPF and CAP_PERFMON."""
    held = _effective()
    is_admin = bool(held >> BITS["CAP_SYS_ADMIN"] & 1)
    return [name for name in names if not held >> BITS[name] & 1 and not (is_admin and name in NEEDED)]


def require() -> None:
    """GputailError when a capability without which nothing can be traced is missing."""
    if lacking := missing(NEEDED):
        raise GputailError(f"cannot load BPF programs without {' and '.join(lacking)}", "run as root, or grant CAP_BPF and CAP_PERFMON")


def _effective() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0
