"""Names of kernels as people write them: demangled, and short enough for a line.

In: a name as a process gave it, so anything at all, cut off at events.NAME_BYTES. Out: text. What a terminal would obey
is left to whoever shows it.
"""

from __future__ import annotations

import functools
import re

MAX_CHARS = 80
_OPEN, _CLOSE = "<([{", ">)]}"
_LENGTH = re.compile(r"(\d{1,3})")


@functools.lru_cache(maxsize=4096)
def short(name: str) -> str:
    """`at::native::vectorized_elementwise_kernel` for its mangled name: without return type, arguments and templates'."""
    readable = _qualified(_demangled(name)) if name.startswith("_Z") else name
    return readable if len(readable) <= MAX_CHARS else readable[: MAX_CHARS - 3] + "..."


def _demangled(name: str) -> str:
    try:
        import cxxfilt  # late: it looks for its library with a process of its own

        return str(cxxfilt.demangle(name))
    except (ImportError, cxxfilt.Error, UnicodeError):
        return _beginning(name)  # cut off, or no C++ library here


def _beginning(mangled: str) -> str:
    """The qualified name that a mangled one begins with (Itanium C++ ABI, 5.1.3: <length> <identifier>, N for nested)."""
    position, parts = 3 if mangled.startswith("_ZN") else 2, []
    while match := _LENGTH.match(mangled, position):
        start = match.end()
        position = start + int(match[1])
        if position > len(mangled):
            break
        part = mangled[start:position]
        parts.append("(anonymous)" if part.startswith("_GLOBAL__N") else part)
    return "::".join(parts) or mangled


def _qualified(name: str) -> str:
    """`a::b` of `void a::b<int, c<4> >(float*, int)`."""
    name = name.replace("(anonymous namespace)", "anonymous")
    out: list[str] = []
    depth = 0
    for character in name:
        if character in _OPEN:
            if not depth and character == "(" and out:
                break  # the arguments
            depth += 1
        elif character in _CLOSE:
            depth = max(depth - 1, 0)
        elif not depth:
            out.append(character)
    return "".join(out).strip().rpartition(" ")[2] or name
