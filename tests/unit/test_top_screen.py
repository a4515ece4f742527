"""The live screen, headless: keys pressed, daemons that come and go, and terminals of any size."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from textual.events import Key, Resize
from textual.geometry import Size
from textual.pilot import Pilot

from gputail.errors import GputailError
from gputail.surfaces.client import NoDaemon
from gputail.surfaces.control import ControlServer
from gputail.surfaces.top.drawing import plain
from gputail.surfaces.top.lines import Lines
from gputail.surfaces.top.screen import Top
from tests.unit.snapshots import NOW_NS, S, outlier, snapshot, view

DAEMON = {"pid": 7, "version": "0.0", "start_ns": 0}
DEADLINE_S = 20.0
_CHARACTERS = {"space": " ", "slash": "/", "question_mark": "?"}


class CountingTop(Top):
    """Counts the keys that it has dealt with."""

    dealt_with = 0

    def obey(self, event: Key) -> None:
        super().obey(event)
        self.dealt_with += 1


class Shown:
    """The application under test, its pilot, and what is on the screen."""

    def __init__(self, app: CountingTop, pilot: Pilot) -> None:
        self.app, self.pilot = app, pilot

    @property
    def lines(self) -> list[str]:
        return [plain(line) for part in ("#head", "#body", "#foot") for line in self.app.query_one(part, Lines).shown]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def pids(self) -> list[str]:
        return [line.split()[0] for line in (plain(part) for part in self.app.query_one("#body", Lines).shown[1:])]

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = asyncio.get_running_loop().time() + DEADLINE_S
        while not condition():
            assert asyncio.get_running_loop().time() < deadline, self.text
            await asyncio.sleep(0.002)

    async def press(self, *keys: str) -> None:
        """Not as the pilot does it, which waits for a process with nothing to do: this one has another thread."""
        assert self.app._driver
        for key in keys:
            wanted = self.app.dealt_with + 1
            self.app._driver.send_message(Key(key, _CHARACTERS.get(key, key if len(key) == 1 else None)))
            await self.until(lambda wanted=wanted: self.app.dealt_with >= wanted)  # type: ignore[misc]

    async def resize(self, width: int, height: int) -> None:
        size = Size(width, height)
        self.app._driver._size = size  # type: ignore[union-attr]
        self.app.post_message(Resize(size, size))
        await asyncio.sleep(0)


def show(path: str, act: Callable[[Shown], Awaitable[None]], size: tuple[int, int] = (80, 24), **options: Any) -> Top:
    app = CountingTop(path, delay_s=0.02, **options)

    async def main() -> None:
        async with app.run_test(size=size) as pilot:
            await act(Shown(app, pilot))

    asyncio.run(main())
    return app


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ControlServer]:
    made = ControlServer(str(tmp_path / "socket"), DAEMON)
    made.publish(snapshot(*[view(1000 + number, outliers=(30 - number) % 31) for number in range(30)]))
    yield made
    made.close()


def test_rows_fill_the_screen_and_are_the_workloads_worst_first(server: ControlServer) -> None:
    async def act(shown: Shown) -> None:
        await shown.until(lambda: "live" in shown.lines[0])
        assert len(shown.lines) == 24
        assert shown.pids == [str(pid) for pid in range(1000, 1018)]
        assert shown.lines[-2].startswith("1/30 python3/1000/HtoD..sync: foreign_kernel pid 556 sm90_xmma_gemm_f16 (97%")

    show(server.path, act)


def test_figures_change_in_place_and_only_their_lines_are_painted_again(server: ControlServer) -> None:
    async def act(shown: Shown) -> None:
        await shown.until(lambda: "live" in shown.lines[0])
        body = shown.app.query_one("#body", Lines)
        painted: list[int] = []
        body.refresh = lambda *regions, **_: painted.extend(region.y for region in regions) or body  # type: ignore[method-assign]
        before = shown.pids
        views = [view(1000 + number, outliers=(30 - number) % 31) for number in range(30)]
        views[4] = view(1004, outliers=90)
        server.publish(snapshot(*views))
        await shown.until(lambda: bool(painted))
        assert painted == [5]  # of the head and 18 rows
        assert shown.pids == before

    show(server.path, act)


def test_keys_move_over_all_rows_and_sort_them(server: ControlServer) -> None:
    async def act(shown: Shown) -> None:
        await shown.until(lambda: "live" in shown.lines[0])
        for keys, place in (
            (("down", "j"), 3), (("up", "k"), 1), (("up",), 1), (("pagedown",), 19), (("pagedown",), 30), (("down",), 30), (("home",), 1),
            (("G",), 30), (("g",), 1), (("end",), 30), (("pageup",), 12),
        ):  # fmt: skip
            await shown.press(*keys)
            assert shown.lines[-2].startswith(f"{place}/30 "), keys
        await shown.press("n", "I")
        assert shown.pids[:2] == ["1029", "1028"]
        assert shown.lines[-2] == "sorted by name, the other way round"
        await shown.press("I", "o")
        assert shown.pids[0] == "1000"
        for name in ("name", "rate", "p50", "p99", "p99.9", "outliers"):
            await shown.press("greater_than_sign")
            assert shown.lines[-2] == f"sorted by {name}"
        await shown.press("less_than_sign")
        assert shown.lines[-2] == "sorted by p99.9"
        await shown.press("K")
        assert "no signals" in shown.lines[-2]
        await shown.press("y")
        assert "? shows the keys" in shown.lines[-2]

    show(server.path, act)


def test_a_filter_is_typed_kept_and_taken_away(server: ControlServer) -> None:
    async def act(shown: Shown) -> None:
        await shown.until(lambda: "live" in shown.lines[0])
        await shown.press("slash", *"1007q")
        assert shown.lines[-1].startswith("/1007q_") and "no workload matches the filter" in shown.text
        await shown.press("backspace", "enter")
        assert shown.pids == ["1007"] and "filter: 1007" in shown.lines[0]
        await shown.press("enter")
        await shown.until(lambda: "model1007/serve.py" in shown.text)
        await shown.press("escape", "escape")
        assert len(shown.pids) == 18

    show(server.path, act)


def test_enter_opens_a_workload_and_then_an_outlier_and_escape_comes_back(server: ControlServer) -> None:
    async def act(shown: Shown) -> None:
        await shown.until(lambda: "live" in shown.lines[0])
        await shown.press("down", "enter")
        await shown.until(lambda: "latest outliers" in shown.text)
        assert "python3 serve.py  pid 1001" in shown.lines[3]
        await shown.press("down", "enter")
        assert "python3[1001] tid 1001" in shown.lines[3]
        assert "waiting behind kernels of pid 556" in shown.lines[4]
        await shown.press("escape")
        assert "python3 serve.py  pid 1001" in shown.lines[3]
        for _ in range(60):
            await shown.press("down")
        assert shown.app.page.cursor == 28  # of 29 outliers
        await shown.press("home")
        assert "python3 serve.py  pid 1001" in shown.lines[3]
        server.publish(snapshot(view(1000)))
        await shown.until(lambda: "this workload is gone" in shown.text)
        await shown.press("escape")
        assert shown.pids == ["1000"]

    show(server.path, act)


def test_a_paused_picture_stands_still_until_it_is_let_go(server: ControlServer) -> None:
    async def act(shown: Shown) -> None:
        await shown.until(lambda: "live" in shown.lines[0])
        await shown.press("space")
        assert "paused" in shown.lines[0]
        server.publish(snapshot(view(5)))
        for _ in range(5):
            await asyncio.sleep(0.03)
        assert shown.pids[0] == "1000"
        await shown.press("enter")
        await shown.until(lambda: "this workload is gone" in shown.text)  # what is opened while paused is asked for
        await shown.press("escape", "space")
        await shown.until(lambda: shown.pids == ["5"])

    show(server.path, act)


def test_help_and_cost_are_pages_that_their_key_closes_again(server: ControlServer) -> None:
    async def act(shown: Shown) -> None:
        await shown.until(lambda: "live" in shown.lines[0])
        for key, words in (("question_mark", "quit; the terminal is left as it was"), ("f1", "one row up"), ("c", "lost, by stage")):
            await shown.press(key)
            assert words in shown.text
            for _ in range(20):
                await shown.press("pagedown")
            await shown.press(key)
            assert shown.pids[0] == "1000"

    show(server.path, act, size=(80, 30))


def test_the_worst_workload_is_found_from_anywhere(server: ControlServer) -> None:
    async def act(shown: Shown) -> None:
        await shown.until(lambda: "live" in shown.lines[0])
        await shown.press("n", "I", "w")
        assert shown.lines[-2].startswith("30/30 python3/1000/")

    show(server.path, act)


def test_a_daemon_that_goes_away_is_said_and_found_again_when_it_comes_back(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    first = ControlServer(path, DAEMON)
    first.publish(snapshot(view(1000)))

    async def act(shown: Shown) -> None:
        await shown.until(lambda: "live" in shown.lines[0])
        first.close()
        await shown.until(lambda: "reconnecting: the daemon is gone" in shown.lines[0])
        assert shown.pids == ["1000"]  # what was known stays
        second = ControlServer(path, {**DAEMON, "pid": 8})
        second.publish(snapshot(view(2000)))
        await shown.until(lambda: "live" in shown.lines[0] and shown.pids == ["2000"])
        assert "daemon pid 8" in shown.lines[0]
        second.close()

    show(path, act)


def test_a_daemon_that_was_never_there_or_speaks_otherwise_ends_it_with_one_error(tmp_path: Path) -> None:
    async def act(shown: Shown) -> None:
        await shown.until(lambda: not shown.app.is_running)

    app = show(str(tmp_path / "socket"), act)
    assert isinstance(app.return_value, NoDaemon)

    async def main() -> GputailError | None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"220 mail ready\n")

        other = await asyncio.start_unix_server(answer, tmp_path / "mail")
        app = Top(str(tmp_path / "mail"), delay_s=0.02)
        async with app.run_test() as pilot:
            await Shown(app, pilot).until(lambda: not app.is_running)
        other.close()
        return app.return_value

    assert "does not speak gputail's protocol" in str(asyncio.run(main()))


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (5, 3), (20, 6), (79, 5), (80, 24), (300, 100)])
def test_field_case_38_every_page_fits_a_terminal_of_any_size(server: ControlServer, size: tuple[int, int]) -> None:
    async def act(shown: Shown) -> None:
        await shown.until(lambda: shown.app.state == "live")
        for keys in (
            (),
            ("enter",),
            ("enter",),
            ("question_mark",),
            ("pagedown",),
            ("c",),
            ("end",),
            ("escape",) * 6,
            ("slash", "x", "escape"),
        ):
            await shown.press(*keys)
            for _ in range(3):
                await asyncio.sleep(0.01)
            for part in ("#head", "#body", "#foot"):
                widget = shown.app.query_one(part, Lines)
                strips = [widget.render_line(y) for y in range(widget.size.height)]
                assert all(strip.cell_length == widget.size.width for strip in strips)

    show(server.path, act, size=size)


def test_field_case_38_a_storm_of_resizes_is_survived(server: ControlServer) -> None:
    chance = random.Random(38)

    async def act(shown: Shown) -> None:
        await shown.until(lambda: shown.app.state == "live")
        for number in range(150):
            await shown.resize(chance.choice((1, 2, 40, 80, 200)), chance.choice((1, 2, 10, 24, 90)))
            if number % 10 == 0:
                await shown.press(chance.choice(("enter", "escape", "question_mark", "down", "end", "c")))
        await shown.press("escape", "escape", "escape", "home")
        await shown.resize(80, 24)
        await shown.until(lambda: len(shown.lines) == 24 and shown.pids[:1] == ["1000"])

    show(server.path, act)


def test_field_case_42_processes_that_come_and_go_each_moment_leave_the_others_in_place(server: ControlServer) -> None:
    async def act(shown: Shown) -> None:
        await shown.until(lambda: "live" in shown.lines[0])
        for number in range(20):
            now = NOW_NS + number * S
            gone = view(3000 + number, now_ns=now, comm=None, command=None, outliers=0)
            server.publish(snapshot(view(1000, now_ns=now), gone, view(1001, now_ns=now), now_ns=now))
            await shown.until(lambda number=number: f"{3000 + number} ?" in shown.text)  # type: ignore[misc]
            assert shown.pids == ["1000", "1001", str(3000 + number)]

    show(server.path, act)


def test_hostile_names_are_no_markup(server: ControlServer) -> None:
    async def act(shown: Shown) -> None:
        await shown.until(lambda: "live" in shown.lines[0])
        assert "[red]x[bold]" in shown.text

    name = "[red]x[bold]"
    record = outlier(1, comm=name)
    server.publish(snapshot(view(1, command=name, comm=name, recent_outliers=(record,))))
    show(server.path, act)
