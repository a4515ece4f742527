"""The page as plain text, to be pasted where text goes: no escapes, no colours, within the width asked for.

In goes a `Page`, out comes a string. Bars and timelines are drawn with block characters, or with ASCII alone.
"""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gputail.budget import ALLOC, COLLECTIVE, COPY, HOST, LAUNCH, MODULE, OFF_CPU, OTHER, RUN_QUEUE, SYNC
from gputail.surfaces.report.gathering import QUANTILES, Change, Findings, spoken_quantile
from gputail.surfaces.report.page import Page
from gputail.surfaces.report.stories import story
from gputail.surfaces.terminal import clean, duration
from gputail.timeline import COPIES, KERNELS, NOTHING, ON_CPU, WORDS, Around, Timeline

MIN_WIDTH, MAX_WIDTH = 80, 100
MAX_DETAILED = 5  # workloads with a section of their own
MAX_ROWS = 20
MAX_CULPRITS = 5
LABEL_CHARS = 12
BAR_CHARS = 20
MIN_NAME = 24  # of a workload's name

_GLYPHS = {
    HOST: "·", RUN_QUEUE: "r", OFF_CPU: "z", LAUNCH: "l", COPY: "c", ALLOC: "a", MODULE: "m", SYNC: "█", COLLECTIVE: "n",
    OTHER: "o", NOTHING: " ", KERNELS: "▓", COPIES: "▒", ON_CPU: "▓",
}  # fmt: skip
_ASCII = {**_GLYPHS, HOST: ".", SYNC: "W", KERNELS: "#", COPIES: "%", ON_CPU: "#"}
_TICK, _ASCII_TICK = "│", "|"
_UNIT = re.compile(r"(?<=\d) (?=(?:ns|us|ms|s)\b)")
_NO_BREAK, _FILLER = "\u00a0", "\ue000"  # neither is in text that has been cleaned


@dataclass(frozen=True)
class _Pen:
    """What the page is drawn with: how many cells wide, and whether ASCII has to do."""

    width: int
    ascii_only: bool

    @property
    def glyphs(self) -> Mapping[int, str]:
        return _ASCII if self.ascii_only else _GLYPHS

    @property
    def tick(self) -> str:
        return _ASCII_TICK if self.ascii_only else _TICK

    def letters(self, text: str) -> str:
        """Names of others in letters that can be shown."""
        return text.encode("ascii", "replace").decode() if self.ascii_only else text

    def title(self, text: str) -> Iterator[str]:
        text = self.letters(text)
        yield text
        yield ("-" if self.ascii_only else "─") * min(_cells(text), self.width)

    def bar(self, share: float, cells: int) -> str:
        return ("#" if self.ascii_only else "█") * (round(share * cells) or int(share > 0))

    def wrap(self, text: str, indent: str = "") -> list[str]:
        """Text in lines; a number stays with its unit, and a wide character counts for the two cells it takes."""
        text, width = _UNIT.sub(_NO_BREAK, self.letters(text)), self.width
        if not text.isascii():
            text = "".join(char + _FILLER * (_cells(char) - 1) for char in text)
            width -= _FILLER in text  # a line may end between a character and its filler
        lines = textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False) or [""]
        return [line.replace(_NO_BREAK, " ").replace(_FILLER, "") for line in lines]

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,), shrink: int = 0) -> Iterator[str]:
        """Columns, those of the numbers in `left` to the left; the column `shrink` gives way where all would not fit."""
        lines = [[self.letters(cell) for cell in row] for row in (head, *rows)]
        widths = [max(_cells(line[column]) for line in lines) for column in range(len(head))]
        others = sum(widths) - widths[shrink] + 2 * (len(head) - 1)
        widths[shrink] = max(min(widths[shrink], self.width - others), 8)
        for line in lines:
            padded = []
            for column, size in enumerate(widths):
                cell = _fit(line[column], size)
                blank = " " * (size - _cells(cell))
                padded.append(cell + blank if column in left else blank + cell)
            yield "  ".join(padded).rstrip()


def page(report: Page, width: int = MAX_WIDTH, ascii_only: bool = False) -> str:
    """The whole page, no line wider than `width` (80 to 100)."""
    pen = _Pen(min(max(width, MIN_WIDTH), MAX_WIDTH), ascii_only)
    lines: list[str] = [*_head(report, pen), ""]
    if report.workloads:
        lines += [*_tails(report, pen), ""]
    detailed = [found for found in report.workloads if found.outliers or found.change][:MAX_DETAILED]
    for found in detailed:
        lines += [*_workload(report, found, pen), ""]
    lines += _worst(report, pen)
    return "\n".join(line.rstrip() for line in lines).rstrip() + "\n"


def _head(report: Page, pen: _Pen) -> Iterator[str]:
    yield from pen.wrap(f"gputail report of {clean(report.file, 4 * pen.width)}")
    yield from pen.wrap(report.facts())
    for notice in report.notices():
        yield from pen.wrap(notice)
    yield ""
    yield from pen.wrap(report.headline())


def _tails(report: Page, pen: _Pen) -> Iterator[str]:
    head = ("workload", "requests", "/s", "p50", "p90", "p99", "p99.9", "max", "usual", "slow")
    rows = []
    for found in report.workloads[:MAX_ROWS]:
        quantiles = (_short(found.quantile(q)) for q in QUANTILES)
        rows.append(
            (
                clean(found.name, MAX_WIDTH),
                str(found.requests),
                rate(found.per_second),
                *quantiles,
                _short(found.longest_ns),
                _short(found.baseline_ns),
                str(found.outliers),
            )
        )
    if (
        sum(max(_cells(row[column]) for row in [head, *rows]) + 2 for column in range(1, len(head)))
        + min(MIN_NAME, max(len(row[0]) for row in rows))
        <= pen.width
    ):
        yield from pen.table(head, rows)
    else:  # too narrow for names beside the numbers: above them
        numbers = list(pen.table(("", *head[1:]), [("", *row[1:]) for row in rows]))
        yield numbers[0]
        for row, line in zip(rows, numbers[1:], strict=True):
            yield pen.letters(_fit(row[0], pen.width))
            yield line
    if (hidden := len(report.workloads) - MAX_ROWS) > 0:
        yield f"and {hidden} more workloads"


def _workload(report: Page, found: Findings, pen: _Pen) -> Iterator[str]:
    yield from pen.title(clean(found.name, pen.width))
    command = report.command(found.pid)
    if command:
        yield from pen.wrap(f"command: {command}")
    if found.change:
        yield from _change(report, found.change, pen)
    if not found.outliers:
        return
    yield from pen.wrap(
        f"{found.outliers} of {found.requests} requests were slow, {duration(found.excess_ns)} longer than usual in all; of that:"
    )
    rows = []
    for share in found.shares:
        bar = pen.bar(share.permille / 1000, BAR_CHARS)
        rows.append((share.cause, f"{share.permille / 10:.1f}%", duration(share.ns), str(share.outliers), bar))
    yield from pen.table(("cause", "share", "excess", "requests", ""), rows, left=(0, 4))
    if found.culprits:
        yield ""
        rows = [
            (str(c.pid) if c.pid is not None else "-", duration(c.ns), str(c.requests), c.cause, _who(report, c.pid, c.text))
            for c in found.culprits[:MAX_CULPRITS]
        ]
        yield from pen.table(("culprit", "excess", "requests", "cause", "who or what"), rows, left=(0, 3, 4), shrink=4)
        if (rest := len(found.culprits) - MAX_CULPRITS) > 0:
            yield f"and {rest} more, {duration(sum(c.ns for c in found.culprits[MAX_CULPRITS:]))} in all"


def _who(report: Page, pid: int | None, text: str) -> str:
    command = report.command(pid) if pid is not None else None
    return "; ".join(filter(None, (clean(text, MAX_WIDTH) if text else "", command)))


def _change(report: Page, change: Change, pen: _Pen) -> Iterator[str]:
    if change.what == "regime change":
        also = f" ({change.further} further ones)" if change.further else ""
        yield from pen.wrap(f"regime change: what is usual shifted for good about {report.when(change.time_ns)}{also}")
    else:
        yield from pen.wrap(f"the first and the second half differ; they meet at {report.when(change.time_ns)}")
    rows = [
        (name, str(part.count), *(_short(spoken_quantile(part, q)) for q in QUANTILES), _short(part.quantile(1)), str(slow))
        for name, part, slow in (("before", change.before, change.outliers_before), ("after", change.after, change.outliers_after))
    ]
    yield from pen.table(("", "requests", "p50", "p90", "p99", "p99.9", "max", "slow"), rows)
    yield ""


def _worst(report: Page, pen: _Pen) -> Iterator[str]:
    if not report.worst:
        return
    title = f"the {len(report.worst)} worst requests" if len(report.worst) > 1 else "the worst request"
    yield from pen.title(title)
    used: dict[int, None] = {}
    for number, around in enumerate(report.worst, 1):
        record = around.record
        head = f"{number}. {clean(record.workload)} at {report.when(record.start_ns)}: "
        yield from pen.wrap(head + story(record), indent="   ")
        lane_chars = pen.width - 3 - LABEL_CHARS
        timeline = around.timeline(lane_chars)
        yield from timeline_lines(timeline, around, pen.ascii_only)
        for lane in timeline.lanes:
            used.update(dict.fromkeys(sorted(set(lane.kinds))))
        yield ""
    # One glyph can stand for two things on two kinds of lanes: each with its words.
    key = [f"{pen.glyphs[kind]} {WORDS[kind]}" for kind in sorted(used) if kind != NOTHING]
    key.append(f"{pen.tick} where a usual request would have ended")
    yield from pen.wrap("key: " + ", ".join(key), indent="     ")


def timeline_lines(timeline: Timeline, around: Around, ascii_only: bool = False) -> Iterator[str]:
    """A line for each lane and one with the scale, each LABEL_CHARS + 3 wider than the lanes have cells."""
    pen = _Pen(0, ascii_only)
    cells = len(timeline.lanes[0].kinds)
    span_ns = timeline.end_ns - timeline.start_ns
    usual = (around.record.baseline_ns or 0) * cells // max(span_ns, 1)
    for lane in timeline.lanes:
        drawn = "".join(pen.glyphs[kind] for kind in lane.kinds)
        label = clean(lane.name, LABEL_CHARS - 1) + ("*" if lane.partly else "")
        yield f"   {label:<{LABEL_CHARS}}{drawn}"
    yield f"   {'ms':<{LABEL_CHARS}}{_scale(span_ns, cells, usual, pen.tick)}"
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


def rate(per_second: float | None) -> str:
    """Requests a second in three digits or whole."""
    return "-" if per_second is None else f"{per_second:.3g}" if per_second < 1000 else f"{per_second:.0f}"


def _short(ns: int | None) -> str:
    """A duration without the blank, for narrow columns."""
    return duration(ns).replace(" ", "")


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
