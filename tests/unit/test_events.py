"""bpf/events.h and gputail/events.py describe the same bytes; the C compiler is asked."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from gputail import events
from gputail.paths import bpf_sources

STRUCTS = {"call_event": events.CALL, "name_event": events.NAME}
CONSTANTS = {
    "GPUTAIL_NAME_BYTES": events.NAME_BYTES,
    "CALL_AFTER_GAP": events.AFTER_GAP,
    "CALL_ARGS_UNREAD": events.ARGS_UNREAD,
    "CALL_PER_THREAD": events.PER_THREAD,
    "CALL_ENTRY_ONLY": events.ENTRY_ONLY,
    "NAME_KERNEL": events.NAME_KERNEL,
    "NAME_THREAD": events.NAME_THREAD,
    "NAME_TRUNCATED": events.NAME_TRUNCATED,
    "COUNTERS": len(events.KERNEL_STAGES),
    **{f"COUNTER_{stage.upper()}": number for number, stage in enumerate(events.KERNEL_STAGES)},
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """What the C compiler makes of events.h: "struct.field" and "struct.field:size", struct sizes, constants."""
    lines = []
    for struct, dtype in STRUCTS.items():
        lines.append(f'printf("{struct} %zu\\n", sizeof(struct {struct}));')
        for field in dtype.names or ():
            lines.append(f'printf("{struct}.{field} %zu\\n", offsetof(struct {struct}, {field}));')
            lines.append(f'printf("{struct}.{field}:size %zu\\n", sizeof(((struct {struct} *)0)->{field}));')
    lines += [f'printf("{name} %lld\\n", (long long){name});' for name in CONSTANTS]
    directory = tmp_path_factory.mktemp("offsets")
    source = "#include <stddef.h>\n#include <stdio.h>\n#include <linux/types.h>\n#include <events.h>\nint main(void)\n{\n"
    (directory / "offsets.c").write_text(source + "\n".join(lines) + "\nreturn 0;\n}\n")
    program = directory / "offsets"
    subprocess.run(["cc", "-Wall", "-Werror", "-I", bpf_sources(), "-o", program, directory / "offsets.c"], check=True)
    output = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return {name: int(number) for name, number in (line.split() for line in output.splitlines())}


@pytest.mark.parametrize("struct", STRUCTS)
def test_every_field_lies_where_the_compiler_puts_it(struct: str, compiled: dict[str, int]) -> None:
    dtype = STRUCTS[struct]
    for name in dtype.names or ():
        field, offset = (dtype.fields or {})[name][:2]
        assert (offset, field.itemsize) == (compiled[f"{struct}.{name}"], compiled[f"{struct}.{name}:size"]), name
    assert dtype.itemsize == compiled[struct]


@pytest.mark.parametrize("struct", STRUCTS)
def test_no_byte_of_a_struct_is_without_a_field(struct: str) -> None:
    dtype = STRUCTS[struct]
    assert sum(field[0].itemsize for field in (dtype.fields or {}).values()) == dtype.itemsize


def test_constants_are_those_of_the_header(compiled: dict[str, int]) -> None:
    assert {name: compiled[name] for name in CONSTANTS} == CONSTANTS


def test_number_of_off_cpu_rows_is_that_of_the_table() -> None:
    from gputail.probes import table

    header = (Path(bpf_sources()) / "events.h").read_text()
    assert f"#define OFF_CPU_CALL {table.OFF_CPU_CALL} " in header


def test_end_is_start_plus_duration() -> None:
    calls = np.zeros(2, events.CALL)
    calls["start_ns"], calls["duration_ns"] = [5, 2**63], [3, 10]
    assert events.end_ns(calls).tolist() == [8, 2**63 + 10]
