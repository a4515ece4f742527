"""`gputail report`: what the page says is what the records say, and nothing that a process is called can break it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gputail import attribution, cli, events
from gputail.errors import GputailError, UsageError
from gputail.pipeline import replay_batches
from gputail.report import Options, analyse, run
from gputail.source import Source
from gputail.surfaces.report import stories, text
from gputail.surfaces.report.gathering import permille
from gputail.surfaces.report.stories import headline, reason, story
from gputail.surfaces.terminal import duration
from gputail.tail import Contribution, RequestRecord
from gputail.timeline import runs
from tests.unit.reports import CULPRIT, DATA, HOSTILE, HOSTILE_BYTES, TRACES, VICTIM, page_of, record, serving_beside_a_burst
from tests.unit.streams import MS, Actor


def records_of(name: str) -> list[RequestRecord]:
    return list(replay_batches(Source(str(DATA / f"{name}.npz"))))


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    return record(tmp_path / "slow.gpt", serving_beside_a_burst())


@pytest.mark.parametrize("name", TRACES)
def test_a_page_adds_up_to_the_records(name: str) -> None:
    records, page = records_of(name), page_of(name)
    assert sum(found.requests for found in page.workloads) == len(records)
    for found in page.workloads:
        mine = [r for r in records if r.workload == found.name]
        slow = [r for r in mine if r.outlier]
        assert (found.requests, found.outliers, found.incomplete) == (len(mine), len(slow), sum(r.incomplete for r in mine))
        assert found.longest_ns == max(r.duration_ns for r in mine)
        assert found.histogram.count == len(mine)
        assert found.excess_ns == sum(r.excess_ns or 0 for r in slow) == sum(share.ns for share in found.shares)
        assert sum(share.permille for share in found.shares) == (1000 if slow else 0)
        assert sum(share.outliers for share in found.shares) == len(slow)
        for share in found.shares:
            assert share.ns == sum(c.ns for r in slow for c in r.contributions if c.cause == share.cause)
        named = [c for r in slow for c in r.contributions if c.culprit or c.culprit_pid is not None]
        assert sum(c.ns for c in found.culprits) == sum(c.ns for c in named)


@pytest.mark.parametrize("name", TRACES)
def test_the_worst_requests_are_those_of_the_largest_excess(name: str) -> None:
    excess = sorted((r.excess_ns for r in records_of(name) if r.outlier and r.excess_ns), reverse=True)
    assert [around.record.excess_ns for around in page_of(name).worst] == excess[:5]
    assert [around.record.excess_ns for around in page_of(name, worst=2).worst] == excess[:2]
    assert page_of(name, worst=0).worst == ()


@pytest.mark.parametrize("name", TRACES)
def test_a_story_tells_the_times_and_the_culprit_of_its_record(name: str) -> None:
    for around in page_of(name).worst:
        told, first = story(around.record), around.record.contributions[0]
        assert told.startswith(
            f"{duration(around.record.duration_ns)} instead of {duration(around.record.baseline_ns)}: {duration(first.ns)} "
        )
        assert first.culprit is None or first.culprit in told
        assert first.culprit_pid is None or re.search(rf"\b[pt]id {first.culprit_pid}\b", told)


def test_a_story_names_the_process_and_its_kernel(recording: Path) -> None:
    page = analyse(Options(str(recording)))
    assert len(page.worst) == 3
    for around in page.worst:
        assert f"waiting behind kernels of pid {CULPRIT} (python3, gemm)" in story(around.record)
    (found, other) = page.workloads
    assert (found.pid, other.pid) == (VICTIM, CULPRIT)
    assert f"3 of 120 requests were slow, by {duration(found.excess_ns)} in all; " in headline(found)
    assert headline(found).endswith(f"waiting behind kernels of pid {CULPRIT} (python3, gemm)")
    assert [(c.pid, c.text, c.requests) for c in found.culprits][:1] == [(CULPRIT, "python3, gemm", 3)]


def test_every_cause_has_words() -> None:
    assert set(attribution.CAUSES) <= set(stories._WORDS) | set(stories._BEHIND)


@pytest.mark.parametrize("cause", ["foreign_kernel", "cpu_preempted", "unknown", "of_the_future"])
def test_a_reason_has_words_for_every_cause(cause: str) -> None:
    assert reason(Contribution(cause, 1)) and "_" not in reason(Contribution(cause, 1))
    assert "pid 7" in reason(Contribution(cause, 1, 7, "x"))


@pytest.mark.parametrize("parts", [[1, 1, 1], [0, 5], [10**18, 1], [3], [1] * 999, [1] * 1001])
def test_shares_sum_to_the_whole_and_differ_from_exact_ones_by_less_than_one(parts: list[int]) -> None:
    shares = permille(parts)
    assert sum(shares) == 1000
    assert all(abs(share - 1000 * part / sum(parts)) < 1 for share, part in zip(shares, parts, strict=True))


def test_shares_of_nothing_are_nothing() -> None:
    assert permille([]) == [] and permille([0, 0]) == [0, 0]


@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("width", [80, 93, 100])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_every_line_fits_the_width_and_ascii_is_ascii(name: str, width: int, ascii_only: bool) -> None:
    shown = text.page(page_of(name), width, ascii_only)
    assert max(map(len, shown.splitlines())) <= width
    assert shown.isascii() == ascii_only
    assert "\x1b" not in shown


@pytest.mark.parametrize("name", TRACES)
def test_a_timeline_has_a_cell_for_each_column_and_a_lane_for_the_culprit(name: str) -> None:
    with_lanes = 0
    for around in page_of(name).worst:
        shown = around.timeline(70)
        assert (shown.start_ns, shown.end_ns) == (around.record.start_ns, around.record.end_ns)
        assert [len(lane.kinds) for lane in shown.lanes] == [70] * len(shown.lanes)
        assert not any(lane.partly for lane in shown.lanes)
        first = around.record.contributions[0]
        if first.cause in ("foreign_kernel", "foreign_copy", "sibling_kernel", "blocking_sync", "cpu_preempted"):
            with_lanes += 1
            assert shown.lanes[1].pid in (first.culprit_pid, around.record.pid)
        lines = list(text.timeline_lines(shown, around))
        assert {len(line) for line in lines} == {3 + text.LABEL_CHARS + 70}
    assert with_lanes >= 2


def test_a_timeline_shows_what_took_the_time_where_it_was_taken() -> None:
    """Of 14 ms: launches for 2, then off the CPU in the program for 4, ready to run for 2, and a wait for 6."""
    from gputail.budget import HOST, LAUNCH, OFF_CPU, RUN_QUEUE, SYNC
    from gputail.timeline import ON_CPU, Around
    from tests.unit.streams import stream

    actor = Actor()
    start = actor.now_ns
    actor.call("cuLaunchKernel", 2 * MS).rest(MS).sleep(5 * MS, run_queue_ns=2 * MS, stream=77).sync(6 * MS)
    request = RequestRecord(100, 100, None, "w", start, start + 14 * MS, "sync", 2, 1, False, True, (0,) * 10, 1, 1, "cpu_preempted", 1.0,
                            (Contribution("cpu_preempted", 1, 77, "tid 77 ran on cpu 0"),))  # fmt: skip
    own, other = Around(request, stream(actor), events.no_calls()).timeline(14).lanes
    assert runs(own.kinds) == [(LAUNCH, 0, 2), (HOST, 2, 3), (OFF_CPU, 3, 6), (RUN_QUEUE, 6, 8), (SYNC, 8, 14)]
    assert [(first, stop) for kind, first, stop in runs(other.kinds) if kind == ON_CPU] == [(6, 8)]
    assert other.pid == 77


def test_runs_of_cells_cover_them_all() -> None:
    assert runs(np.array([1, 1, 2, 1])) == [(1, 0, 2), (2, 2, 3), (1, 3, 4)]
    assert runs(np.array([], int)) == []


def test_a_lasting_shift_is_shown_before_and_after(tmp_path: Path) -> None:
    victim = Actor(tgid=VICTIM)
    for number in range(1000):
        victim.serve(wait_ns=2 * MS if number < 500 else 8 * MS)
    page = analyse(Options(str(record(tmp_path / "shift.gpt", (victim,)))))
    change = page.workloads[0].change
    assert change is not None and change.what == "regime change"
    before, after = change.before.quantile(0.5), change.after.quantile(0.5)
    assert before and after and after - before == pytest.approx(6 * MS, rel=0.05)
    assert change.before.count + change.after.count < 1000  # the shift itself belongs to neither
    assert re.search(r"^before +\d+ .*\nafter +\d+ ", text.page(page), re.MULTILINE)


def test_halves_alike_are_not_shown_as_a_change(tmp_path: Path) -> None:
    victim = Actor(tgid=VICTIM)
    for _ in range(300):
        victim.serve()
    page = analyse(Options(str(record(tmp_path / "calm.gpt", (victim,)))))
    assert page.workloads[0].change is None
    shown = text.page(page)
    assert "no outliers: no request was well above what is usual" in shown
    assert "worst" not in shown


def test_what_was_lost_and_what_is_incomplete_is_said(tmp_path: Path) -> None:
    victim, other = serving_beside_a_burst()
    row = victim.rows[40 * 26]
    victim.rows[40 * 26] = (*row[:11], row[11] | events.AFTER_GAP, *row[12:])
    shown = text.page(analyse(Options(str(record(tmp_path / "lossy.gpt", (victim, other), lost=7)))))
    assert "lost: ring_full 7" in shown and "\ncalls were lost while tracing: " in shown
    assert re.search(r"^1 request is incomplete and has no verdict: \d", shown, re.MULTILINE)


def test_too_few_requests_to_judge_is_said(tmp_path: Path) -> None:
    shown = text.page(analyse(Options(str(record(tmp_path / "short.gpt", serving_beside_a_burst(20, (10,)))))))
    assert "no outliers: too few complete requests" in shown


def test_an_empty_recording_has_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gputail.capture import CaptureWriter

    with CaptureWriter(str(tmp_path / "empty.gpt")):
        pass
    assert cli.main(["report", str(tmp_path / "empty.gpt"), "--html", str(tmp_path / "page"), "--perfetto", str(tmp_path / "trace")]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("gputail report of ") and "0 events; lost: nothing" in out and err == ""


def test_a_cut_off_recording_is_reported_as_far_as_it_goes(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording.write_bytes(recording.read_bytes()[:-200])
    assert cli.main(["report", str(recording)]) == 1
    out, err = capsys.readouterr()
    assert "NOT WHOLE: " in out and "the 3 worst requests" in out
    assert err.count("gputail: ") == 1 and "what could be read was analysed" in err


@pytest.mark.parametrize("content", [None, b"", b"hello\n", b"PK\x03\x04 and no more"], ids=["missing", "empty", "text", "zip"])
def test_another_file_is_one_clear_error_and_no_output_is_touched(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "other", tmp_path / "out"
    if content is not None:
        path.write_bytes(content)
    out.write_text("kept")
    for option in ("--html", "--perfetto"):
        assert cli.main(["report", str(path), option, str(out)]) == 1
        assert out.read_text() == "kept"
        stdout, stderr = capsys.readouterr()
        assert stdout == "" and stderr.count("gputail: ") == 1 and str(path) in stderr


def test_what_cannot_be_read_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GputailError, match="standard input: it is read twice"):
        run(Options("-"))
    with pytest.raises(GputailError, match="it is read twice"):
        run(Options("/dev/null"))


def test_the_recording_itself_is_never_overwritten(recording: Path) -> None:
    before = recording.read_bytes()
    link = recording.with_name("link")
    link.symlink_to(recording)
    for options in (Options(str(recording), html=str(link)), Options(str(recording), perfetto=str(recording))):
        with pytest.raises(UsageError, match="is the recording itself"):
            run(options)
    with pytest.raises(UsageError, match="would both write"):
        run(Options(str(recording), html="x", perfetto="x"))
    with pytest.raises(UsageError, match="standard output is for the text"):
        run(Options(str(recording), html="-"))
    assert recording.read_bytes() == before


def test_only_the_workloads_asked_for_are_reported(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(recording), "--workload", f"/{CULPRIT}/"]) == 0
    out = capsys.readouterr().out
    assert f"python3/{CULPRIT}/" in out and f"python3/{VICTIM}/" not in out
    assert cli.main(["report", str(recording), "--workload", "nosuch"]) == 1
    stdout, stderr = capsys.readouterr()
    assert stdout == "" and "no workload has 'nosuch' in its name" in stderr and f"python3/{VICTIM}/" in stderr


@pytest.mark.parametrize("value", ["-1", "101", "x", "", "1.5"])
def test_a_number_of_worst_requests_out_of_range_is_wrong_usage(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", "file", f"--worst={value}"]) == 2
    assert "--worst" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_one_error(recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--html", "--perfetto"):
        assert cli.main(["report", str(recording), option, str(tmp_path / "no" / "such")]) == 1
        assert capsys.readouterr().err.count("gputail: cannot write ") == 1
        assert cli.main(["report", str(recording), option, "/dev/full"]) == 1
        assert capsys.readouterr().err.count("gputail: cannot write ") == 1


@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize("name", [HOSTILE, "漢字" * 100, "e\u0301" * 100, "\udcff\ud800", "x" * 5000])
def test_names_of_other_processes_cannot_break_the_page(name: str, ascii_only: bool, tmp_path: Path) -> None:
    path = record(tmp_path / "slow.gpt", serving_beside_a_burst(), name=name, kernel=HOSTILE_BYTES)
    shown = text.page(analyse(Options(str(path))), 100, ascii_only)
    assert all(char.isprintable() or char == "\n" for char in shown)
    assert max(text._cells(line) for line in shown.splitlines()) <= 100
    shown.encode()  # no lone surrogates
    assert "the 3 worst requests" in shown and f"kernels of pid {CULPRIT}" in shown


def gputail(*args: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "gputail", "report", *args], capture_output=True, env={"PATH": "", **environment})


def test_a_locale_that_is_not_utf8_gets_ascii_and_the_width_is_obeyed() -> None:
    path = str(DATA / "xgemm.npz")
    plain, drawn = gputail(path, LC_ALL="C", COLUMNS="80"), gputail(path, LC_ALL="C.UTF-8")
    assert plain.stdout.isascii() and max(map(len, plain.stdout.splitlines())) <= 80
    assert "█" in drawn.stdout.decode()
    assert gputail(path, "--ascii", LC_ALL="C.UTF-8").stdout.isascii()
