"""The table of probed functions holds together, and its cookies carry what it says."""

from __future__ import annotations

from collections import Counter

import pytest

from gputail.probes import table

# (name, bits) of a cookie's fields from bit 0, as bpf/calls.h unpacks them.
LAYOUT = (
    ("call", 16), ("kind", 4), ("handle", 4), ("stream", 4), ("size", 4), ("times", 4), ("shift", 4), ("block", 4),
    ("out", 4), ("name", 4), ("per_thread", 1), ("narrow", 1), ("stack_args", 1), ("id", 4),
)  # fmt: skip
ARGUMENTS = ("handle", "stream", "size", "times", "block", "out", "name")


def unpack(cookie: int) -> dict[str, int]:
    fields = {}
    for name, bits in LAYOUT:
        fields[name] = cookie & ((1 << bits) - 1)
        cookie >>= bits
    assert cookie == 0, "bits beyond the layout"
    return fields


def every_symbol() -> list[tuple[table.Function, str]]:
    return [(function, symbol) for function in table.FUNCTIONS for symbol in function.symbols]


def test_numbers_are_given_once() -> None:
    numbers = Counter(function.number for function in table.FUNCTIONS)
    numbers[table.OFF_CPU_CALL] += 1
    assert [number for number, times in numbers.items() if times > 1] == []


def test_names_and_symbols_are_given_once() -> None:
    assert len({function.name for function in table.FUNCTIONS}) == len(table.FUNCTIONS)
    symbols = Counter(symbol for _, symbol in every_symbol())
    assert [symbol for symbol, times in symbols.items() if times > 1] == []


def test_categories_are_known_and_all_in_use() -> None:
    assert {function.category for function in table.FUNCTIONS} | {table.OFF_CPU, table.TIER, table.EXIT} == set(table.CATEGORIES)


def test_symbols_of_the_32_bit_abi_belong_to_their_function() -> None:
    for function in table.FUNCTIONS:
        assert function.narrow <= set(function.symbols), function.name


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_cookie_carries_what_the_row_says(machine: str) -> None:
    for function, symbol in every_symbol():
        got = unpack(table.cookie(function, symbol, machine))
        args = function.args
        assert got["call"] == function.number
        assert got["kind"] == args.kind
        assert got["shift"] == args.shift
        assert got["per_thread"] == symbol.endswith(("_ptsz", "_ptds"))
        assert got["narrow"] == (symbol in function.narrow or args.size_is_int)
        behind_registers = max(got[name] for name in ARGUMENTS) > table.REGISTER_ARGS[machine]
        assert got["stack_args"] == (args.kind == table.Kind.LAUNCH or behind_registers)
        for name in ARGUMENTS:
            number = getattr(args, name)
            shifted = machine == "x86_64" and args.after_id and number > args.after_id
            assert got[name] == number - bool(shifted), (symbol, name)


def test_a_128_byte_id_passed_by_value_takes_a_register_on_arm64_only() -> None:
    function = table.BY_SYMBOL["ncclCommInitRank"]  # (comm *, int ranks, ncclUniqueId, int rank)
    assert unpack(table.cookie(function, "ncclCommInitRank", "x86_64"))["block"] == 3
    assert unpack(table.cookie(function, "ncclCommInitRank", "aarch64"))["block"] == 4


def test_an_id_lies_on_the_stack_on_x86_64_and_behind_a_pointer_elsewhere() -> None:
    places = {symbol: [unpack(table.cookie(table.BY_SYMBOL[symbol], symbol, machine))["id"] for machine in ("x86_64", "aarch64", "riscv64")]
              for symbol in ("ncclCommInitRank", "ncclCommInitRankConfig", "ncclCommInitRankScalable", "ncclAllReduce")}  # fmt: skip
    assert places == {
        "ncclCommInitRank": [table.ID_ON_STACK, 3, 3],  # (comm *, int ranks, ncclUniqueId, int rank)
        "ncclCommInitRankConfig": [table.ID_ON_STACK, 3, 3],
        "ncclCommInitRankScalable": [5, 5, 5],  # (comm *, int ranks, int rank, int ids, ncclUniqueId *, config *)
        "ncclAllReduce": [0, 0, 0],
    }


def test_cookies_tell_every_function_and_stream_default_apart() -> None:
    cookies = {table.cookie(function, symbol, "x86_64"): function.number for function, symbol in every_symbol()}
    assert set(cookies.values()) == {function.number for function in table.FUNCTIONS}
