"""A value of an option is read alike wherever it comes from, and what is wrong with it is said."""

from __future__ import annotations

import argparse
from dataclasses import fields

import pytest

from gputail import cli
from gputail.config import OPTIONS, Address, Settings, parse_duration, parse_flush_ms, parse_jsonl, parse_listen, parse_pids, parse_run_time


def test_every_option_of_run_can_be_configured() -> None:
    (verbs,) = [action for action in cli.parser()._actions if isinstance(action, argparse._SubParsersAction)]
    flags = {action.dest: action.option_strings[-1] for action in verbs.choices["run"]._actions}
    about_the_run = {"help", "debug", "config", "print_config"}
    assert {name: option.flag for name, option in OPTIONS.items()} == {
        name: flag for name, flag in flags.items() if name not in about_the_run
    }
    assert {one.name for one in fields(Settings)} - OPTIONS.keys() == {"command", "output"}


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


def test_off_is_no_file_and_no_end() -> None:
    assert parse_jsonl("off") is None
    assert parse_run_time("off") is None


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
