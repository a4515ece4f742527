"""Perf rings: one per CPU, drained in bulk into numpy and merged in order of the calls' ends.

The kernel side writes fixed-size records without waking anyone; `PerfRings.drain` copies whatever lies in the rings
and hands the space back at once. `Merger` orders what came from several CPUs. No Python code runs per record.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
import threading
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from gputail.errors import GputailError
from gputail.events import CALL, NAME, NAME_BYTES, end_ns
from gputail.probes import syscalls

_PAGE = mmap.PAGESIZE
# struct perf_event_mmap_page: where the kernel has written to, where we have read to.
_HEAD, _TAIL = 1024, 1032
_RECORD_LOST, _RECORD_SAMPLE = 2, 9
_HEADER = np.dtype([("type", "<u4"), ("misc", "<u2"), ("size", "<u2")])


def sample_dtype(event: np.dtype) -> np.dtype:
    """A PERF_RECORD_SAMPLE holding one event: header, size of the raw data, data, padded to 8 bytes."""
    raw = -(-(event.itemsize + 4) // 8) * 8
    fields = [("type", "<u4"), ("misc", "<u2"), ("size", "<u2"), ("raw_size", "<u4"), ("event", event)]
    padding = raw - 4 - event.itemsize
    return np.dtype(fields + [("padding", f"V{padding}")] if padding else fields)


@dataclass
class Decoded:
    """What a stretch of ring bytes held: events in ring order, records the kernel reports lost, bytes not understood."""

    events: list[np.ndarray] = field(default_factory=list)
    lost: int = 0
    malformed: int = 0


def decode(raw: np.ndarray, sample: np.dtype) -> Decoded:
    """Take ring bytes apart (raw: uint8, whole perf records, oldest first). One pass where all are samples."""
    out = Decoded()
    position, end = 0, len(raw)
    while position < end:
        whole = (end - position) // sample.itemsize
        samples = raw[position : position + whole * sample.itemsize].view(sample)
        odd = (samples["type"] != _RECORD_SAMPLE) | (samples["size"] != sample.itemsize)
        good = int(odd.argmax()) if odd.any() else whole
        if good:
            out.events.append(samples["event"][:good])
            position += good * sample.itemsize
        if position + _HEADER.itemsize > end:
            out.malformed += end - position
            break
        if good == whole and position == end:
            break
        header = raw[position : position + _HEADER.itemsize].view(_HEADER)[0]
        size = int(header["size"])
        if size < _HEADER.itemsize or position + size > end:
            out.malformed += end - position
            break
        if header["type"] == _RECORD_LOST and size >= 24:
            # u64 id, u64 lost
            out.lost += int(raw[position + 16 : position + 24].view("<u8")[0])
        elif header["type"] != _RECORD_SAMPLE or size != sample.itemsize:
            out.malformed += size
        position += size
    return out


class _Ring:
    def __init__(self, cpu: int, data_bytes: int) -> None:
        self.cpu = cpu
        self.fd = syscalls.open_bpf_output(cpu, watermark_bytes=data_bytes // 2)
        try:
            self.memory = mmap.mmap(self.fd, _PAGE + data_bytes)
        except OSError:
            os.close(self.fd)
            raise
        self.size = data_bytes
        self._control = np.frombuffer(self.memory, "<u8", 2, _HEAD)
        self._data = np.frombuffer(self.memory, np.uint8, data_bytes, _PAGE)
        syscalls.enable(self.fd)

    def take(self, barrier: threading.Lock) -> np.ndarray | None:
        """Copy out all that has been written and free its space; None when there is nothing."""
        tail = int(self._control[1])
        head = int(self._control[0])
        if head == tail:
            return None
        with barrier:  # acquiring and releasing orders the read of head before those of the data, and both before tail
            begin, end = tail % self.size, head % self.size
            if begin < end:
                raw = self._data[begin:end].copy()
            else:
                raw = np.concatenate((self._data[begin:], self._data[:end]))
        self._control[1] = head
        return raw

    def close(self) -> None:
        del self._control, self._data
        self.memory.close()
        os.close(self.fd)


def online_cpus() -> list[int]:
    """CPUs that can run something now, in order; numbers may have gaps."""
    with open("/sys/devices/system/cpu/online") as online:
        text = online.read()
    cpus: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return cpus


class PerfRings:
    """The rings of one BPF perf-event array, one per CPU that is online; later CPUs are added by `cover_new_cpus`."""

    def __init__(self, map_fd: int, event: np.dtype, bytes_per_cpu: int) -> None:
        """bytes_per_cpu: rounded up to a power of two of pages; halved where we may not lock that much memory."""
        self._map_fd = map_fd
        self._sample = sample_dtype(event)
        self._event = event
        pages = max(1, -(-bytes_per_cpu // _PAGE))
        self.bytes_per_cpu = _PAGE << (pages - 1).bit_length()
        self._barrier = threading.Lock()
        self._poll = select.poll()
        self._rings: dict[int, _Ring] = {}
        self.uncovered: dict[int, str] = {}  # CPU -> why it has no ring: its records are refused and counted by the kernel
        self._is_refused = False
        self.cover_new_cpus()
        while self._is_refused and self.bytes_per_cpu > _PAGE:
            self.close()
            self.bytes_per_cpu //= 2
            self._is_refused = False
            self.cover_new_cpus()
        if not self._rings:
            raise GputailError(
                f"no perf ring could be opened: {next(iter(self.uncovered.values()), 'no CPU is online')}",
                "run as root, or grant CAP_PERFMON and CAP_IPC_LOCK",
            )

    def cover_new_cpus(self) -> None:
        """Open a ring on every online CPU that has none."""
        for cpu in online_cpus():
            if cpu in self._rings:
                continue
            try:
                ring = _Ring(cpu, self.bytes_per_cpu)
            except OSError as error:  # the CPU may have gone offline since
                self.uncovered[cpu] = str(error)
                # What a user may lock: RLIMIT_MEMLOCK and perf_event_mlock_kb for each CPU (perf_mmap in kernel/events/core.c).
                self._is_refused |= error.errno == errno.EPERM
                continue
            self.uncovered.pop(cpu, None)
            syscalls.update_map(self._map_fd, cpu, ring.fd)
            self._rings[cpu] = ring
            self._poll.register(ring.fd, select.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Sleep for the time given, or until a ring is half full."""
        self._poll.poll(timeout_s * 1000)

    def drain(self) -> tuple[list[np.ndarray], int, int]:
        """All records written so far: arrays of events, each in the order of one CPU; kernel's count of lost; malformed bytes."""
        events: list[np.ndarray] = []
        lost = malformed = 0
        for ring in self._rings.values():
            raw = ring.take(self._barrier)
            if raw is None:
                continue
            decoded = decode(raw, self._sample)
            events += decoded.events
            lost += decoded.lost
            malformed += decoded.malformed
        return events, lost, malformed

    def close(self) -> None:
        for ring in self._rings.values():
            ring.close()
        self._rings.clear()
        self._poll = select.poll()


class Merger:
    """Orders calls from several CPUs by their end, holding back those too young to be sure of.

    A record reaches its ring a little after the end it states; so a drain that began at `now` may miss some that
    ended before. Calls are handed on once they ended `hold_ns` before the drain that found them. One that comes
    later still is handed on at once, out of order, and counted.
    """

    def __init__(self, hold_ns: int) -> None:
        self.hold_ns = hold_ns
        self.watermark_ns = 0
        self._held: np.ndarray = np.empty(0, CALL)

    def merge(self, arrays: list[np.ndarray], drain_began_ns: int) -> tuple[np.ndarray, int]:
        """CALL rows that may be handed on, in order of their end, and how many of them came late."""
        calls = np.concatenate([self._held, *arrays]) if arrays else self._held
        ends = end_ns(calls)
        order = np.argsort(ends, kind="stable")  # runs per CPU are sorted already, which timsort makes use of
        calls, ends = calls[order], ends[order]
        late = int(np.searchsorted(ends, self.watermark_ns, side="left"))
        self.watermark_ns = max(self.watermark_ns, drain_began_ns - self.hold_ns)
        ready = int(np.searchsorted(ends, self.watermark_ns, side="left"))
        self._held = calls[ready:]
        return calls[:ready], late

    def flush(self) -> np.ndarray:
        """All that is held, at the end."""
        held, self._held = self._held, np.empty(0, CALL)
        if len(held):
            self.watermark_ns = max(self.watermark_ns, int(end_ns(held[-1:])[0]) + 1)
        return held


def concatenated_names(arrays: list[np.ndarray]) -> np.ndarray:
    """NAME rows in order of time, the length of each without the padding that the kernel puts behind a comm."""
    if not arrays:
        return np.empty(0, NAME)
    names = np.concatenate(arrays)
    unpadded = np.char.str_len(np.ascontiguousarray(names["text"]).view(f"S{NAME_BYTES}"))
    names["length"] = np.minimum(names["length"], unpadded)
    return names[np.argsort(names["time_ns"], kind="stable")]


def summed(counts: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    """What was added to totals since `before`, by stage, without the stages where nothing was."""
    added: dict[str, int] = defaultdict(int)
    for stage, total in counts.items():
        if total != before.get(stage, 0):
            added[stage] = total - before.get(stage, 0)
    return dict(added)
