"""Hostile names, cgroup paths and container ids."""

from __future__ import annotations

import pytest

from gputail.discovery.describe import cgroup_path, container_of
from gputail.discovery.sanitize import printable

ID = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (b"python3", "python3"),
        ("größe 猫", "größe 猫"),
        (b"caf\xc3", r"caf\xc3"),  # a multibyte character cut by the 15 bytes of a comm
        (b"\xff\xfe", r"\xff\xfe"),
        (b"\x1b[31mred\x07", r"\x1b[31mred\x07"),
        ("a\nb\tc\r", r"a\x0ab\x09c\x0d"),
        ("\u202egpj.exe", r"\u202egpj.exe"),
        ("a\u2028b\u200db", r"a\u2028b\u200db"),
        ("\udcff\ud800", r"\xff\ud800"),
        ("\U000e0041", r"\U000e0041"),
        ("\x85\xa0", r"\x85\xa0"),
        (b"", ""),
    ],
)
def test_hostile_text_becomes_one_printable_line(text: bytes | str, shown: str) -> None:
    assert printable(text, 80) == shown
    assert printable(text, 80).isprintable()


@pytest.mark.parametrize(
    ("text", "limit", "shown"),
    [("abcdef", 6, "abcdef"), ("abcdefg", 6, "abcde…"), (b"\xff\xff\xff", 6, r"\xff\…"), ("ab", 1, "…"), ("ab", 0, ""),
     ("猫" * 7, 6, "猫猫猫猫猫…")],
)  # fmt: skip
def test_text_longer_than_the_limit_is_cut_with_an_ellipsis(text: bytes | str, limit: int, shown: str) -> None:
    assert printable(text, limit) == shown


def test_every_pair_of_bytes_is_shown_printably() -> None:
    for first in range(256):
        for second in range(256):
            shown = printable(bytes([first, second]), 16)
            assert shown.isprintable() and "\n" not in shown


def test_a_character_cut_by_the_bound_on_work_does_not_show() -> None:
    assert printable("é".encode() * 1000, 4) == "ééé…"
    assert printable(b"a" + "猫".encode() * 1000, 4) == "a猫猫…"


@pytest.mark.parametrize(
    ("cgroup", "container"),
    [
        (f"/docker/{ID}", ID[:12]),
        (f"/system.slice/docker-{ID}.scope", ID[:12]),
        (f"/kubepods/burstable/pod5f1d8a3e-0001-4b6c-9d5e-d2f7a1b3c4d5/{ID}", ID[:12]),
        (f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod5f1d.slice/cri-containerd-{ID}.scope", ID[:12]),
        (f"/kubepods.slice/kubepods-pod5f1d.slice/crio-{ID}.scope/container", ID[:12]),
        (f"/system.slice/containerd.service/kubepods-burstable-pod5f1d.slice:cri-containerd:{ID}", ID[:12]),
        (f"/machine.slice/libpod-{ID}.scope/container", ID[:12]),
        (f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope", ID[:12]),
        (f"/../../docker-{ID}.scope", ID[:12]),
        (f"/docker/{'f' * 64}/docker/{ID}", ID[:12]),
        ("/slurm/uid_1000/job_4711/step_0/task_3", "job_4711"),
        ("/system.slice/slurmstepd.scope/job_4711/step_batch/user/task_0", "job_4711"),
        ("/lxc.payload.trainer/init.scope", "trainer"),
        ("/lxc/trainer", "trainer"),
        ("/machine.slice/systemd-nspawn@trainer.service/payload", "trainer"),
        ("/machine.slice/machine-trainer.scope", "trainer"),
        ("/system.slice/vllm@0.service", "vllm@0.service"),
        ("/system.slice/system-serving.slice/vllm.service", "vllm.service"),
        ("/user.slice/user-1000.slice/session-3.scope", None),
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/app.service", None),
        ("/init.scope", None),
        (f"/docker/{ID}0", None),
        (f"/docker/{ID[1:]}", None),
        ("/", None),
    ],
)
def test_a_container_is_named_as_its_runtime_names_it(cgroup: str, container: str | None) -> None:
    assert container_of(cgroup) == container


@pytest.mark.parametrize(
    ("text", "path"),
    [
        (b"0::/user.slice\n", "/user.slice"),
        (b"0::/\n", "/"),
        (b"12:memory:/docker/a\n11:cpu,cpuacct:/docker/b\n1:name=systemd:/docker/c\n0::/\n", "/docker/a"),
        (b"12:memory:/\n11:cpu,cpuacct:/slurm/uid_1/job_2\n", "/slurm/uid_1/job_2"),
        (b"5:memory:/a\n0::/unified\n", "/unified"),
        (b"0::/evil\x1b[2J:\xff\n", r"/evil\x1b[2J:\xff"),
        (b"garbage\n\n:::\n", None),
        (b"", None),
    ],
)
def test_the_telling_cgroup_path_is_found_for_both_versions(text: bytes, path: str | None) -> None:
    assert cgroup_path(text) == path
