"""The scheduler's tracepoints: attached once, for all threads that make traced calls."""

from __future__ import annotations

import os
from functools import partial

from gputail.errors import GputailError
from gputail.probes import syscalls
from gputail.probes.kernel import Kernel


class HostProbes:
    """Follows the end of threads always, their time off the CPU and their children where asked for."""

    def __init__(self, kernel: Kernel, *, off_cpu: bool) -> None:
        events = ["sched_process_exit", "sched_process_exec"]
        if off_cpu:
            events += ["sched_switch", "sched_wakeup"]
        if kernel.only_targets:
            events.append("sched_process_fork")
        self._descriptors: list[int] = []
        for event in events:
            program = kernel.program(event, "tracepoint")
            try:
                self._descriptors.append(syscalls.attach_tracepoint(program, kernel.tracepoint_id(event)))
            except OSError as error:
                self.close()
                raise GputailError(
                    f"cannot attach to the tracepoint sched:{event}: {error.strerror}", "run as root, or grant CAP_PERFMON"
                ) from error

    def close(self) -> None:
        descriptors, self._descriptors = self._descriptors, []
        syscalls.all_at_once([partial(os.close, fd) for fd in descriptors])
