"""The dynamic section of an ELF file and the tables it leads to, read as the dynamic loader reads them.

In: an open file and what its program headers say (`Layout`). Out: symbols as a numpy array, and the text of their names.
Symbols are read in bulk, since an object per symbol takes too long. Every size is bounded before it is read.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

# libcuda has about 1,500 dynamic symbols and 60 kB of names; these bounds are far above, and keep what one file can
# make us read under 32 MiB.
MAX_SYMBOLS = 400_000
MAX_NAMES_BYTES = 16 << 20
MAX_DYNAMIC_ENTRIES = 1024
MAX_SONAME_BYTES = 256
MAX_OFFSET = 1 << 62  # pread takes a signed 64-bit offset; no file is that long

SYMBOL = np.dtype([("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")])
_ENTRY = np.dtype([("tag", "<i8"), ("value", "<u8")])
_DT_NULL, _DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_SYMENT, _DT_SONAME, _DT_GNU_HASH = 0, 4, 5, 6, 10, 11, 14, 0x6FFFFEF5


class ElfRefused(Exception):
    """The file cannot be traced; the text says why, in lower case, fit to be shown."""


class Segment(NamedTuple):
    address: int
    offset: int
    size_bytes: int  # in the file
    executable: bool


class Layout(NamedTuple):
    """The program headers: what is loaded where, and the file ranges (offset, size) of the dynamic section and the notes."""

    loads: list[Segment]
    dynamic: tuple[int, int] | None
    notes: list[tuple[int, int]]

    def offset_of(self, address: int, executable: bool = False) -> int | None:
        """File offset of what is loaded at `address`; None where nothing of the file is (or, if asked for, no code)."""
        for segment in reversed(self.loads):  # the loader maps them in turn, a later one over an earlier
            if segment.address <= address < segment.address + segment.size_bytes:
                return address - segment.address + segment.offset if segment.executable or not executable else None
        return None


def read_exactly(fd: int, offset: int, size_bytes: int, what: str) -> bytes:
    """Exactly `size_bytes` of the file; the caller has bounded them. Raises ElfRefused where the file ends before."""
    if offset > MAX_OFFSET:
        raise ElfRefused(f"{what} lies outside the file")
    data = os.pread(fd, size_bytes, offset)
    if len(data) < size_bytes:
        raise ElfRefused(f"truncated: {what} lies outside the file")
    return data


def read_dynamic(fd: int, layout: Layout) -> dict[int, int]:
    """The dynamic section: value by tag, the first of a tag counting."""
    if layout.dynamic is None:
        raise ElfRefused("no dynamic symbols: statically linked")
    offset, size_bytes = layout.dynamic
    size_bytes = min(size_bytes, MAX_DYNAMIC_ENTRIES * _ENTRY.itemsize) // _ENTRY.itemsize * _ENTRY.itemsize
    entries = np.frombuffer(read_exactly(fd, offset, size_bytes, "the dynamic section"), _ENTRY)
    values: dict[int, int] = {}
    for tag, value in entries.tolist():
        if tag == _DT_NULL:
            break
        values.setdefault(tag, value)
    return values


def read_symbol_table(fd: int, layout: Layout, dynamic: Mapping[int, int]) -> np.ndarray:
    """All dynamic symbols, as an array of SYMBOL. Raises ElfRefused, as all here do."""
    if _DT_SYMTAB not in dynamic:
        raise ElfRefused("no dynamic symbols")
    if dynamic.get(_DT_SYMENT, SYMBOL.itemsize) != SYMBOL.itemsize:
        raise ElfRefused(f"dynamic symbols of {dynamic[_DT_SYMENT]} bytes each")
    count = _symbol_count(fd, layout, dynamic)
    if count > MAX_SYMBOLS:
        raise ElfRefused(f"{count} dynamic symbols; at most {MAX_SYMBOLS} are read")
    offset = _table_offset(layout, dynamic[_DT_SYMTAB], "the symbol table")
    return np.frombuffer(read_exactly(fd, offset, count * SYMBOL.itemsize, "the symbol table"), SYMBOL)


def _symbol_count(fd: int, layout: Layout, dynamic: Mapping[int, int]) -> int:
    """How many dynamic symbols there are. Only the hash tables tell: the dynamic section holds no count."""
    if _DT_HASH in dynamic:
        offset = _table_offset(layout, dynamic[_DT_HASH], "the hash table")
        return struct.unpack("<II", read_exactly(fd, offset, 8, "the hash table"))[1]
    if _DT_GNU_HASH not in dynamic:
        raise ElfRefused("no hash table of its dynamic symbols")
    offset = _table_offset(layout, dynamic[_DT_GNU_HASH], "the hash table")
    buckets, first_hashed, bloom_words, _ = struct.unpack("<IIII", read_exactly(fd, offset, 16, "the hash table"))
    if max(buckets, first_hashed, bloom_words) > MAX_SYMBOLS:
        raise ElfRefused(f"a hash table of {buckets} buckets; at most {MAX_SYMBOLS} symbols are read")
    offset += 16 + 8 * bloom_words
    heads = np.frombuffer(read_exactly(fd, offset, 4 * buckets, "the hash table"), "<u4")
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


def _table_offset(layout: Layout, address: int, what: str) -> int:
    offset = layout.offset_of(address)
    if offset is None:
        raise ElfRefused(f"{what} lies outside what is loaded")
    return offset


def read_names(fd: int, layout: Layout, dynamic: Mapping[int, int]) -> bytes:
    size_bytes = dynamic.get(_DT_STRSZ, 0)
    if size_bytes > MAX_NAMES_BYTES:
        raise ElfRefused(f"{size_bytes} bytes of symbol names; at most {MAX_NAMES_BYTES} are read")
    return read_exactly(fd, _table_offset(layout, dynamic.get(_DT_STRTAB, 0), "the string table"), size_bytes, "the string table")


def soname(dynamic: Mapping[int, int], names: bytes) -> bytes | None:
    start = dynamic.get(_DT_SONAME)
    if start is None or start >= len(names):
        return None
    return names[start : start + MAX_SONAME_BYTES].split(b"\0", 1)[0]
