"""`gputail report`: a recording, or a labelled trace, as a page for an incident: text, HTML, and a trace for Perfetto.

In goes a file, which is read twice: once through the same stages as a live run, and once more for the calls around the worst
requests. What the pages say and look like is left to surfaces/report/.
"""

from __future__ import annotations

import locale
import os
import shutil
import stat
import sys
from contextlib import ExitStack
from dataclasses import dataclass

from gputail.errors import GputailError, UsageError
from gputail.names import Names
from gputail.pipeline import Pipeline
from gputail.source import Source
from gputail.surfaces.progress import Progress
from gputail.surfaces.report import text, web
from gputail.surfaces.report.gathering import Gathering
from gputail.surfaces.report.page import Page
from gputail.surfaces.report.perfetto import TraceWriter
from gputail.surfaces.report.windows import Windows
from gputail.surfaces.terminal import clean

MAX_COMMAND = 160


@dataclass(frozen=True)
class Options:
    """What is asked for; html and perfetto are files to be written, or None."""

    file: str
    worst: int = 5
    workload: str = ""
    html: str | None = None
    perfetto: str | None = None
    ascii_only: bool = False


def run(options: Options) -> int:
    """Print the page of a file, write what else is asked for, and return the exit status."""
    _check_files(options)
    report = analyse(options)
    ascii_only = options.ascii_only or not _is_utf8()
    sys.stdout.write(text.page(report, shutil.get_terminal_size((text.MAX_WIDTH, 24)).columns, ascii_only))
    sys.stdout.flush()
    if options.html is not None:
        _write(options.html, web.page(report))
    if report.damage:
        raise GputailError(report.damage, "what could be read was analysed")
    return 0


def analyse(options: Options) -> Page:
    """What there is to say of the file; writes the trace for Perfetto on the way, if it is asked for."""
    pipeline, names, gathering = Pipeline(), Names(), Gathering(options.workload, options.worst)
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(f"reading {clean(options.file)}"))
        source = Source(options.file, progress)
        stream = iter(source)
        batch = next(stream, None)  # before the trace is opened: a file that cannot be read must not cost one that exists
        trace = stack.enter_context(TraceWriter(options.perfetto, names)) if options.perfetto is not None else None

        def hand_on() -> None:
            records = [record for record in pipeline.take_records() if gathering.is_wanted(record)]
            gathering.add(records)
            if trace:
                trace.requests(records)

        while batch is not None:
            names.learn(batch)
            pipeline.feed(batch)
            if trace:
                trace.calls(batch)
            hand_on()
            batch = next(stream, None)
        pipeline.finish()
        hand_on()
        snapshot = pipeline.snapshot()
        if trace:
            trace.regime_changes(snapshot.regime_changes)
            trace.note(
                "recording",
                {
                    "file": clean(options.file, MAX_COMMAND),
                    "damage": source.damage and clean(source.damage, MAX_COMMAND),
                    "lost": dict(snapshot.lost),
                },
            )
    workloads = gathering.findings(snapshot)
    if options.workload and not workloads:
        raise _no_such_workload(options.workload, gathering.passed_over())
    damage, worst = source.damage, gathering.worst()
    windows = Windows(worst)
    with Progress(f"reading {clean(options.file)} again") as progress:
        if not windows.is_done():
            for batch in Source(options.file, progress):
                windows.feed(batch)
                if windows.is_done():
                    break
    pids = {c.pid for found in workloads for c in found.culprits if c.pid is not None} | {found.pid for found in workloads}
    commands = {pid: clean(command, MAX_COMMAND) for pid in pids if (command := names.process(pid).command)}
    return Page(
        file=options.file,
        metadata=source.metadata,
        start_ns=min((found.first_ns for found in workloads), default=0),
        end_ns=max((found.last_ns for found in workloads), default=0),
        events=snapshot.events,
        lost=snapshot.lost,
        damage=damage,
        workloads=workloads,
        further_workloads=gathering.further_workloads,
        further_requests=gathering.further_requests,
        worst=windows.around(),
        commands=commands,
    )


def _check_files(options: Options) -> None:
    """What is read is read twice, and what is written must not be what is read."""
    try:
        is_file = options.file != "-" and stat.S_ISREG(os.stat(options.file).st_mode)
    except OSError as error:
        raise GputailError(f"cannot read {options.file}: {(error.strerror or str(error)).lower()}") from error
    if not is_file:
        what = "standard input" if options.file == "-" else options.file
        raise GputailError(f"cannot report on {what}: it is read twice, and only a regular file can be", "save the recording to a file")
    for path in (options.html, options.perfetto):
        if path == "-":
            raise UsageError("standard output is for the text", "give --html and --perfetto the names of files")
        if path is not None and os.path.exists(path) and os.path.samefile(path, options.file):
            raise UsageError(f"{path} is the recording itself", "give another file to be written")
    if options.html is not None and options.html == options.perfetto:
        raise UsageError(f"--html and --perfetto would both write {options.html}", "give each a file of its own")


def _write(path: str, content: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(content)
    except OSError as error:
        raise GputailError(f"cannot write the page to {path}: {(error.strerror or str(error)).lower()}") from error


def _no_such_workload(wanted: str, names: list[str]) -> GputailError:
    shown = ", ".join(clean(name, 80) for name in names[:10]) + (", ..." if len(names) > 10 else "")
    return GputailError(f"no workload has {clean(wanted)!r} in its name", f"there are: {shown}" if names else "there are none in this file")


def _is_utf8() -> bool:
    """Whether block characters can be shown: the locale says so, and stdout is written so."""
    encodings = ((sys.stdout.encoding or ""), locale.getpreferredencoding(False))
    named = next((value for name in ("LC_ALL", "LC_CTYPE", "LANG") if (value := os.environ.get(name))), "")
    return all("utf8" in each.lower().replace("-", "") for each in (*encodings, named))
