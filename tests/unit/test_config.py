"""Flags and file become settings, and what is wrong in them is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from gputail.config import Address, Settings, parse_duration, parse_flush_ms, parse_listen, parse_pids, settings
from gputail.errors import UsageError


def test_nothing_given_is_the_defaults() -> None:
    assert settings({}) == Settings()
    assert Settings().listen == Address("127.0.0.1", 9490)


def test_flags_win_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('listen = "off"\nflush_ms = 50\npids = [4, 5, 4]\njsonl = "out.jsonl"\nduration_s = 1.5\n')
    got = settings({"flush_ms": 20, "jsonl": None, "verb": "run"}, tmp_path / "c.toml")
    assert got == Settings(listen=None, flush_ms=20, pids=(4, 5), jsonl="out.jsonl", duration_s=1.5)


def test_a_flag_can_switch_off_what_the_file_switches_on(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('listen = "0.0.0.0:1234"\n')
    assert settings({}, tmp_path / "c.toml").listen == Address("0.0.0.0", 1234)
    assert settings({"listen": "off"}, tmp_path / "c.toml").listen is None


@pytest.mark.parametrize(
    ("text", "problem", "hint"),
    [
        ("lisen = 1", "unknown key 'lisen'", "did you mean 'listen'?"),
        ("zzz = 1", "unknown key 'zzz'", "the keys are libraries, pids, jsonl, listen, socket, flush_ms, duration_s, budget_percent, tier"),
        ("flush_ms = 0", "flush_ms: 0 is not a whole number from 1 to 10000", ""),
        ("flush_ms = true", "flush_ms: True is not a whole number from 1 to 10000", ""),
        ("pids = [1, 'x']", "pids: 'x' is not a whole number from 1 to 4194304", ""),
        ("listen = 9490", 'listen: must be text such as "127.0.0.1:9490" or "off"', ""),
        ("duration_s = -1", "duration_s: -1 is not a number of seconds above 0", ""),
        ("jsonl = ''", 'jsonl: must be a file name, or "-" for standard output', ""),
        ("a = [", "is not valid TOML", ""),
        ("a = " + "[" * 5000, "is not valid TOML", ""),
    ],
)
def test_a_mistake_in_the_file_is_named_with_the_file(tmp_path: Path, text: str, problem: str, hint: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        settings({}, path)
    assert str(path) in caught.value.problem
    assert problem in caught.value.problem
    assert caught.value.hint == hint
    assert "\n" not in caught.value.problem


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a = 1\n" * 300_000])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "c.toml").write_bytes(content)
    with pytest.raises(UsageError, match="c.toml"):
        settings({}, tmp_path / "c.toml")


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read configuration .*none.toml: no such file or directory"):
        settings({}, tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9490", Address("127.0.0.1", 9490)),
        ("[::1]:0", Address("::1", 0)),
        ("localhost:65535", Address("localhost", 65535)),
        ("off", None),
    ],
)
def test_addresses_are_read(text: str, address: Address | None) -> None:
    assert parse_listen(text) == address
    assert address is None or str(address) == text


@pytest.mark.parametrize(
    "text", ["", "9490", ":9490", "host:", "host:x", "host:65536", "host:-1", "::1:9490", "host:99999999999999999999", "host:\u0663"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_listen(text)


@pytest.mark.parametrize("text", ["0", "-1", "x", "", "nan", "inf", "1e99", True, None])
def test_what_is_no_duration_is_refused(text: object) -> None:
    with pytest.raises(ValueError):
        parse_duration(text)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "99999999999999999999", "\u0663", None])
def test_what_is_no_whole_number_is_refused(text: object) -> None:
    with pytest.raises(ValueError):
        parse_flush_ms(text)
    with pytest.raises(ValueError):
        parse_pids(text)
