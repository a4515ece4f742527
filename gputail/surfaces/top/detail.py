"""One workload, and one outlier, as lines.

In come a workload or verdict message and the room there is, out come lines; those of outliers can be chosen. Pure.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from itertools import groupby, pairwise
from typing import Any

from gputail.surfaces.top.drawing import Line, Pen, Span, compact
from gputail.surfaces.top.listing import culprit
from gputail.surfaces.top.model import title
from gputail.surfaces.words import clock, duration, number

MIN_BARS, MAX_BARS = 6, 24
# Everything on the page of a workload but the bars, with a few outliers.
_OTHER_LINES = 14
SPACIOUS = 28  # lines from which there is room for empty ones
_LETTERS = {
    "host": "h", "run_queue": "r", "off_cpu": "z", "launch": "l", "copy": "c", "alloc": "a", "module": "m", "sync": "w", "collective": "n",
    "other": "o",
}  # fmt: skip
_WORDS = {
    "host": "in the program itself", "run_queue": "ready, not on a CPU", "off_cpu": "asleep", "launch": "in launches", "copy": "in copies",
    "alloc": "in allocations", "module": "loading kernels", "sync": "waiting for the GPU", "collective": "in collectives",
    "other": "in other calls",
}  # fmt: skip
# Of what others did; the letters of a timeline's cells are those of messages.CELL_LETTERS.
_OTHERS = {"g": "kernels", "p": "copies", "x": "on the CPU it waits for"}
_LANE_STYLES = {
    "w": "warn",
    "n": "warn",
    "r": "bad",
    "z": "bad",
    "h": "good",
    "l": "accent",
    "c": "accent",
    "g": "bad",
    "p": "bad",
    "x": "bad",
}
_STYLES = {"sync": "warn", "collective": "warn", "run_queue": "bad", "off_cpu": "bad", "host": "good", "launch": "accent", "copy": "accent"}


def workload_page(message: dict[str, Any], pen: Pen, width: int, height: int) -> tuple[list[Line], dict[int, int]]:
    """Lines, and which of them stand for which outlier of the message."""
    row = message["workload"]
    gap: list[Line] = [(("", ""),)] if height >= SPACIOUS else []
    usual = duration(row["baseline_ns"]) if row["baseline_ns"] is not None else "not known yet"
    lines: list[Line] = [
        ((pen.text(title(row)), "bold"), (f"  pid {row['pid']}  {pen.text(row['shape'])}  usual {usual}", "")),
        ((_about(row, pen), "dim"),),
        _figures("last minute", row["recent"]),
        _figures("in all", row["total"]),
        *gap,
    ]
    bars = _merged(message["bars"], max(MIN_BARS, min(height - _OTHER_LINES, MAX_BARS)))
    lines += _histogram(bars, pen, width)
    lines += [*gap, *_causes(message["causes"], pen, width)]
    lines += [*gap, (("latest outliers", "bold"), ("  (Enter opens one)", "dim"))]
    chosen: dict[int, int] = {}
    for number_, verdict in enumerate(message["outliers"]):
        chosen[len(lines)] = number_
        record = verdict["record"]
        text = f"  {clock(record['end_ns'])} {record['cause']}: {pen.text(verdict['story'])}"
        lines.append(((pen.fit(text, width), ""),))
    if not message["outliers"]:
        lines.append((("  none yet" if row["baseline_ns"] is not None else "  none: what is usual is learned from 32 requests", "dim"),))
    return lines, chosen


def _about(row: dict[str, Any], pen: Pen) -> str:
    parts = [pen.text(row["command"] or row["comm"])]
    if row["container"]:
        parts.append(f"container {pen.text(row['container'])}")
    if row["incomplete"]:
        parts.append(f"{row['incomplete']} of {row['requests']} requests incomplete")
    if row["gpu"]:
        parts.append(f"GPU {pen.text(row['gpu'])}")
    return "  " + ", ".join(parts)


def _figures(what: str, f: dict[str, Any]) -> Line:
    text = (
        f"  {what:11} {number(f['requests']):>5} requests {number(f['rate']):>5}/s  p50 {compact(f['p50_ns']):<6} "
        f"p99 {compact(f['p99_ns']):<6} p99.9 {compact(f['p999_ns']):<6} {number(f['outliers_per_min']):>4} outliers/min"
    )
    return ((text, ""),)


def _merged(bars: list[dict[str, int]], at_most: int) -> list[dict[str, int]]:
    """Neighbouring steps joined, so that there are no more than so many."""
    each = -(-len(bars) // at_most) or 1
    joined = []
    for first in range(0, len(bars), each):
        part = bars[first : first + each]
        counts = {key: sum(bar[key] for bar in part) for key in ("recent", "before")}
        joined.append({"from_ns": part[0]["from_ns"], "to_ns": part[-1]["to_ns"], **counts})
    return joined


def _histogram(bars: list[dict[str, int]], pen: Pen, width: int) -> list[Line]:
    if not bars:
        return [(("no requests", "dim"),)]
    room = max((width - 21 - 2 * 10) // 2, 4)
    lines: list[Line] = [((f"{'':20} {'last minute':{room + 9}} {'before'}", "bold"),)]
    most = {key: max(max(bar[key] for bar in bars), 1) for key in ("recent", "before")}
    for bar in bars:
        spans: list[Span] = [(f"  {compact(bar['from_ns']):>7} - {compact(bar['to_ns']):>7} ", "dim")]
        for key, style in (("recent", "accent"), ("before", "dim")):
            spans.append((pen.bar(bar[key] / most[key], room), style))
            spans.append((f" {number(bar[key]) if bar[key] else '.':<9}", "" if bar[key] else "dim"))
        lines.append(tuple(spans))
    return lines


def _causes(causes: list[dict[str, Any]], pen: Pen, width: int) -> list[Line]:
    lines: list[Line] = [(("causes by their share of the excess, in all", "bold"),)]
    room = max(min(width - 52, 40), 8)
    for cause in causes:
        share = cause["share"] or 0
        text = f" {100 * share:5.1f}%  {compact(cause['excess_ns']):>7}  {cause['outliers']} outliers"
        lines.append(((f"  {pen.text(cause['cause'], 20):20} ", "warn"), (pen.bar(share, room), "accent"), (text, "")))
    if not causes:
        lines.append((("  no outliers", "good"),))
    return lines


def _timeline(lanes: list[dict[str, Any]] | None, record: dict[str, Any], pen: Pen, room: int) -> list[Line]:
    """What waited for whom: the request's own calls from its beginning to its end, and below them what others did meanwhile."""
    if not lanes:
        return []
    lines: list[Line] = [(("", ""),), (("when: its calls, and what others did meanwhile", "bold"),)]
    used: set[str] = set()
    for lane in lanes:
        cells = _resampled(lane["cells"], room)
        used.update(cells)
        spans: list[Span] = [(f"  {pen.fit(pen.text(lane['name']), 14)} ", "" if lane["pid"] is None else "bad")]
        for letter, run in groupby(cells):
            spans.append(("".join(run), _LANE_STYLES.get(letter, "")))
        lines.append((*spans, (f" {compact(record['duration_ns']):>7}" if lane["pid"] is None else "", "")))
    words = {letter: _WORDS[part] for part, letter in _LETTERS.items()} | _OTHERS
    lines += [
        ((part, "dim"),) for part in textwrap.wrap(", ".join(f"{letter} {words[letter]}" for letter in words if letter in used), 17 + room)
    ]
    return lines


def _resampled(cells: str, room: int) -> str:
    """The cells in so many: each shows what there is most of."""
    edges = [number * len(cells) // room for number in range(room + 1)]
    return "".join(Counter(cells[first : max(stop, first + 1)]).most_common(1)[0][0] for first, stop in pairwise(edges))


def outlier_page(verdict: dict[str, Any], pen: Pen, width: int) -> list[Line]:
    """An outlier: its story, where its time went against what is usual, and what its excess is put down to."""
    record = verdict["record"]
    excess, usual, total = record["excess_ns"] or 0, record["baseline_ns"] or 0, record["duration_ns"]
    room = max(width - 34, 10)
    confidence = record["confidence"]
    lines: list[Line] = [
        ((f"outlier of {clock(record['end_ns'])}  ", "bold"), (f"{pen.text(record['comm'])}[{record['pid']}] tid {record['tid']}", "")),
        *(((part, "warn"),) for part in textwrap.wrap(pen.text(verdict["story"]), max(width - 1, 10))),
        (
            (
                f"  {record['calls']} calls, {record['launches']} launches, ended by {record['boundary']}; "
                f"confidence {'-' if confidence is None else f'{confidence:.2f}'}",
                "dim",
            ),
        ),
        *_timeline(verdict.get("timeline"), record, pen, room),
        (("", ""),),
        (("where its time went (by kind, not in the order of time)", "bold"),),
    ]

    def cells(ns: int) -> int:
        return round(ns / total * room) if total else 0

    mark = pen.bar(1, 1)
    lines.append(((f"  {'usual':14} ", "dim"), ((mark * cells(usual)).ljust(room), "dim"), (f" {compact(usual):>7}", "")))
    spans: list[Span] = [(f"  {'this one':14} ", "")]
    used = 0
    parts = sorted(record["budget"].items(), key=lambda part: list(_LETTERS).index(part[0]) if part[0] in _LETTERS else 99)
    reached = 0
    for part, ns in parts:
        reached += ns
        here = cells(reached) - used
        used += here
        spans.append((_LETTERS.get(part, "?") * here, _STYLES.get(part, "")))
    lines.append((*spans, (" " * (room - used), ""), (f" {compact(total):>7}", "")))
    offset = cells(usual)
    for contribution in record["contributions"]:
        length = max(cells(contribution["ns"]), 1)
        offset = min(offset, room - 1)
        length = min(length, room - offset)
        who = f"pid {contribution['culprit_pid']}" if contribution["culprit_pid"] is not None else contribution["cause"]
        bar = " " * offset + mark * length
        lines.append(
            ((f"  {pen.fit(who, 14)} ", "bad"), (bar.ljust(room), "bad"), (f" {compact(contribution['ns']):>7}", "")),
        )
        offset += length
    lines += [(("", ""),), (("what it was doing", "bold"),)]
    for part, ns in sorted(parts, key=lambda part: -part[1]):
        text = f"  {_LETTERS.get(part, '?')} {_WORDS.get(part, part):22} {compact(ns):>8}  {100 * ns / total if total else 0:5.1f}%"
        lines.append(((text, _STYLES.get(part, "")),))
    lines += [(("", ""),), ((f"what its excess of {compact(excess)} is put down to", "bold"),)]
    for contribution in record["contributions"]:
        share = contribution["ns"] / excess if excess else 0
        text = f"  {contribution['cause']:20} {compact(contribution['ns']):>8}  {100 * share:5.1f}%  {culprit(contribution, pen)}"
        lines.append(((pen.fit(text, width), ""),))
    return lines
