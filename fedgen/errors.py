"""Mistakes that a user can mend. The command line prints them as one line, without a traceback."""

from __future__ import annotations


class FedgenError(Exception):
    """A user's mistake: the configuration key, what is wrong, and what to do.

    Args:
        key: the configuration key or file at fault, e.g. ``privacy.delta``.
        problem: what is wrong with it, with the value that was given.
        remedy: what to do about it.
    """

    def __init__(self, key: str, problem: str, remedy: str) -> None:
        self.key, self.problem, self.remedy = key, problem, remedy
        super().__init__(" ".join(f"{key}: {problem}; {remedy}".split()))

    def __reduce__(self) -> tuple[type[FedgenError], tuple[str, str, str]]:
        return type(self), (self.key, self.problem, self.remedy)


class Interrupted(Exception):  # noqa: N818 (it is no error)
    """A run that was asked to end before it was done."""
