"""Tiers in the kernel: the probes on a library, and those for calls per kernel on some processes only.

In: which tier a process is to have. Out: probes, and rows that say from when on which tier held (see gputail/tiers.py). Which
tier that is, is left to governor.py.

As long as every process is traced in full, one pair of links holds the probes of a library for all of them. When a process is
to have less, each gets links of its own for the calls per kernel, limited to it by its pid, and the common ones go. Two links
on one function are no matter: a call that is entered twice at the same place is one call. All of that happens in a thread of
its own, since taking a link off waits tens of ms for a grace period, while the probes of the light tier stay as they are.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np

from gputail.errors import GputailError
from gputail.events import CALL, no_calls
from gputail.probes import syscalls
from gputail.probes.kernel import Kernel
from gputail.probes.links import Attacher, Links, MultiAttacher, Site
from gputail.probes.table import PER_KERNEL, TIER_CALL
from gputail.tiers import CHANGING, FULL, LAUNCH, sees_off_cpu, tier_of

# Links that are common to all come back when nobody has had less for so long.
UNITE_AFTER_S = 60.0


class LibraryProbes:
    """The probes on one library, by its open file."""

    def __init__(self, attacher: Attacher, kind: str, fd: int, sites: list[Site], tier: int | None) -> None:
        """tier: that of every process alike; None: each will get its own."""
        self._attacher, self._kind = attacher, kind
        self._fd = os.dup(fd)
        self._path = f"/proc/self/fd/{self._fd}"
        self._per_kernel = [site for site in sites if site.function.category in PER_KERNEL]
        self._light = [site for site in sites if site.function.category not in PER_KERNEL]
        self._always: Links | None = None
        self._common: Links | None = None
        self._own: dict[int, Links] = {}
        try:
            self.put_on(tier)
        except BaseException:
            self.close()
            raise

    def put_on(self, tier: int | None) -> None:
        """The probes of the light tier, and those that all processes have in common."""
        self._always = self._attacher.attach(self._kind, self._path, self._light) if self._light else None
        if tier is not None:
            self._common = self._attach(tier)

    def take_off(self) -> None:
        """Every probe."""
        links = [one for one in (*self._own.values(), self._common, self._always) if one]
        self._own, self._common, self._always = {}, None, None
        syscalls.all_at_once([one.close for one in links])

    def _attach(self, tier: int, pid: int = 0) -> Links | None:
        if not self._per_kernel or tier not in (LAUNCH, FULL):
            return None
        if not isinstance(self._attacher, MultiAttacher):
            return self._attacher.attach(self._kind, self._path, self._per_kernel) if tier == FULL else None
        if tier == LAUNCH:
            return self._attacher.attach_entries(self._kind, self._path, self._per_kernel, pid)
        return self._attacher.attach(self._kind, self._path, self._per_kernel, pid)

    def set_own(self, tgid: int, tier: int) -> None:
        """Give a process probes of its own in place of those that it had."""
        self.drop_own(tgid)
        links = self._attach(tier, tgid)
        if links:
            self._own[tgid] = links

    def drop_own(self, tgid: int) -> None:
        links = self._own.pop(tgid, None)
        if links:
            links.close()

    def set_common(self, tier: int | None) -> None:
        """Give every process the same, or none."""
        common, self._common = self._common, None
        if common:
            common.close()
        if tier is not None:
            self._common = self._attach(tier)

    def close(self) -> None:
        self.take_off()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Tiering:
    """Gives processes their tiers, one change after the other, in a thread of its own."""

    def __init__(self, kernel: Kernel, tier: int = FULL) -> None:
        """tier: what every process gets to begin with."""
        self._kernel = kernel
        self._common: int | None = tier
        self._libraries: list[LibraryProbes] = []
        self._states: dict[int, int] = {}  # of processes that have their own
        self._lock = threading.Lock()  # over all of the above, held while links change
        self._shed_at_s = 0.0  # time.monotonic() when a process was last given less than the full tier
        self._rows: list[tuple[int, int, int]] = []
        self._rows_lock = threading.Lock()
        self._worker = ThreadPoolExecutor(1, "gputail-tiers")
        self._changes: list[Future[None]] = []
        self._touched = False
        self.failed: dict[int, str] = {}
        if tier != FULL:
            self._say(0, tier)

    def attach(self, attacher: Attacher, kind: str, fd: int, sites: list[Site]) -> LibraryProbes:
        """Put probes on a library: on all its functions, or as the tiers of its processes say."""
        with self._lock:
            probes = LibraryProbes(attacher, kind, fd, sites, self._common)
            self._libraries.append(probes)
            if self._common is None:
                for tgid, state in self._states.items():
                    self._give(tgid, state, [probes])
            return probes

    def detach(self, probes: LibraryProbes) -> None:
        with self._lock:
            if probes in self._libraries:
                self._libraries.remove(probes)
            probes.close()

    def change(self, wanted: Mapping[int, int], processes: Iterable[int]) -> None:
        """Begin to give processes other tiers. processes: all that are traced, of which the others keep theirs."""
        self._submit(partial(self._change, dict(wanted), tuple(processes)))

    def adopt(self, tgids: Iterable[int]) -> None:
        """Processes that have come: in full."""
        new = [tgid for tgid in tgids if tgid not in self._states]
        if self._common is None and new:
            self._submit(partial(self._change, dict.fromkeys(new, FULL), ()))

    def consider_uniting(self) -> None:
        """Back to common links, when every process has been traced in full for a while."""
        if self._common is None and not self._changes and time.monotonic() - self._shed_at_s > UNITE_AFTER_S:
            self._submit(self._unite)

    def forget(self, tgids: Iterable[int]) -> None:
        """Processes that have ended."""
        gone = [tgid for tgid in tgids if tgid in self._states]
        if gone:
            self._submit(partial(self._forget, gone))

    def take_rows(self) -> np.ndarray:
        """What has changed since it was last asked, as CALL rows."""
        with self._rows_lock:
            changes, self._rows = self._rows, []
        if not changes:
            return no_calls()
        rows = np.zeros(len(changes), CALL)
        rows["start_ns"], rows["tgid"], rows["handle"] = np.array(changes, np.int64).T
        rows["call"] = TIER_CALL
        return rows

    def take_touched(self) -> bool:
        """Whether links have come or gone since it was last asked: calls that ran meanwhile may look like orphans."""
        self._changes = [change for change in self._changes if not change.done()]
        touched, self._touched = self._touched or bool(self._changes), bool(self._changes)
        return touched

    def suspend(self) -> None:
        """Take every probe off, until `resume`."""
        self.settle()
        self._touched = True
        with self._lock:
            syscalls.all_at_once([probes.take_off for probes in self._libraries])

    def resume(self, tier: int | None) -> None:
        """Put them on again: as they were, or at a tier for all."""
        self._touched = True
        with self._lock:
            if tier is not None:
                self._drop(list(self._states))
                self._common = tier
                self._say(0, tier)
            for probes in self._libraries:
                probes.put_on(self._common)
                for tgid, state in self._states.items():
                    self._give(tgid, state, [probes])

    def settle(self) -> None:
        """Wait until every change that was begun is made."""
        for change in self._changes:
            change.result()

    def close(self) -> None:
        self._worker.shutdown(wait=True)
        with self._lock:
            libraries, self._libraries = self._libraries, []
            syscalls.all_at_once([probes.close for probes in libraries])

    def _submit(self, job: Callable[[], None]) -> None:
        self._touched = True
        self._changes.append(self._worker.submit(job))

    def _change(self, wanted: Mapping[int, int], others: Iterable[int]) -> None:
        with self._lock:
            if self._common is not None:
                self._part([tgid for tgid in others if tgid not in wanted])
            for tgid in wanted:
                self._say(tgid, CHANGING)
            common, self._common = self._common, None
            closing = [partial(probes.drop_own, tgid) for probes in self._libraries for tgid in wanted]
            if common is not None:
                closing += [partial(probes.set_common, None) for probes in self._libraries]
            syscalls.all_at_once(closing)
            for tgid, state in wanted.items():
                self._give(tgid, state, self._libraries)
            if any(state != FULL for state in wanted.values()):
                self._shed_at_s = time.monotonic()

    def _part(self, others: list[int]) -> None:
        """Give links of their own to processes that keep what all have, before that goes."""
        assert self._common is not None
        for tgid in others:
            self._give(tgid, self._common, self._libraries)
        self._say(0, CHANGING)  # whoever comes, before it is known

    def _give(self, tgid: int, state: int, libraries: list[LibraryProbes]) -> None:
        """Links of its own. It may have ended meanwhile; what else may be wrong is told."""
        self._kernel.set_quiet(tgid, not sees_off_cpu(state))
        try:
            for probes in libraries:
                probes.set_own(tgid, tier_of(state))
        except GputailError as error:
            cause = error.__cause__
            if not (isinstance(cause, OSError) and cause.errno == errno.ESRCH):
                self.failed[tgid] = error.problem
        self._states[tgid] = state
        self._say(tgid, state)

    def _unite(self) -> None:
        """Back to what all have: those that are left may come one by one again."""
        with self._lock:
            if self._common is not None or any(state != FULL for state in self._states.values()):
                return
            for probes in self._libraries:
                probes.set_common(FULL)
            self._common = FULL
            self._say(0, FULL)
            self._drop(list(self._states))

    def _forget(self, gone: list[int]) -> None:
        with self._lock:
            self._drop(gone)

    def _drop(self, tgids: list[int]) -> None:
        syscalls.all_at_once([partial(probes.drop_own, tgid) for probes in self._libraries for tgid in tgids])
        for tgid in tgids:
            self._kernel.set_quiet(tgid, False)
            self._states.pop(tgid, None)
            self.failed.pop(tgid, None)

    def _say(self, tgid: int, state: int) -> None:
        with self._rows_lock:
            self._rows.append((time.monotonic_ns(), tgid, state))
