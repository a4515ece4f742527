"""A wait, for all streams of the device or of the legacy default stream, for work that is not the request's own."""

from __future__ import annotations

import numpy as np

from gputail.attribution.case import Case, Claim
from gputail.attribution.outstanding import union_ns
from gputail.budget import C_COPY, C_GRAPH, C_HTOD, C_LAUNCH, C_SYNC, NUMBERS
from gputail.probes import table

CAUSE = "blocking_sync"
_DEVICE_WIDE = np.zeros(NUMBERS, bool)
_DEVICE_WIDE[[function.number for function in table.FUNCTIONS if function.waits_for == "device"]] = True
DEFAULT_STREAM = 0
LATEST = 5  # usual requests that tell whether such waits are usual


def claims(case: Case) -> list[Claim]:
    """The time of such waits during which the streams that they wait for had work outstanding.

    Work on the legacy default stream waits for that of every stream that was not created as non-blocking, as CUDA
    defines it; of a stream whose creation was not seen it is not believed.
    """
    wide = case.own[_DEVICE_WIDE[case.own["call"]]]
    siblings = [work for work in case.siblings if work.overlap_ns(case.request.start_ns, case.request.end_ns)]
    if len(wide) and siblings:
        return _claim(case, wide, siblings, "")
    if len(wide) and not case.request.are_launches_seen:
        return _claim_unseen(case, wide)
    blocking = [work for work in siblings if case.streams.is_blocking(work.tgid, work.stream)]
    if not blocking:
        return []
    kind = case.own_class
    uses = (kind == C_LAUNCH) | (kind == C_GRAPH) | ((kind >= C_HTOD) & (kind <= C_COPY))
    on_default = case.own["stream"] == DEFAULT_STREAM
    if not (uses & on_default).any():
        return []
    waits = case.own[on_default & ((kind == C_SYNC) | ((kind >= C_HTOD) & (kind <= C_COPY)))]
    return _claim(case, waits, blocking, " on the default stream") if len(waits) else []


def _claim_unseen(case: Case, wide: np.ndarray) -> list[Claim]:
    """Where launches are not seen: such waits that usual requests do not have, for as long as all its waits took longer than usual.

    A request that waits for its own work in the middle has less of it to wait for at the end.
    """
    if any(_DEVICE_WIDE[rows["call"]].any() for rows in case.latest_usual(LATEST)):
        return []
    longest = wide[np.argmax(wide["duration_ns"])]
    ns = min(int(wide["duration_ns"].sum()), case.waiting_left)
    name = table.BY_NUMBER[int(longest["call"])].name
    return [Claim(CAUSE, ns, True, None, f"{name} waited for other streams (launches not seen)")]


def _claim(case: Case, waits: np.ndarray, work: list, where: str) -> list[Claim]:
    longest = waits[np.argmax(waits["duration_ns"])]
    ns = sum(union_ns(work, int(wait["start_ns"]), int(wait["start_ns"] + wait["duration_ns"])) for wait in waits)
    largest = max(work, key=lambda span: span.block_threads)
    kernel = case.names.kernel(largest.tgid, largest.kernel) or f"kernel {largest.kernel:#x}"
    name = table.BY_NUMBER[int(longest["call"])].name
    return [Claim(CAUSE, ns, True, None, f"{name}{where} waited for stream {largest.stream:#x} (tid {largest.tid}, {kernel})")]
