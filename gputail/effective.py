"""The configuration of a run: flags above the environment above a TOML file above the defaults, and which of them said what.

In: the flags as text, the environment, the name of a file. Out: an `Effective`, or a UsageError that names flag, variable or
file and line, and the nearest key where one is wrong. What values may be is left to config.py.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from gputail import __version__
from gputail.config import DEFAULT_SOCKET, OPTIONS, Settings
from gputail.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT_FILE = Path("/etc/gputail/config.toml")
ENVIRONMENT = "GPUTAIL_"
FILE_VARIABLE = "GPUTAIL_CONFIG"
MAX_FILE_BYTES = 1 << 20
# How alike an unknown variable must be to one of ours to be taken for a slip of the pen. Others of that prefix are nobody's
# mistake: Kubernetes makes GPUTAIL_PORT of a Service called gputail.
_SLIP = 0.8


@dataclass(frozen=True)
class Effective:
    """Settings, and for each key of config.OPTIONS where its value comes from: default, FILE:LINE, a variable or a flag."""

    settings: Settings
    origins: Mapping[str, str]
    file: Path | None = None  # that was read
    doubts: tuple[str, ...] = ()  # about what was given and has no effect

    def toml(self) -> str:
        """As a configuration file that says the same."""
        assignments = {name: f"{name} = {_toml(getattr(self.settings, name))}" for name in OPTIONS}
        width = max(map(len, assignments.values()))
        lines = [f"{assignment:{width}}  # {self.origins[name]}" for name, assignment in assignments.items()]
        return "\n".join([f"# what gputail {__version__} would run with, and where each value comes from", *lines, ""])


def variable(name: str) -> str:
    """What an option is called in the environment."""
    return ENVIRONMENT + name.upper()


def load(flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None = None) -> Effective:
    """Join them. flags: by field of Settings, as values that config.OPTIONS can parse; None means the flag was not given.

    Without `file`, the environment may name one, and DEFAULT_FILE is read where it exists.
    """
    if file is None:
        named = environ.get(FILE_VARIABLE)
        file = Path(named) if named else DEFAULT_FILE if DEFAULT_FILE.exists() else None
    given = _Given()
    if file is not None:
        _read_file(file, given)
    doubts = _read_environment(environ, given)
    for name, option in OPTIONS.items():
        if flags.get(name) is not None:
            given.take(name, flags[name], option.flag, option.flag)
    known = {one.name for one in fields(Settings)} - OPTIONS.keys()
    others = {name: value for name, value in flags.items() if name in known and value is not None}
    origins = {name: given.origins.get(name, "default") for name in OPTIONS}
    return Effective(replace(Settings(), **given.values, **others), origins, file, doubts)


def of_flags(flags: Mapping[str, Any]) -> Settings:
    """The settings of a verb that takes flags alone."""
    return load(flags, {}, Path("/dev/null")).settings


def daemon_socket(environ: Mapping[str, str]) -> str:
    """Where the daemon of this machine has its control socket, as far as its configuration can be read from here."""
    try:
        return load({}, environ).settings.socket or DEFAULT_SOCKET
    except UsageError:  # the daemon's own affair
        return DEFAULT_SOCKET


@dataclass
class _Given:
    """What has been given so far; what comes later counts."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def take(self, name: str, value: object, origin: str, where: str) -> None:
        try:
            self.values[name] = OPTIONS[name].parse(value)
        except ValueError as error:
            raise UsageError(f"{where}: {error}") from error
        self.origins[name] = origin


def _read_file(path: Path, given: _Given) -> None:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read configuration {path}: {(error.strerror or str(error)).lower()}") from error
    if len(content) > MAX_FILE_BYTES:
        raise UsageError(f"configuration {path} is larger than {MAX_FILE_BYTES} bytes", "is it the right file?")
    try:
        text = content.decode()
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r" \(at line (\d+), column \d+\)$", str(error))
        raise UsageError(f"{path}:{line[1] if line else text.count(chr(10)) + 1}: not valid TOML: {error}") from error
    except UnicodeDecodeError as error:
        line_number = content.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}:{line_number}: not valid TOML, which is UTF-8") from error
    except RecursionError as error:
        raise UsageError(f"configuration {path}: not valid TOML that a configuration could be: too deep") from error
    for name, value in table.items():
        place = f"{path}{_line_of(name, text)}"
        if name not in OPTIONS:
            raise UsageError(f"{place}: unknown key {name!r}", _nearest(name))
        given.take(name, value, place, f"{place}: {name}")


def _line_of(key: str, text: str) -> str:
    """ ":LINE" of a key's assignment (or table); "" where it is written in a way that cannot be found."""
    found = re.search(rf"""^[ \t]*\[*[ \t]*["']?{re.escape(key)}["']?[ \t]*[=.\]]""", text, re.MULTILINE)
    return f":{text.count(chr(10), 0, found.start()) + 1}" if found else ""


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, OPTIONS, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(OPTIONS)}"


def _read_environment(environ: Mapping[str, str], given: _Given) -> tuple[str, ...]:
    """Take the variables that are set and not empty; what to say of those that look like a slip of the pen."""
    ours = {variable(name): name for name in OPTIONS}
    doubts = []
    for key, text in sorted(environ.items()):
        if name := ours.get(key):
            if text:
                is_list = isinstance(getattr(Settings(), name), tuple)
                given.take(name, [one.strip() for one in text.split(",")] if is_list else text, key, key)
        elif key.startswith(ENVIRONMENT) and key != FILE_VARIABLE:
            near = difflib.get_close_matches(key.removeprefix(ENVIRONMENT), [one.removeprefix(ENVIRONMENT) for one in ours], 1, _SLIP)
            doubts += [f"{key} is no option and has no effect; did you mean {ENVIRONMENT}{one}?" for one in near]
    return tuple(doubts)


def _toml(value: object) -> str:
    if value is None:
        return '"off"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, (bool, int, float)):
        return repr(value).lower()
    # JSON's strings are TOML's but for DEL.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
