"""Builds the simulated driver and its programs with the system's C compiler, once for each state of their sources.

What comes out lies in a cache, under a name that is a hash of all that went in: sources, flags and compiler. A build
happens in a folder of its own, which is then renamed: two builds at a time do no harm.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gputail.errors import GputailError

SOURCES = Path(__file__).resolve().parent
BUILD_TIMEOUT_S = 120

_WARNINGS = ["-Wall", "-Wextra"]
_PROGRAM = ["-O1", "-g", "-fno-omit-frame-pointer", *_WARNINGS]
# Functions must begin as the real libraries' do: push %rbp; mov %rsp,%rbp, behind endbr64 in libnccl.
_FRAMES = ["-mno-omit-leaf-frame-pointer", "-fno-shrink-wrap"] if platform.machine() == "x86_64" else []
_LIBRARY = ["-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-omit-frame-pointer", "-Wl,-z,defs", *_FRAMES, *_WARNINGS]
_WITHOUT_ENDBR = ["-fcf-protection=none"] if platform.machine() == "x86_64" else []
_WITH_ENDBR = ["-fcf-protection=full"] if platform.machine() == "x86_64" else []


@dataclass(frozen=True)
class Built:
    """`libraries` holds libcuda.so.1 and libnccl.so.2; `programs` are by name. All lie under `folder`."""

    folder: Path
    libraries: Path
    programs: dict[str, Path]


def build() -> Built:
    """The simulated driver and its programs. Raises GputailError where there is no compiler or it fails."""
    folder = _cached("sim", [SOURCES / "driver", SOURCES / "programs"], _build_all)
    programs = {path.name: path for path in sorted((folder / "bin").iterdir())}
    return Built(folder, folder / "lib", programs)


def build_bare() -> tuple[Path, Path]:
    """A libcuda whose calls do nothing, and a program that calls it: what a probe costs is all that is to measure."""
    folder = _cached("bare", [SOURCES / "bare"], _build_bare)
    return folder / "libcuda.so.1", folder / "caller"


def _build_all(folder: Path) -> None:
    libraries, programs, driver = folder / "lib", folder / "bin", SOURCES / "driver"
    libraries.mkdir()
    programs.mkdir()
    cuda, nccl = (sorted((driver / name).glob("*.c")) for name in ("cuda", "nccl"))
    _compile(
        libraries / "libcuda.so.1",
        *_LIBRARY, *_WITHOUT_ENDBR, f"-I{driver}", "-Wl,-soname,libcuda.so.1", *cuda, "-lpthread", "-ldl", "-lm",
    )  # fmt: skip
    _compile(
        libraries / "libnccl.so.2",
        *_LIBRARY, *_WITH_ENDBR, f"-I{driver}", "-Wl,-soname,libnccl.so.2", "-Wl,-rpath,$ORIGIN", *nccl, "-lpthread", "-ldl",
    )  # fmt: skip
    common = SOURCES / "programs" / "common.c"
    for source in sorted((SOURCES / "programs").glob("*.c")):
        if source != common:
            _compile(
                programs / source.stem,
                *_PROGRAM, source, *([common] if common.exists() else []), f"-L{libraries}", "-Wl,--no-as-needed",
                "-l:libcuda.so.1", "-Wl,-rpath,$ORIGIN/../lib", "-lpthread", "-ldl", "-lm",
            )  # fmt: skip

    # These find the driver themselves, by dlopen.
    for source in sorted((SOURCES / "programs" / "loaders").glob("*.c")):
        _compile(programs / source.stem, *_PROGRAM, source, "-Wl,-rpath,$ORIGIN/../lib", "-lpthread", "-ldl")


def _build_bare(folder: Path) -> None:
    library = ["-O0", "-fPIC", "-shared", "-fno-omit-frame-pointer", *_WITHOUT_ENDBR, "-Wl,-soname,libcuda.so.1"]
    _compile(folder / "libcuda.so.1", *library, SOURCES / "bare" / "libcuda.c")
    _compile(folder / "caller", "-O1", SOURCES / "bare" / "caller.c", f"-L{folder}", "-l:libcuda.so.1", "-Wl,-rpath,$ORIGIN")


def _cached(name: str, sources: list[Path], make: Callable[[Path], None]) -> Path:
    """The cached folder that `make` fills from the sources, made now if need be."""
    digest = hashlib.sha256((_run(_compiler(), "--version") + platform.machine()).encode())
    files = [path for folder in sources for path in folder.rglob("*.[ch]")]
    for path in [Path(__file__), *sorted(files)]:
        digest.update(f"{path.relative_to(SOURCES)}\0".encode() + path.read_bytes())
    place = _cache_folder() / f"{name}-{digest.hexdigest()[:16]}"
    if place.is_dir():
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=place.parent))
    except OSError as error:
        raise GputailError(f"cannot write to the cache {place.parent}: {error.strerror}", "set XDG_CACHE_HOME, or make room") from error
    try:
        make(building)
        building.chmod(0o755)
        try:
            building.rename(place)
        except OSError:
            if not place.is_dir():  # otherwise another build was first, with the same result
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return place


def _cache_folder() -> Path:
    if os.geteuid() == 0:
        return Path("/var/cache/gputail")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gputail"


def _compiler() -> str:
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None:
        raise GputailError(
            "cannot build the simulated driver: there is no C compiler",
            "install gcc and libc6-dev (Debian, Ubuntu) or gcc and glibc-devel (Fedora)",
        )
    return compiler


def _compile(output: Path, *arguments: str | Path) -> None:
    _run(_compiler(), "-o", output, *arguments)


def _run(*command: str | Path) -> str:
    """Standard output; GputailError with the compiler's first error if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GputailError(f"cannot run {command[0]}: {error}", "check the compiler that CC or PATH names") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["no message"]
        raise GputailError(f"cannot build the simulated driver: {lines[0].strip()}", "check that the C library's headers are installed")
    return done.stdout
