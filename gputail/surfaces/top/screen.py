"""The live screen: asks the daemon once an interval, and shows the page that the user is on.

In come messages and keys, out goes what the pages (listing, detail, keys) make of them. Alone in wiring textual's application; the
terminal is put back as it was, however it ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.events import Click, Key, MouseScrollDown, MouseScrollUp, Resize
from textual.timer import Timer

from gputail.errors import GputailError
from gputail.surfaces.client import ANSWER_S, MAX_MESSAGE_BYTES, NoDaemon, cannot_connect, decoded, request
from gputail.surfaces.top import detail, listing
from gputail.surfaces.top.drawing import Line, Pen, clip
from gputail.surfaces.top.keys import ACTIONS, help_page
from gputail.surfaces.top.lines import Lines
from gputail.surfaces.top.model import SORTS, Model
from gputail.surfaces.top.session import Session

if TYPE_CHECKING:
    from gputail.surfaces.top import Options

T = TypeVar("T")

RETRY_S = 0.5
LEAVE_S = 3.0
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
HEAD, FOOT = 3, 2
MAX_FILTER = 60
_HINTS = "Enter open  / filter  > sort  r order  w worst  Space pause  c cost  ? keys  q"
# What undoes everything that may have been switched on: alternate screen, hidden cursor, mouse, paste and key reports, colours.
_RESTORE = "\x1b[?1049l\x1b[?25h\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?1015l\x1b[?2004l\x1b[?1004l\x1b[?7h\x1b[<u\x1b[0m"


@dataclass
class Page:
    """A page that is open, and where in it the user is."""

    name: str  # list, workload, outlier, help or cost
    of: str = ""  # the workload's name
    verdict: dict[str, Any] | None = None  # the outlier
    top: int = 0  # first line or row that is seen
    cursor: int = 0  # of the rows, or of the lines that can be chosen


class Top(App[GputailError | None]):
    """The application. `path` is the socket; `session` the one of our own, if there is one."""

    CSS = f"""
    Screen {{ layout: vertical; overflow: hidden hidden; background: ansi_default; color: ansi_default; }}
    #head {{ height: {HEAD}; }}
    #body {{ height: 1fr; }}
    #foot {{ height: {FOOT}; }}
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS = [Binding("ctrl+c", "leave", show=False, priority=True), Binding("ctrl+q", "leave", show=False, priority=True)]

    def __init__(self, path: str, session: Session | None = None, delay_s: float = 1.0, sort: str = "outliers", text: str = "",
                 is_ascii: bool = False) -> None:  # fmt: skip
        super().__init__(ansi_color=True)
        self.path, self.session, self.delay_s = path, session, delay_s
        self.model, self.pen = Model(sort, text), Pen(is_ascii)
        self.pages = [Page("list")]
        self.state = "starting to trace" if session else "connecting"
        self.details: dict[str, Any] | None = None  # the message of the workload that is looked at
        self.typed: str | None = None  # a filter that is being typed
        self.note = ""
        self.when_leaving: Callable[[], None] = lambda: None
        self._is_leaving = False
        self.is_asked_to_end = False  # perhaps by a signal that came before there was anything to end
        self._chosen: dict[int, int] = {}
        self._hurry = asyncio.Event()
        self._look: asyncio.Task[None] | None = None
        self._ticker: Timer | None = None

    def compose(self) -> ComposeResult:
        yield Lines("head")
        yield Lines("body")
        yield Lines("foot")

    def on_mount(self) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.action_leave)
        if self.is_asked_to_end:
            self.action_leave()
        self._look = asyncio.create_task(self._keep_looking())
        self.redraw()

    def action_leave(self) -> None:
        if not self._is_leaving:
            self._is_leaving = True
            self.when_leaving()
            self.exit(None)

    @property
    def page(self) -> Page:
        return self.pages[-1]

    # What the daemon says.

    async def _keep_looking(self) -> None:
        """Ask, show, wait; connect again when the daemon has gone."""
        is_first = True
        while True:
            try:
                if self.session:
                    self.session.check()
                reader, writer = await self._connect()
                try:
                    await self._look_on(reader, writer)
                finally:
                    writer.close()
            except NoDaemon as gone:
                if is_first and not self.session and not self.model.snapshot:
                    self.exit(gone)
                    return
                if self.model.snapshot:
                    self.state = "reconnecting: the daemon is gone"
                self.redraw()
                await asyncio.sleep(RETRY_S)
            except GputailError as error:
                self.exit(error)
                return
            is_first = False

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            return await asyncio.open_unix_connection(self.path, limit=MAX_MESSAGE_BYTES)
        except OSError as error:
            raise cannot_connect(self.path, error) from error

    async def _look_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def ask(**fields: object) -> dict[str, Any]:
            try:
                writer.write(request(**fields))
                line = await _within(reader.readline(), ANSWER_S)
            except (OSError, ValueError) as error:
                raise NoDaemon(f"the daemon at {self.path} does not answer") from error
            if not line.endswith(b"\n"):
                raise NoDaemon(f"the daemon that served {self.path} is gone")
            return decoded(line, self.path)

        while True:
            self._hurry.clear()
            if not self.model.is_paused or not self.model.snapshot:
                self.model.apply(await ask(get="snapshot"))
                self.state = "live" if not self.session else "live (tracing by itself, no daemon)"
            wanted = next((page.of for page in self.pages if page.name == "workload"), None)
            if wanted and (not self.model.is_paused or not self.details or self.details.get("workload", {}).get("name") != wanted):
                self.details = await ask(get="workload", name=wanted)
            self.redraw()
            with suppress(TimeoutError):
                await _within(self._hurry.wait(), self.delay_s)
            if self.session:
                self.session.check()
            if reader.at_eof():
                raise NoDaemon(f"the daemon that served {self.path} is gone")

    # What the user does.

    def on_key(self, event: Key) -> None:
        event.stop()
        self.obey(event)

    def obey(self, event: Key) -> None:
        """Do what a key asks for, and show it."""
        self.note = ""
        if self.typed is not None:
            self._type(event)
        else:
            action = ACTIONS.get(event.character or "") or ACTIONS.get(event.key)
            if action is None and event.character and event.character.isprintable():
                self.note = f"{event.character!r} does nothing; ? shows the keys"
            elif action is not None:
                self._do(action)
        self.redraw()

    def _type(self, event: Key) -> None:
        assert self.typed is not None
        if event.key == "enter":
            self.typed = None
        elif event.key == "escape":
            self.typed, self.model.filter = None, ""
        elif event.key in ("backspace", "ctrl+h"):
            self.typed = self.typed[:-1]
        elif event.key == "ctrl+u":
            self.typed = ""
        elif event.character and event.character.isprintable() and len(self.typed) < MAX_FILTER:
            self.typed += event.character
        if self.typed is not None:
            self.model.filter = self.typed
        self.page.top = self.page.cursor = 0

    def _do(self, action: str) -> None:
        model, page = self.model, self.page
        if action == "quit":
            self.action_leave()
        elif action in ("help", "cost"):
            if page.name != action:
                self.pages.append(Page(action))
            else:
                self.pages.pop()
        elif action == "back":
            if len(self.pages) > 1:
                self.pages.pop()
            else:
                model.filter = ""
        elif action == "open":
            self._open()
        elif action == "pause":
            model.is_paused = not model.is_paused
            self._hurry.set()
        elif action == "filter":
            del self.pages[1:]
            self.typed = model.filter
        elif action == "figures":
            model.figures = "total" if model.figures == "recent" else "recent"
        elif action == "no_signals":
            self.note = "gputail only looks: no signals, no priorities, no users"
        elif action in ("up", "down", "page_up", "page_down", "first", "last"):
            self._move(action)
        elif page.name == "list":
            self._arrange(action)

    def _arrange(self, action: str) -> None:
        model = self.model
        if action == "worst":
            worst = model.worst()
            names = [row["name"] for row in model.rows()]
            if worst and worst["name"] in names:
                self.page.cursor = names.index(worst["name"])
            else:
                self.note = "no workload has outliers now" if not worst else "the worst workload does not match the filter"
            return
        if action == "invert":
            model.is_inverted = not model.is_inverted
        elif action == "silent":
            model.shows_silent = not model.shows_silent
        elif action.startswith("sort_"):
            step = {"sort_next": 1, "sort_previous": -1}.get(action)
            place = SORTS.index(model.sort)
            model.sort = SORTS[(place + step) % len(SORTS)] if step else action.removeprefix("sort_")
        model.put_in_order()
        self.page.top = self.page.cursor = 0
        self.note = f"sorted by {model.sort}" + (", the other way round" if model.is_inverted else "")

    def _open(self) -> None:
        page = self.page
        if page.name == "list":
            rows = self.model.rows()
            if rows:
                self.details = None
                self.pages.append(Page("workload", of=rows[min(page.cursor, len(rows) - 1)]["name"]))
                self._hurry.set()
        elif page.name == "workload" and self.details and self._chosen:
            chosen = list(self._chosen.values())[min(page.cursor, len(self._chosen) - 1)]
            self.pages.append(Page("outlier", page.of, self.details["outliers"][chosen]))

    def _move(self, action: str) -> None:
        page = self.page
        height = max(self._room() - (page.name == "list"), 1)
        steps = {"up": -1, "down": 1, "page_up": -height, "page_down": height, "first": -(1 << 30), "last": 1 << 30}[action]
        if page.name == "list" or (page.name == "workload" and action in ("up", "down")):
            count = len(self.model.rows()) if page.name == "list" else len(self._chosen)
            before, page.cursor = page.cursor, min(max(page.cursor + steps, 0), max(count - 1, 0))
            if page.name == "list":
                return
            if page.cursor != before:  # the list sees to it by itself
                line = list(self._chosen)[page.cursor]
                page.top = min(max(page.top, line - height + 1), line)
                return
        page.top = max(page.top + steps, 0)  # what is too far is taken back when it is drawn

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        self._scroll(3)

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        self._scroll(-3)

    def _scroll(self, rows: int) -> None:
        if self.page.name == "list":
            count = len(self.model.rows())
            self.page.cursor = min(max(self.page.cursor + rows, 0), max(count - 1, 0))
        else:
            self.page.top = max(self.page.top + rows, 0)
        self.redraw()

    def on_click(self, event: Click) -> None:
        row = event.screen_y - HEAD - 1 + self.page.top
        if self.page.name == "list" and event.screen_y > HEAD and 0 <= row < len(self.model.rows()):
            is_again = self.page.cursor == row and event.chain > 1
            self.page.cursor = row
            if is_again:
                self._open()
            self.redraw()

    def on_resize(self, event: Resize) -> None:
        self.call_after_refresh(self.redraw)

    # What is seen.

    def _room(self) -> int:
        return max(self.size.height - HEAD - FOOT, 1)

    def redraw(self) -> None:
        """Work out every line that is seen, and show those that have changed."""
        if not self.is_running:
            return
        width = max(self.size.width, 1)
        with suppress(LookupError):  # the screen is being taken down
            self.query_one("#head", Lines).show(self._head(width))
            self.query_one("#body", Lines).show(self._body(width, self._room()))
            self.query_one("#foot", Lines).show(self._foot(width))

    def _head(self, width: int) -> list[Line]:
        model, pen = self.model, self.pen
        state = "paused" if model.is_paused and self.state.startswith("live") else self.state
        title = listing.title_line(model, state, time.strftime("%H:%M:%S"), pen, width)
        if not model.snapshot:
            return [title]
        return [title, listing.totals_line(model, pen), listing.cost_line(model)]

    def _body(self, width: int, height: int) -> list[Line]:
        page, model, pen = self.page, self.model, self.pen
        if page.name == "help":
            return self._part(help_page(), height)
        if not model.snapshot:
            return [(("", ""),), (("  waiting for the first figures", "dim"),)]
        if page.name == "list":
            return self._list(width, height)
        if page.name == "cost":
            return self._part(listing.cost_page(model, pen, width), height)
        if page.name == "outlier" and page.verdict:
            return self._part(detail.outlier_page(page.verdict, pen, width), height)
        message = self.details
        if message is None:
            return [(("", ""),)]
        if message["type"] != "workload":
            return [(("  this workload is gone", "warn"),)]
        if message["workload"]["name"] != page.of:
            return [(("", ""),)]
        lines, self._chosen = detail.workload_page(message, pen, width, height)
        if self._chosen:
            page.cursor = min(page.cursor, len(self._chosen) - 1)
            line = list(self._chosen)[page.cursor]
            lines[line] = tuple((text, "cursor") for text, _ in lines[line])
        return self._part(lines, height)

    def _list(self, width: int, height: int) -> list[Line]:
        page, model, pen = self.page, self.model, self.pen
        rows = model.rows()
        room = max(height - 1, 1)
        page.cursor = min(page.cursor, max(len(rows) - 1, 0))
        page.top = min(max(page.top, page.cursor - room + 1, 0), page.cursor, max(len(rows) - room, 0))
        places = listing.layout_for(model, width)
        lines = [listing.head(model, pen, places)]
        for place, row in enumerate(rows[page.top : page.top + room], page.top):
            line = listing.row(row, model.figures, pen, places)
            if place == page.cursor:
                line = ((pen.fit("".join(text for text, _ in line), width), "cursor"),)
            lines.append(line)
        if not rows:
            why = "matches the filter" if model.filter else "has made a request yet; they appear as they come"
            lines.append(((f"  no workload {why}", "dim"),))
        return lines

    def _part(self, lines: list[Line], height: int) -> list[Line]:
        page = self.page
        page.top = min(page.top, max(len(lines) - height, 0))
        return lines[page.top : page.top + height]

    def _foot(self, width: int) -> list[Line]:
        return [clip(self._about(width), width), self._hint(width)]

    def _about(self, width: int) -> Line:
        """Of the row under the cursor, what its columns have no room for."""
        if self.note:
            return ((self.note, "warn"),)
        rows = self.model.rows() if self.page.name == "list" and self.model.snapshot else []
        if not rows:
            return (("", ""),)
        row = rows[min(self.page.cursor, len(rows) - 1)]
        place = f"{min(self.page.cursor, len(rows) - 1) + 1}/{len(rows)} "
        top = row["top"]
        share = f" ({100 * top['share']:.0f}% of the excess)" if top and top["share"] is not None else ""
        if top:
            text = f"{self.pen.text(row['name'], 60)}: {listing.cause(top, self.pen)}{share}"
        else:
            text = self.pen.text(row["command"] or row["name"])
        return ((place, "dim"), (self.pen.fit(text, max(width - len(place), 0)), ""))

    def _hint(self, width: int) -> Line:
        if self.typed is not None:
            return (("/" + self.pen.text(self.typed, MAX_FILTER), "bold"), ("_", "cursor"), ("   Enter keeps it, Esc takes it away", "dim"))
        hints = _HINTS if self.page.name == "list" else "Esc back  Enter open  PgDn more  Space pause  ? keys  q quit"
        return ((self.pen.fit(hints, width), "dim"),)


def run(options: Options, source: Session | str, is_ascii: bool) -> int:
    """Show it until the user has seen enough; the exit status. GputailError where it cannot go on."""
    session, path = (source, source.path) if isinstance(source, Session) else (None, source)
    app = Top(path, session, options.delay_s, options.sort, options.filter, is_ascii)
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)  # the size of some other moment: textual would believe it
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def ask_to_end(number: int, frame: object) -> None:
        app.is_asked_to_end = True

    # Until the application listens, and after: raised amid its start or end, an exception would leave it hanging.
    handlers = {number: signal.signal(number, ask_to_end) for number in SIGNALS}

    def leave_at_once() -> None:
        # To leave in order would mean to wait for a terminal that is gone, reading its end over and over.
        with suppress(termios.error):
            termios.tcsetattr(terminal, termios.TCSANOW, before)
        if session:
            session.close()
        os._exit(128 + signal.SIGHUP)

    last_resort = threading.Timer(LEAVE_S, leave_at_once)
    last_resort.daemon = True
    app.when_leaving = last_resort.start
    stderr = os.dup(2)
    os.dup2(1, 2)  # textual draws on stderr, which may lead elsewhere
    is_clean = False
    try:
        error = app.run()
        is_clean = app.return_code == 0
    finally:
        if not is_clean:
            with suppress(OSError):
                sys.stdout.write(_RESTORE)
                sys.stdout.flush()
        with suppress(termios.error):
            termios.tcsetattr(terminal, termios.TCSANOW, before)
        last_resort.cancel()
        os.dup2(stderr, 2)
        os.close(stderr)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if error is not None:
        raise error
    return app.return_code or 0


async def _within(what: Coroutine[Any, Any, T], seconds: float) -> T:
    """The result of what is awaited; TimeoutError after so many seconds.

    Not asyncio.wait_for: before Python 3.12 that one may take a cancellation for itself, and the end would wait for us for ever.
    """
    task = asyncio.ensure_future(what)
    done, _ = await asyncio.wait({task}, timeout=seconds)
    if not done:
        task.cancel()
        raise TimeoutError
    return task.result()
