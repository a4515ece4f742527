"""Text that other processes chose, made safe to show.

In: names, command lines, paths and cgroups as bytes or str, with anything in them. Out: one line of printable text of
bounded length. Quoting for a particular output (labels, JSON, markup) is left to that output.
"""

from __future__ import annotations

_MORE = "…"


def printable(text: bytes | str, limit: int) -> str:
    r"""`text` as at most `limit` printable characters; longer text ends in an ellipsis.

    What str.isprintable refuses (control characters and escapes, line and paragraph separators, bidirectional and other
    format marks, lone surrogates, private and unassigned code points) and bytes that are no UTF-8 become `\x1b`, `\u202e`:
    escaped rather than dropped, so that two names stay two names. Work is bounded by `limit`, not by the text.
    """
    if limit < 1:
        return ""
    if isinstance(text, bytes):
        # A character is at most 4 bytes; one more character tells whether something was cut.
        text = text[: 4 * (limit + 1)].decode("utf-8", "surrogateescape")
    text = text[: limit + 1]
    if not text.isprintable():
        text = "".join(character if character.isprintable() else _escape(ord(character)) for character in text)
    return text if len(text) <= limit else text[: limit - 1] + _MORE


def _escape(code: int) -> str:
    if 0xDC80 <= code <= 0xDCFF:  # surrogateescape's way to carry the byte 0x80 to 0xff
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
