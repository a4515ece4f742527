"""The system calls that BCC does not offer: bpf(2) links with cookies and perf_event_open(2), through ctypes.

Layouts and numbers are the kernel's ABI: include/uapi/linux/bpf.h and perf_event.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from gputail.errors import GputailError

_NUMBERS = {"x86_64": (321, 298), "aarch64": (280, 241)}
TRACE_UPROBE_MULTI = 48  # enum bpf_attach_type, Linux 6.6

_BPF_MAP_UPDATE_ELEM = 2
_BPF_PROG_LOAD = 5
_BPF_LINK_CREATE = 28
_PROG_TYPE_KPROBE = 2
_VERIFIER_LOG_BYTES = 1 << 20
_UPROBE_MULTI_RETURN = 1
_PERF_TYPE_SOFTWARE, _PERF_TYPE_TRACEPOINT = 1, 2
_PERF_COUNT_SW_BPF_OUTPUT = 10
_PERF_SAMPLE_RAW = 1 << 10
_PERF_FLAG_FD_CLOEXEC = 8
_PERF_ATTR_WATERMARK = 1 << 14
_PERF_EVENT_IOC_ENABLE = 0x2400
_PERF_EVENT_IOC_SET_BPF = 0x40042408

_libc = ctypes.CDLL(None, use_errno=True)


class _ProgLoad(ctypes.Structure):
    """The attributes of BPF_PROG_LOAD up to expected_attach_type."""

    _fields_ = [
        ("prog_type", ctypes.c_uint32),
        ("insn_cnt", ctypes.c_uint32),
        ("insns", ctypes.c_uint64),
        ("license", ctypes.c_uint64),
        ("log_level", ctypes.c_uint32),
        ("log_size", ctypes.c_uint32),
        ("log_buf", ctypes.c_uint64),
        ("kern_version", ctypes.c_uint32),
        ("prog_flags", ctypes.c_uint32),
        ("prog_name", ctypes.c_char * 16),
        ("prog_ifindex", ctypes.c_uint32),
        ("expected_attach_type", ctypes.c_uint32),
    ]


class _LinkUprobeMulti(ctypes.Structure):
    _fields_ = [
        ("prog_fd", ctypes.c_uint32),
        ("target_fd", ctypes.c_uint32),
        ("attach_type", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("path", ctypes.c_uint64),
        ("offsets", ctypes.c_uint64),
        ("ref_ctr_offsets", ctypes.c_uint64),
        ("cookies", ctypes.c_uint64),
        ("count", ctypes.c_uint32),
        ("multi_flags", ctypes.c_uint32),
        ("pid", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
    ]


class _MapUpdate(ctypes.Structure):
    _fields_ = [
        ("map_fd", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
        ("key", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
    ]


class _PerfEventAttr(ctypes.Structure):
    """Version 1 of perf_event_attr (72 bytes): all that is needed here."""

    _fields_ = [
        ("type", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("config", ctypes.c_uint64),
        ("sample_period", ctypes.c_uint64),
        ("sample_type", ctypes.c_uint64),
        ("read_format", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("wakeup", ctypes.c_uint32),
        ("bp_type", ctypes.c_uint32),
        ("config1", ctypes.c_uint64),
        ("config2", ctypes.c_uint64),
    ]


def _number(which: int) -> int:
    try:
        return _NUMBERS[platform.machine()][which]
    except KeyError:
        raise GputailError(f"gputail does not run on {platform.machine()}: x86-64 and arm64 only") from None


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _bpf(command: int, attributes: ctypes.Structure, what: str) -> int:
    return _check(_libc.syscall(_number(0), command, ctypes.byref(attributes), ctypes.sizeof(attributes)), what)


def load_uprobe_multi(name: bytes, instructions: bytes) -> int:
    """Load a program (GPL) for uprobe_multi links, which asks for an attach type that BCC before 0.26 cannot give; its descriptor.

    Where the kernel refuses it, the OSError's text ends with the verifier's log.
    """
    code = ctypes.create_string_buffer(instructions, len(instructions))
    license_text = ctypes.create_string_buffer(b"GPL")
    attributes = _ProgLoad(
        prog_type=_PROG_TYPE_KPROBE,
        insn_cnt=len(instructions) // 8,
        insns=ctypes.addressof(code),
        license=ctypes.addressof(license_text),
        prog_name=name[:15],
        expected_attach_type=TRACE_UPROBE_MULTI,
    )
    try:
        return _bpf(_BPF_PROG_LOAD, attributes, "cannot load a BPF program")
    except OSError as error:
        log = ctypes.create_string_buffer(_VERIFIER_LOG_BYTES)
        attributes.log_level, attributes.log_size, attributes.log_buf = 1, len(log), ctypes.addressof(log)
        try:
            return _bpf(_BPF_PROG_LOAD, attributes, "cannot load a BPF program")
        except OSError:
            raise OSError(error.errno, f"{error.strerror}\n{log.value.decode(errors='replace')}") from None


def link_uprobe_multi(program_fd: int, path: str, offsets: Sequence[int], cookies: Sequence[int], is_return: bool, pid: int = 0) -> int:
    """Attach one program to many file offsets of one library at once; the descriptor of the link.

    The link holds the probes: closing it removes them. pid 0 means every process. OSError EINVAL where the kernel
    has no uprobe_multi.
    """
    count = len(offsets)
    wide = ctypes.c_uint64 * count
    path_buffer = ctypes.create_string_buffer(os.fsencode(path))
    offset_array, cookie_array = wide(*offsets), wide(*cookies)
    attributes = _LinkUprobeMulti(
        prog_fd=program_fd,
        attach_type=TRACE_UPROBE_MULTI,
        path=ctypes.addressof(path_buffer),
        offsets=ctypes.addressof(offset_array),
        cookies=ctypes.addressof(cookie_array),
        count=count,
        multi_flags=_UPROBE_MULTI_RETURN if is_return else 0,
        pid=pid,
    )
    return _bpf(_BPF_LINK_CREATE, attributes, "cannot create a uprobe_multi link")


def has_uprobe_multi() -> bool:
    """Whether the kernel knows uprobe_multi links: told by which of two wrong things it complains about first.

    A kernel that knows them resolves the program first and answers EBADF; an older one refuses the attributes' size
    (E2BIG, bytes it does not know are set) or the type (EINVAL).
    """
    try:
        attributes = _LinkUprobeMulti(prog_fd=0xFFFFFFFF, attach_type=TRACE_UPROBE_MULTI, count=1, path=1, offsets=1, cookies=1)
        os.close(_bpf(_BPF_LINK_CREATE, attributes, "probe"))
    except OSError as error:
        return error.errno == errno.EBADF
    return False


def update_map(map_fd: int, key: int, value: int) -> None:
    """Put a 32-bit value under a 32-bit key."""
    key_cell, value_cell = ctypes.c_uint32(key), ctypes.c_uint32(value)
    attributes = _MapUpdate(map_fd=map_fd, key=ctypes.addressof(key_cell), value=ctypes.addressof(value_cell))
    _bpf(_BPF_MAP_UPDATE_ELEM, attributes, "cannot update a BPF map")


def _perf_event_open(attributes: _PerfEventAttr, cpu: int, what: str) -> int:
    attributes.size = ctypes.sizeof(attributes)
    return _check(_libc.syscall(_number(1), ctypes.byref(attributes), -1, cpu, -1, _PERF_FLAG_FD_CLOEXEC), what)


def open_bpf_output(cpu: int, watermark_bytes: int) -> int:
    """A perf event that BPF programs write records to; readable (poll) once `watermark_bytes` lie in its ring."""
    attributes = _PerfEventAttr(
        type=_PERF_TYPE_SOFTWARE,
        config=_PERF_COUNT_SW_BPF_OUTPUT,
        sample_period=1,
        sample_type=_PERF_SAMPLE_RAW,
        flags=_PERF_ATTR_WATERMARK,
        wakeup=watermark_bytes,
    )
    return _perf_event_open(attributes, cpu, f"cannot open a perf ring on CPU {cpu}")


def attach_tracepoint(program_fd: int, tracepoint_id: int) -> int:
    """Run a program at a tracepoint, on every CPU; closing the descriptor ends it."""
    attributes = _PerfEventAttr(type=_PERF_TYPE_TRACEPOINT, config=tracepoint_id, sample_period=1)
    fd = _perf_event_open(attributes, 0, "cannot open a tracepoint")
    try:
        _check(_libc.ioctl(fd, ctypes.c_ulong(_PERF_EVENT_IOC_SET_BPF), ctypes.c_int(program_fd)), "cannot attach to a tracepoint")
        enable(fd)
    except OSError:
        os.close(fd)
        raise
    return fd


def enable(fd: int) -> None:
    _check(_libc.ioctl(fd, ctypes.c_ulong(_PERF_EVENT_IOC_ENABLE), ctypes.c_int(0)), "cannot enable a perf event")


def all_at_once(closing: Sequence[Callable[[], None]]) -> None:
    """Call each in a thread of its own. Taking a probe off waits tens of ms for a grace period; waits at once share it."""
    with ThreadPoolExecutor(max(1, len(closing))) as pool:
        for done in [pool.submit(close) for close in closing]:
            done.result()
