"""Names of labels. They are public, and each names a folder wherever samples are written to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fedgen.errors import FedgenError

_SHOWN = 20  # names in a line
_LONG = 100  # letters of a name
_NO_NAME = set('/\\:*?"<>|')  # not in a folder's name, on some systems


def named(told: object) -> list[str]:
    """The names that the setting ``data.labels`` tells, in order.

    Raises:
        FedgenError: for what is no list of names.
    """
    if not isinstance(told, list | tuple) or not all(type(each) in (str, int) for each in told):
        raise FedgenError("data.labels", f"cannot be {told!r}", "list names, e.g. [cat,dog]")
    names = [str(each) for each in told]
    if not are_names(names):
        remedy = "give each a name of its own that may be a folder's"
        raise FedgenError("data.labels", f"cannot be {', '.join(names)}", remedy)
    return names


def known(found: Iterable[str], told: Sequence[str] | None) -> list[str]:
    """The labels' names in order: those ``told`` by the setting, or all that there are.

    Raises:
        FedgenError: for a label that is none of those told, or what is no list of names.
    """
    labels = sorted(set(found)) if told is None else named(told)
    if unknown := set(found).difference(labels):
        some = ", ".join(each[:_LONG] for each in sorted(unknown)[:_SHOWN])
        problem = f"the data have labels that it does not name: {some}"
        raise FedgenError("data.labels", problem, "add them, or move their images away")
    return labels


def are_names(told: Sequence[object]) -> bool:
    """Whether these may name labels: each a folder of its own."""
    names = [each for each in told if isinstance(each, str) and 0 < len(each) <= _LONG]
    if any(each.strip(". ") != each or set(each) & _NO_NAME for each in names):
        return False
    return len({each.casefold() for each in names if each.isprintable()}) == len(told)
