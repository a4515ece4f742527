"""What a screen is drawn with: lines of styled text, cells, bars and sparklines, in block characters or in ASCII alone.

A `Line` is a sequence of (text, style) with a style of STYLES; how a style looks is left to the screen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from gputail.surfaces.words import clean, duration

Span = tuple[str, str]
Line = tuple[Span, ...]
STYLES = ("", "dim", "bold", "good", "warn", "bad", "accent", "head", "cursor")

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "_.-=+*%#"


@dataclass(frozen=True)
class Pen:
    """Draws with block characters, or with ASCII alone."""

    ascii: bool

    @property
    def blocks(self) -> str:
        return _ASCII_BLOCKS if self.ascii else _BLOCKS

    def text(self, text: str | None, limit: int = 400) -> str:
        """Text of others in letters that can be shown; "?" where it is not known."""
        shown = clean(text, limit)
        return shown.encode("ascii", "replace").decode() if self.ascii else shown

    def fit(self, text: str, width: int, right: bool = False) -> str:
        """Exactly `width` cells of a text, its end marked where something is cut off."""
        if width <= 0:
            return ""
        length = len(text) if text.isascii() else cell_len(text)
        if length <= width:
            return " " * (width - length) + text if right else text + " " * (width - length)
        mark = "~" if self.ascii else "…"
        return set_cell_size(text, width - 1) + mark

    def spark(self, values: Sequence[int | None], width: int, usual: int | None) -> str:
        """The last `width` values as columns from 0 up, half the height for what is usual; a gap where nothing is known."""
        shown = list(values[-width:])
        high = max(max((value for value in shown if value is not None), default=0), 2 * (usual or 0), 1)
        steps = len(self.blocks)
        marks = [" " if value is None else self.blocks[min(value * steps // high, steps - 1)] for value in shown]
        return "".join(marks).rjust(width)

    def bar(self, share: float, width: int) -> str:
        """A bar of `width` cells, filled to a share; anything above nothing is seen."""
        filled = min(max(round(share * width), 1 if share > 0 else 0), width)
        return (("#" if self.ascii else "█") * filled).ljust(width)


def compact(ns: float | None) -> str:
    """A duration without the space: 12.5ms."""
    return duration(ns).replace(" ", "")


def plain(line: Line) -> str:
    """A line as text alone."""
    return "".join(text for text, _ in line).rstrip()


def clip(line: Line, width: int) -> Line:
    """A line of at most `width` cells."""
    spans: list[Span] = []
    for text, style in line:
        length = len(text) if text.isascii() else cell_len(text)
        if length > width:
            spans.append((set_cell_size(text, width), style))
            break
        spans.append((text, style))
        width -= length
    return tuple(spans)
