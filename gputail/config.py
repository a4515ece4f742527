"""Settings of a run: what flags and an optional TOML file say becomes one frozen value.

In go the parsed flags (None where a flag was not given) and a file's path; out comes Settings, or a UsageError that
names file, key and what would be right. Flags win over the file, the file over the defaults. Reads nothing else.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from gputail.errors import UsageError
from gputail.tiers import FULL, TIERS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT_LISTEN = "127.0.0.1:9490"
DEFAULT_SOCKET = "/run/gputail/gputail.sock"
MAX_SOCKET_BYTES = 107  # what the kernel takes as a socket's name
MAX_FLUSH_MS = 10_000
MAX_CONFIG_BYTES = 1 << 20
MAX_BUDGET_PERCENT = 100.0
AUTO = "auto"
TIER_CHOICES = (AUTO, *TIERS[: FULL + 1])


@dataclass(frozen=True)
class Address:
    """Where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Settings:
    """What `run` and `record` do. The fields that a file may set are the keys of KEYS."""

    libraries: tuple[str, ...] = ()  # libraries to trace although no process has them mapped yet
    pids: tuple[int, ...] = ()  # trace only these processes; empty: every process that uses the GPU
    command: tuple[str, ...] = ()  # start this program, trace it, and end when it ends
    jsonl: str | None = None  # where request records go, "-" for stdout
    listen: Address | None = Address("127.0.0.1", 9490)  # of the Prometheus endpoint; None: off
    socket: str | None = DEFAULT_SOCKET  # where `top` and `events` look; None: off
    flush_ms: int = 200  # how often the rings are drained
    duration_s: float | None = None  # end after this long; None: run until told to end
    budget_percent: float = 1.0  # of its CPU time, that tracing may cost a process
    tier: str = AUTO  # of probes: by the budget, or the same for every process
    output: str | None = None  # the recording that `record` writes, "-" for stdout


def parse_listen(value: object) -> Address | None:
    """HOST:PORT, [IPV6]:PORT or "off" (None). Raises ValueError saying what is wrong."""
    if not isinstance(value, str):
        raise ValueError('must be text such as "127.0.0.1:9490" or "off"')
    if value == "off":
        return None
    host, colon, port = value.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{value!r}: an IPv6 address goes in brackets, as in [::1]:9490")
    if not colon or not host:
        raise ValueError(f"{value!r} is not HOST:PORT, as in 127.0.0.1:9490, and not off")
    if not (port.isascii() and port.isdigit()) or not 0 <= int(port[:6]) <= 65535:
        raise ValueError(f"{value!r}: the port must be a number up to 65535")
    return Address(host, int(port))


def parse_socket(value: object) -> str | None:
    """A path, or "off" (None). Raises ValueError saying what is wrong."""
    if value == "off":
        return None
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError('must be the path of a socket, or "off"')
    if len(value.encode(errors="surrogateescape")) > MAX_SOCKET_BYTES - len(".lock"):
        raise ValueError(f"the path of a socket has at most {MAX_SOCKET_BYTES - len('.lock')} bytes")
    return value


def parse_pids(value: object) -> tuple[int, ...]:
    pids = value if isinstance(value, (list, tuple)) else [value]
    return tuple(dict.fromkeys(_whole(pid, 1, 2**22) for pid in pids))


def parse_libraries(value: object) -> tuple[str, ...]:
    paths = value if isinstance(value, (list, tuple)) else [value]
    for path in paths:
        if not isinstance(path, str) or not path or "\0" in path:
            raise ValueError("must be the path of a library, or a list of them")
    return tuple(dict.fromkeys(paths))


def parse_flush_ms(value: object) -> int:
    return _whole(value, 1, MAX_FLUSH_MS)


def parse_duration(value: object) -> float:
    """Seconds, more than none."""
    try:
        seconds = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else float("nan")
    except ValueError:
        seconds = float("nan")
    if not 0 < seconds <= 1e9:
        raise ValueError(f"{value!r} is not a number of seconds above 0")
    return seconds


def parse_budget(value: object) -> float:
    """Percent of a process's CPU time: a number, or text such as "0.5%"."""
    try:
        text = value.strip().removesuffix("%") if isinstance(value, str) else value
        percent = float(text) if isinstance(text, (int, float, str)) and not isinstance(text, bool) else float("nan")
    except ValueError:
        percent = float("nan")
    if not 0 < percent <= MAX_BUDGET_PERCENT:
        raise ValueError(f"{value!r} is not a percentage above 0, such as 1 or 0.5%")
    return percent


def parse_tier(value: object) -> str:
    if value not in TIER_CHOICES:
        raise ValueError(f"{value!r} is none of {', '.join(TIER_CHOICES)}")
    return str(value)


def parse_jsonl(value: object) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError('must be a file name, or "-" for standard output')
    return value


def _whole(value: object, low: int, high: int) -> int:
    text = str(value).strip() if isinstance(value, (int, str)) and not isinstance(value, bool) else ""
    if not (text.isascii() and text.isdigit()) or not low <= int(text[:12]) <= high:
        raise ValueError(f"{value!r} is not a whole number from {low} to {high}")
    return int(text)


# The keys of a configuration file, which are fields of Settings, and how each value is read.
KEYS: Mapping[str, Callable[[object], Any]] = {
    "libraries": parse_libraries,
    "pids": parse_pids,
    "jsonl": parse_jsonl,
    "listen": parse_listen,
    "socket": parse_socket,
    "flush_ms": parse_flush_ms,
    "duration_s": parse_duration,
    "budget_percent": parse_budget,
    "tier": parse_tier,
}


def read_file(path: Path) -> dict[str, Any]:
    """The values of a TOML file, by field of Settings. Raises UsageError naming file and key."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read configuration {path}: {(error.strerror or str(error)).lower()}") from error
    if len(text) > MAX_CONFIG_BYTES:
        raise UsageError(f"configuration {path} is larger than {MAX_CONFIG_BYTES} bytes", "is it the right file?")
    try:
        table = tomllib.loads(text.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"configuration {path} is not valid TOML: {error}") from error
    values = {}
    for key, value in table.items():
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.5)
            raise UsageError(
                f"configuration {path}: unknown key {key!r}",
                f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(KEYS)}",
            )
        try:
            values[key] = KEYS[key](value)
        except ValueError as error:
            raise UsageError(f"configuration {path}: {key}: {error}") from error
    return values


def settings(flags: Mapping[str, Any], config: Path | None = None) -> Settings:
    """Join defaults, the file and the flags. flags: by field of Settings; None means the flag was not given.

    A `listen` or `socket` of None cannot be told from a flag that was not given, so flags carry "off" as text.
    """
    known = {field.name for field in fields(Settings)}
    values = read_file(config) if config is not None else {}
    given = {name: value for name, value in flags.items() if name in known and value is not None}
    if "listen" in given and not isinstance(given["listen"], Address):
        given["listen"] = parse_listen(given["listen"])
    if "socket" in given:
        given["socket"] = parse_socket(given["socket"])
    return replace(Settings(), **{**values, **given})
