"""gputail names, live, what makes the slow requests of a GPU node slow."""

__version__ = "0.1.0"
