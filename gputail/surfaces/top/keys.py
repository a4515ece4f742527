"""The keys of top: what each does, in one table that the screen obeys and the help shows.

Keys are as textual names them. Where nvitop, nvtop and htop have a key for the same thing, that key is here, too.
"""

from __future__ import annotations

from gputail.surfaces.top.drawing import Line

# action -> its keys, and what it does in words; the first keys are the ones to remember.
KEYS: dict[str, tuple[tuple[str, ...], str]] = {
    "quit": (("q", "f10", "ctrl+c", "ctrl+q"), "quit; the terminal is left as it was"),
    "help": (("question_mark", "h", "f1"), "these keys"),
    "open": (("enter", "right", "l"), "the workload, or the outlier, in detail"),
    "back": (("escape", "backspace", "left"), "back to where you came from; takes a filter away"),
    "up": (("up", "k"), "one row up"),
    "down": (("down", "j"), "one row down"),
    "page_up": (("pageup", "ctrl+b"), "a page up"),
    "page_down": (("pagedown", "ctrl+f"), "a page down"),
    "first": (("home", "g"), "the first row"),
    "last": (("end", "G"), "the last row"),
    "pause": (("space", "z", "Z"), "hold the picture, or let it go on"),
    "filter": (("slash", "f3", "f4", "backslash"), "show only rows that have a text in them"),
    "sort_next": (("greater_than_sign", "full_stop", "f6", "s"), "sort by the next column"),
    "sort_previous": (("less_than_sign", "comma"), "sort by the column before"),
    "order": (("r", "f5"), "sort again now: rows stay where they are until then"),
    "invert": (("I", "i"), "the other way round"),
    "sort_outliers": (("o",), "sort by outliers"),
    "sort_name": (("n", "N"), "sort by name and pid"),
    "sort_rate": (("t",), "sort by requests a second"),
    "sort_p50": (("5",), "sort by p50"),
    "sort_p99": (("9", "P"), "sort by p99"),
    "sort_p99.9": (("p",), "sort by p99.9"),
    "worst": (("w",), "go to the workload with the most outliers a minute"),
    "figures": (("m",), "figures of the last minute, or since tracing began"),
    "silent": (("a", "H"), "show what has been silent for minutes, or leave it out"),
    "cost": (("c", "f2"), "what gputail itself costs and misses"),
    "no_signals": (("f9", "K", "T", "f7", "f8", "u", "e"), "(kill, nice, users: not here, gputail only looks)"),
}
ACTIONS = {key: action for action, (keys, _) in KEYS.items() for key in keys}

_NAMES = {
    "question_mark": "?", "slash": "/", "backslash": "\\", "greater_than_sign": ">", "less_than_sign": "<", "full_stop": ".",
    "comma": ",", "space": "Space", "enter": "Enter", "escape": "Esc", "backspace": "Backspace", "pageup": "PgUp", "pagedown": "PgDn",
    "up": "Up", "down": "Down", "left": "Left", "right": "Right", "home": "Home", "end": "End", "ctrl+c": "^C", "ctrl+q": "^Q",
    "ctrl+b": "^B", "ctrl+f": "^F",
}  # fmt: skip


def shown(key: str) -> str:
    """A key as it is written on it."""
    return _NAMES.get(key, key.upper() if key[0] == "f" and key[1:].isdigit() else key)


def help_page() -> list[Line]:
    """Every key in a line, and how to read the columns."""
    lines: list[Line] = [(("keys", "bold"),)]
    for keys, what in KEYS.values():
        lines.append(((f"  {' '.join(shown(key) for key in keys):20} ", "accent"), (what, "")))
    lines += [(("", ""),), (("columns", "bold"),)]
    for name, what in (
        ("RATE", "requests a second"),
        ("P50 P99 P99.9", 'of request durations; "-": too few requests to say'),
        ("OUT/m", "requests a minute that were well above the usual"),
        ("TAIL", "p99 of each 5 s, now on the right; half height: usual"),
        ("CAUSE", "what most of the latest excess went to, who is to blame"),
    ):
        lines.append(((f"  {name:20} ", "accent"), (what, "")))
    lines.append((("  yellow: 1.3 times the usual, red: twice and more; grey: silent for a minute", "dim"),))
    return lines
