"""A dictionary that traced processes fill, kept within a bound."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def put(store: OrderedDict[K, V], key: K, value: V, limit: int) -> None:
    """Store it as the newest; beyond `limit` entries the oldest is forgotten."""
    store[key] = value
    store.move_to_end(key)
    if len(store) > limit:
        store.popitem(last=False)
