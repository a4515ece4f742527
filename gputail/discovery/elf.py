"""Where the functions to be probed lie in a library file: ELF symbols as file offsets.

In: an open file and the names wanted. Out: offsets, since uprobes take those, not addresses. Files are an attacker's:
headers are checked before they are followed, sizes are bounded, and only the dynamic symbol table is read. A file that
cannot be used is an `ElfError` that says why.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from elftools.common.exceptions import ELFError, ELFParseError
from elftools.elf.elffile import ELFFile

MAX_SYMBOLS = 1 << 20  # libcuda has 1,500, libtorch 100,000
MAX_STRINGS = 64 << 20
MAX_SECTIONS = 4096
MAX_SEGMENTS = 256

_MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
_SYMBOL = np.dtype([("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")])
_TYPE_FUNC, _TYPE_IFUNC = 2, 10
_BIND_LOCAL = 0


class ElfError(Exception):
    """This file cannot be probed; the text says why, in a few words."""


@dataclass(frozen=True)
class ElfSymbols:
    """What was found: `sites` maps each distinct file offset to the symbols that lie there, in order of name."""

    sites: dict[int, tuple[str, ...]]
    code: dict[int, bytes]  # the first bytes of each, by offset
    missing: frozenset[str]  # wanted and not exported
    indirect: frozenset[str]  # exported as IFUNC: the address is decided at run time and cannot be probed here


def read_symbols(file: BinaryIO, wanted: frozenset[str]) -> ElfSymbols:
    """Find the wanted functions among the dynamic symbols of a 64-bit library for this machine."""
    size = os.fstat(file.fileno()).st_size
    try:
        elf = ELFFile(file)
        _check_header(elf, size)
        loads = _executable_segments(elf, size)
        symbols, strings = _dynamic_symbols(elf, file, size)
    except ElfError:
        raise
    except (ELFError, ELFParseError) as error:
        raise ElfError(f"no ELF file ({error or 'bad header'})") from error
    except Exception as error:  # pyelftools meets hostile bytes with whatever its parsers raise
        raise ElfError(f"damaged ELF file ({type(error).__name__})") from error
    return _locate(file, symbols, strings, loads, wanted)


def _check_header(elf: ELFFile, size: int) -> None:
    if elf.elfclass != 64:
        raise ElfError("a 32-bit library: only 64-bit processes are traced")
    if not elf.little_endian or elf["e_machine"] != _MACHINES.get(platform.machine()):
        raise ElfError(f"built for another machine ({elf['e_machine']})")
    if elf["e_shnum"] > MAX_SECTIONS or elf["e_phnum"] > MAX_SEGMENTS:
        raise ElfError(f"{elf['e_shnum']} sections and {elf['e_phnum']} segments are more than any library has")
    if elf["e_phentsize"] != 56 or elf["e_phoff"] + 56 * elf["e_phnum"] > size:
        raise ElfError("its program headers lie outside the file")
    if elf["e_shnum"] and (elf["e_shentsize"] != 64 or elf["e_shoff"] + 64 * elf["e_shnum"] > size):
        raise ElfError("its section headers lie outside the file")


def _executable_segments(elf: ELFFile, size: int) -> list[tuple[int, int, int]]:
    """(address, size in the file, file offset) of each segment that is mapped executable."""
    loads = []
    for index in range(elf["e_phnum"]):
        header = elf._get_segment_header(index)
        if header["p_type"] == "PT_LOAD" and header["p_flags"] & 1 and header["p_offset"] + header["p_filesz"] <= size:
            loads.append((header["p_vaddr"], header["p_filesz"], header["p_offset"]))
    if not loads:
        raise ElfError("nothing in it is executable")
    return loads


def _dynamic_symbols(elf: ELFFile, file: BinaryIO, size: int) -> tuple[np.ndarray, bytes]:
    for index in range(elf["e_shnum"]):
        section = elf._get_section_header(index)
        if section["sh_type"] == "SHT_DYNSYM":
            break
    else:
        raise ElfError("it exports nothing (no dynamic symbol table)")
    if not 0 < section["sh_link"] < elf["e_shnum"]:
        raise ElfError("its symbol table has no string table")
    names = elf._get_section_header(section["sh_link"])
    count = section["sh_size"] // _SYMBOL.itemsize
    if count > MAX_SYMBOLS or names["sh_size"] > MAX_STRINGS:
        raise ElfError(f"{count} symbols with {names['sh_size']} bytes of names are more than any library has")
    for part in (section, names):
        if part["sh_offset"] + part["sh_size"] > size:
            raise ElfError("its symbol table lies outside the file")
    return (
        np.frombuffer(_read(file, section["sh_offset"], count * _SYMBOL.itemsize), _SYMBOL),
        _read(file, names["sh_offset"], names["sh_size"]),
    )


def _read(file: BinaryIO, offset: int, size: int) -> bytes:
    data = os.pread(file.fileno(), size, offset)
    if len(data) != size:
        raise ElfError("it changed while it was read")
    return data


def _locate(file: BinaryIO, symbols: np.ndarray, strings: bytes, loads: list[tuple[int, int, int]], wanted: frozenset[str]) -> ElfSymbols:
    kind, bind = symbols["info"] & 15, symbols["info"] >> 4
    exported = symbols[((kind == _TYPE_FUNC) | (kind == _TYPE_IFUNC)) & (bind != _BIND_LOCAL) & (symbols["section"] != 0)]
    longest = max(map(len, wanted), default=0) + 1
    sites: dict[int, list[str]] = {}
    indirect, found = set(), set()
    for name_at, info, address in zip(exported["name"].tolist(), exported["info"].tolist(), exported["value"].tolist(), strict=True):
        end = strings.find(b"\0", name_at, name_at + longest)
        name = strings[name_at:end].decode("latin-1") if end > name_at else ""
        if name not in wanted:
            continue
        found.add(name)
        if info & 15 == _TYPE_IFUNC:
            indirect.add(name)
            continue
        for begin, length, offset in loads:
            if begin <= address < begin + length:
                names = sites.setdefault(address - begin + offset, [])
                if name not in names:  # one name may have several versions
                    names.append(name)
                break
    return ElfSymbols(
        sites={offset: tuple(sorted(names)) for offset, names in sorted(sites.items())},
        code={offset: os.pread(file.fileno(), 16, offset) for offset in sites},
        missing=wanted - found,
        indirect=frozenset(indirect),
    )
