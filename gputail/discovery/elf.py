"""Exported functions of an ELF library and where in the file they begin: the places that uprobes take.

In: an open file and the names wanted. Out: `ElfSymbols`, or `ElfRefused` with the reason. Finding the file is
`libraries`' job, attaching that of the probes.

The file may be anything that somebody named libcuda.so.1. So it is read the way the dynamic loader reads it, through
its program headers and dynamic section, and never through section headers, which no loader looks at; only with
pread, because a mapped file that is truncated meanwhile kills the reader; and every size is bounded before it is read.
pyelftools reads the headers; symbols are read in bulk with numpy, since an object per symbol takes too long.
"""

from __future__ import annotations

import os
import platform
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import IO, NamedTuple

import numpy as np
from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

CODE_BYTES = 16

# libcuda has about 1,500 dynamic symbols, 60 kB of names, 10 program headers; these bounds are far above, and keep
# what one file can make us read under 32 MiB.
MAX_SYMBOLS = 400_000
MAX_NAMES_BYTES = 16 << 20
MAX_PROGRAM_HEADERS = 128
MAX_DYNAMIC_ENTRIES = 1024
MAX_NOTES_BYTES = 64 << 10
MAX_SONAME_BYTES = 256
MAX_SITES = 4096

_MAX_OFFSET = 1 << 62  # pread takes a signed 64-bit offset; no file is that long
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_HEADER_BYTES = 64
_PROGRAM_HEADER_BYTES = 56

_SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)
_DYNAMIC = np.dtype([("tag", "<i8"), ("value", "<u8")])
_DT_NULL, _DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_SYMENT, _DT_SONAME, _DT_GNU_HASH = 0, 4, 5, 6, 10, 11, 14, 0x6FFFFEF5
_SHN_UNDEF, _SHN_ABS = 0, 0xFFF1
_STB_EXPORTED = (1, 2, 10)  # GLOBAL, WEAK, GNU_UNIQUE
_STT_NOTYPE, _STT_FUNC, _STT_GNU_IFUNC = 0, 2, 10
_NT_GNU_BUILD_ID = 3
_PF_X = 1

# uname's machine names against pyelftools' names of e_machine.
_MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64", "riscv64": "EM_RISCV", "ppc64le": "EM_PPC64"}


class ElfRefused(Exception):
    """The file cannot be traced; the text says why, in lower case, fit to be shown."""


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


class _Segment(NamedTuple):
    address: int
    offset: int
    size_bytes: int  # in the file
    executable: bool


class _Layout(NamedTuple):
    """The program headers: what is loaded where, and the file ranges (offset, size) of the dynamic section and the notes."""

    loads: list[_Segment]
    dynamic: tuple[int, int] | None
    notes: list[tuple[int, int]]

    def offset_of(self, address: int, executable: bool = False) -> int | None:
        """File offset of what is loaded at `address`; None where nothing of the file is (or, if asked for, no code)."""
        for segment in reversed(self.loads):  # the loader maps them in turn, a later one over an earlier
            if segment.address <= address < segment.address + segment.size_bytes:
                return address - segment.address + segment.offset if segment.executable or not executable else None
        return None


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
    dynamic = _dynamic(fd, layout)
    symbols = _symbol_table(fd, layout, dynamic)
    names = _names(fd, layout, dynamic)

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
    return ElfSymbols(machine, _soname(dynamic, names), _build_id(fd, layout), ready, reasons, wanted - found)


def _descriptor(file: int | IO[bytes]) -> int:
    return file if isinstance(file, int) else file.fileno()


def _read(fd: int, offset: int, size_bytes: int, what: str) -> bytes:
    """Exactly `size_bytes` of the file; the caller has bounded them. Raises ElfRefused where the file ends before."""
    if offset > _MAX_OFFSET:
        raise ElfRefused(f"{what} lies outside the file")
    data = os.pread(fd, size_bytes, offset)
    if len(data) < size_bytes:
        raise ElfRefused(f"truncated: {what} lies outside the file")
    return data


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


def _layout(fd: int, elf: ELFFile) -> _Layout:
    count, entry_bytes = elf.header["e_phnum"], elf.header["e_phentsize"]
    if count == 0 or count > MAX_PROGRAM_HEADERS or entry_bytes != _PROGRAM_HEADER_BYTES:
        raise ElfRefused(f"{count} program headers of {entry_bytes} bytes")
    table = _read(fd, elf.header["e_phoff"], count * entry_bytes, "the table of program headers")
    loads: list[_Segment] = []
    dynamic = None
    notes: list[tuple[int, int]] = []
    for start in range(0, len(table), entry_bytes):
        header = elf.structs.Elf_Phdr.parse(table[start : start + entry_bytes])
        place = (header["p_offset"], header["p_filesz"])
        if header["p_type"] == "PT_LOAD":
            # Not congruent or out of reach: no loader maps it, so an offset computed from it would mean nothing.
            if (header["p_vaddr"] - header["p_offset"]) % _PAGE_BYTES == 0 and sum(place) <= _MAX_OFFSET:
                loads.append(_Segment(header["p_vaddr"], *place, bool(header["p_flags"] & _PF_X)))
        elif header["p_type"] == "PT_DYNAMIC":
            dynamic = place
        elif header["p_type"] == "PT_NOTE":
            notes.append(place)
    return _Layout(loads, dynamic, notes)


def _dynamic(fd: int, layout: _Layout) -> dict[int, int]:
    """The dynamic section: value by tag, the first of a tag counting."""
    if layout.dynamic is None:
        raise ElfRefused("no dynamic symbols: statically linked")
    offset, size_bytes = layout.dynamic
    size_bytes = min(size_bytes, MAX_DYNAMIC_ENTRIES * _DYNAMIC.itemsize) // _DYNAMIC.itemsize * _DYNAMIC.itemsize
    entries = np.frombuffer(_read(fd, offset, size_bytes, "the dynamic section"), _DYNAMIC)
    values: dict[int, int] = {}
    for tag, value in entries.tolist():
        if tag == _DT_NULL:
            break
        values.setdefault(tag, value)
    return values


def _symbol_table(fd: int, layout: _Layout, dynamic: Mapping[int, int]) -> np.ndarray:
    """All dynamic symbols, as an array of _SYMBOL."""
    if _DT_SYMTAB not in dynamic:
        raise ElfRefused("no dynamic symbols")
    if dynamic.get(_DT_SYMENT, _SYMBOL.itemsize) != _SYMBOL.itemsize:
        raise ElfRefused(f"dynamic symbols of {dynamic[_DT_SYMENT]} bytes each")
    count = _symbol_count(fd, layout, dynamic)
    if count > MAX_SYMBOLS:
        raise ElfRefused(f"{count} dynamic symbols; at most {MAX_SYMBOLS} are read")
    offset = _table_offset(layout, dynamic[_DT_SYMTAB], "the symbol table")
    return np.frombuffer(_read(fd, offset, count * _SYMBOL.itemsize, "the symbol table"), _SYMBOL)


def _symbol_count(fd: int, layout: _Layout, dynamic: Mapping[int, int]) -> int:
    """How many dynamic symbols there are. Only the hash tables tell: the dynamic section holds no count."""
    if _DT_HASH in dynamic:
        offset = _table_offset(layout, dynamic[_DT_HASH], "the hash table")
        return struct.unpack("<II", _read(fd, offset, 8, "the hash table"))[1]
    if _DT_GNU_HASH not in dynamic:
        raise ElfRefused("no hash table of its dynamic symbols")
    offset = _table_offset(layout, dynamic[_DT_GNU_HASH], "the hash table")
    buckets, first_hashed, bloom_words, _ = struct.unpack("<IIII", _read(fd, offset, 16, "the hash table"))
    if max(buckets, first_hashed, bloom_words) > MAX_SYMBOLS:
        raise ElfRefused(f"a hash table of {buckets} buckets; at most {MAX_SYMBOLS} symbols are read")
    offset += 16 + 8 * bloom_words
    heads = np.frombuffer(_read(fd, offset, 4 * buckets, "the hash table"), "<u4")
    last = int(heads.max(initial=0))
    if last < first_hashed:
        return first_hashed  # nothing is exported
    if last > MAX_SYMBOLS:
        return last
    # The chain that begins last ends the table, at the first value with its lowest bit set.
    chains_at = offset + 4 * buckets + 4 * (last - first_hashed)
    data = os.pread(fd, 4 * MAX_SYMBOLS, chains_at)
    ends = np.flatnonzero(np.frombuffer(data[: len(data) // 4 * 4], "<u4") & 1)
    if not len(ends):
        raise ElfRefused("the hash table does not end")
    return last + int(ends[0]) + 1


def _table_offset(layout: _Layout, address: int, what: str) -> int:
    offset = layout.offset_of(address)
    if offset is None:
        raise ElfRefused(f"{what} lies outside what is loaded")
    return offset


def _names(fd: int, layout: _Layout, dynamic: Mapping[int, int]) -> bytes:
    size_bytes = dynamic.get(_DT_STRSZ, 0)
    if size_bytes > MAX_NAMES_BYTES:
        raise ElfRefused(f"{size_bytes} bytes of symbol names; at most {MAX_NAMES_BYTES} are read")
    return _read(fd, _table_offset(layout, dynamic.get(_DT_STRTAB, 0), "the string table"), size_bytes, "the string table")


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


def _probe_offset(symbol: np.void, layout: _Layout) -> tuple[int | None, str]:
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


def _soname(dynamic: Mapping[int, int], names: bytes) -> bytes | None:
    start = dynamic.get(_DT_SONAME)
    if start is None or start >= len(names):
        return None
    return names[start : start + MAX_SONAME_BYTES].split(b"\0", 1)[0]


def _build_id(fd: int, layout: _Layout) -> str | None:
    for offset, size_bytes in layout.notes[:8]:
        if offset > _MAX_OFFSET:
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
