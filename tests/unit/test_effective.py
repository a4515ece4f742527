"""Flags, environment and file become one configuration; each value's origin and each mistake's place is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gputail import effective
from gputail.config import OPTIONS, Address, Settings
from gputail.effective import Effective, daemon_socket, load
from gputail.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
# A value of each option other than its default, as the environment or a flag has it, and in a file.
OTHER = {
    "libraries": ("/a/libcuda.so.1,/b/libnccl.so.2", '["/a/libcuda.so.1", "/b/libnccl.so.2"]'),
    "pids": ("4, 5,4", "[4, 5, 4]"),
    "jsonl": ("out.jsonl", '"out.jsonl"'),
    "listen": ("off", '"off"'),
    "max_workloads": ("7", "7"),
    "metrics_tls_cert": ("/c", '"/c"'),
    "metrics_tls_key": ("/k", '"/k"'),
    "metrics_auth_file": ("/a", '"/a"'),
    "socket": ("/s", '"/s"'),
    "otlp": ("grpc://collector", '"grpc://collector:4317"'),
    "otlp_spans": ("on", "true"),
    "flush_ms": ("50", "50"),
    "duration_s": ("1.5", "1.5"),
    "budget_percent": ("0.5%", "0.5"),
    "tier": ("light", '"light"'),
}
OTHERWISE = Settings(
    ("/a/libcuda.so.1", "/b/libnccl.so.2"),
    (4, 5),
    (),
    "out.jsonl",
    None,
    7,
    "/c",
    "/k",
    "/a",
    "/s",
    otlp="grpc://collector:4317",
    otlp_spans=True,
    flush_ms=50,
    duration_s=1.5,
    budget_percent=0.5,
    tier="light",
)


@pytest.fixture(autouse=True)
def default_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without a configuration."""
    monkeypatch.setattr(effective, "DEFAULT_FILE", tmp_path / "etc.toml")
    return tmp_path / "etc.toml"


def write(path: Path, values: dict[str, str]) -> Path:
    path.write_text("# comment\n" + "".join(f"{name} = {value}\n" for name, value in values.items()))
    return path


def test_nothing_given_is_the_defaults() -> None:
    assert load({}, {}) == Effective(Settings(), dict.fromkeys(OPTIONS, "default"))
    assert Settings().listen == Address("127.0.0.1", 9490)


def test_the_file_of_the_machine_is_read_where_there_is_one(default_file: Path) -> None:
    write(default_file, {"flush_ms": "50"})
    got = load({}, {})
    assert (got.settings, got.file, got.origins["flush_ms"]) == (Settings(flush_ms=50), default_file, f"{default_file}:2")


def test_a_named_file_takes_the_place_of_the_machines(default_file: Path, tmp_path: Path) -> None:
    write(default_file, {"flush_ms": "50", "tier": '"light"'})
    file, other = write(tmp_path / "a.toml", {"flush_ms": "60"}), write(tmp_path / "b.toml", {"flush_ms": "70"})
    assert load({}, {"GPUTAIL_CONFIG": str(file)}).settings == Settings(flush_ms=60)
    assert load({}, {"GPUTAIL_CONFIG": str(file)}, other).settings == Settings(flush_ms=70)


def test_every_option_is_taken_from_each_place_and_its_origin_named(tmp_path: Path) -> None:
    assert OTHER.keys() == OPTIONS.keys()
    file = write(tmp_path / "c.toml", {name: value for name, (_, value) in OTHER.items()})
    assert load({}, {}, file) == Effective(OTHERWISE, {name: f"{file}:{number}" for number, name in enumerate(OTHER, 2)}, file)
    environ = {f"GPUTAIL_{name.upper()}": text for name, (text, _) in OTHER.items()}
    assert load({}, environ) == Effective(OTHERWISE, {name: f"GPUTAIL_{name.upper()}" for name in OTHER})
    flags = {name: text.split(",") if name in ("libraries", "pids") else text for name, (text, _) in OTHER.items()}
    assert load(flags, {}) == Effective(OTHERWISE, {name: option.flag for name, option in OPTIONS.items()})


@pytest.mark.parametrize("name", OPTIONS)
def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path, name: str) -> None:
    default, other = getattr(Settings(), name), getattr(OTHERWISE, name)
    plain = load({}, {}).toml()
    (line,) = [line for line in plain.splitlines() if line.startswith(f"{name} = ")]
    text = line.partition(" = ")[2].partition("  #")[0].strip().strip('"[]')
    file = write(tmp_path / "c.toml", {name: OTHER[name][1]})
    assert getattr(load({}, {}, file).settings, name) == other
    if default == ():
        return  # nothing that a variable could say takes a list back
    assert getattr(load({}, {f"GPUTAIL_{name.upper()}": text}, file).settings, name) == default
    environ = {f"GPUTAIL_{name.upper()}": OTHER[name][0]}
    assert getattr(load({name: text}, environ, file).settings, name) == default


def test_an_empty_variable_is_none(tmp_path: Path) -> None:
    assert load({}, {f"GPUTAIL_{name.upper()}": "" for name in OPTIONS}) == load({}, {})


def test_a_misspelt_variable_is_doubted_and_a_strangers_is_not() -> None:
    strangers = {"GPUTAIL_PORT": "tcp://10.0.0.1:9490", "GPUTAIL_SERVICE_HOST": "10.0.0.1", "GPUTAIL_LIVE_TESTS": "1", "HOME": "/"}
    got = load({}, {"GPUTAIL_LISEN": "off", **strangers})
    assert got.settings == Settings()
    assert got.doubts == ("GPUTAIL_LISEN is no option and has no effect; did you mean GPUTAIL_LISTEN?",)


@pytest.mark.parametrize(
    ("text", "line", "problem", "hint"),
    [
        ("\n\nlisen = 1", 3, "unknown key 'lisen'", "did you mean 'listen'?"),
        ("flush-ms = 1", 1, "unknown key 'flush-ms'", "did you mean 'flush_ms'?"),
        ("# tier\n'budget' = 1", 2, "unknown key 'budget'", "did you mean 'budget_percent'?"),
        ("zzz = 1", 1, "unknown key 'zzz'", f"the keys are {', '.join(OPTIONS)}"),
        ("flush_ms = 5\n[zzz]\nlisten = 'off'", 2, "unknown key 'zzz'", f"the keys are {', '.join(OPTIONS)}"),
        ("tier = 'full'\n  flush_ms = 0", 2, "flush_ms: 0 is not a whole number from 1 to 10000", ""),
        ("flush_ms = true", 1, "flush_ms: True is not a whole number from 1 to 10000", ""),
        ("pids = [\n1,\n'x']", 1, "pids: 'x' is not a whole number from 1 to 4194304", ""),
        ("tier = 'ful'", 1, "tier: 'ful' is none of auto, light, launch, full", ""),
        ("listen = 9490", 1, 'listen: must be text such as "127.0.0.1:9490" or "off"', ""),
        ("listen.port = 9490", 1, 'listen: must be text such as "127.0.0.1:9490" or "off"', ""),
        ("duration_s = -1", 1, "duration_s: -1 is not a number of seconds above 0", ""),
        ("jsonl = ''", 1, 'jsonl: must be a file name, "-" for standard output, or "off"', ""),
        ("tier = 'full'\ntier = 'full'", 2, "not valid TOML", ""),
        ("a = [\n\n", 3, "not valid TOML", ""),
        ("\n\nlisten = off", 3, "not valid TOML", ""),
    ],
)
def test_a_mistake_in_the_file_is_named_with_file_line_and_nearest_key(
    tmp_path: Path, text: str, line: int, problem: str, hint: str
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load({}, {}, path)
    assert caught.value.problem.startswith(f"{path}:{line}: {problem}")
    assert caught.value.hint == hint
    assert "\n" not in caught.value.problem


def test_a_mistake_in_the_environment_is_named_with_the_variable() -> None:
    with pytest.raises(UsageError) as caught:
        load({}, {"GPUTAIL_FLUSH_MS": "0"})
    assert caught.value.problem == "GPUTAIL_FLUSH_MS: '0' is not a whole number from 1 to 10000"
    with pytest.raises(UsageError, match="GPUTAIL_PIDS: 'x' is not a whole number"):
        load({}, {"GPUTAIL_PIDS": "4,x"})


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a = 1\n" * 300_000, b"a = " + b"[" * 5000])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "c.toml").write_bytes(content)
    with pytest.raises(UsageError, match="c.toml"):
        load({}, {}, tmp_path / "c.toml")


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read configuration .*none.toml: no such file or directory"):
        load({}, {}, tmp_path / "none.toml")


@pytest.mark.parametrize("settings", [Settings(), OTHERWISE, Settings(jsonl='a"b\\\x7f\n\u2028€', listen=Address("::1", 80), socket=None)])
def test_what_is_printed_is_a_file_that_says_the_same(tmp_path: Path, settings: Settings) -> None:
    text = Effective(settings, dict.fromkeys(OPTIONS, "a flag")).toml()
    (tmp_path / "c.toml").write_text(text)
    assert load({}, {}, tmp_path / "c.toml").settings == settings


def test_print_config_prints_where_each_value_comes_from_and_traces_nothing(tmp_path: Path) -> None:
    file = write(tmp_path / "c.toml", {"flush_ms": "50", "tier": '"light"'})
    command = [sys.executable, "-m", "gputail", "run", "--config", str(file), "--print-config", "--jsonl"]
    environ = {**os.environ, "GPUTAIL_TIER": "launch", "GPUTAIL_LISTEN": "[::1]:80"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    said = [tuple(part.strip() for part in line.split("  # ")) for line in done.stdout.splitlines()[1:]]
    assert said == [
        ("libraries = []", "default"),
        ("pids = []", "default"),
        ('jsonl = "-"', "--jsonl"),
        ('listen = "[::1]:80"', "GPUTAIL_LISTEN"),
        ("max_workloads = 100", "default"),
        ('metrics_tls_cert = "off"', "default"),
        ('metrics_tls_key = "off"', "default"),
        ('metrics_auth_file = "off"', "default"),
        ('socket = "/run/gputail/gputail.sock"', "default"),
        ('otlp = "off"', "default"),
        ("otlp_spans = false", "default"),
        ("flush_ms = 50", f"{file}:2"),
        ('duration_s = "off"', "default"),
        ("budget_percent = 1.0", "default"),
        ('tier = "launch"', "GPUTAIL_TIER"),
    ]


def test_who_looks_for_the_daemon_finds_the_socket_of_its_configuration(default_file: Path) -> None:
    assert daemon_socket({}) == "/run/gputail/gputail.sock"
    write(default_file, {"socket": '"/s"'})
    assert daemon_socket({}) == "/s"
    assert daemon_socket({"GPUTAIL_SOCKET": "/t"}) == "/t"
    write(default_file, {"socket": '"off"'})
    assert daemon_socket({}) == "/run/gputail/gputail.sock"
    write(default_file, {"sockt": "1"})
    assert daemon_socket({}) == "/run/gputail/gputail.sock"
