"""The errors a user may meet: what failed, on what, and what to do about it.

Every layer raises these; `cli.main` alone prints them, once, and turns them into an exit status.
"""


class GputailError(Exception):
    """Something that stops the command.

    `problem` says what failed and on what, in lower case and without a full stop; `hint` says what to do,
    or is empty where there is nothing to advise.
    """

    exit_status = 1

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint

    def __str__(self) -> str:
        return f"gputail: {self.problem}" + (f"\nhint: {self.hint}" if self.hint else "")


class UsageError(GputailError):
    """The command line or the configuration cannot be carried out as written."""

    exit_status = 2
