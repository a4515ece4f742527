"""Names behind handles, in this very process: its own memory is read as another's would be."""

from __future__ import annotations

import ctypes
import os

import numpy as np
import pytest

from gputail import events
from gputail.probes.handles import READS_PER_BATCH, HandleNames, read_name
from gputail.probes.table import BY_SYMBOL

PID = os.getpid()


class Handle:
    """What a CUfunction looks like: a pointer to its name at offset 8."""

    def __init__(self, name: bytes) -> None:
        self.name = ctypes.create_string_buffer(name)
        self.words = (ctypes.c_uint64 * 2)(1, ctypes.addressof(self.name))
        self.address = ctypes.addressof(self.words)


def launches(*addresses: int) -> np.ndarray:
    rows = np.zeros(len(addresses), events.CALL)
    rows["call"], rows["tgid"], rows["handle"] = BY_SYMBOL["cuLaunchKernel"].number, PID, addresses
    return rows


def named(address: int, text: bytes) -> np.ndarray:
    row = np.zeros(1, events.NAME)
    row["tgid"], row["handle"], row["kind"], row["length"] = PID, address, events.NAME_KERNEL, len(text)
    row["text"] = text.ljust(events.NAME_BYTES, b"\0")
    return row


def texts(rows: np.ndarray) -> list[bytes]:
    return [bytes(row["text"])[: row["length"]] for row in rows]


def test_each_launched_handle_is_named_once() -> None:
    handles = [Handle(b"_Z5saxpyv"), Handle(b"triton_poi_fused_add_0")]
    names = HandleNames()
    calls = launches(*(handle.address for handle in handles * 3))
    assert sorted(texts(names.learn(calls, events.no_names()))) == [b"_Z5saxpyv", b"triton_poi_fused_add_0"]
    assert len(names.learn(calls, events.no_names())) == 0


@pytest.mark.parametrize("text", [b"", b"x", b"two words", b"\x1b[2Jx", b"9lives", b"caf\xc3\xa9", b"-x"])
def test_what_does_not_read_as_a_symbol_is_not_believed(text: bytes) -> None:
    assert read_name(PID, Handle(text).address) is None


@pytest.mark.parametrize("address", [0, 8, 1 << 63, (1 << 64) - 8, 0xDEADBEEF])
def test_an_address_that_is_none_gives_no_name(address: int) -> None:
    assert read_name(PID, address) is None


def test_a_process_that_is_gone_gives_no_name() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert read_name(pid, 0x1000) is None


def test_a_long_name_is_cut_off_where_the_room_ends() -> None:
    assert read_name(PID, Handle(b"_Z" + b"k" * 1000).address) == b"_Z" + b"k" * (events.NAME_BYTES - 2)


def test_a_process_whose_handles_point_elsewhere_is_not_believed() -> None:
    known, other = Handle(b"something_else"), Handle(b"plausible")
    names = HandleNames()
    assert len(names.learn(launches(known.address, other.address), named(known.address, b"_Z5saxpyv"))) == 0


def test_a_handle_that_was_looked_up_is_not_read_again() -> None:
    known = Handle(b"_Z5saxpyv")
    assert len(HandleNames().learn(launches(known.address), named(known.address, b"_Z5saxpyv"))) == 0


def test_reads_are_bounded_and_the_rest_is_read_next_time() -> None:
    handles = [Handle(b"kernel_%d" % number) for number in range(READS_PER_BATCH + 10)]
    calls = launches(*(handle.address for handle in handles))
    names = HandleNames()
    assert len(names.learn(calls, events.no_names())) == READS_PER_BATCH
    assert len(names.learn(calls, events.no_names())) == 10
