"""Which GPU work is on, as far as that is known: work on two GPUs does not wait for one another.

In: CALL rows, which tell of one process which of its devices a context, a stream and a thread are on, by an ordinal that means
something in that process only; and news of processes, which tell by their open device files which GPUs they can be on.
Out: whether two pieces of work are apart. What is not known is not apart. Bounded, since processes make it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from gputail import events
from gputail.bounded import put
from gputail.probes import table
from gputail.streams import PER_THREAD_STREAM

MAX_CONTEXTS = 4096
MAX_THREADS = 16384
MAX_STREAMS = 16384
MAX_PROCESSES = 4096
# CU_STREAM_LEGACY and CU_STREAM_PER_THREAD besides 0: the same handles in every context.
_DEFAULT_STREAMS = frozenset((0, 1, PER_THREAD_STREAM))
_MIXED = -1  # a thread that has worked on several devices

_NUMBER = {function.name: function.number for function in table.FUNCTIONS}
_RETAIN = _NUMBER["cuDevicePrimaryCtxRetain"]
_CREATES = frozenset(number for name, number in _NUMBER.items() if name.startswith("cuCtxCreate"))
_MAKES_CURRENT = frozenset((_NUMBER["cuCtxSetCurrent"], _NUMBER["cuCtxPushCurrent"]))
_DESTROY = _NUMBER["cuCtxDestroy"]
_STREAM_CREATES = frozenset(number for name, number in _NUMBER.items() if name.startswith("cuStreamCreate"))
_MATTERS = np.zeros(65536, bool)
_MATTERS[list(_CREATES | _MAKES_CURRENT | _STREAM_CREATES | {_RETAIN, _DESTROY})] = True


class Devices:
    """What is known of where processes, threads and streams work; the oldest are forgotten beyond the bounds."""

    def __init__(self) -> None:
        self._contexts: OrderedDict[tuple[int, int], int] = OrderedDict()  # (tgid, context): ordinal
        self._threads: OrderedDict[tuple[int, int], int] = OrderedDict()  # (tgid, tid): ordinal, or _MIXED
        self._streams: OrderedDict[tuple[int, int], int] = OrderedDict()  # (tgid, stream): ordinal
        self._gpus: OrderedDict[int, frozenset[str]] = OrderedDict()

    def learn(self, calls: np.ndarray) -> None:
        """Take in what CALL rows say of contexts and streams."""
        chosen = calls[_MATTERS[calls["call"]] & (calls["result"] == 0) & (calls["depth"] == 0)]
        columns = (chosen[name].tolist() for name in ("call", "tgid", "tid", "handle", "size"))
        for call, tgid, tid, handle, size in zip(*columns, strict=True):
            if call == _RETAIN:
                put(self._contexts, (tgid, handle), size & 0xFFFFFFFF, MAX_CONTEXTS)
            elif call in _CREATES:  # and makes it current
                put(self._contexts, (tgid, handle), size & 0xFFFFFFFF, MAX_CONTEXTS)
                self._works_in(tgid, tid, handle)
            elif call in _MAKES_CURRENT:
                if handle:
                    self._works_in(tgid, tid, handle)
            elif call == _DESTROY:
                self._contexts.pop((tgid, handle), None)
            else:
                self._made_stream(tgid, tid, handle)

    def learn_processes(self, processes: Iterable[events.Process]) -> None:
        """Take in news of processes: by a pid that is used again, the last counts."""
        for process in processes:
            if process.gpus:
                put(self._gpus, process.tgid, frozenset(process.gpus), MAX_PROCESSES)
            else:
                self._gpus.pop(process.tgid, None)

    def _works_in(self, tgid: int, tid: int, context: int) -> None:
        ordinal = self._contexts.get((tgid, context), _MIXED)  # one made before tracing began may be on any
        before = self._threads.get((tgid, tid), ordinal)
        put(self._threads, (tgid, tid), ordinal if before == ordinal else _MIXED, MAX_THREADS)

    def _made_stream(self, tgid: int, tid: int, stream: int) -> None:
        ordinal = self._threads.get((tgid, tid), _MIXED)
        if ordinal == _MIXED:
            self._streams.pop((tgid, stream), None)  # one of this handle may have been on another
        else:
            put(self._streams, (tgid, stream), ordinal, MAX_STREAMS)

    def ordinal(self, tgid: int, tid: int, stream: int) -> int | None:
        """The process's own number of the device that a thread's work on a stream is on; None where that is not known."""
        if stream not in _DEFAULT_STREAMS and (tgid, stream) in self._streams:
            return self._streams[tgid, stream]
        ordinal = self._threads.get((tgid, tid), _MIXED)
        return None if ordinal == _MIXED else ordinal

    def gpu(self, tgid: int) -> str | None:
        """The GPU a process is on, by the number in its device file's name; None where it is not known or may be several."""
        gpus = self._gpus.get(tgid, frozenset())
        return next(iter(gpus)) if len(gpus) == 1 else None

    def are_apart(self, one: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
        """Whether the work of two (tgid, tid, stream) is known to be on different GPUs."""
        if one[0] == other[0]:
            ordinals = self.ordinal(*one), self.ordinal(*other)
            return None not in ordinals and ordinals[0] != ordinals[1]
        gpus, others = self._gpus.get(one[0]), self._gpus.get(other[0])
        return bool(gpus and others) and gpus.isdisjoint(others)  # type: ignore[union-attr, arg-type]
