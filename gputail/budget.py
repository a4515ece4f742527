"""The parts a request's wall time is split into, and the class of each call that decides where its time goes.

Plain data derived from probes/table.py: arrays indexed by a call's number, for use on whole columns at once.

The convention (all in ns; the parts of a request sum to its wall time exactly):

- A call's time goes to the part of its category, except while its thread was runnable and not running: that is
  run queue wherever it happens, in a call or outside of one. A sleep inside a call is the call's own way of waiting.
- Outside of calls a sleep is off-CPU, the rest is host: on the CPU in the program itself.
- A run of queries is one wait: what lies between two queries that follow each other is sync, too.
- Calls made inside another traced call count as calls, launches and bytes, but their time is the outer call's.
"""

from __future__ import annotations

import numpy as np

from gputail.probes import table

PARTS = ("host", "run_queue", "off_cpu", "launch", "copy", "alloc", "module", "sync", "collective", "other")
HOST, RUN_QUEUE, OFF_CPU, LAUNCH, COPY, ALLOC, MODULE, SYNC, COLLECTIVE, OTHER = range(len(PARTS))

# Classes of calls: finer than parts, coarser than functions; what the structure of a request is made of.
CLASSES = (
    "none", "launch", "graph", "HtoD", "DtoH", "copy", "memset", "alloc", "free", "module", "collective",
    "group", "sync", "query", "off_cpu", "host_func",
)  # fmt: skip
(
    C_NONE, C_LAUNCH, C_GRAPH, C_HTOD, C_DTOH, C_COPY, C_MEMSET, C_ALLOC, C_FREE, C_MODULE, C_COLLECTIVE,
    C_GROUP, C_SYNC, C_QUERY, C_OFF_CPU, C_HOST_FUNC,
) = range(len(CLASSES))  # fmt: skip

_CLASS_OF_CATEGORY = {
    table.LAUNCH: C_LAUNCH, table.GRAPH: C_GRAPH, table.HOST_FUNC: C_HOST_FUNC, table.SYNC: C_SYNC, table.QUERY: C_QUERY,
    table.MEMSET: C_MEMSET, table.ALLOC: C_ALLOC, table.FREE: C_FREE, table.MODULE: C_MODULE, table.LOOKUP: C_MODULE,
    table.COLLECTIVE: C_COLLECTIVE, table.GROUP: C_GROUP, table.COMMUNICATOR: C_GROUP, table.SPLIT: C_GROUP, table.OFF_CPU: C_OFF_CPU,
}  # fmt: skip
_CLASS_OF_DIRECTION = {"HtoD": C_HTOD, "DtoH": C_DTOH}

PART_OF_CLASS = np.array(
    [OTHER, LAUNCH, LAUNCH, COPY, COPY, COPY, LAUNCH, ALLOC, ALLOC, MODULE, COLLECTIVE, COLLECTIVE, SYNC, SYNC, OTHER, LAUNCH],
    np.int64,
)
# Classes that give the GPU something to do: a request has at least one of them.
IS_WORK = np.zeros(len(CLASSES), bool)
IS_WORK[[C_LAUNCH, C_GRAPH, C_HTOD, C_DTOH, C_COPY, C_MEMSET, C_COLLECTIVE]] = True

NUMBERS = 65536
CLASS_OF_CALL = np.zeros(NUMBERS, np.uint8)
# How a call can end a request: 1 it blocks until the GPU is done, 2 it asks whether the GPU is done.
WAIT_OF_CALL = np.zeros(NUMBERS, np.uint8)
BLOCKS, ASKS = 1, 2
for _function in table.BY_NUMBER.values():
    _class = _CLASS_OF_CATEGORY.get(_function.category, C_NONE)
    if _function.category == table.COPY:
        _class = _CLASS_OF_DIRECTION.get(_function.direction, C_COPY)
    CLASS_OF_CALL[_function.number] = _class
    WAIT_OF_CALL[_function.number] = BLOCKS if _function.waits_for else ASKS if _class == C_QUERY else 0

# What a record calls the boundary that ended its request.
BOUNDARY_OF_WAIT = {"stream": "sync", "device": "sync", "event": "event", "copy": "copy"}


def boundary(call: int) -> str:
    """Name of the boundary a request has that ended with the return of `call`."""
    function = table.BY_NUMBER.get(call)
    if function is None:
        return "unknown"
    return BOUNDARY_OF_WAIT.get(function.waits_for, "poll")
