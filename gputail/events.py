"""Events as numpy arrays: the dtypes of the wire structs in bpf/events.h, and the batch that every stage takes.

One row of CALL is one finished driver or NCCL call, or one stretch off the CPU. Nothing here makes a Python
object per event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

NAME_BYTES = 224

CALL = np.dtype(
    [
        ("start_ns", "<u8"),
        ("duration_ns", "<u8"),
        ("handle", "<u8"),
        ("stream", "<u8"),
        ("size", "<u8"),
        ("tgid", "<u4"),
        ("tid", "<u4"),
        ("result", "<i4"),
        ("block", "<u4"),
        ("call", "<u2"),
        ("cpu", "<u2"),
        ("flags", "<u2"),
        ("depth", "u1"),
        ("reserved", "u1"),
    ]
)

NAME = np.dtype(
    [
        ("time_ns", "<u8"),
        ("handle", "<u8"),
        ("tgid", "<u4"),
        ("tid", "<u4"),
        ("kind", "<u2"),
        ("length", "<u2"),
        ("flags", "<u2"),
        ("reserved", "<u2"),
        ("text", f"V{NAME_BYTES}"),
    ]
)

# Flags of CALL rows.
AFTER_GAP = 1
ARGS_UNREAD = 2
PER_THREAD = 4
ENTRY_ONLY = 8

# Kinds and flags of NAME rows.
NAME_KERNEL = 1
NAME_THREAD = 2
NAME_TRUNCATED = 1

# Stages at which something can be lost, in the order of the kernel's counters (enum counter in bpf/events.h).
KERNEL_STAGES = (
    "ring_full",
    "in_flight_full",
    "too_deep",
    "entry_orphaned",
    "return_orphaned",
    "name_lost",
    "off_cpu_full",
    "rate_bound",
)
# Stages of user space: records that arrived after younger ones had been handed on (counted, and handed on late),
# and bytes of a ring that were no record of ours.
USER_STAGES = ("late", "malformed")
# And behind the analysis: request records that a reader who is slow or gone did not take.
OUTLET_STAGES = ("jsonl", "otlp")


def no_calls() -> np.ndarray:
    return np.empty(0, CALL)


def no_names() -> np.ndarray:
    return np.empty(0, NAME)


def end_ns(calls: np.ndarray) -> np.ndarray:
    """Return time (ns) of each row, the order in which rows travel through the program."""
    return calls["start_ns"] + calls["duration_ns"]


@dataclass(frozen=True)
class Process:
    """What is known of a traced process; None where it could not be learned (it may have ended before)."""

    tgid: int
    comm: str | None = None
    command: str | None = None
    cgroup: str | None = None
    container: str | None = None
    start_ns: int | None = None
    gpus: tuple[str, ...] | None = None  # which GPUs' device files it has open, by their numbers


@dataclass(frozen=True)
class Batch:
    """What one drain of the rings hands on. Stages keep their own state; a batch's size has no meaning.

    calls: CALL rows in order of their end; names: NAME rows; processes: news of processes; lost: what was lost
    since the batch before, by stage; watermark_ns: every call that ended before it is in this batch or an
    earlier one (late ones excepted, which are counted).
    """

    calls: np.ndarray = field(default_factory=no_calls)
    names: np.ndarray = field(default_factory=no_names)
    processes: tuple[Process, ...] = ()
    lost: Mapping[str, int] = field(default_factory=dict)
    watermark_ns: int = 0
