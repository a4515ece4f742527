"""What a verb says to people: lines on stderr; where that is the journal, with a priority in front (see sd-daemon(3)).

In: a text and how grave it is. The journal names the program itself, and takes each line for a message of its own.
"""

from __future__ import annotations

import os
import sys

from gputail.errors import GputailError

ERROR, WARNING, NOTICE, INFO = 3, 4, 5, 6  # as syslog(3) numbers them


def say(text: str, priority: int = INFO) -> None:
    """One message."""
    if _is_journal():
        text = "".join(f"<{priority}>{line}\n" for line in text.splitlines())
    else:
        text = f"gputail: {text}\n"
    sys.stderr.write(text)
    sys.stderr.flush()


def say_error(error: GputailError) -> None:
    """What failed, and what to do about it."""
    say(f"{error.problem}\nhint: {error.hint}" if error.hint else error.problem, ERROR)


def _is_journal() -> bool:
    """The variable alone does not tell: whoever inherits it may have another stderr."""
    try:
        status = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # closed, or no file
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"
