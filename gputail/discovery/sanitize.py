"""Text from other processes, made safe to show: names are an attacker's."""

from __future__ import annotations

import unicodedata

# Control, format (bidi overrides among them), surrogate, private, unassigned, and separators of lines and paragraphs.
_UNSAFE = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))


def printable(text: bytes | str, limit: int = 256) -> str:
    """`text` with everything that a terminal or a log could act upon replaced by "?", at most `limit` characters.

    Bytes are read as UTF-8; a character cut off at the end of a fixed-size field becomes one "?" like any other.
    """
    if isinstance(text, bytes):
        text = text[: 4 * limit].decode("utf-8", errors="replace")
    return "".join("?" if unicodedata.category(c) in _UNSAFE or c == "\ufffd" else c for c in text[:limit])
