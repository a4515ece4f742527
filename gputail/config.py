"""The options of a run: what each is called, how a value of it is read, and the frozen value that all of them make.

In goes one value, from the command line, the environment or a file alike; out comes what Settings hold, or a ValueError that
says what would be right. Where values come from, and which of them counts, is left to effective.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from gputail.tiers import FULL, TIERS

DEFAULT_LISTEN = "127.0.0.1:9490"
DEFAULT_SOCKET = "/run/gputail/gputail.sock"
MAX_SOCKET_BYTES = 107  # what the kernel takes as a socket's name
OTLP_PORTS = {"http": 4318, "https": 4318, "grpc": 4317, "grpcs": 4317}
MAX_FLUSH_MS = 10_000
MAX_SERIES = 512  # as many workloads as pipeline.py keeps
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
    """What `run` and `record` do. The fields that can be configured are those of OPTIONS."""

    libraries: tuple[str, ...] = ()  # libraries to trace although no process has them mapped yet
    pids: tuple[int, ...] = ()  # trace only these processes; empty: every process that uses the GPU
    command: tuple[str, ...] = ()  # start this program, trace it, and end when it ends
    jsonl: str | None = None  # where request records go, "-" for stdout
    listen: Address | None = Address("127.0.0.1", 9490)  # of the Prometheus endpoint; None: off
    max_workloads: int = 100  # with series of their own
    metrics_tls_cert: str | None = None  # file of the certificate (PEM) that the endpoint has; None: no TLS
    metrics_tls_key: str | None = None  # and of its key
    metrics_auth_file: str | None = None  # of those who may scrape and their passwords; None: everybody
    socket: str | None = DEFAULT_SOCKET  # where `top` and `events` look; None: off
    otlp: str | None = None  # URL of the OpenTelemetry receiver; None: off
    otlp_spans: bool = False  # whether it is sent outliers as spans, too
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


def parse_otlp(value: object) -> str | None:
    """http, https, grpc or grpcs://HOST[:PORT], or "off" (None). Without a port it is the usual one. Raises ValueError."""
    if value == "off":
        return None
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError('must be a URL such as "http://collector:4318" or "grpc://collector:4317", or "off"')
    try:
        parts = urlsplit(value)
        port = parts.port or OTLP_PORTS.get(parts.scheme)
    except ValueError as error:
        raise ValueError(f"{value!r}: {str(error).lower()}") from error
    if parts.scheme not in OTLP_PORTS or not parts.hostname or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(f"{value!r} is not http, https, grpc or grpcs://HOST:PORT")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port}{parts.path.rstrip('/')}"


def parse_switch(value: object) -> bool:
    if str(value).lower() in ("on", "true", "1"):
        return True
    if str(value).lower() in ("off", "false", "0"):
        return False
    raise ValueError(f"{value!r} is not true or false")


def parse_pids(value: object) -> tuple[int, ...]:
    pids = value if isinstance(value, (list, tuple)) else [value]
    return tuple(dict.fromkeys(_whole(pid, 1, 2**22) for pid in pids))


def parse_libraries(value: object) -> tuple[str, ...]:
    paths = value if isinstance(value, (list, tuple)) else [value]
    for path in paths:
        if not isinstance(path, str) or not path or "\0" in path:
            raise ValueError("must be the path of a library, or a list of them")
    return tuple(dict.fromkeys(paths))


def parse_file(value: object) -> str | None:
    """The path of a file, or "off" (None)."""
    if value == "off":
        return None
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError('must be the path of a file, or "off"')
    return value


def parse_max_workloads(value: object) -> int:
    return _whole(value, 1, MAX_SERIES)


def parse_flush_ms(value: object) -> int:
    return _whole(value, 1, MAX_FLUSH_MS)


def parse_run_time(value: object) -> float | None:
    """Seconds, or "off" (None): until told to end."""
    return None if value == "off" else parse_duration(value)


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


def parse_jsonl(value: object) -> str | None:
    """A file name, "-" for standard output, or "off" (None)."""
    if value == "off":
        return None
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError('must be a file name, "-" for standard output, or "off"')
    return value


def _whole(value: object, low: int, high: int) -> int:
    text = str(value).strip() if isinstance(value, (int, str)) and not isinstance(value, bool) else ""
    if not (text.isascii() and text.isdigit()) or not low <= int(text[:12]) <= high:
        raise ValueError(f"{value!r} is not a whole number from {low} to {high}")
    return int(text)


@dataclass(frozen=True)
class Option:
    """An option of `run`. Its name is that of the field of Settings and of the key in a file; GPUTAIL_ and the name in capitals
    is its variable in the environment. `parse` takes a value of TOML or a text, and raises ValueError.
    """

    parse: Callable[[object], Any]
    flag: str
    is_live: bool = False  # a reload changes it while tracing goes on; else it takes a restart


OPTIONS: Mapping[str, Option] = {
    "libraries": Option(parse_libraries, "--library"),
    "pids": Option(parse_pids, "--pid"),
    "jsonl": Option(parse_jsonl, "--jsonl", is_live=True),
    "listen": Option(parse_listen, "--listen", is_live=True),
    "max_workloads": Option(parse_max_workloads, "--max-workloads"),
    "metrics_tls_cert": Option(parse_file, "--metrics-tls-cert"),
    "metrics_tls_key": Option(parse_file, "--metrics-tls-key"),
    "metrics_auth_file": Option(parse_file, "--metrics-auth-file"),
    "socket": Option(parse_socket, "--socket", is_live=True),
    "otlp": Option(parse_otlp, "--otlp", is_live=True),
    "otlp_spans": Option(parse_switch, "--otlp-spans"),
    "flush_ms": Option(parse_flush_ms, "--flush-ms", is_live=True),
    "duration_s": Option(parse_run_time, "--duration"),
    "budget_percent": Option(parse_budget, "--budget", is_live=True),
    "tier": Option(parse_tier, "--tier"),
}
