"""The command line: verbs, exit statuses, and every error printed once."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from gputail import cli
from gputail.config import Address, Settings
from gputail.effective import Effective
from gputail.errors import GputailError
from gputail.surfaces.follow import Filter
from gputail.surfaces.top import Options

ROOT = Path(__file__).resolve().parents[2]
MANUAL = ROOT / "docs" / "man" / "gputail.1"
VERBS = ("run", "top", "events", "check", "record", "replay", "report", "export", "demo", "completion")


def verbs() -> dict[str, argparse.ArgumentParser]:
    (subparsers,) = [action for action in cli.parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(subparsers.choices)


def fake(monkeypatch: pytest.MonkeyPatch, module: str, **functions: object) -> None:
    """Stand in for a module that a verb imports when it runs."""
    made = types.ModuleType(f"gputail.{module}")
    vars(made).update(functions)
    monkeypatch.setitem(sys.modules, f"gputail.{module}", made)
    monkeypatch.setattr("gputail." + module, made, raising=False)


def gputail(*args: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "gputail", *args], cwd=ROOT, capture_output=True, text=True, **options)  # type: ignore[call-overload, no-any-return]


def test_the_verbs_are_those_of_the_design() -> None:
    assert tuple(verbs()) == VERBS


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_ends_with_examples_of_it(verb: str) -> None:
    text = verbs()[verb].format_help()
    examples = text[text.index("examples:\n") :]
    assert f"  gputail {verb}" in examples
    # Nothing but examples and the exit status stands behind them.
    assert re.fullmatch(r"examples:\n(  .*gputail .*\n)+(\nexit status: .*\n)?", examples)


@pytest.mark.parametrize(
    "args", [(), ("frob",), ("run", "--frob"), ("run", "--flush-ms", "0"), ("record",), ("replay",), ("run", "-p", "x"), ("run", "--")]
)
def test_wrong_usage_exits_2_and_says_so_on_stderr_alone(args: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("gputail: ") == (1 if args else 0)


def test_help_exits_0_and_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    assert "exit status: 0 fine" in capsys.readouterr().out


def test_run_hands_its_settings_to_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []
    fake(monkeypatch, "daemon", run=lambda configuration, load: seen.append(configuration.settings) or 0)
    line = [
        "run",
        "-p",
        "4",
        "-p",
        "5",
        "--jsonl",
        "--listen",
        "[::1]:80",
        "--flush-ms",
        "7",
        "--duration",
        "2.5",
        "--",
        "prog",
        "--",
        "-p",
        "9",
    ]
    assert cli.main(line) == 0
    assert seen == [
        Settings(pids=(4, 5), jsonl="-", listen=Address("::1", 80), flush_ms=7, duration_s=2.5, command=("prog", "--", "-p", "9"))
    ]


def test_listen_off_switches_the_endpoint_off(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []
    fake(monkeypatch, "daemon", run=lambda configuration, load: seen.append(configuration.settings) or 0)
    cli.main(["run", "--listen", "off"])
    cli.main(["run"])
    assert [settings.listen for settings in seen] == [None, Address("127.0.0.1", 9490)]


def test_record_hands_its_settings_to_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []
    fake(monkeypatch, "daemon", record=lambda settings: seen.append(settings) or 1)
    assert cli.main(["record", "-o", "file", "--", "prog"]) == 1
    assert seen == [Settings(output="file", command=("prog",))]


def test_check_and_demo_are_called_with_their_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    fake(monkeypatch, "check", run=lambda as_json: seen.append(as_json) or 0)
    fake(monkeypatch, "demo", run=lambda seconds: seen.append(seconds) or 0)
    assert [cli.main(line) for line in (["check"], ["check", "--json"], ["demo"], ["demo", "--seconds", "3"])] == [0, 0, 0, 0]
    assert seen == [False, True, 20.0, 3.0]


def test_an_error_is_printed_once_with_its_hint(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(configuration: Effective, load: object) -> int:
        raise GputailError("cannot attach to cuLaunchKernel", "run as root")

    fake(monkeypatch, "daemon", run=run)
    assert cli.main(["run"]) == 1
    assert capsys.readouterr() == ("", "gputail: cannot attach to cuLaunchKernel\nhint: run as root\n")


def test_ctrl_c_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(configuration: Effective, load: object) -> int:
        raise KeyboardInterrupt

    fake(monkeypatch, "daemon", run=run)
    assert cli.main(["run"]) == 130
    assert capsys.readouterr() == ("", "")


def test_an_unexpected_error_is_one_line_and_its_traceback_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def run(configuration: Effective, load: object) -> int:
        raise KeyError("no\nsuch")

    fake(monkeypatch, "daemon", run=run)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert cli.main(["run"]) == 1
    log = tmp_path / "gputail" / "crash.log"
    assert (
        capsys.readouterr().err == f"gputail: unexpected error: KeyError: 'no\\nsuch'\nhint: please report it with the traceback in {log}\n"
    )
    assert "Traceback" in log.read_text()
    assert cli.main(["run", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "gputail", "completion", "bash"]
    done = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_top_and_events_are_called_with_their_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr("gputail.surfaces.top.run", lambda options: seen.append(options) or 0)
    monkeypatch.setattr("gputail.surfaces.follow.run", lambda *arguments: seen.append(arguments) or 0)
    assert cli.main(["top"]) == 0
    assert cli.main(["top", "--socket", "/s", "--once", "--json", "--ascii", "-d", "0.5", "--filter", "x", "--sort", "p99"]) == 0
    line = ["events", "--cause", "a", "--cause", "b", "-p", "4", "--workload", "w", "--min-ms", "2.5", "-n", "0", "--json"]
    assert cli.main(line) == 0
    assert seen == [
        Options("/run/gputail/gputail.sock"),
        Options("/s", True, True, True, 0.5, "x", "p99"),
        ("/run/gputail/gputail.sock", Filter(("a", "b"), (4,), "w", 2.5), 0, True),
    ]


def test_socket_off_is_for_the_daemon_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Settings] = []
    fake(monkeypatch, "daemon", run=lambda configuration, load: seen.append(configuration.settings) or 0)
    cli.main(["run", "--socket", "off"])
    cli.main(["run"])
    assert [settings.socket for settings in seen] == [None, "/run/gputail/gputail.sock"]
    assert cli.main(["top", "--socket", "off"]) == 2
    assert cli.main(["run", "--socket", "/" + "x" * 200]) == 2
    assert "at most 102 bytes" in capsys.readouterr().err


def test_the_command_line_and_replay_need_no_bcc() -> None:
    code = (
        "import sys\nfrom gputail import cli, replay\ncli.parser()\n"
        "print(sorted({'bcc', 'elftools', 'prometheus_client'} & {name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_manual_names_every_verb_and_option_and_no_other() -> None:
    manual = MANUAL.read_text().replace("\\-", "-")
    sections = {match[1]: match[2] for match in re.finditer(r'^\.SS "?gputail (\w+).*\n((?:(?!^\.S[SH]).*\n)*)', manual, re.MULTILINE)}
    assert tuple(sections) == VERBS
    common = {"-h", "--help", "--debug"}
    for verb, parser in verbs().items():
        options = {option for action in parser._actions for option in action.option_strings} - common
        described = {
            option
            for line in re.findall(r"^\.B[RI]* (-.*)$", sections[verb], re.MULTILINE)
            for option in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", line)
        }
        assert described == options, verb
