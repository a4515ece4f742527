"""Discovery of real libraries in real processes, mount namespaces and overlays. Needs root; no eBPF."""

from __future__ import annotations

import ctypes
import os
import pickle
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from gputail.discovery import elf
from gputail.discovery.describe import namespace_pid
from gputail.discovery.libraries import Library, open_mapping
from gputail.discovery.maps import Mapping
from gputail.discovery.processes import Scan, Scanner

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for mount namespaces and other users' processes")

NOBODY = 65534

# Maps the files it is told to, says so, and does what it is told on its standard input; ends with it.
TARGET = """
import ctypes, mmap, os, sys
kept = []
def load(path): kept.append(ctypes.CDLL(path))
def map_code(path):
    with open(path, "rb") as file:
        kept.append(mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC))
def many(count):
    pages = mmap.mmap(-1, 2 * count * 4096)
    libc = ctypes.CDLL(None)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    for number in range(count):
        assert libc.mprotect(ctypes.c_void_p(start + 2 * number * 4096), 4096, 1) == 0
    kept.append(pages)
def become(statement): os.execv(sys.executable, [*sys.orig_argv[:5], statement])
for lines in (sys.argv[1:], sys.stdin):
    for line in lines:
        exec(line)
        print("done", flush=True)
"""


class Target:
    """A process under test; `tell` returns when what was told is done."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.pid = process.pid

    def tell(self, statement: str) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(statement.encode() + b"\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == b"done\n"

    def end(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Target]]:
    """Starts a Target; `within` is a shell command to run before it, in a mount namespace of its own."""
    with ExitStack() as stack:

        def make(*statements: str, within: str = "", unshare: str = "-m", user: int | None = None) -> Target:
            command = [sys.executable, "-S", "-E", "-c", TARGET]
            if within:
                command = ["unshare", *unshare.split(), "sh", "-ec", f'{within}; exec "$@"', "sh", *command]
            target = Target(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, user=user, group=user))
            stack.callback(target.end)
            for statement in ("pass", *statements):
                target.tell(statement)
            return target

        yield make


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A stand-in libcuda: the bytes of a shared library with two real names."""
    directory = tmp_path_factory.mktemp("stub")
    (directory / "stub.c").write_text("int cuInit(int flags) { return flags; }\nint cuCtxSynchronize(void) { return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", directory / "stub.so", directory / "stub.c"], check=True)
    return (directory / "stub.so").read_bytes()


@pytest.fixture
def place(tmp_path: Path, built: bytes) -> Iterator[Callable[[str], Path]]:
    """Puts a copy of the stand-in where it is told, below a directory that everybody may enter."""
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(0o755)

    def put(name: str = "libcuda.so.1") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(built)
        return path

    yield put


@pytest.fixture
def scanner() -> Iterator[Scanner]:
    scanner = Scanner()
    yield scanner
    scanner.close()


def of(scan: Scan, *targets: Target) -> list[Library]:
    """The libraries of these processes: others on the machine may have some too."""
    pids = {target.pid for target in targets}
    return sorted((library for library in scan.libraries if library.pids & pids), key=lambda library: library.path)


def reasons(scan: Scan, target: Target) -> list[tuple[str, str]]:
    return [(refused.path, refused.reason) for refused in scan.refused if refused.pid == target.pid]


def content(library: Library) -> bytes:
    fd = library.open()
    try:
        return os.pread(fd, library.size_bytes + 1, 0)
    finally:
        os.close(fd)


@contextmanager
def forked(work: Callable[[], Any]) -> Iterator[Any]:
    """The result of `work` done in a child process, which may change its user and namespaces."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            result = pickle.dumps(work())
        except (OSError, AssertionError, subprocess.CalledProcessError) as error:
            result = pickle.dumps(repr(error))
        with open(write, "wb") as pipe:
            pipe.write(result)
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        result = pipe.read()
    os.waitpid(pid, 0)
    yield pickle.loads(result)


def become_nobody() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def scan_as_nobody() -> Scan:
    become_nobody()
    scanner = Scanner()
    scanner.scan()
    return scanner.scan()


def test_a_library_that_only_a_mount_namespace_shows_is_found_and_read(
    start: Callable[..., Target], place: Callable[..., Path], scanner: Scanner, tmp_path: Path, built: bytes
) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    path = inside / "libcuda.so.1"
    target = start(f"load('{path}')", within=f"mount -t tmpfs none {inside}; cp {place('source')} {path}")
    assert not path.exists()
    (library,) = of(scanner.scan(), target)
    assert (library.path, library.kind, library.pids, library.deleted) == (str(path), "cuda", {target.pid}, False)
    assert content(library) == built
    fd = library.open()
    try:
        symbols = elf.read_symbols(fd, frozenset(["cuInit", "cuCtxSynchronize"]))
        assert sorted(site.symbols for site in symbols.sites.values()) == [("cuCtxSynchronize",), ("cuInit",)]
    finally:
        os.close(fd)
    assert Path(library.file_path).read_bytes() == built


def test_a_deleted_library_is_found_and_read(
    start: Callable[..., Target], place: Callable[..., Path], scanner: Scanner, built: bytes
) -> None:
    path = place()
    target = start(f"load('{path}')")
    path.unlink()
    (library,) = of(scanner.scan(), target)
    assert (library.path, library.deleted) == (str(path), True)
    assert content(library) == built


def test_a_replaced_library_is_a_second_one_and_the_first_vanishes_with_its_last_process(
    start: Callable[..., Target], place: Callable[..., Path], scanner: Scanner
) -> None:
    path = place()
    old = start(f"load('{path}')")
    (first,) = of(scanner.scan(), old)
    os.rename(place("new"), path)
    new = start(f"load('{path}')")
    scan = scanner.scan()
    (second,) = of(scan, new)
    assert scan.appeared == (second,) and scan.vanished == ()
    assert first.path == second.path and first.inode != second.inode
    old.end()
    scan = scanner.scan()
    assert [library.identity for library in scan.vanished] == [first.identity]
    assert scan.ended == (old.pid,)
    with pytest.raises(FileNotFoundError):
        first.open()


def test_a_library_rewritten_in_place_vanishes_and_appears(
    start: Callable[..., Target], place: Callable[..., Path], scanner: Scanner
) -> None:
    path = place()
    target = start(f"load('{path}')")
    (first,) = of(scanner.scan(), target)
    with path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(OSError, match="the file has changed"):
        first.open()
    scan = scanner.scan()
    assert [library.size_bytes for library in scan.vanished] == [first.size_bytes]
    assert [library.size_bytes for library in scan.appeared] == [first.size_bytes + 4]


def test_three_inodes_under_many_names_are_three_libraries(
    start: Callable[..., Target], place: Callable[..., Path], scanner: Scanner, tmp_path: Path
) -> None:
    paths = [place("a/libcuda.so.1"), place("b/libcuda.so.1"), place("c/libnccl.so.2")]
    (tmp_path / "libcuda.so").symlink_to(paths[0])
    (tmp_path / "d").symlink_to(tmp_path / "b")
    os.link(paths[2], tmp_path / "libnccl.so")
    names = [*paths, tmp_path / "libcuda.so", tmp_path / "d" / "libcuda.so.1", tmp_path / "libnccl.so"]
    targets = [start(f"load('{name}')") for name in names]
    found = of(scanner.scan(), *targets)
    assert sorted(library.inode for library in found) == sorted(path.stat().st_ino for path in paths)
    assert sorted(sorted(library.pids) for library in found) == sorted(
        sorted([targets[number].pid, targets[number + 3].pid]) for number in range(3)
    )


def test_one_file_bound_into_two_mount_namespaces_is_one_library(
    start: Callable[..., Target], place: Callable[..., Path], scanner: Scanner, tmp_path: Path
) -> None:
    source = place()
    targets = [start(f"load('{source}')")]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        targets.append(start(f"load('{tmp_path / name}/libcuda.so.1')", within=f"mount --bind {tmp_path} {tmp_path / name}"))
    (library,) = of(scanner.scan(), *targets)
    assert library.pids == {target.pid for target in targets}


def test_containers_of_one_image_on_overlayfs_share_one_library_until_one_changes_it(
    start: Callable[..., Target], place: Callable[..., Path], scanner: Scanner, tmp_path: Path, built: bytes
) -> None:
    if "overlay" not in Path("/proc/filesystems").read_text():
        pytest.skip("no overlayfs in this kernel")
    place("lower/libcuda.so.1")
    targets = []
    for name, change in (("one", "true"), ("two", "true"), ("changed", "printf more >> {}/libcuda.so.1")):
        for part in ("upper", "work", "merged"):
            (tmp_path / name / part).mkdir(parents=True)
        at = tmp_path / name
        mount = f"mount -t overlay none -o lowerdir={tmp_path}/lower,upperdir={at}/upper,workdir={at}/work {at}/merged"
        targets.append(start(f"load('{at}/merged/libcuda.so.1')", within=f"{mount}; {change.format(at / 'merged')}"))
    found = of(scanner.scan(), *targets)
    assert sorted(len(library.pids) for library in found) == [1, 2]
    assert {content(library) for library in found} == {built, built + b"more"}
    targets[0].end()
    (shared, _) = of(scanner.scan(), *targets[1:])
    assert shared.pids in ({targets[1].pid}, {targets[2].pid})
    assert content(shared) in (built, built + b"more")


def test_a_library_loaded_after_the_start_is_found_by_the_next_scan_and_so_is_a_fork(
    start: Callable[..., Target], place: Callable[..., Path], scanner: Scanner
) -> None:
    target = start()
    assert of(scanner.scan(), target) == []
    target.tell(f"load('{place()}')")
    scan = scanner.scan()
    assert len(of(scan, target)) == 1 and scan.started == (target.pid,)
    target.tell("read, write = os.pipe(); child = os.fork(); child or (os.close(write), os.read(read, 1), os._exit(0))")
    scan = scanner.scan()
    (library,) = of(scan, target)
    assert len(library.pids) == 2 and scan.appeared == ()
    assert set(scan.started) == library.pids - {target.pid}
    target.tell("os.close(write); os.waitpid(child, 0)")
    assert scanner.scan().ended == scan.started


def test_a_hinted_scan_sees_a_library_that_was_just_mapped(
    start: Callable[..., Target], place: Callable[..., Path], scanner: Scanner
) -> None:
    target, other = start(), start()
    scanner.scan()
    target.tell(f"load('{place()}')")
    other.tell(f"load('{place('other/libcuda.so.1')}')")
    scanner.rescan([target.pid])
    scan = scanner.scan(hinted_only=True)
    assert scan.started == (target.pid,) and len(scan.appeared) == 1
    assert scanner.scan().started == (other.pid,)


def test_an_exec_is_an_end_and_a_start_of_the_same_pid(start: Callable[..., Target], place: Callable[..., Path], scanner: Scanner) -> None:
    path = place()
    target = start(f"load('{path}')")
    scanner.scan()
    target.tell("become('pass')")
    scan = scanner.scan()
    assert of(scan, target) == [] and scan.ended == (target.pid,) and len(scan.vanished) == 1
    target.tell(f"load('{path}')")
    assert scanner.scan().started == (target.pid,)
    target.tell(f"become(\"load('{path}')\")")
    scan = scanner.scan()
    assert (scan.started, scan.ended, scan.appeared, scan.vanished) == ((target.pid,), (target.pid,), (), ())


def test_processes_that_come_and_go_during_scans_harm_nothing(
    start: Callable[..., Target], place: Callable[..., Path], scanner: Scanner
) -> None:
    path = place()
    survivor = start(f"load('{path}')")
    program = f"import ctypes, time; ctypes.CDLL('{path}'); time.sleep(0.05)"
    running: list[subprocess.Popen[bytes]] = []
    seen: set[int] = set()
    for _ in range(40):
        running.append(subprocess.Popen([sys.executable, "-S", "-E", "-c", program]))
        scan = scanner.scan()
        (library,) = of(scan, survivor)
        os.close(library.open())
        seen |= library.pids
    while any(process.poll() is None for process in running):
        (library,) = of(scanner.scan(), survivor)
        os.close(library.open())
        seen |= library.pids
    assert {process.returncode for process in running} == {0}
    assert len(seen) > 1
    (library,) = of(scanner.scan(), survivor)
    assert library.pids == {survivor.pid}


def header_of(built: bytes, elf_class: int, machine: int) -> bytes:
    """The stand-in with another class and machine in its header, which is all that tells a 32-bit file at first sight."""
    image = bytearray(built)
    image[4] = elf_class
    struct.pack_into("<H", image, 18, machine)
    return bytes(image)


def test_mapped_files_that_cannot_be_traced_are_refused_with_a_reason(
    start: Callable[..., Target], place: Callable[..., Path], scanner: Scanner, built: bytes
) -> None:
    files = {
        "32/libcuda.so.1": (header_of(built, 1, 3), "32-bit"),
        "x32/libcuda.so.1": (header_of(built, 1, 62), "x32 ABI"),
        "s390/libcuda.so.1": (header_of(built, 2, 22), "built for another machine (EM_S390, little endian)"),
        "text/libcuda.so.1": (b"not a library\n" * 400, "not an ELF file"),
        "short/libnccl.so.2": (b"\x7fELF", "truncated: the ELF header is incomplete"),
    }
    target = start()
    for name, (image, _) in files.items():
        path = place(name)
        path.write_bytes(image)
        target.tell(f"map_code('{path}')")
    scan = scanner.scan()
    assert of(scan, target) == []
    root = place().parent
    assert reasons(scan, target) == sorted((str(root / name), reason) for name, (_, reason) in files.items())
    assert reasons(scanner.scan(), target) == reasons(scan, target)


def test_a_32_bit_process_does_not_hide_the_64_bit_copies(
    start: Callable[..., Target], place: Callable[..., Path], scanner: Scanner, built: bytes
) -> None:
    narrow = place("lib32/libcuda.so.1")
    narrow.write_bytes(header_of(built, 1, 3))
    target = start(f"map_code('{narrow}')", f"load('{place('lib/libcuda.so.1')}')")
    scan = scanner.scan()
    assert [library.path for library in of(scan, target)] == [str(narrow.parent.parent / "lib" / "libcuda.so.1")]
    assert reasons(scan, target) == [(str(narrow), "32-bit")]


def test_sixty_thousand_mappings_do_not_hide_a_library(start: Callable[..., Target], place: Callable[..., Path], scanner: Scanner) -> None:
    target = start("many(30_000)", f"load('{place()}')")
    scan = scanner.scan()
    assert len(of(scan, target)) == 1
    assert target.pid not in scan.capped


def test_names_of_a_process_are_made_printable(start: Callable[..., Target], place: Callable[..., Path], scanner: Scanner) -> None:
    path = place("\x1b[31m\nevil/libcuda.so.1")
    target = start(f"load({str(path)!r})", "open('/proc/self/comm', 'wb').write(b'abc)\\n\\x1b \\xe7\\x8c')")
    scan = scanner.scan()
    process = scan.processes[target.pid]
    assert process.comm == r"abc)\x0a\x1b \xe7\x8c"
    assert process.command and process.command.startswith(f"{sys.executable} -S -E -c \\x0aimport ctypes") and process.command.isprintable()
    assert process.start_ns is not None and 0 < process.start_ns
    (library,) = of(scan, target)
    assert library.path.isprintable() and library.path.endswith("evil/libcuda.so.1")
    os.close(library.open())


def test_a_process_in_a_pid_namespace_goes_by_our_pid_and_tells_its_own(
    start: Callable[..., Target], place: Callable[..., Path], scanner: Scanner
) -> None:
    target = start(f"load('{place()}')", within="true", unshare="-m -p --fork --kill-child")
    (library,) = [library for library in scanner.scan().libraries if library.path == str(place())]
    (pid,) = library.pids
    fd = os.open("/proc", os.O_RDONLY)
    try:
        assert pid != target.pid and namespace_pid(pid, fd) == 1
    finally:
        os.close(fd)


def test_without_privilege_own_processes_are_read_through_their_root_and_others_are_counted_hidden(
    start: Callable[..., Target], place: Callable[..., Path], built: bytes
) -> None:
    theirs = start(f"load('{place('root/libcuda.so.1')}')")
    mine = start(f"load('{place('mine/libcuda.so.1')}')", user=NOBODY)
    gone = start(f"load('{place('gone/libcuda.so.1')}')", user=NOBODY)
    (place("gone/libcuda.so.1")).unlink()

    def look() -> tuple[Scan, list[bytes]]:
        scan = scan_as_nobody()
        return scan, [content(library) for library in of(scan, mine)]

    with forked(look) as (scan, contents):
        assert contents == [built]
        assert of(scan, theirs) == [] and scan.hidden > 0
        assert of(scan, gone) == []
        assert [reason for _, reason in reasons(scan, gone)] == [
            "a deleted file can be opened only with CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE"
        ]


@pytest.mark.parametrize(
    ("swap", "reason"),
    [
        ("fifo", "not a regular file"),
        ("directory", "not a regular file"),
        ("symbolic link", "not a regular file"),
        ("other file", "another file has taken its place"),
    ],
)
def test_what_took_a_librarys_place_is_neither_waited_for_nor_believed(
    start: Callable[..., Target], place: Callable[..., Path], swap: str, reason: str
) -> None:
    path, other = place(), place("other")
    target = start(f"load('{path}')", user=NOBODY)
    path.rename(path.parent / "aside")
    if swap == "fifo":
        os.mkfifo(path)
    elif swap == "directory":
        path.mkdir()
    elif swap == "symbolic link":
        path.symlink_to(path.parent / "aside")
    else:
        other.rename(path)
    with forked(lambda: led_astray(path, target.pid)) as given:
        assert given == reason


def led_astray(path: Path, pid: int) -> str | None:
    """Why the file now at `path` is not opened, without privilege, for a mapping of the one that was there before."""
    aside = path.parent / "aside"
    start, end = next(
        line.split()[0].split("-")
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if "r-xp" in line and line.endswith(str(aside))
    )
    device = aside.stat().st_dev
    mapping = Mapping(pid, "cuda", int(start, 16), int(end, 16), os.major(device), os.minor(device), aside.stat().st_ino, os.fsencode(path))
    become_nobody()
    try:
        os.close(open_mapping(mapping))
    except OSError as error:
        return error.strerror
    return None


def test_hidden_processes_are_a_normal_thing(start: Callable[..., Target], place: Callable[..., Path], tmp_path: Path) -> None:
    mine = start(f"load('{place('mine/libcuda.so.1')}')", user=NOBODY)
    theirs = start(f"load('{place('theirs/libcuda.so.1')}')")
    libc = ctypes.CDLL(None, use_errno=True)

    def look() -> Scan:
        assert libc.unshare(0x00020000) == 0  # CLONE_NEWNS
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "proc", "-o", "hidepid=invisible", "proc", "/proc"], check=True)
        return scan_as_nobody()

    with forked(look) as scan:
        assert len(of(scan, mine)) == 1
        assert of(scan, theirs) == [] and scan.hidden == 0


def test_a_device_under_a_librarys_name_is_not_opened(start: Callable[..., Target], place: Callable[..., Path], scanner: Scanner) -> None:
    path = place()
    path.unlink()
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero
    target = start(
        f"file = open('{path}', 'r+b', 0)",
        "kept.append(mmap.mmap(file.fileno(), 4096, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC))",
    )
    scan = scanner.scan()
    assert of(scan, target) == []
    assert reasons(scan, target) in ([], [(str(path), "not a regular file")])
