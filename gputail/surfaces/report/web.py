"""The page as one HTML file that needs nothing else: no script, no network, plots within it; for screens light and dark, and paper.

In goes a `Page`, out comes a string. It is built as a tree of elements, and the standard library's serializer escapes all text and
attributes; no markup is ever made from text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, tostring

from gputail import __version__
from gputail.surfaces.report import plots
from gputail.surfaces.report.gathering import QUANTILES, Findings, spoken_quantile
from gputail.surfaces.report.page import Page
from gputail.surfaces.report.stories import cause_in_words, reason, story
from gputail.surfaces.report.text import rate
from gputail.surfaces.terminal import clean, duration
from gputail.timeline import NOTHING, Around

MAX_NAME = 200
MAX_ROWS = 50
MAX_DETAILED = 10
MAX_CULPRITS = 10
QUANTILE_NAMES = ("p50", "p90", "p99", "p99.9")

_STYLE = Path(__file__).with_name("page.css")


def page(report: Page) -> str:
    """The whole document."""
    html = Element("html", {"lang": "en"})
    head = SubElement(html, "head")
    SubElement(head, "meta", {"charset": "utf-8"})
    # Nothing may be loaded, whatever a name in the page might try.
    SubElement(head, "meta", {"http-equiv": "Content-Security-Policy", "content": "default-src 'none'; style-src 'unsafe-inline'"})
    SubElement(head, "meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"})
    SubElement(head, "title").text = f"gputail: {clean(report.file, MAX_NAME)}"
    SubElement(head, "style").text = _STYLE.read_text(encoding="ascii")
    main = SubElement(SubElement(html, "body"), "main")
    _head(main, report)
    if report.workloads:
        _tails(main, report)
    for found in [found for found in report.workloads if found.outliers or found.change][:MAX_DETAILED]:
        _workload(main, report, found)
    _worst(main, report)
    SubElement(main, "p", {"class": "soft"}).text = f"gputail {__version__}"
    return "<!DOCTYPE html>\n" + tostring(html, encoding="unicode", method="html") + "\n"


def _head(main: Element, report: Page) -> None:
    SubElement(main, "h1").text = f"gputail report of {clean(report.file, MAX_NAME)}"
    SubElement(main, "p", {"class": "soft"}).text = report.facts()
    for notice in report.notices():
        SubElement(main, "p", {"class": "notice"}).text = notice
    SubElement(main, "p", {"class": "headline"}).text = report.headline()


def _tails(main: Element, report: Page) -> None:
    SubElement(main, "h2").text = "The tail of each workload"
    rows = []
    for found in report.workloads[:MAX_ROWS]:
        quantiles = [duration(found.quantile(q)) for q in QUANTILES]
        rows.append([clean(found.name, MAX_NAME), str(found.requests), rate(found.per_second), *quantiles, duration(found.longest_ns),
                     duration(found.baseline_ns), str(found.outliers)])  # fmt: skip
    _table(main, ("workload", "requests", "/s", *QUANTILE_NAMES, "max", "usual", "slow"), rows)
    hidden = len(report.workloads) - MAX_ROWS
    if hidden > 0:
        SubElement(main, "p", {"class": "soft"}).text = f"and {hidden} more workloads"


def _workload(main: Element, report: Page, found: Findings) -> None:
    section = SubElement(main, "section")
    SubElement(section, "h2").text = clean(found.name, MAX_NAME)
    command = report.command(found.pid)
    if command:
        SubElement(SubElement(section, "p", {"class": "soft"}), "code").text = command
    where = "; the dashed line is where before and after meet" if found.change else ""
    p99 = "p99 (upper line, where there are enough requests), " if plots.has_p99(found) else ""
    caption = f"Durations over time, logarithmic: median (line), {p99}longest (dots, large where slow)"
    _figure(section, plots.tail_over_time(found), caption + where)
    caption = "How many requests took how long, both logarithmic; the dashed line is what is usual"
    _figure(section, plots.distribution(found), caption + ("; left bars before, right bars after" if found.change else ""))
    if found.change:
        change = found.change
        SubElement(section, "h3").text = f"Before and after: {change.what}, {report.when(change.time_ns)}"
        rows = [
            [name, str(part.count), *(duration(spoken_quantile(part, q)) for q in QUANTILES), duration(part.quantile(1)), str(slow)]
            for name, part, slow in (("before", change.before, change.outliers_before), ("after", change.after, change.outliers_after))
        ]
        _table(section, ("", "requests", *QUANTILE_NAMES, "max", "slow"), rows)
        if change.further:
            SubElement(section, "p", {"class": "soft"}).text = f"{change.further} further regime changes are not shown"
    if not found.outliers:
        return
    SubElement(section, "h3").text = "Causes, by their share of the excess"
    note = f"{found.outliers} of {found.requests} requests were slow, {duration(found.excess_ns)} longer than usual in all."
    SubElement(section, "p").text = note
    shares: list[Sequence[str | Element]] = [
        [s.cause, plots.share_bar(s.permille), f"{s.permille / 10:.1f}%", duration(s.ns), str(s.outliers), cause_in_words(s.cause)]
        for s in found.shares
    ]
    _table(section, ("cause", "", "share", "excess", "requests", "time spent"), shares, left=(0, 1, 5))
    if found.culprits:
        SubElement(section, "h3").text = "Culprits"
        shown = found.culprits[:MAX_CULPRITS]
        commands = [(report.command(c.pid) if c.pid is not None else None) or "" for c in shown]
        culprits = [
            [
                "-" if c.pid is None else str(c.pid),
                duration(c.ns),
                str(c.requests),
                c.cause,
                clean(c.text, MAX_NAME) if c.text else "",
                command,
            ]
            for c, command in zip(shown, commands, strict=True)
        ]
        head = ("pid", "excess", "requests", "cause", "who or what", "command")
        columns = len(head) if any(commands) else len(head) - 1
        _table(section, head[:columns], [row[:columns] for row in culprits], left=(0, 3, 4, 5))
        rest = found.culprits[MAX_CULPRITS:]
        if rest:
            SubElement(section, "p", {"class": "soft"}).text = f"and {len(rest)} more, {duration(sum(c.ns for c in rest))} in all"


def _worst(main: Element, report: Page) -> None:
    if not report.worst:
        return
    section = SubElement(main, "section")
    SubElement(section, "h2").text = "The worst requests"
    used: set[int] = set()
    articles = [_article(report, number, around, used) for number, around in enumerate(report.worst, 1)]
    key = SubElement(section, "ul", {"class": "key"})
    for kind in sorted(used - {NOTHING}):
        entry = SubElement(key, "li")
        swatch = plots.swatch(kind)
        entry.append(swatch)
        swatch.tail = plots.WORDS[kind]
    SubElement(key, "li").text = "dashed: where a usual request would have ended"
    section.extend(articles)


def _article(report: Page, number: int, around: Around, used: set[int]) -> Element:
    record, article = around.record, Element("article")
    SubElement(article, "h3").text = f"{number}. {story(record)}"
    where = f"{clean(record.workload, MAX_NAME)}, pid {record.pid}, tid {record.tid}, {report.when(record.start_ns)}; "
    counts = f"{record.calls} calls, {record.launches} launches; confidence {100 * (record.confidence or 0):.0f}%"
    SubElement(article, "p", {"class": "soft"}).text = where + counts
    shown = around.timeline(plots.TIMELINE_CELLS)
    for lane in shown.lanes:
        used.update(lane.kinds)
    _figure(article, plots.timeline(shown, record.baseline_ns), "")
    if any(lane.partly for lane in shown.lanes):
        SubElement(article, "p", {"class": "soft"}).text = "* there were too many calls to keep: the earliest are missing"
    rows = [[c.cause, duration(c.ns), reason(c)] for c in record.contributions]
    _table(article, ("cause", "of the excess", "what"), rows, left=(0, 2))
    return article


def _figure(parent: Element, plot: Element, caption: str) -> None:
    figure = SubElement(parent, "figure")
    figure.append(plot)
    if caption:
        SubElement(figure, "figcaption").text = caption


def _table(parent: Element, head: Sequence[str], rows: Iterable[Sequence[str | Element]], left: Sequence[int] = (0,)) -> None:
    """A table that scrolls by itself where it is wider than the page; a cell is text or an element."""
    table = SubElement(SubElement(parent, "div", {"class": "scroll"}), "table")
    line = SubElement(SubElement(table, "thead"), "tr")
    for number, name in enumerate(head):
        SubElement(line, "th", {"class": "left"} if number in left else {}).text = name
    body = SubElement(table, "tbody")
    for row in rows:
        line = SubElement(body, "tr")
        for number, cell in enumerate(row):
            long = isinstance(cell, str) and len(cell) > 40
            made = SubElement(line, "td", {"class": "left wide" if long else "left"} if number in left else {})
            if isinstance(cell, str):
                made.text = cell
            else:
                made.append(cell)
