"""Symbols of ELF files: real ones made by the compiler, damaged ones, and ones made to hurt the reader."""

from __future__ import annotations

import ctypes
import os
import random
import struct
import subprocess
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from gputail.discovery import dynamic, elf

SOURCE = r"""
int first(int a) { return a + 1; }
int other(int a) { return a * 2; }
int alias(int) __attribute__((alias("first")));
int feeble(int a) __attribute__((weak));
int feeble(int a) { return a + 3; }
static int chosen(int a) { return a; }
static void *resolve(void) { return chosen; }
int indirect(int a) __attribute__((ifunc("resolve")));
int variable = 5;
__attribute__((visibility("hidden"))) int hidden(int a) { return a; }
extern int imported(int);
int calls(void) { return imported(1) + hidden(2); }
int versioned_1(int a) { return a + 10; }
int versioned_2(int a) { return a + 20; }
__asm__(".symver versioned_1, versioned@V1\n.symver versioned_2, versioned@@V2\n"
        ".globl untyped\n.text\nuntyped: ret\n.globl constant\n.set constant, 0x1234\n");
"""
VERSIONS = "V1 { global: *; };\nV2 { } V1;\n"
WANTED = frozenset(
    ["first", "other", "alias", "feeble", "indirect", "variable", "hidden", "imported", "calls", "versioned", "untyped"]
    + ["constant", "absent"]
)

_DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_SYMENT, _DT_GNU_HASH = 4, 5, 6, 10, 11, 0x6FFFFEF5
_PT_LOAD, _PT_DYNAMIC, _PT_NOTE = 1, 2, 4


def build(directory: Path, *options: str, name: str = "libcuda.so.1") -> Path:
    (directory / "versions").write_text(VERSIONS)
    (directory / "library.c").write_text(SOURCE)
    path = directory / name
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", f"-Wl,--version-script={directory / 'versions'}"]
        + ["-Wl,--build-id=0x0123abcd", *options, "-o", str(path), str(directory / "library.c")],
        check=True,
    )
    return path


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("elf"))


def read(path: Path, wanted: frozenset[str] = WANTED, machine: str | None = None) -> elf.ElfSymbols:
    with open(path, "rb") as file:
        return elf.read_symbols(file, wanted, *([machine] if machine else []))


class Image:
    """The bytes of a 64-bit little-endian ELF file, and ways to damage them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = bytearray(path.read_bytes())

    def poke(self, offset: int, layout: str, *values: int) -> Image:
        struct.pack_into("<" + layout, self.data, offset, *values)
        return self

    def program_headers(self) -> list[int]:
        at, count = struct.unpack_from("<Q", self.data, 32)[0], struct.unpack_from("<H", self.data, 56)[0]
        return [at + 56 * number for number in range(count)]

    def header(self, kind: int) -> int:
        return next(at for at in self.program_headers() if struct.unpack_from("<I", self.data, at)[0] == kind)

    def dynamic(self, tag: int) -> int:
        """Offset of a dynamic entry."""
        at = struct.unpack_from("<Q", self.data, self.header(_PT_DYNAMIC) + 8)[0]
        while (found := struct.unpack_from("<q", self.data, at)[0]) != tag:
            assert found
            at += 16
        return at

    def table(self, tag: int) -> int:
        """Offset of the table that a dynamic entry gives the address of."""
        address = struct.unpack_from("<Q", self.data, self.dynamic(tag) + 8)[0]
        for at in self.program_headers():
            kind, _, offset, start, _, size = struct.unpack_from("<IIQQQQ", self.data, at)
            if kind == _PT_LOAD and start <= address < start + size:
                return address - start + offset
        raise AssertionError(address)

    def set(self, tag: int, value: int) -> Image:
        return self.poke(self.dynamic(tag) + 8, "Q", value)

    def drop(self, tag: int) -> Image:
        return self.poke(self.dynamic(tag), "q", 0x6FFFFFFF)

    def write(self, path: Path) -> Path:
        path.write_bytes(self.data)
        return path


def loaded_offset(handle: ctypes.CDLL, name: str) -> int:
    """File offset of a loaded function as the kernel's own record of the mapping gives it."""
    address = ctypes.cast(getattr(handle, name), ctypes.c_void_p).value
    assert address is not None
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset = line.split()[:3]
        start, end = (int(part, 16) for part in span.split("-"))
        if start <= address < end:
            return address - start + int(offset, 16)
    raise AssertionError(name)


@pytest.mark.parametrize(
    "options",
    [(), ("-Wl,--hash-style=sysv",), ("-Wl,--hash-style=gnu",), ("-Wl,--section-start=.text=0x500000",),
     ("-Wl,-z,noseparate-code",), ("-s",)],
    ids=["plain", "sysv-hash", "gnu-hash", "moved-text", "one-segment", "stripped"],
)  # fmt: skip
def test_offsets_are_where_the_kernel_maps_the_functions_from(tmp_path: Path, options: tuple[str, ...]) -> None:
    path = build(tmp_path, "-Wl,--unresolved-symbols=ignore-all", *options)
    names = ("first", "other", "feeble", "calls")
    symbols = read(path)
    handle = ctypes.CDLL(str(path), mode=os.RTLD_LAZY)
    offsets = {name: loaded_offset(handle, name) for name in names}
    assert {name: site.offset for site in symbols.sites.values() for name in site.symbols if name in names} == offsets
    data = path.read_bytes()
    assert all(site.code == data[offset : offset + 16] for offset, site in symbols.sites.items())


def test_names_of_one_address_are_one_site(library: Path) -> None:
    sites = read(library).sites
    assert sorted(site.symbols for site in sites.values()) == [
        ("alias", "first"), ("calls",), ("feeble",), ("other",), ("untyped",), ("versioned",), ("versioned",),
    ]  # fmt: skip
    assert list(sites) == sorted(sites)
    assert all((site.size_bytes > 0) == (site.symbols != ("untyped",)) for site in sites.values())


def test_what_cannot_be_probed_has_a_reason_and_what_is_not_defined_is_missing(library: Path) -> None:
    symbols = read(library)
    assert symbols.unusable == {
        "indirect": "indirect function (IFUNC)",
        "variable": "not a function",
        "constant": "absolute address",
    }
    assert symbols.missing == {"hidden", "imported", "absent"}


def test_identity_of_the_library_is_read(library: Path) -> None:
    symbols = read(library)
    assert (symbols.soname, symbols.build_id, symbols.machine) == (b"libcuda.so.1", "0123abcd", os.uname().machine)


def test_a_descriptor_serves_as_well_as_a_file(library: Path) -> None:
    fd = os.open(library, os.O_RDONLY)
    try:
        os.lseek(fd, 7, os.SEEK_SET)
        assert elf.read_symbols(fd, WANTED) == read(library)
    finally:
        os.close(fd)


def test_a_library_without_section_headers_reads_the_same(library: Path, tmp_path: Path) -> None:
    stripped = Image(library).poke(40, "Q", 0).poke(58, "HHH", 0, 0, 0).write(tmp_path / "stripped")
    assert read(stripped) == read(library)


def test_section_headers_full_of_lies_change_nothing(library: Path, tmp_path: Path) -> None:
    liar = Image(library)
    at = struct.unpack_from("<Q", liar.data, 40)[0]
    liar.data[at:] = random.Random(1).randbytes(len(liar.data) - at)
    liar.poke(58, "HHH", 64, 0xFFFF, 0xFFFF)
    assert read(liar.write(tmp_path / "liar")) == read(library)


def test_nothing_wanted_gives_nothing(library: Path) -> None:
    symbols = read(library, frozenset())
    assert (symbols.sites, symbols.unusable, symbols.missing) == ({}, {}, frozenset())


Damage = Callable[[Image], object]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda i: i.poke(0, "I", 0x464C457E), "not an ELF file"),
        (lambda i: i.poke(4, "B", 1).poke(18, "H", 3), "32-bit"),
        (lambda i: i.poke(4, "B", 1).poke(18, "H", 62), "x32 ABI"),
        (lambda i: i.poke(18, "H", 22), "built for another machine (EM_S390, little endian)"),
        (lambda i: i.poke(5, "B", 2), "built for another machine"),
        (lambda i: i.poke(4, "B", 7), "the ELF header is malformed"),
        (lambda i: i.poke(16, "H", 1), "neither a shared library nor a program"),
        (lambda i: i.poke(54, "H", 0), "program headers of 0 bytes"),
        (lambda i: i.poke(56, "H", 0xFFFF), "65535 program headers of 56 bytes"),
        (lambda i: i.poke(32, "Q", 1 << 63), "the table of program headers lies outside the file"),
        (lambda i: i.poke(i.header(_PT_DYNAMIC), "I", 0), "no dynamic symbols: statically linked"),
        (lambda i: i.poke(i.header(_PT_DYNAMIC) + 8, "Q", 1 << 40), "truncated: the dynamic section lies outside the file"),
        (lambda i: i.drop(_DT_SYMTAB), "no dynamic symbols"),
        (lambda i: i.set(_DT_SYMENT, 0), "dynamic symbols of 0 bytes each"),
        (lambda i: i.set(_DT_SYMTAB, 1 << 50), "the symbol table lies outside what is loaded"),
        (lambda i: i.drop(_DT_GNU_HASH), "no hash table of its dynamic symbols"),
        (lambda i: i.poke(i.table(_DT_GNU_HASH), "I", 0xFFFFFFFF), "a hash table of 4294967295 buckets"),
        (lambda i: i.poke(i.table(_DT_GNU_HASH) + 8, "I", 0xFFFFFFFF), "a hash table of"),
        (lambda i: i.poke(i.table(_DT_GNU_HASH) + 16 + 8 * struct.unpack_from("<I", i.data, i.table(_DT_GNU_HASH) + 8)[0], "I", 0x7FFFFFFF),
         "2147483647 dynamic symbols; at most 400000 are read"),
        (lambda i: i.set(_DT_STRSZ, 1 << 40), "1099511627776 bytes of symbol names; at most 16777216 are read"),
        (lambda i: i.poke(i.header(_PT_LOAD) + 8, "Q", (1 << 64) - 4096), "lies outside what is loaded"),
        (lambda i: i.set(_DT_STRTAB, 1 << 50), "the string table lies outside what is loaded"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_traced_is_refused_with_the_reason(library: Path, tmp_path: Path, damage: Damage, reason: str) -> None:
    image = Image(library)
    damage(image)
    with pytest.raises(elf.ElfRefused) as refused:
        read(image.write(tmp_path / "damaged"))
    assert reason in str(refused.value)


def test_a_library_of_this_machine_is_refused_where_another_is_expected(library: Path) -> None:
    with pytest.raises(elf.ElfRefused, match="another machine"):
        read(library, machine="sparc64")


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "not an ELF file"), (b"\x7fELF", "truncated"), (b"\x7fELF" + bytes(30), "truncated"), (b"#!/bin/sh\n" * 100, "not an ELF file")],
)
def test_a_file_too_short_or_of_another_kind_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "libcuda.so.1"
    path.write_bytes(content)
    with pytest.raises(elf.ElfRefused, match=reason):
        read(path)


def test_every_truncation_reads_or_is_refused(library: Path, tmp_path: Path) -> None:
    data = library.read_bytes()
    whole = read(library)
    path = tmp_path / "short"
    outcomes = set()
    for size in range(0, len(data), 61):
        path.write_bytes(data[:size])
        try:
            outcomes.add(read(path) == whole)
        except elf.ElfRefused:
            outcomes.add(False)
    assert outcomes == {True, False}  # True: where only section headers are missing


def test_code_beyond_the_end_of_the_file_is_unusable_not_a_site(library: Path, tmp_path: Path) -> None:
    image = Image(library)
    code = next(at for at in image.program_headers() if struct.unpack_from("<II", image.data, at) == (_PT_LOAD, 5))
    image.poke(code + 32, "QQ", 1 << 40, 1 << 40)
    first = next(offset for offset, site in read(library).sites.items() if "first" in site.symbols)
    moved = 0
    for at in range(image.table(_DT_SYMTAB), image.table(_DT_STRTAB), 24):
        if struct.unpack_from("<Q", image.data, at + 8)[0] == first:  # address and offset are the same in this library
            image.poke(at + 8, "Q", 1 << 30)
            moved += 1
    assert moved == 2
    symbols = read(image.write(tmp_path / "cut"))
    assert symbols.unusable["first"] == symbols.unusable["alias"] == "the file ends before its code"
    assert {"first", "alias"} & {name for site in symbols.sites.values() for name in site.symbols} == set()


def test_hostile_sizes_cost_little_memory(library: Path, tmp_path: Path) -> None:
    """A sparse file of 64 GiB, loaded whole, whose hash table and string table are as large as any that is read."""
    image = Image(library)
    image.poke(image.header(_PT_LOAD) + 32, "QQ", 64 << 30, 64 << 30)
    image.poke(image.header(_PT_NOTE) + 32, "Q", 64 << 30)
    image.set(_DT_STRSZ, dynamic.MAX_NAMES_BYTES)
    table = image.table(_DT_GNU_HASH)
    last = dynamic.MAX_SYMBOLS - 1
    image.poke(table, "IIII", 1, last, 1, 0).poke(table + 24, "II", last, 1)
    with open(image.write(tmp_path / "hostile"), "r+b") as file:
        file.truncate(64 << 30)
    tracemalloc.start()
    try:
        read(tmp_path / "hostile")
        assert dynamic.MAX_SYMBOLS * 24 + dynamic.MAX_NAMES_BYTES < tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_one_name_at_hundreds_of_thousands_of_addresses_is_refused(library: Path, tmp_path: Path) -> None:
    image = Image(library)
    first = bytes(image.data).index(b"\0first\0") + 1 - image.table(_DT_STRTAB)
    table, symbols_at, last = image.table(_DT_GNU_HASH), 1 << 20, dynamic.MAX_SYMBOLS - 1
    image.poke(table, "IIII", 1, last, 1, 0).poke(table + 24, "II", last, 1)
    image.poke(image.header(_PT_LOAD) + 4, "I", 5).poke(image.header(_PT_LOAD) + 32, "QQ", 64 << 20, 64 << 20)
    image.set(_DT_SYMTAB, symbols_at)
    image.data[symbols_at:] = bytes(symbols_at - len(image.data))
    for number in range(dynamic.MAX_SYMBOLS):
        image.data += struct.pack("<IBBHQQ", first, 0x12, 0, 1, symbols_at + number, 1)
    with pytest.raises(elf.ElfRefused, match="more than 4096 addresses of wanted functions"):
        read(image.write(tmp_path / "many"))


def test_random_damage_gives_symbols_or_a_reason_and_nothing_else(library: Path, tmp_path: Path) -> None:
    chance = random.Random(20)
    original = library.read_bytes()
    image = Image(library)
    targets = [image.table(tag) for tag in (_DT_GNU_HASH, _DT_STRTAB, _DT_SYMTAB)] + [image.dynamic(_DT_STRTAB), 0, 64, 64]
    path = tmp_path / "mutant"
    outcomes = {"read": 0, "refused": 0}
    for _ in range(600):
        mutant = bytearray(original)
        for _ in range(chance.randint(1, 6)):
            at = min(chance.choice(targets) + chance.randrange(400), len(mutant) - 8)
            mutant[at : at + 8] = chance.choice(
                [chance.randbytes(8), b"\xff" * 8, bytes(8), struct.pack("<Q", chance.choice([1 << 31, 1 << 63, len(mutant), at]))]
            )
        path.write_bytes(mutant)
        try:
            symbols = read(path)
        except elf.ElfRefused:
            outcomes["refused"] += 1
        else:
            outcomes["read"] += 1
            assert all(0 <= offset < len(mutant) for offset in symbols.sites)
    assert outcomes["read"] and outcomes["refused"] and sum(outcomes.values()) == 600
