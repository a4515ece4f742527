"""Picking rows out of arrays of wire structs."""

from __future__ import annotations

import numpy as np

from gputail import events

_WORDS = events.CALL.itemsize // 8


def take(calls: np.ndarray, index: np.ndarray) -> np.ndarray:
    """calls[index] (CALL rows; index holds numbers or booleans): numpy copies words twenty times as fast as structs."""
    if index.dtype == bool:
        index = np.flatnonzero(index)
    words = np.ascontiguousarray(calls).view(np.uint64).reshape(-1, _WORDS)
    return np.take(words, index, axis=0).view(events.CALL).reshape(-1)
