"""The page as HTML is well formed, needs nothing else, says what the text says, and no name in it can become markup."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gputail import cli
from gputail.report import Options, analyse
from gputail.surfaces.report import plots, web
from gputail.surfaces.report.stories import story
from gputail.surfaces.terminal import duration
from tests.unit.reports import CULPRIT, DATA, HOSTILE, HOSTILE_BYTES, TRACES, page_of, record, serving_beside_a_burst

VOID = {"meta", "br", "img", "link", "input", "hr"}
EXPECTED = {
    "html", "head", "meta", "title", "style", "body", "main", "section", "article", "h1", "h2", "h3", "p", "code", "ul", "li", "figure",
    "figcaption", "div", "table", "thead", "tbody", "tr", "th", "td", "svg", "rect", "line", "text", "polyline", "circle",
}  # fmt: skip


class Reader(HTMLParser):
    """Follows the nesting of a page and keeps its elements and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


@pytest.mark.parametrize("name", TRACES)
def test_the_page_is_well_formed_and_loads_nothing(name: str) -> None:
    html = web.page(page_of(name))
    reader = read(html)
    assert html.startswith("<!DOCTYPE html>\n<html")
    assert {tag for tag, _ in reader.elements} <= EXPECTED
    allowed = {"charset", "content", "http-equiv", "name", "lang", "class", "viewbox", "role", "aria-label", "xmlns", "x", "y", "width",
               "height", "x1", "x2", "y1", "y2", "cx", "cy", "r", "points", "text-anchor"}  # fmt: skip
    assert {name for _, attributes in reader.elements for name in attributes} <= allowed
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", html)


@pytest.mark.parametrize("name", TRACES)
def test_the_page_says_what_the_records_say(name: str) -> None:
    page = page_of(name)
    said = " ".join(read(web.page(page)).text)
    for around in page.worst:
        assert story(around.record) in said
    for found in page.workloads:
        for share in found.shares:
            assert share.cause in said and f"{share.permille / 10:.1f}%" in said and duration(share.ns) in said


@pytest.mark.parametrize("name", TRACES)
def test_every_plot_is_there_and_all_that_is_drawn_lies_within_it(name: str) -> None:
    page = page_of(name)
    reader = read(web.page(page))
    plotted = sum(2 for found in page.workloads if found.outliers or found.change) + len(page.worst)
    assert sum(tag == "svg" and attributes["class"] == "plot" for tag, attributes in reader.elements) == plotted
    width = height = 0.0
    for tag, attributes in reader.elements:
        if tag == "svg":
            width, height = (float(number) for number in (attributes["viewbox"] or "").split()[2:])
        elif tag == "rect":
            x, y, wide, tall = (float(attributes[key] or "nan") for key in ("x", "y", "width", "height"))
            assert 0 <= x <= x + wide <= width + 0.1 and 0 <= y <= y + tall <= height + 0.1
        elif tag == "circle":
            assert 0 <= float(attributes["cx"] or "nan") <= width and 0 <= float(attributes["cy"] or "nan") <= height
        elif tag == "polyline":
            for x, y in ((float(x), float(y)) for x, y in (point.split(",") for point in (attributes["points"] or "").split())):
                assert 0 <= x <= width and 0 <= y <= height


def test_the_style_knows_every_class_and_every_colour_is_there_for_light_and_dark() -> None:
    style = Path(web.__file__).with_name("page.css").read_text()
    used = {
        name
        for trace in TRACES
        for _, attributes in read(web.page(page_of(trace))).elements
        for name in (attributes.get("class") or "").split()
    }
    used |= set(plots.CLASS_OF_KIND.values())
    assert {name for name in used if f".{name}" not in style} == set()
    light, dark = style.split("@media screen and (prefers-color-scheme: dark)")  # and paper is as light as light
    named = set(re.findall(r"var\((--[\w-]+)\)", style))
    assert named == set(re.findall(r"^ +(--[\w-]+):", light, re.MULTILINE)) == set(re.findall(r"^ +(--[\w-]+):", dark, re.MULTILINE))


@pytest.mark.parametrize("name", [HOSTILE, "</td></table><img src=x onerror=alert(1)>", "&lt;script&gt;", "\udcff\ud800", "漢字" * 50])
def test_names_of_other_processes_are_text_and_nothing_else(name: str, tmp_path: Path) -> None:
    path = record(tmp_path / "<b>&'\".gpt", serving_beside_a_burst(), name=name, kernel=HOSTILE_BYTES)
    html = web.page(analyse(Options(str(path))))
    reader = read(html)
    assert {tag for tag, _ in reader.elements} <= EXPECTED
    assert not any(attribute.startswith("on") for _, attributes in reader.elements for attribute in attributes)
    assert all(char.isprintable() or char == "\n" for char in html)
    html.encode()  # no lone surrogates
    said = "".join(reader.text)
    assert "<b>&'\".gpt" in said
    assert "<img src=x onerror=alert(1)>\"'" in said  # the kernel's name, as it is
    assert f"pid {CULPRIT}" in said


def test_the_page_is_written_beside_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    assert cli.main(["report", str(DATA / "xgemm.npz"), "--html", str(out), "--worst", "2"]) == 0
    assert "the 2 worst requests" in capsys.readouterr().out
    assert sum(tag == "article" for tag, _ in read(out.read_text(encoding="utf-8")).elements) == 2


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium to open the page with")
def test_a_browser_opens_the_page_without_a_complaint_and_shows_every_plot(tmp_path: Path) -> None:
    page = page_of("gil")
    out = tmp_path / "page.html"
    out.write_text(web.page(page), encoding="utf-8")
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr",
        "--dump-dom", out.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)  # type: ignore[arg-type]
    assert done.returncode == 0
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    assert done.stdout.count('class="plot"') == 2 + len(page.worst)
