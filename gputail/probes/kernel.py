"""The BPF program: joined from bpf/, compiled by BCC without kernel headers, loaded, with its maps at hand.

In: which way of attaching the kernel offers and what is to be followed. Out: a `Kernel` with program descriptors,
counters and ring maps. Attaching and draining are left to `links` and `rings`.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from gputail.errors import GputailError
from gputail.events import KERNEL_STAGES
from gputail.paths import bpf_sources
from gputail.probes import capabilities, syscalls
from gputail.probes.table import CUDA, NCCL

PARTS = ("calls.h", "cuda.c", "nccl.c", "host.c")
TRACEFS = (Path("/sys/kernel/tracing"), Path("/sys/kernel/debug/tracing"))
FIELDS = {
    "sched_switch": ("prev_state", "next_pid"),
    "sched_wakeup": ("pid",),
    "sched_process_exec": ("old_pid",),
    "sched_process_fork": ("child_pid",),
}
_BCC_HINT = "install the distribution's package: apt-get install python3-bpfcc (Debian, Ubuntu) or dnf install python3-bcc (Fedora)"


def import_bcc() -> ModuleType:
    """The distribution's bcc module. Another package of that name (PyPI has one) is told apart and refused."""
    try:
        with warnings.catch_warnings():
            # BCC's sources have escapes that Python 3.12 warns about whenever it compiles them.
            warnings.simplefilter("ignore", SyntaxWarning)
            bcc = importlib.import_module("bcc")
    except ImportError as error:
        if error.name == "bcc":
            raise GputailError("BCC's Python module is not installed", _BCC_HINT) from error
        raise GputailError(f"BCC's Python module cannot be loaded: {error}", _BCC_HINT) from error
    except OSError as error:
        raise GputailError(f"BCC's library cannot be loaded: {error}", _BCC_HINT) from error
    if not hasattr(bcc, "BPF"):
        raise GputailError(f"{bcc.__file__ or bcc.__path__} is not BCC: an unrelated module shadows it", f"remove it; {_BCC_HINT}")
    return bcc


def bcc_version() -> str:
    return str(getattr(import_bcc(), "__version__", "unknown"))


def tracefs() -> Path:
    """Where tracefs is mounted."""
    for path in TRACEFS:
        try:
            if (path / "events/sched").stat():
                return path
        except PermissionError as error:
            raise GputailError(f"cannot read tracefs at {path}: permission denied", "run as root, or grant CAP_DAC_READ_SEARCH") from error
        except OSError:
            continue
    raise GputailError("tracefs is not mounted, so scheduler events cannot be read", "mount -t tracefs none /sys/kernel/tracing")


def field_offsets(event_format: str) -> dict[str, int]:
    """Byte offset of each field of a tracepoint, from the text of its tracefs `format` file."""
    offsets = {}
    for line in event_format.splitlines():
        declaration, _, rest = line.strip().removeprefix("field:").partition(";")
        if rest.strip().startswith("offset:"):
            name = declaration.split()[-1].partition("[")[0]
            offsets[name] = int(rest.strip().removeprefix("offset:").partition(";")[0])
    return offsets


def program_bytes(bcc: ModuleType, bpf: Any, name: bytes) -> bytes:
    """A program of a `bcc.BPF` as it is given to the kernel: the descriptors of its maps are in it by then."""
    start = bcc.lib.bpf_function_start(bpf.module, name)
    return ctypes.string_at(start, bcc.lib.bpf_function_size(bpf.module, name))


@dataclass(frozen=True)
class KernelOptions:
    """What the program is to do. off_cpu: follow the scheduler; only_targets: record only `add_targets` and children."""

    off_cpu: bool = True
    only_targets: bool = False
    max_threads: int = 16384


class Kernel:
    """The loaded program. Closing it is the process's exit: BCC keeps descriptors until then; `close` drops the maps."""

    def __init__(self, options: KernelOptions, per_symbol: Mapping[str, list[int]] | None = None) -> None:
        """Compile the program.

        Attached addresses carry cookies (uprobe_multi), unless `per_symbol` lists, by library kind, the cookie of each
        program to make: program `{kind}_enter_{index}` then stands for it.
        """
        cookies = per_symbol is None
        off_cpu, only_targets, max_threads = options.off_cpu, options.only_targets, options.max_threads
        self._bcc = import_bcc()
        capabilities.require()
        events = tracefs() / "events/sched"
        self._events = events
        flags = [f"-I{bpf_sources()}", f"-DMAX_THREADS={max_threads}", "-Wno-macro-redefined"]
        if platform.machine() == "aarch64":
            flags.append("-D__TARGET_ARCH_arm64")
        if only_targets:
            flags.append("-DONLY_TARGETS")
        for event, fields in FIELDS.items():
            if event == "sched_switch" and not off_cpu:
                continue
            offsets = field_offsets((events / event / "format").read_text())
            flags += [f"-DFIELD_{event}_{field}={offsets[field]}" for field in fields]
        if not cookies:
            flags.append("-DPROBES")
            for kind in (CUDA, NCCL):
                probes = "".join(f" PROBE({index}, {cookie}ULL)" for index, cookie in enumerate((per_symbol or {}).get(kind, ())))
                flags.append(f"-D{kind.upper()}_PROBES={probes}")
        self._bpf = self._compile(flags)
        self._counters = self._bpf[b"counters"]
        self._programs: list[int] = []  # loaded by us, not by BCC
        self.only_targets = only_targets

    def _compile(self, flags: list[str]) -> Any:
        source = "".join(f'#line 1 "{part}"\n{(bpf_sources() / part).read_text()}' for part in PARTS)
        log = ""
        # The bundled headers first: they are known to do. Installed ones, where BCC finds them, are the fallback.
        for headers in (str(bpf_sources() / "kernel"), None):
            if headers:
                os.environ["BCC_KERNEL_SOURCE"] = headers
            else:
                os.environ.pop("BCC_KERNEL_SOURCE", None)
            with _Captured() as captured:
                try:
                    program = self._bcc.BPF(text=source.encode(), cflags=flags)
                    ctypes.CDLL(None).malloc_trim(0)  # what the compiler has freed, 18 MB, would else stay ours
                    return program
                except Exception as error:  # BCC raises plain Exception and says why on stderr
                    reason = error
            log += captured.text + f"{reason}\n"
        path = _keep_log(log)
        raise GputailError(
            f"BCC {bcc_version()} cannot compile the BPF program for Linux {platform.release()}; its messages are in {path}",
            "update python3-bpfcc; a BCC older than the kernel may not know it",
        )

    def program(self, name: str, kind: str) -> int:
        """Load a program of the object as kind "uprobe_multi", "uprobe" or "tracepoint"; its descriptor."""
        bcc_class = self._bcc.BPF
        with _Captured() as captured:
            try:
                if kind == "uprobe_multi":
                    self._programs.append(syscalls.load_uprobe_multi(name.encode(), program_bytes(self._bcc, self._bpf, name.encode())))
                    return self._programs[-1]
                return self._bpf.load_func(name.encode(), bcc_class.TRACEPOINT if kind == "tracepoint" else bcc_class.KPROBE).fd
            except Exception as error:
                reason = error
        if "not permitted" in str(reason).lower() + captured.text.lower():
            raise GputailError(
                "the kernel refuses to load BPF programs: operation not permitted", "run as root, or grant CAP_BPF and CAP_PERFMON"
            )
        path = _keep_log(captured.text + str(reason))
        raise GputailError(f"the kernel refuses the BPF program {name}; its reason is in {path}")

    def attach_uprobe(self, program_fd: int, path: str, offset: int, is_return: bool) -> int:
        """Attach one of BCC's own uprobes at a file offset; a descriptor whose closing detaches it.

        BPF.attach_uprobe is not used: whether its `addr` is a file offset or an address differs between versions.
        """
        attach = self._bcc.lib.bpf_attach_uprobe
        name = f"gputail_{'r' if is_return else 'p'}_{os.getpid()}_{offset:x}".encode()
        # The last is the offset of a USDT semaphore, which libbcc takes since 0.19 and its Python side does not declare:
        # left out, the kernel gets whatever lay in that register, and counts up what it finds there in the program's memory.
        no_semaphore = ctypes.c_uint32(0)
        with _Captured() as captured:
            fd = attach(program_fd, int(is_return), name, os.fsencode(path), offset, -1, no_semaphore)
        if fd < 0:
            raise OSError(ctypes.get_errno(), captured.text.strip().splitlines()[-1] if captured.text.strip() else "cannot attach")
        return fd

    def tracepoint_id(self, event: str) -> int:
        return int((self._events / event / "id").read_text())

    def map_fd(self, name: str) -> int:
        return self._bpf[name.encode()].map_fd

    def counts(self) -> dict[str, int]:
        """Totals since loading of what the kernel side could not record, by stage."""
        return {stage: sum(self._counters[index]) for index, stage in enumerate(KERNEL_STAGES)}

    def remove_target(self, tgid: int) -> None:
        table = self._bpf[b"targets"]
        del table[table.Key(tgid)]

    def add_targets(self, tgids: Iterable[int]) -> None:
        table = self._bpf[b"targets"]
        for tgid in tgids:
            table[table.Key(tgid)] = table.Leaf(1)

    def set_quiet(self, tgid: int, is_quiet: bool) -> None:
        """Record a process's time off the CPU no longer, or again."""
        table = self._bpf[b"quiet"]
        key = table.Key(tgid)
        if is_quiet:
            table[key] = table.Leaf(1)
        else:
            with suppress(KeyError):
                del table[key]

    def close(self) -> None:
        while self._programs:
            os.close(self._programs.pop())
        self._bpf.cleanup()


class _Captured:
    """What C and C++ code writes meanwhile, in `text` afterwards: clang and BCC report on stderr, BCC on stdout, too."""

    text = ""
    _libc = ctypes.CDLL(None)

    def __enter__(self) -> _Captured:
        self._file = tempfile.TemporaryFile()
        self._libc.fflush(None)
        self._saved = [(fd, os.dup(fd)) for fd in (1, 2)]
        for fd, _ in self._saved:
            os.dup2(self._file.fileno(), fd)
        return self

    def __exit__(self, *exc: object) -> None:
        self._libc.fflush(None)  # C's stdout keeps what goes to no terminal, and would write it where our data go
        for fd, saved in self._saved:
            os.dup2(saved, fd)
            os.close(saved)
        self._file.seek(0)
        self.text = self._file.read(1 << 20).decode(errors="replace")
        self._file.close()


def _keep_log(text: str) -> str:
    with tempfile.NamedTemporaryFile("w", prefix="gputail-bpf-", suffix=".log", delete=False) as log:
        log.write(text)
    return log.name
