"""What is known of CUDA streams: which of them the legacy default stream waits for. Bounded: processes create them."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from gputail.probes import table

MAX_STREAMS = 16384
# CU_STREAM_PER_THREAD: one stream for each thread under the same name.
PER_THREAD_STREAM = 2
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_CREATES = [function.number for function in table.FUNCTIONS if function.name.startswith("cuStreamCreate")]
_FIRST, _LAST = min(_CREATES), max(_CREATES)


class Streams:
    """Streams whose creation was seen; the oldest are forgotten beyond the bound."""

    def __init__(self) -> None:
        self._is_blocking: OrderedDict[tuple[int, int], bool] = OrderedDict()

    def learn(self, calls: np.ndarray) -> None:
        """Take in the streams that CALL rows create."""
        for index in np.flatnonzero((calls["call"] >= _FIRST) & (calls["call"] <= _LAST) & (calls["result"] == 0)):
            row = calls[index]
            self._is_blocking[int(row["tgid"]), int(row["handle"])] = not int(row["size"]) & NON_BLOCKING
            if len(self._is_blocking) > MAX_STREAMS:
                self._is_blocking.popitem(last=False)

    def is_blocking(self, tgid: int, stream: int) -> bool:
        """Whether the stream is known to be one that the default stream waits for."""
        return self._is_blocking.get((tgid, stream), False)
