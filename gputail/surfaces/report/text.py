"""The page as plain text, to be pasted where text goes: no escapes, no colours, within the width asked for.

In goes a `Page`, out comes a string. Bars and timelines are drawn with block characters, or with ASCII alone.
"""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Iterator, Sequence

import numpy as np

from gputail.budget import ALLOC, COLLECTIVE, COPY, HOST, LAUNCH, MODULE, OFF_CPU, OTHER, RUN_QUEUE, SYNC
from gputail.surfaces.report.gathering import QUANTILES, Change, Findings, spoken_quantile
from gputail.surfaces.report.page import Page
from gputail.surfaces.report.stories import headline, story
from gputail.surfaces.report.timeline import COPIES, KERNELS, NOTHING, ON_CPU, WORDS, Around, Timeline
from gputail.surfaces.terminal import clean, duration, losses

MIN_WIDTH, MAX_WIDTH = 80, 100
MAX_DETAILED = 5  # workloads with a section of their own
MAX_ROWS = 20
MAX_CULPRITS = 5
LABEL_CHARS = 12
MIN_NAME = 24  # of a workload's name

_GLYPHS = {
    HOST: "·", RUN_QUEUE: "r", OFF_CPU: "z", LAUNCH: "l", COPY: "c", ALLOC: "a", MODULE: "m", SYNC: "█", COLLECTIVE: "n",
    OTHER: "o", NOTHING: " ", KERNELS: "▓", COPIES: "▒", ON_CPU: "▓",
}  # fmt: skip
_ASCII = {**_GLYPHS, HOST: ".", SYNC: "W", KERNELS: "#", COPIES: "%", ON_CPU: "#"}
_TICK, _ASCII_TICK = "│", "|"
_UNIT = re.compile(r"(?<=\d) (?=(?:ns|us|ms|s)\b)")
_FILLER = "\ue000"  # for private use, and so in no text that has been cleaned


def page(report: Page, width: int = MAX_WIDTH, ascii_only: bool = False) -> str:
    """The whole page, no line wider than `width` (80 to 100)."""
    width = min(max(width, MIN_WIDTH), MAX_WIDTH)
    lines: list[str] = [*_head(report, width), ""]
    if report.workloads:
        lines += [*_tails(report, width), ""]
    detailed = [found for found in report.workloads if found.outliers or found.change][:MAX_DETAILED]
    for found in detailed:
        lines += [*_workload(report, found, width, ascii_only), ""]
    lines += _worst(report, width, ascii_only)
    text = "\n".join(line.rstrip() for line in lines).rstrip() + "\n"
    return text.encode("ascii", "replace").decode() if ascii_only else text


def _head(report: Page, width: int) -> Iterator[str]:
    yield f"gputail report of {clean(report.file, width - 18)}"
    began = report.clock(report.start_ns)
    where = f"on {report.node}, " if report.node else ""
    when = f"{began} UTC, " if began else ""
    yield from _wrap(f"{where}{when}{(report.end_ns - report.start_ns) / 1e9:.1f} s; {report.events} events; {losses(report.lost)}", width)
    if report.damage:
        yield from _wrap(f"NOT WHOLE: {clean(report.damage, 400)}", width)
    incomplete = sum(found.incomplete for found in report.workloads)
    if incomplete:
        longest = max(found.longest_incomplete_ns or 0 for found in report.workloads)
        yield from _wrap(f"{incomplete} requests are incomplete and have no verdict, the longest of them {duration(longest)}", width)
    yield ""
    slow = [found for found in report.workloads if found.outliers]
    yield from _wrap(headline(slow[0]) if slow else "no outliers: " + why_no_outliers(report), width)


def _tails(report: Page, width: int) -> Iterator[str]:
    head = ("workload", "requests", "/s", "p50", "p90", "p99", "p99.9", "max", "usual", "slow")
    rows = []
    for found in report.workloads[:MAX_ROWS]:
        quantiles = (_short(spoken_quantile(found.histogram, q)) for q in QUANTILES)
        rate = "-" if found.per_second is None else f"{found.per_second:.3g}" if found.per_second < 1000 else f"{found.per_second:.0f}"
        rows.append(
            (found.name, str(found.requests), rate, *quantiles, _short(found.longest_ns), _short(found.baseline_ns), str(found.outliers))
        )
    if (
        sum(max(_cells(row[column]) for row in [head, *rows]) + 2 for column in range(1, len(head)))
        + min(MIN_NAME, max(len(row[0]) for row in rows))
        <= width
    ):
        yield from _table(head, rows, width)
    else:  # too narrow for names beside the numbers: above them
        numbers = list(_table(("", *head[1:]), [("", *row[1:]) for row in rows], width))
        yield numbers[0]
        for row, line in zip(rows, numbers[1:], strict=True):
            yield clean(row[0], width)
            yield line
    if (hidden := len(report.workloads) - MAX_ROWS) > 0:
        yield f"and {hidden} more workloads"
    if report.further_workloads:
        yield f"and {report.further_requests} requests of {report.further_workloads} workloads that came and went"


def why_no_outliers(report: Page) -> str:
    """Whether that is good news."""
    if all(found.baseline_ns is None for found in report.workloads):
        return "too few complete requests were seen to know what is usual."
    return "no request was well above what is usual for its workload."


def _workload(report: Page, found: Findings, width: int, ascii_only: bool) -> Iterator[str]:
    title = f"{clean(found.name, width - 2)}"
    yield title
    yield ("-" if ascii_only else "─") * _cells(title)
    command = report.command(found.pid)
    if command:
        yield from _wrap(f"command: {command}", width)
    if found.change:
        yield from _change(report, found.change, width)
    if not found.outliers:
        return
    yield from _wrap(
        f"{found.outliers} of {found.requests} requests were slow, {duration(found.excess_ns)} longer than usual in all; of that:", width
    )
    bar_chars = 20
    rows = []
    for share in found.shares:
        bar = _bar(share.permille / 1000, bar_chars, ascii_only)
        rows.append((share.cause, f"{share.permille / 10:.1f}%", duration(share.ns), str(share.outliers), bar))
    yield from _table(("cause", "share", "excess", "requests", ""), rows, width, left=(0, 4))
    if found.culprits:
        yield ""
        rows = [
            (str(c.pid) if c.pid is not None else "-", duration(c.ns), str(c.requests), c.cause, _who(report, c.pid, c.text))
            for c in found.culprits[:MAX_CULPRITS]
        ]
        yield from _table(("culprit", "excess", "requests", "cause", "who or what"), rows, width, left=(0, 3, 4), shrink=4)
        if (rest := len(found.culprits) - MAX_CULPRITS) > 0:
            yield f"and {rest} more, {duration(sum(c.ns for c in found.culprits[MAX_CULPRITS:]))} in all"


def _who(report: Page, pid: int | None, text: str) -> str:
    command = report.command(pid) if pid is not None else None
    return "; ".join(filter(None, (clean(text, MAX_WIDTH) if text else "", command)))


def _change(report: Page, change: Change, width: int) -> Iterator[str]:
    if change.what == "regime change":
        also = f" ({change.further} further ones)" if change.further else ""
        yield from _wrap(f"regime change: what is usual shifted for good about {report.when(change.time_ns)}{also}", width)
    else:
        yield from _wrap(f"the first and the second half differ; they meet at {report.when(change.time_ns)}", width)
    rows = [
        (name, str(part.count), *(_short(spoken_quantile(part, q)) for q in QUANTILES), _short(part.quantile(1)), str(slow))
        for name, part, slow in (("before", change.before, change.outliers_before), ("after", change.after, change.outliers_after))
    ]
    yield from _table(("", "requests", "p50", "p90", "p99", "p99.9", "max", "slow"), rows, width)
    yield ""


def _worst(report: Page, width: int, ascii_only: bool) -> Iterator[str]:
    if not report.worst:
        return
    title = f"the {len(report.worst)} worst requests" if len(report.worst) > 1 else "the worst request"
    yield title
    yield ("-" if ascii_only else "─") * len(title)
    used: dict[int, None] = {}
    for number, around in enumerate(report.worst, 1):
        record = around.record
        head = f"{number}. {clean(record.workload)} at {report.when(record.start_ns)}: "
        yield from _wrap(head + story(record), width, indent="   ")
        lane_chars = width - 3 - LABEL_CHARS
        timeline = around.timeline(lane_chars)
        yield from timeline_lines(timeline, around, ascii_only)
        for lane in timeline.lanes:
            used.update(dict.fromkeys(np.unique(lane.kinds).tolist()))
        yield ""
    glyphs = _ASCII if ascii_only else _GLYPHS
    # One glyph can stand for two things on two kinds of lanes: each with its words.
    key = [f"{glyphs[kind]} {WORDS[kind]}" for kind in sorted(used) if kind != NOTHING]
    key.append(f"{_ASCII_TICK if ascii_only else _TICK} where a usual request would have ended")
    yield from _wrap("key: " + ", ".join(key), width, indent="     ")


def timeline_lines(timeline: Timeline, around: Around, ascii_only: bool = False) -> Iterator[str]:
    """A line for each lane and one with the scale, each LABEL_CHARS + 3 wider than the lanes have cells."""
    glyphs = _ASCII if ascii_only else _GLYPHS
    cells = len(timeline.lanes[0].kinds)
    span_ns = timeline.end_ns - timeline.start_ns
    usual = (around.record.baseline_ns or 0) * cells // max(span_ns, 1)
    for lane in timeline.lanes:
        drawn = "".join(glyphs[kind] for kind in lane.kinds.tolist())
        label = clean(lane.name, LABEL_CHARS - 1) + ("*" if lane.partly else "")
        yield f"   {label:<{LABEL_CHARS}}{drawn}"
    yield f"   {'ms':<{LABEL_CHARS}}{_scale(span_ns, cells, usual, _ASCII_TICK if ascii_only else _TICK)}"
    if any(lane.partly for lane in timeline.lanes):
        yield "   * there were too many calls to keep: the earliest are missing"


def scale_step_ms(span_ms: float, marks: float) -> float:
    """A round number of ms (1, 2 or 5 times a power of ten) so that about so many of them fit the span."""
    rough = max(span_ms, 1e-6) / max(marks, 1)
    power = 10.0 ** np.floor(np.log10(rough))
    return float(next(step * power for step in (1, 2, 5, 10) if step * power >= rough))


def _scale(span_ns: int, cells: int, usual: int, tick: str) -> str:
    """Numbers of ms under the cells that they mark, and a tick where a usual request ends."""
    line = [" "] * cells
    span_ms = span_ns / 1e6
    step = scale_step_ms(span_ms, cells / 10)
    digits = max(0, -int(np.floor(np.log10(step))))
    for number in range(int(span_ms / step) + 1):
        text, at = f"{number * step:.{digits}f}", int(number * step / max(span_ms, 1e-9) * cells)
        if at + len(text) <= cells:
            line[at : at + len(text)] = text
    if 0 < usual < cells:
        line[usual] = tick
    return "".join(line)


def _bar(share: float, chars: int, ascii_only: bool) -> str:
    full = round(share * chars)
    return ("#" if ascii_only else "█") * (full or int(share > 0))


def _short(ns: int | None) -> str:
    """A duration without the blank, for narrow columns."""
    return duration(ns).replace(" ", "")


def _wrap(text: str, width: int, indent: str = "") -> list[str]:
    """Lines of at most `width` cells; a number stays with its unit, and a wide character counts for the two cells it takes."""
    text = _UNIT.sub("\u00a0", text)
    text = text if text.isascii() else "".join(char + _FILLER * (_cells(char) - 1) for char in text)
    lines = textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False) or [""]
    return [line.replace("\u00a0", " ").replace(_FILLER, "") for line in lines]


def _cells(text: str) -> int:
    """Terminal cells that printable text takes: two for wide characters, none for those that join the one before."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _fit(text: str, width: int) -> str:
    """Printable text in at most so many cells."""
    if _cells(text) <= width:
        return text
    out, used = "", 0
    for char in text:
        used += _cells(char)
        if used > width - 3:
            break
        out += char
    return out + "..."


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], width: int, left: Sequence[int] = (0,), shrink: int = 0) -> Iterator[str]:
    """Columns, those of the numbers in `left` to the left; the column `shrink` gives way where all would not fit."""
    lines = [list(head), *(list(row) for row in rows)]
    for line in lines:
        line[shrink] = clean(line[shrink], MAX_WIDTH) if line[shrink] else ""
    widths = [max(_cells(line[column]) for line in lines) for column in range(len(head))]
    widths[shrink] = max(min(widths[shrink], width - sum(widths) + widths[shrink] - 2 * (len(head) - 1)), 8)
    for line in lines:
        cells = [_fit(cell, size) for cell, size in zip(line, widths, strict=True)]
        padded = []
        for column, (cell, size) in enumerate(zip(cells, widths, strict=True)):
            blank = " " * (size - _cells(cell))
            padded.append(cell + blank if column in left else blank + cell)
        yield "  ".join(padded).rstrip()
