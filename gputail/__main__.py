"""`python -m gputail` is the command `gputail`."""

from gputail.cli import entry

if __name__ == "__main__":
    entry()
