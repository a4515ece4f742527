"""What top shows, as pure functions of messages: figures, order, widths, letters; and the single view."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from gputail.budget import PARTS
from gputail.surfaces import messages
from gputail.surfaces.control import ControlServer
from gputail.surfaces.jsonl import line
from gputail.surfaces.top import Options, detail, is_ascii, keys, listing, once
from gputail.surfaces.top.drawing import Pen, clip, plain
from gputail.surfaces.top.model import Model
from gputail.surfaces.words import number, short_command, size
from gputail.timeline import KINDS
from tests.unit.snapshots import NOW_NS, S, outlier, snapshot, view

ROOT = Path(__file__).resolve().parents[2]
BLOCKS, ASCII = Pen(False), Pen(True)
DAEMON = {"pid": 7, "version": "0.0", "start_ns": 0}


def message(*views: Any, **changes: Any) -> dict[str, Any]:
    return messages.snapshot(snapshot(*views, **changes), DAEMON)


def model_of(*views: Any, **options: Any) -> Model:
    model = Model(**options)
    model.apply(message(*views))
    return model


def row_text(view_: Any, width: int = 120, pen: Pen = BLOCKS) -> str:
    model = model_of(view_)
    return plain(listing.row(model.rows()[0], "recent", pen, listing.layout_for(model, width)))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ControlServer]:
    made = ControlServer(str(tmp_path / "socket"), DAEMON)
    made.publish(snapshot(view(1000), view(1001, outliers=0)))
    yield made
    made.close()


def top(server: ControlServer, *arguments: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in {**os.environ, **environment}.items() if value is not None}
    command = [sys.executable, "-m", "gputail", "top", "--socket", server.path, *arguments]
    return subprocess.run(command, cwd=ROOT, env=kept, stdin=subprocess.DEVNULL, capture_output=True, text=True)


def test_a_row_has_rate_quantiles_outliers_tail_cause_and_culprit() -> None:
    text = row_text(view(1000), 145)
    assert re.fullmatch(
        r"1000 python3 serve.py HtoD..sync +3f2a91bc77de +22 5\.\d\dms 12\.\dms 12\.\dms +26 █+ foreign_kernel pid 556 sm90_xmma_gemm_f16",
        text,
    )


@pytest.mark.parametrize("width", [80, 81, 100, 120, 160, 250])
@pytest.mark.parametrize("pen", [BLOCKS, ASCII])
def test_rows_and_their_head_are_exactly_as_wide_as_the_screen_or_less(width: int, pen: Pen) -> None:
    wide = view(4194303, comm="語" * 40, command="語" * 300, container="c" * 64, gpu="MIG-" + "8" * 40, shape="x" * 200)
    model = model_of(view(1), wide, view(2, recent_outliers=(), windows=()))
    places = listing.layout_for(model, width)
    head = plain(listing.head(model, pen, places))
    for row in model.rows():
        text = "".join(part for part, _ in listing.row(row, "recent", pen, places))
        assert cell_len(text) <= width
        assert cell_len(text) == cell_len("".join(part for part, _ in listing.head(model, pen, places)))
    assert {"PID", "WORKLOAD", "P50", "P99", "P99.9", "TAIL"} <= set(head.split())


def test_rows_keep_their_places_while_figures_change_and_new_ones_come_last() -> None:
    model = model_of(view(1, outliers=5), view(2, outliers=3), view(3, outliers=0))
    assert [row["pid"] for row in model.rows()] == [1, 2, 3]
    model.apply(message(view(9, outliers=9), view(3, outliers=8), view(2, outliers=0), view(1, outliers=0)))
    assert [row["pid"] for row in model.rows()] == [1, 2, 3, 9]
    assert model.rows()[2]["recent"]["outliers_per_min"] > 50
    model.put_in_order()
    assert [row["pid"] for row in model.rows()] == [9, 3, 1, 2]
    model.apply(message(view(3), view(1)))
    assert [row["pid"] for row in model.rows()] == [3, 1]


@pytest.mark.parametrize("sort", ["outliers", "name", "rate", "p50", "p99", "p99.9"])
def test_every_order_puts_what_is_not_known_last_and_can_be_inverted(sort: str) -> None:
    unknown = view(5, comm=None, command=None, windows=(), recent_outliers=(), outliers=0, excess_ns={}, first_start_ns=NOW_NS)
    model = model_of(unknown, view(1), view(2, outliers=4), sort=sort)
    model.shows_silent = True
    model.put_in_order()
    order = [row["pid"] for row in model.rows()]
    if sort != "name":
        assert order[-1] == 5
    model.is_inverted = True
    model.put_in_order()
    assert [row["pid"] for row in model.rows()] == order[::-1]


def test_what_has_been_silent_for_minutes_is_left_out_and_counted() -> None:
    silent = view(5, windows=(), recent_outliers=())
    model = model_of(view(1), silent)
    assert [row["pid"] for row in model.rows()] == [1]
    assert plain(listing.totals_line(model, BLOCKS)).startswith("2 workloads (1 silent), ")


@pytest.mark.parametrize("text", ["SERVE", "3f2a", "gemm", "foreign", "1000/htod"])
def test_a_filter_looks_at_every_name_in_a_row(text: str) -> None:
    model = model_of(view(1000), view(2, outliers=0, comm="other", command="other", container=None, name="other/2/x"))
    model.filter = text
    assert [row["pid"] for row in model.rows()] == [1000]


def test_speeds_are_differences_of_counters_and_begin_anew_with_another_daemon() -> None:
    model = Model()
    model.apply(message(view(1), events=1000))
    assert model.events_per_s() is None and model.cpu_share() == pytest.approx(12.5 / 1000)
    model.apply(message(view(1, now_ns=NOW_NS + 2 * S), now_ns=NOW_NS + 2 * S, events=41_000))
    assert model.events_per_s() == 20_000
    assert model.cpu_share() == 0
    other = message(view(1), events=5)
    other["daemon"] = {**DAEMON, "pid": 8}
    model.apply(other)
    assert model.events_per_s() is None


def test_losses_and_what_is_not_attached_are_never_hidden() -> None:
    model = Model()
    model.apply(message(view(1), lost={"ring_full": 12_345, "late": 0}))
    assert "lost 12.3k" in plain(listing.cost_line(model)) and "1 not attached" in plain(listing.cost_line(model))
    page = "\n".join(plain(part) for part in listing.cost_page(model, BLOCKS, 80))
    assert re.search(r"ring_full +12345", page) and "late" not in page
    assert "cost to traced programs   not measured" in page
    assert "/opt/libnccl.so.2: no symbols" in page
    assert re.search(r"incomplete requests +3$", page, re.MULTILINE)


def test_a_page_of_a_workload_counts_every_request_in_its_bars_and_fits() -> None:
    for width, height in ((80, 19), (200, 60), (40, 5)):
        told = messages.workload(snapshot(view(1000)), "python3/1000/HtoD..sync")
        assert told
        lines, chosen = detail.workload_page(told, BLOCKS, width, height)
        text = [plain(part) for part in lines]
        start = next(place for place, part in enumerate(text) if part.strip().startswith("last minute ") and "before" in part)
        bars = [part for part in text[start + 1 :] if re.match(r" +[\d.]+\wss? - |^ +[\d.]+[mun]s - ", part)]
        assert 1 <= len(bars) <= 24
        assert list(chosen.values()) == [0, 1]
        assert all("foreign_kernel: 12.5 ms" in text[place] for place in chosen) or width == 40
    told["workload"]["baseline_ns"] = None
    told["outliers"] = []
    assert "learned from 32 requests" in "".join(plain(part) for part in detail.workload_page(told, BLOCKS, 80, 19)[0])


def test_a_page_of_an_outlier_shows_its_parts_and_beside_them_who_is_to_blame() -> None:
    told = messages.verdict(outlier())
    lines = [plain(part) for part in detail.outlier_page(told, BLOCKS, 94)]
    usual, this, foreign, unknown = lines[lines.index("where its time went (by kind, not in the order of time)") + 1 :][:4]
    room = 60
    assert usual.count("█") == round(room * 5.2 / 12.5) and usual.endswith("5.20ms")
    drawn = re.fullmatch(r"  this one +([hlcw]+) +12\.5ms", this)
    assert drawn and len(drawn[1]) == room
    assert {letter: drawn[1].count(letter) for letter in "hlcw"} == {"h": 2, "l": 5, "c": 5, "w": 48}
    assert foreign.startswith("  pid 556") and foreign.count("█") == round(room * 7.1 / 12.5)
    assert foreign.index("█") == usual.rindex("█") + 1  # it begins where the usual ends
    assert unknown.startswith("  unknown") and unknown.endswith("200us")
    assert any(re.search(r"foreign_kernel +7\.10ms +97\.3%  pid 556 sm90_xmma_gemm_f16", part) for part in lines)


def test_a_page_of_an_outlier_shows_when_its_calls_waited_and_what_others_did_then() -> None:
    told = messages.verdict(outlier())
    lines = [plain(part) for part in detail.outlier_page(told, BLOCKS, 94)]
    calls, other, legend = lines[lines.index("when: its calls, and what others did meanwhile") + 1 :][:3]
    assert calls == "  calls          " + "h" * 20 + "l" * 20 + "w" * 20 + "  12.5ms"
    assert other == "  pid 556        " + " " * 30 + "g" * 30
    assert legend == "h in the program itself, l in launches, w waiting for the GPU, g kernels"
    assert not any("when:" in plain(part) for part in detail.outlier_page(messages.verdict(outlier(timeline=None)), BLOCKS, 94))
    wide = [plain(part) for part in detail.outlier_page(told, BLOCKS, 300)]
    assert any(re.match(r"  calls {10}h{88,89}l{88,89}w{88,89}  12.5ms$", part) for part in wide)


def test_a_timeline_has_a_letter_for_every_kind_of_cell() -> None:
    assert len(messages.CELL_LETTERS) == KINDS == len(set(messages.CELL_LETTERS))
    assert messages.CELL_LETTERS[: len(PARTS)] == "".join(detail._LETTERS[part] for part in PARTS)


def test_field_case_9_names_that_end_within_a_character_or_steer_a_terminal_are_shown_harmless() -> None:
    hostile = "pyt\udcc3\x1b[2J\u202e\n語"
    shown = view(1000, comm=hostile, command=None, container=hostile, shape=hostile, recent_outliers=(outlier(1000, comm=hostile),))
    told = message(shown)
    assert line(told).isascii()
    for pen in (BLOCKS, ASCII):
        text = once.page(told, "", "outliers", pen.ascii)
        assert "\x1b" not in text and "\u202e" not in text and "\udcc3" not in text
        assert "pyt?" in text and len(text.splitlines()) == 5
        page = detail.workload_page(messages.workload(snapshot(shown), shown.name) or {}, pen, 100, 30)[0]
        assert all(plain(part).isprintable() for part in page)
    assert once.page(told, "", "outliers", True).isascii()


def test_field_case_40_a_culprit_that_is_not_traced_is_not_visible_whatever_has_its_pid_here() -> None:
    contribution = outlier().contributions[0]
    unnamed = outlier(contributions=(type(contribution)("foreign_kernel", 7_100_000, os.getpid(), None),))
    told = message(view(1000, recent_outliers=(unnamed,)))
    assert listing.cause(told["workloads"][0]["top"], BLOCKS) == f"foreign_kernel pid {os.getpid()} (not visible)"
    page = "\n".join(plain(part) for part in detail.outlier_page(messages.verdict(unnamed), BLOCKS, 100))
    assert f"pid {os.getpid()} (not visible)" in page
    assert "python" not in page.replace("python3[1000]", "")


def test_field_case_42_a_process_that_is_hidden_or_gone_is_a_row_with_a_question_mark() -> None:
    text = row_text(view(1000, comm=None, command=None, container=None))
    assert re.match(r"1000 \? HtoD\.\.sync ", text)


def test_field_case_39_without_utf8_everything_is_ascii() -> None:
    model = model_of(view(1000))
    told = messages.workload(snapshot(view(1000)), "python3/1000/HtoD..sync") or {}
    pages = [
        listing.title_line(model, "live", "12:00:00", ASCII, 100), listing.totals_line(model, ASCII), listing.cost_line(model),
        *listing.cost_page(model, ASCII, 100), *detail.workload_page(told, ASCII, 60, 30)[0], *keys.help_page(),
        *detail.outlier_page(messages.verdict(outlier()), ASCII, 60),
    ]  # fmt: skip
    assert "".join(plain(part) for part in pages).isascii()


@pytest.mark.parametrize(
    ("environment", "ascii_only"),
    [
        ({"LC_ALL": "C"}, True), ({"LC_ALL": "C", "LANG": "en_US.UTF-8"}, True), ({}, True), ({"LANG": "POSIX"}, True),
        ({"LANG": "de_DE.utf8"}, False), ({"LC_ALL": "", "LANG": "C.UTF-8"}, False), ({"LC_CTYPE": "en_US.UTF-8", "LANG": "C"}, False),
        ({"LANG": "C.UTF-8", "TERM": "linux"}, True), ({"LANG": "C.UTF-8", "TERM": "vt100"}, True),
    ],
)  # fmt: skip
def test_ascii_is_drawn_where_locale_or_terminal_have_nothing_else(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], ascii_only: bool
) -> None:
    for name in ("LC_ALL", "LC_CTYPE", "LANG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_ascii(Options("/x")) == ascii_only
    assert is_ascii(Options("/x", ascii=True))


@pytest.mark.parametrize("arguments", [("--once",), ()])
def test_field_case_37_without_a_terminal_one_view_is_printed_as_plain_text(server: ControlServer, arguments: tuple[str, ...]) -> None:
    for term in (None, "dumb", "xterm-256color", "no-such-terminal"):
        done = top(server, *arguments, TERM=term, LANG="C.UTF-8", LC_ALL=None, COLUMNS=None)
        assert (done.returncode, done.stderr) == (0, "")
        lines = done.stdout.splitlines()
        assert "\x1b" not in done.stdout
        assert lines[0].startswith("gputail top ") and "daemon pid 7" in lines[0]
        assert [part.split()[0] for part in lines[4:]] == ["1000", "1001"]


def test_json_is_the_message_of_the_protocol(server: ControlServer) -> None:
    import json

    done = top(server, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == json.loads(line(messages.snapshot(snapshot(view(1000), view(1001, outliers=0)), DAEMON)))


def test_field_case_39_the_c_locale_prints_ascii(server: ControlServer) -> None:
    assert top(server, LC_ALL="C").stdout.isascii()
    assert not top(server, LC_ALL="C.UTF-8").stdout.isascii()


def test_a_filter_and_an_order_hold_for_the_single_view_too(server: ControlServer) -> None:
    done = top(server, "--filter", "model1001", "--sort", "p99")
    assert [part.split()[0] for part in done.stdout.splitlines()[4:]] == ["1001"]
    assert "no workload matches the filter" in top(server, "--filter", "nothing like it").stdout


@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_without_a_daemon_and_without_root_one_line_says_what_to_do(tmp_path: Path, term: str) -> None:
    code = "import os, sys; os.geteuid = lambda: 1000; from gputail.cli import entry; entry()"
    command = [sys.executable, "-c", code, "top", "--socket", str(tmp_path / "socket")]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "TERM": term}, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        f"gputail: no gputail daemon serves {tmp_path / 'socket'}, and to trace by itself top needs root\n"
        "hint: run as root: sudo gputail top\n"
    )


def test_top_and_events_start_without_numpy_bcc_and_the_analysis() -> None:
    code = (
        "import sys\nfrom gputail.surfaces import follow\nfrom gputail.surfaces.top import once, screen, session\n"
        "print(sorted({'numpy', 'bcc', 'psutil', 'prometheus_client'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_no_key_means_two_things_and_all_are_in_the_help() -> None:
    every = [key for keys_, _ in keys.KEYS.values() for key in keys_]
    assert len(every) == len(set(every))
    page = "\n".join(plain(part) for part in keys.help_page())
    assert all(re.search(rf"(^| ){re.escape(keys.shown(key))} ", page, re.MULTILINE) for key in every)
    assert max(len(plain(part)) for part in keys.help_page()) < 80


def test_a_line_is_cut_at_the_edge_of_the_screen_by_cells() -> None:
    assert plain(clip((("abc", ""), ("語語", "bold")), 5)) == "abc語"
    assert cell_len(plain(clip((("語語", ""),), 3))) <= 3
    assert clip((("abc", ""),), 0) == (("", ""),)


@pytest.mark.parametrize(
    ("command", "comm", "name"),
    [
        ("/usr/bin/python3 -u /srv/serve.py --port 80", "python3", "python3 serve.py"),
        ("python -m vllm.entrypoints.api", "x", "python vllm.entrypoints.api"),
        ("/opt/triton/bin/tritonserver --model /m", "x", "tritonserver"),
        ("python3 -c 'import os'", "x", "python3"),
        ("nginx: worker process", "nginx", "nginx"),
        ("/bin/sh run.sh", "sh", "sh run.sh"),
        ("python3.11", "p", "python3.11"),
        (None, "worker", "worker"),
        (None, None, "?"),
        ("", None, "?"),
    ],
)  # fmt: skip
def test_a_process_is_called_what_people_call_it(command: str | None, comm: str | None, name: str) -> None:
    assert short_command(command, comm) == name


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0"), (0.44, "0.4"), (9.96, "10"), (21.4, "21"), (999, "999"), (12_345, "12.3k"), (999_600, "1M"), (2e9, "2G")],
)
def test_counts_are_short(value: float | None, text: str) -> None:
    assert number(value) == text


def test_sizes_are_short() -> None:
    assert [size(value) for value in (None, 0, 84 << 20, 4096)] == ["-", "0B", "88.1 MB", "4.1 kB"]
