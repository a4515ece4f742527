"""Plots for the HTML page: inline SVG built as elements, so that whatever text is in them is escaped when they are written.

In go findings and timelines, out come `svg` elements that scale with the page. Their colours are classes, which the style sheet in
web.py gives colours for light, dark and paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element, SubElement

import numpy as np

from gputail.budget import PARTS
from gputail.histogram import Histogram
from gputail.surfaces.report.gathering import Findings, spoken_quantile
from gputail.surfaces.report.text import scale_step_ms
from gputail.surfaces.terminal import clean, duration
from gputail.timeline import COPIES, KERNELS, NOTHING, ON_CPU, WORDS, Timeline, runs

WIDTH = 900
LEFT, RIGHT, BOTTOM = 70, 12, 26
TIMELINE_CELLS = 800
LANE_HEIGHT, LANE_STEP, LANE_LEFT = 22, 28, 90
BINS = 48

CLASS_OF_KIND = {**{number: f"k-{part}" for number, part in enumerate(PARTS)}, KERNELS: "k-kernels", COPIES: "k-copies", ON_CPU: "k-on-cpu"}


def svg(height: float, label: str, width: float = WIDTH) -> Element:
    """An empty plot; `label` is what it shows, for who cannot see it."""
    made = Element("svg", {"viewBox": f"0 0 {width:g} {height:g}", "role": "img", "aria-label": label, "class": "plot"})
    made.set("xmlns", "http://www.w3.org/2000/svg")
    return made


def text(parent: Element, x: float, y: float, content: str, anchor: str = "start", kind: str = "label") -> Element:
    made = SubElement(parent, "text", {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor, "class": kind})
    made.text = content
    return made


def rect(parent: Element, x: float, y: float, width: float, height: float, kind: str, title: str = "") -> Element:
    size = {"x": f"{x:.2f}", "y": f"{y:.2f}", "width": f"{max(width, 0):.2f}", "height": f"{max(height, 0):.2f}"}
    made = SubElement(parent, "rect", {**size, "class": kind})
    if title:
        SubElement(made, "title").text = title
    return made


def line(parent: Element, x1: float, y1: float, x2: float, y2: float, kind: str) -> Element:
    return SubElement(parent, "line", {"x1": f"{x1:.1f}", "y1": f"{y1:.1f}", "x2": f"{x2:.1f}", "y2": f"{y2:.1f}", "class": kind})


def share_bar(permille: int) -> Element:
    """A bar for a table: a share of the whole."""
    made = svg(12, f"{permille / 10:.1f}%", width=160)
    made.set("class", "share")
    rect(made, 0, 1, 160, 10, "bar-back")
    rect(made, 0, 1, max(160 * permille / 1000, 1 if permille else 0), 10, "bar")
    return made


def swatch(kind: int) -> Element:
    """The colour of a kind, for the key."""
    made = svg(12, WORDS[kind], width=12)
    made.set("class", "swatch")
    rect(made, 0, 0, 12, 12, CLASS_OF_KIND[kind])
    return made


def timeline(shown: Timeline, usual_ns: int | None) -> Element:
    """A row for each lane over one scale in ms, and where a request of the usual length would have ended."""
    height = len(shown.lanes) * LANE_STEP + BOTTOM
    width, span_ns = WIDTH - LANE_LEFT - RIGHT, max(shown.end_ns - shown.start_ns, 1)
    made = svg(height, "timeline of the request's calls and of the work it waited for")
    for number, lane in enumerate(shown.lanes):
        y = number * LANE_STEP + 2
        text(made, LANE_LEFT - 8, y + LANE_HEIGHT * 0.7, clean(lane.name, 14) + ("*" if lane.partly else ""), "end")
        rect(made, LANE_LEFT, y, width, LANE_HEIGHT, "lane")
        cell, cell_ns = width / len(lane.kinds), span_ns / len(lane.kinds)
        for kind, first, stop in runs(lane.kinds):
            if kind != NOTHING:
                title = f"{WORDS[kind]}, {first * cell_ns / 1e6:.2f} to {stop * cell_ns / 1e6:.2f} ms"
                rect(made, LANE_LEFT + first * cell, y, (stop - first) * cell, LANE_HEIGHT, CLASS_OF_KIND[kind], title)
    bottom = len(shown.lanes) * LANE_STEP
    step = scale_step_ms(span_ns / 1e6, 10)
    digits = max(0, -int(np.floor(np.log10(step))))
    for number in range(int(span_ns / 1e6 / step) + 1):
        x = LANE_LEFT + number * step * 1e6 / span_ns * width
        line(made, x, bottom, x, bottom + 4, "axis")
        text(made, x, bottom + 17, f"{number * step:.{digits}f}", "middle")
    text(made, LANE_LEFT - 8, bottom + 17, "ms", "end")
    if usual_ns is not None and 0 < usual_ns < span_ns:
        x = LANE_LEFT + usual_ns / span_ns * width
        SubElement(line(made, x, 0, x, bottom + 4, "usual"), "title").text = f"a usual request takes {duration(usual_ns)}"
    return made


class _LogScale:
    """Durations (ns) to places between two ends."""

    def __init__(self, low_ns: float, high_ns: float, start: float, stop: float) -> None:
        self.low_ns, self.high_ns = max(low_ns, 1) / 1.1, max(high_ns, low_ns + 1, 2) * 1.1
        self._start, self._stop = start, stop

    def __call__(self, ns: float) -> float:
        share = np.log(max(ns, self.low_ns) / self.low_ns) / np.log(self.high_ns / self.low_ns)
        return float(self._start + share * (self._stop - self._start))

    def ticks(self) -> list[float]:
        powers = 10.0 ** np.arange(np.floor(np.log10(self.low_ns)), np.ceil(np.log10(self.high_ns)) + 1)
        ratio = self.high_ns / self.low_ns
        steps: Sequence[int] = (1, 2, 3, 4, 6, 8) if ratio < 12 else (1, 2, 5) if ratio < 200 else (1,)
        found = [power * step for power in powers.tolist() for step in steps if self.low_ns <= power * step <= self.high_ns]
        return found or [self.low_ns * 1.1]


def has_p99(found: Findings) -> bool:
    """Whether any slice of the recording has enough requests for a p99."""
    return any(spoken_quantile(found.tail.histogram(first, first + 1), 0.99) is not None for first in range(len(found.tail)))


def tail_over_time(found: Findings, height: float = 220) -> Element:
    """Median, p99 where there are enough requests, and the longest request of each slice of the recording."""
    made = svg(height, "durations over the time of the recording: median, p99 and the longest request")
    tail, points = found.tail, len(found.tail)
    if not points:
        return made
    parts = [tail.histogram(first, first + 1) for first in range(points)]
    medians = [part.quantile(0.5) for part in parts]
    p99s = [spoken_quantile(part, 0.99) for part in parts]
    longest = [int(ns) if part.count else None for ns, part in zip(tail.longest_ns[:points], parts, strict=True)]
    known = [ns for ns in (*medians, *longest) if ns is not None]
    y = _LogScale(min(known), max(known), height - BOTTOM, 8)
    width = WIDTH - LEFT - RIGHT
    x = [LEFT + (number + 0.5) / points * width for number in range(points)]
    for ns in y.ticks():
        line(made, LEFT, y(ns), WIDTH - RIGHT, y(ns), "grid")
        text(made, LEFT - 6, y(ns) + 4, duration(ns), "end")
    _time_axis(made, points * tail.width_ns / 1e9, height)
    if found.change:
        at = LEFT + min(max((found.change.time_ns - tail.origin_ns) / (points * tail.width_ns), 0), 1) * width
        SubElement(line(made, at, 8, at, height - BOTTOM, "change"), "title").text = found.change.what
    for number, most in enumerate(longest):
        if most is not None:
            slow = int(tail.outliers[number])
            radius = 3.5 if slow else 2
            dot = SubElement(
                made,
                "circle",
                {"cx": f"{x[number]:.1f}", "cy": f"{y(most):.1f}", "r": f"{radius}", "class": "longest slow" if slow else "longest"},
            )
            SubElement(dot, "title").text = f"longest {duration(most)}; {parts[number].count} requests, {slow} slow"
    for values, kind in ((medians, "p50"), (p99s, "p99")):
        for stretch in _stretches(values):
            points_text = " ".join(f"{x[number]:.1f},{y(values[number] or 0):.1f}" for number in stretch)
            SubElement(made, "polyline", {"points": points_text, "class": f"curve {kind}"})
    return made


def _stretches(values: Sequence[int | None]) -> list[list[int]]:
    """Numbers of the values that are known, in runs without a gap."""
    out: list[list[int]] = [[]]
    for number, value in enumerate(values):
        if value is not None:
            out[-1].append(number)
        elif out[-1]:
            out.append([])
    return [stretch for stretch in out if stretch]


def _time_axis(made: Element, seconds: float, height: float) -> None:
    width, base = WIDTH - LEFT - RIGHT, height - BOTTOM
    line(made, LEFT, base, WIDTH - RIGHT, base, "axis")
    step = scale_step_ms(seconds, 10)
    digits = max(0, -int(np.floor(np.log10(step))))
    for number in range(int(seconds / step) + 1):
        at = LEFT + number * step / seconds * width
        line(made, at, base, at, base + 4, "axis")
        text(made, at, base + 17, f"{number * step:.{digits}f}" + (" s" if not number else ""), "middle")


def distribution(found: Findings, height: float = 180) -> Element:
    """How many requests took how long, both on logarithmic scales; before and after apart where something changed."""
    made = svg(height, "distribution of request durations")
    low, high = found.histogram.quantile(0), found.histogram.quantile(1)
    if low is None or high is None:
        return made
    x = _LogScale(low, high, LEFT, WIDTH - RIGHT)
    bounds = x.low_ns * (x.high_ns / x.low_ns) ** (np.arange(BINS + 1) / BINS)
    series = [(found.histogram, "bar")]
    if found.change:
        series = [(found.change.before, "before"), (found.change.after, "after")]
    counts = [(_binned(part, bounds), kind) for part, kind in series]
    most = max(int(binned.max()) for binned, _ in counts)
    top, base = 8, height - BOTTOM

    def tall(count: int) -> float:
        """Of a bar: logarithmic, and one request is to be seen."""
        return (base - top) * float(np.log(count + 1) / np.log(most + 1)) if count else 0.0

    for count in (1, 10, 100, 1000, 10_000, 100_000, 10**6, 10**7, 10**8):
        if count <= most:
            line(made, LEFT, base - tall(count), WIDTH - RIGHT, base - tall(count), "grid")
            text(made, LEFT - 6, base - tall(count) + 4, f"{count}", "end")
    step = (WIDTH - LEFT - RIGHT) / BINS
    for place, (binned, kind) in enumerate(counts):
        each = (step - 2) / len(counts)
        for number, count in enumerate(binned.tolist()):
            if count:
                title = f"{count} requests of {duration(bounds[number])} to {duration(bounds[number + 1])}" + (
                    f", {kind}" if kind != "bar" else ""
                )
                rect(made, LEFT + number * step + 1 + place * each, base - tall(count), each, tall(count), kind, title)
    line(made, LEFT, base, WIDTH - RIGHT, base, "axis")
    for ns in x.ticks():
        line(made, x(ns), base, x(ns), base + 4, "axis")
        text(made, x(ns), base + 17, duration(ns), "middle")
    if found.baseline_ns:
        mark = line(made, x(found.baseline_ns), top, x(found.baseline_ns), base, "usual")
        SubElement(mark, "title").text = f"usual: {duration(found.baseline_ns)}"
    return made


def _binned(histogram: Histogram, bounds_ns: np.ndarray) -> np.ndarray:
    counts = np.diff(histogram.cumulative(bounds_ns[1:]), prepend=0)
    counts[-1] += histogram.count - counts.sum()  # what lies beyond the last bound by rounding, and the overflow
    return counts
