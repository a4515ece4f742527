"""A widget that shows lines of styled text and repaints only those that have changed."""

from __future__ import annotations

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from gputail.surfaces.top.drawing import Line, clip

# The 16 colours that every terminal has, as its owner set them.
_STYLES = {
    "": Style(),
    "dim": Style(color="bright_black"),
    "bold": Style(bold=True),
    "good": Style(color="green"),
    "warn": Style(color="yellow"),
    "bad": Style(color="red"),
    "accent": Style(color="cyan"),
    "head": Style(reverse=True, bold=True),
    "cursor": Style(reverse=True),
}


class Lines(Widget):
    """Lines from the top; what does not fit is cut off."""

    def __init__(self, id: str) -> None:
        super().__init__(id=id)
        self.shown: list[Line] = []

    def show(self, lines: list[Line]) -> None:
        """Show these lines; the cells of those that stay the same are left alone."""
        before, self.shown = self.shown, lines
        width = self.size.width
        changed = [
            Region(0, y, width, 1)
            for y in range(max(len(before), len(lines)))
            if (before[y] if y < len(before) else None) != (lines[y] if y < len(lines) else None)
        ]
        if changed:
            self.refresh(*changed)

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        line = self.shown[y] if y < len(self.shown) else ()
        segments = [Segment(text, _STYLES[style]) for text, style in clip(line, width)]
        return Strip(segments).adjust_cell_length(width, Style())
