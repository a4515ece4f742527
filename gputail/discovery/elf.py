"""Exported functions of an ELF library and where in the file they begin: the places that uprobes take.

In: an open file and the names wanted. Out: `ElfSymbols`, or `ElfRefused` with the reason. Finding the file is
`libraries`' job, attaching that of the probes.

The file may be anything that somebody named libcuda.so.1. So it is read the way the dynamic loader reads it, through
its program headers and dynamic section, and never through section headers, which no loader looks at; only with
pread, because a mapped file that is truncated meanwhile kills the reader; and every size is bounded before it is read.
pyelftools reads the headers; the tables behind them are `dynamic`'s.
"""

from __future__ import annotations

import os
import platform
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import IO

import numpy as np
from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

from gputail.discovery.dynamic import (
    MAX_OFFSET,
    ElfRefused,
    Layout,
    Segment,
    read_dynamic,
    read_exactly,
    read_names,
    read_symbol_table,
    soname,
)

CODE_BYTES = 16

# A library has about 10 program headers and 300 functions that are wanted.
MAX_PROGRAM_HEADERS = 128
MAX_NOTES_BYTES = 64 << 10
MAX_SITES = 4096

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_HEADER_BYTES = 64
_PROGRAM_HEADER_BYTES = 56

_SHN_UNDEF, _SHN_ABS = 0, 0xFFF1
_STB_EXPORTED = (1, 2, 10)  # GLOBAL, WEAK, GNU_UNIQUE
_STT_NOTYPE, _STT_FUNC, _STT_GNU_IFUNC = 0, 2, 10
_NT_GNU_BUILD_ID = 3
_PF_X = 1

# uname's machine names against pyelftools' names of e_machine.
_MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64", "riscv64": "EM_RISCV", "ppc64le": "EM_PPC64"}


@dataclass(frozen=True)
class Site:
    """One distinct function address: `offset` is its place in the file, which is what a uprobe is given.

    symbols: every wanted name exported there, sorted; size_bytes: the largest st_size among them, 0 where the file does not
    say; code: the first CODE_BYTES bytes there.
    """

    offset: int
    size_bytes: int
    symbols: tuple[str, ...]
    code: bytes


@dataclass(frozen=True)
class ElfSymbols:
    """What a library exports of the names wanted.

    sites: by file offset, ascending; unusable: wanted names it has but that cannot be probed, with the reason (a name with several
    versions can be in both); missing: wanted names it does not define; machine: as uname says it; soname and build_id (hex)
    are None where absent.
    """

    machine: str
    soname: bytes | None
    build_id: str | None
    sites: Mapping[int, Site]
    unusable: Mapping[str, str]
    missing: frozenset[str]


def check(file: int | IO[bytes], machine: str = platform.machine()) -> None:
    """Raise ElfRefused if the file is not an ELF library of this machine that the 64-bit ABI can load. Reads 64 bytes."""
    _header(_descriptor(file), machine)


def read_symbols(file: int | IO[bytes], wanted: frozenset[str], machine: str = platform.machine()) -> ElfSymbols:
    """The functions among `wanted` that the library open as `file` (its position is not used) exports.

    Raises ElfRefused where the file cannot be traced, and OSError where it cannot be read. At most 400,000 symbols and
    16 MiB of names are read; a file with more is refused.
    """
    fd = _descriptor(file)
    layout = _layout(fd, _header(fd, machine))
    dynamic = read_dynamic(fd, layout)
    symbols = read_symbol_table(fd, layout, dynamic)
    names = read_names(fd, layout, dynamic)

    sites: dict[int, tuple[int, set[str]]] = {}
    reasons: dict[str, str] = {}
    for index, name in _select(symbols, names, wanted):
        offset, reason = _probe_offset(symbols[index], layout)
        if offset is not None:
            if offset not in sites and len(sites) == MAX_SITES:
                raise ElfRefused(f"more than {MAX_SITES} addresses of wanted functions")
            size_bytes, shared = sites.setdefault(offset, (0, set()))
            sites[offset] = (max(size_bytes, int(symbols[index]["size"])), shared | {name})
        elif reason:
            reasons[name] = reason

    ready: dict[int, Site] = {}
    for offset, (size_bytes, shared) in sorted(sites.items()):
        code = os.pread(fd, CODE_BYTES, offset)
        if code:
            ready[offset] = Site(offset, size_bytes, tuple(sorted(shared)), code)
        else:
            reasons.update(dict.fromkeys(shared, "the file ends before its code"))
    found = {name for site in ready.values() for name in site.symbols} | reasons.keys()
    return ElfSymbols(machine, soname(dynamic, names), _build_id(fd, layout), ready, reasons, wanted - found)


def _descriptor(file: int | IO[bytes]) -> int:
    return file if isinstance(file, int) else file.fileno()


def _header(fd: int, machine: str) -> ELFFile:
    head = os.pread(fd, _HEADER_BYTES, 0)
    if head[:4] != b"\x7fELF":
        raise ElfRefused("not an ELF file")
    if len(head) < _HEADER_BYTES:
        raise ElfRefused("truncated: the ELF header is incomplete")
    try:
        elf = ELFFile(BytesIO(head))
        header = elf.header
    except (ELFError, ValueError, KeyError) as error:
        raise ElfRefused("the ELF header is malformed") from error
    if elf.elfclass == 32:
        raise ElfRefused("x32 ABI" if header["e_machine"] == "EM_X86_64" else "32-bit")
    expected = _MACHINES.get(machine, machine)
    if not elf.little_endian or header["e_machine"] != expected:
        raise ElfRefused(f"built for another machine ({header['e_machine']}, {'little' if elf.little_endian else 'big'} endian)")
    if header["e_type"] not in ("ET_DYN", "ET_EXEC"):
        raise ElfRefused("neither a shared library nor a program")
    return elf


def _layout(fd: int, elf: ELFFile) -> Layout:
    count, entry_bytes = elf.header["e_phnum"], elf.header["e_phentsize"]
    if count == 0 or count > MAX_PROGRAM_HEADERS or entry_bytes != _PROGRAM_HEADER_BYTES:
        raise ElfRefused(f"{count} program headers of {entry_bytes} bytes")
    table = read_exactly(fd, elf.header["e_phoff"], count * entry_bytes, "the table of program headers")
    loads: list[Segment] = []
    dynamic = None
    notes: list[tuple[int, int]] = []
    for start in range(0, len(table), entry_bytes):
        header = elf.structs.Elf_Phdr.parse(table[start : start + entry_bytes])
        place = (header["p_offset"], header["p_filesz"])
        if header["p_type"] == "PT_LOAD":
            # Not congruent or out of reach: no loader maps it, so an offset computed from it would mean nothing.
            if (header["p_vaddr"] - header["p_offset"]) % _PAGE_BYTES == 0 and sum(place) <= MAX_OFFSET:
                loads.append(Segment(header["p_vaddr"], *place, bool(header["p_flags"] & _PF_X)))
        elif header["p_type"] == "PT_DYNAMIC":
            dynamic = place
        elif header["p_type"] == "PT_NOTE":
            notes.append(place)
    return Layout(loads, dynamic, notes)


def _select(symbols: np.ndarray, names: bytes, wanted: frozenset[str]) -> list[tuple[int, str]]:
    """(index, name) of the defined, exported symbols that are wanted. No name is looked at beyond the longest wanted."""
    encoded = {name.encode(): name for name in wanted}
    longest = max(map(len, encoded), default=0)
    exported = np.isin(symbols["info"] >> 4, _STB_EXPORTED) & (symbols["section"] != _SHN_UNDEF) & (symbols["name"] < len(names))
    candidates = np.flatnonzero(exported)
    chosen: list[tuple[int, str]] = []
    for index, start in zip(candidates.tolist(), symbols["name"][candidates].tolist()):
        end = names.find(b"\0", start, start + longest + 1)
        name = encoded.get(names[start:end]) if end >= 0 else None
        if name is not None:
            chosen.append((index, name))
    return chosen


def _probe_offset(symbol: np.void, layout: Layout) -> tuple[int | None, str]:
    """File offset of a function's first instruction, or None and why it cannot be probed."""
    kind = int(symbol["info"]) & 0xF
    if kind == _STT_GNU_IFUNC:
        # Its address is that of a resolver, which runs once; the function it chooses has no name here.
        return None, "indirect function (IFUNC)"
    if kind not in (_STT_FUNC, _STT_NOTYPE):
        return None, "not a function"
    if symbol["section"] == _SHN_ABS:
        return None, "absolute address"
    offset = layout.offset_of(int(symbol["value"]), executable=True)
    return (None, "its address is not in the file's code") if offset is None else (offset, "")


def _build_id(fd: int, layout: Layout) -> str | None:
    for offset, size_bytes in layout.notes[:8]:
        if offset > MAX_OFFSET:
            continue
        data = os.pread(fd, min(size_bytes, MAX_NOTES_BYTES), offset)
        at = 0
        while at + 12 <= len(data):
            name_bytes, value_bytes, kind = struct.unpack_from("<III", data, at)
            value_at = at + 12 + (name_bytes + 3 & ~3)
            value = data[value_at : value_at + value_bytes]
            if kind == _NT_GNU_BUILD_ID and data[at + 12 : at + 16] == b"GNU\0" and 0 < len(value) <= 64:
                return value.hex()
            at = value_at + (value_bytes + 3 & ~3)
    return None
