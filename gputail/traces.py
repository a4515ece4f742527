"""Labelled traces (.npz) as batches: recordings in another format than gputail's own, read into the same rows.

In: a file with the arrays described by `ARRAYS`. Out: `events.Batch`es whose rows have the numbers of
probes/table.py, in order of their end. What is injected where, and what the traced program logged, is left to
those who score: the analysis must not see it.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gputail import events
from gputail.errors import GputailError
from gputail.probes import table

ARRAYS = ("events", "apis", "victim", "aggressor")
EVENT_FIELDS = ("ts", "dur", "func", "stream", "bytes", "pid", "tid", "api", "ret", "grid", "block", "cpu")
OFF_CPU_NAME = "offcpu"

# What a trace may expand to; a file that claims more is refused before anything is read.
MAX_BYTES = 4 << 30
MAX_NAMES = 65536
MAX_TIME_NS = 1 << 60
BATCH_ROWS = 65536

_HINT = "a trace is an .npz file with the arrays " + ", ".join(ARRAYS)


@dataclass(frozen=True)
class Trace:
    """calls: CALL rows in order of their end; names: NAME rows; lost: records lost while recording, by stage."""

    calls: np.ndarray
    names: np.ndarray
    tgids: tuple[int, ...]
    lost: dict[str, int]


def load(path: str | Path) -> Trace:
    """Read a trace. GputailError where it cannot be opened, is truncated, or is some other file."""
    try:
        with zipfile.ZipFile(path) as archive:
            expands_to = sum(member.file_size for member in archive.infolist())
        if expands_to > MAX_BYTES:
            raise GputailError(f"cannot read {path}: it would expand to {expands_to} bytes", f"at most {MAX_BYTES} are read")
        with np.load(path, allow_pickle=False) as data:
            missing = [name for name in ARRAYS if name not in data.files]
            if missing:
                raise GputailError(f"cannot read {path}: it has no array {', '.join(missing)}", _HINT)
            rows = data["events"]
            numbers = json.loads(str(data["apis"]))
            names = json.loads(str(data["names"])) if "names" in data.files else []
            lost = int(data["lost"]) if "lost" in data.files else 0
            tgids = tuple(sorted({int(data["victim"]), int(data["aggressor"])} - {0}))
        return _trace(rows, numbers, names, lost, tgids)
    except GputailError as error:
        if str(path) not in error.problem:
            raise GputailError(f"cannot read {path}: {error.problem}", error.hint) from error
        raise
    except FileNotFoundError as error:
        raise GputailError(f"cannot read {path}: no such file") from error
    except OSError as error:
        raise GputailError(f"cannot read {path}: {error.strerror or error}") from error
    except (zipfile.BadZipFile, EOFError, ValueError, TypeError, LookupError, RecursionError, NotImplementedError, MemoryError) as error:
        raise GputailError(f"cannot read {path}: not a trace, or truncated ({error})", _HINT) from error
    except Exception as error:  # zlib.error and what numpy's header parser raises on hostile bytes
        raise GputailError(f"cannot read {path}: not a trace, or truncated ({type(error).__name__}: {error})", _HINT) from error


def batches(trace: Trace, rows: int = BATCH_ROWS) -> Iterator[events.Batch]:
    """The trace as a stream of batches of at most `rows` rows."""
    calls = trace.calls
    ends = events.end_ns(calls)
    processes = tuple(events.Process(tgid) for tgid in trace.tgids)
    for first in range(0, max(len(calls), 1), rows):
        part = calls[first : first + rows]
        last = first + rows >= len(calls)
        watermark = (int(ends[-1]) + 1 if len(ends) else 0) if last else int(ends[first + len(part) - 1])
        yield events.Batch(
            calls=part,
            names=trace.names if first == 0 else events.no_names(),
            processes=processes if first == 0 else (),
            lost=trace.lost if first == 0 else {},
            watermark_ns=watermark,
        )


def _trace(rows: np.ndarray, numbers: object, names: object, lost: int, tgids: tuple[int, ...]) -> Trace:
    if rows.dtype.names is None or any(name not in rows.dtype.names for name in EVENT_FIELDS) or rows.ndim != 1:
        raise GputailError("its events are not rows of " + ", ".join(EVENT_FIELDS), _HINT)
    if not isinstance(numbers, dict) or not isinstance(names, list):
        raise GputailError("its apis or names are not what a trace holds", _HINT)
    if len(rows) and max(int(rows["ts"].max()), int(rows["dur"].max())) >= MAX_TIME_NS:
        raise GputailError("its times are no CLOCK_MONOTONIC nanoseconds", _HINT)
    to_ours = np.zeros(65536, np.uint16)
    for symbol, number in numbers.items():
        if not isinstance(number, int) or not 0 <= number < len(to_ours):
            raise GputailError(f"its number for {symbol[:64]!r} is no small integer", _HINT)
        if symbol == OFF_CPU_NAME:
            to_ours[number] = table.OFF_CPU_CALL
        elif symbol in table.BY_SYMBOL:
            to_ours[number] = table.BY_SYMBOL[symbol].number
    call = to_ours[np.minimum(rows["api"], len(to_ours) - 1)]
    unknown = int((call == 0).sum())
    rows, call = rows[call != 0], call[call != 0]
    calls = np.zeros(len(rows), events.CALL)
    is_launch = rows["grid"] > 0
    calls["start_ns"], calls["duration_ns"] = rows["ts"], rows["dur"]
    calls["handle"], calls["stream"] = rows["func"], rows["stream"]
    calls["size"] = np.where(is_launch, rows["grid"], rows["bytes"])
    calls["tgid"], calls["tid"] = rows["pid"], rows["tid"]
    calls["result"], calls["block"] = rows["ret"], rows["block"]
    calls["call"], calls["cpu"] = call, rows["cpu"]
    # Of two that end together the inner one, which began later, was recorded first.
    order = np.lexsort((np.iinfo(np.uint64).max - calls["start_ns"], events.end_ns(calls)))
    calls = calls[order]
    calls["depth"] = _depths(calls)
    return Trace(calls, _names(names), tgids, {stage: n for stage, n in (("ring_full", lost), ("unknown_function", unknown)) if n})


def _depths(calls: np.ndarray) -> np.ndarray:
    """1 for each call made inside another one of the same thread, else 0: traces do not record it."""
    depths = np.zeros(len(calls), np.uint8)
    of_calls = np.flatnonzero(calls["call"] != table.OFF_CPU_CALL)
    starts = calls["start_ns"][of_calls]
    tids = calls["tid"][of_calls]
    for tid in np.unique(tids):
        mine = of_calls[tids == tid]
        begin = starts[tids == tid]
        # Rows are in order of their end, so a later row that began no later encloses this one.
        later_begin = np.minimum.accumulate(begin[::-1])[::-1]
        depths[mine[:-1][later_begin[1:] <= begin[:-1]]] = 1
    return depths


def _names(names: list) -> np.ndarray:
    rows = np.zeros(min(len(names), MAX_NAMES), events.NAME)
    for row, entry in zip(rows, names, strict=False):
        handle, tgid, text = int(entry[0]), int(entry[1]), str(entry[2])
        if not (0 <= handle < 1 << 64 and 0 <= tgid < 1 << 32):
            raise GputailError("its names hold no handles and pids", _HINT)
        raw = text.encode(errors="replace")[: events.NAME_BYTES]
        row["handle"], row["tgid"], row["kind"] = handle, tgid, events.NAME_KERNEL
        row["length"], row["text"] = len(raw), raw
        row["flags"] = events.NAME_TRUNCATED if len(raw) < len(text.encode(errors="replace")) else 0
    return rows
