"""Where a function is probed."""

import pytest

from gputail.probes.links import probe_offset

ENDBR64 = "f30f1efa"


@pytest.mark.parametrize(
    ("code", "moved"),
    [
        (ENDBR64 + "554889e5", 4),  # push %rbp
        (ENDBR64 + "41574156", 4),  # push %r15
        (ENDBR64 + "53", 4),  # push %rbx
        (ENDBR64 + "4883ec08", 0),  # sub $8,%rsp: single-stepped wherever the probe is
        (ENDBR64 + "41", 0),
        (ENDBR64, 0),
        ("554889e5", 0),
        ("", 0),
    ],
)
def test_a_function_that_begins_with_endbr64_is_probed_at_the_push_behind_it(code, moved):
    assert probe_offset(4096, bytes.fromhex(code)) == 4096 + moved
