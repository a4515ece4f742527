"""Pictures of gputail top while a real daemon traces simulated programs: the list, and an outlier. Argument: where they go."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from gputail.sim.build import build
from gputail.sim.scenario import scenario
from gputail.surfaces.top.screen import Top

LABELS = ("gpu+xgemm", "gdevsync", "pageable", "gside")
SECONDS = 45.0
SIZE = (118, 28)


def picture(app: Top) -> str:
    """The screen as SVG that fetches no fonts."""
    return re.sub(r"\s*@font-face \{.*?\}", "", app.export_screenshot(title="gputail top"), flags=re.DOTALL)


async def look(path: str, folder: Path) -> None:
    app = Top(path)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.pause(3)
        app.model.put_in_order()
        app.redraw()
        await pilot.pause(0.5)
        (folder / "top.svg").write_text(picture(app))
        rows = app.model.rows()
        app.page.cursor = next(place for place, row in enumerate(rows) if (row["top"] or {}).get("cause") == "foreign_kernel")
        app._do("open")
        await pilot.pause(1.5)
        assert app.details
        verdicts = app.details["outliers"]
        app.model.is_paused = True
        app.page.cursor = next(place for place, verdict in enumerate(verdicts) if verdict["record"]["cause"] == "foreign_kernel")
        app._do("open")
        app.redraw()
        await pilot.pause(0.5)
        (folder / "top-outlier.svg").write_text(picture(app))


def main(folder: Path) -> None:
    with ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "socket"
        library = str(build().libraries / "libcuda.so.1")
        daemon = subprocess.Popen(
            [sys.executable, "-m", "gputail", "run", "--library", library, "--listen", "off", "--socket", str(path)],
            stderr=subprocess.DEVNULL,
        )
        stack.callback(daemon.wait)
        stack.callback(daemon.terminate)
        while not path.exists():
            time.sleep(0.1)
        for number, label in enumerate(LABELS):
            stack.enter_context(scenario(label, SECONDS, seed=number))
        time.sleep(SECONDS / 2)
        asyncio.run(look(str(path), folder))


if __name__ == "__main__":
    os.environ["TERM"] = "xterm-256color"
    main(Path(sys.argv[1]))
