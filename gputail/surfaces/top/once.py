"""One view as plain text: what the live screen shows, whole, without anything that only a terminal understands."""

from __future__ import annotations

import shutil
import time
from typing import Any

from gputail.surfaces.top import listing
from gputail.surfaces.top.drawing import Pen, plain
from gputail.surfaces.top.model import Model

WIDTH = 120  # where it is not told by a terminal or COLUMNS


def page(message: dict[str, Any], text: str, sort: str, is_ascii: bool) -> str:
    """A snapshot message as text; `text` filters."""
    model, pen = Model(sort, text), Pen(is_ascii)
    model.apply(message)
    width = max(shutil.get_terminal_size((WIDTH, 24)).columns, 80)
    places = listing.layout_for(model, width)
    rows = model.rows()
    lines = [
        listing.title_line(model, "snapshot", time.strftime("%H:%M:%S"), pen, width),
        listing.totals_line(model, pen),
        listing.cost_line(model),
        listing.head(model, pen, places),
        *(listing.row(row, model.figures, pen, places) for row in rows),
    ]
    if not rows:
        lines.append((("no workload" + (" matches the filter" if text else " has made a request yet"), ""),))
    return "".join(plain(line) + "\n" for line in lines)
