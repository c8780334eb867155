"""Names of labels. They are public, and each names a folder of samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from fedgen.errors import FedgenError

_SHOWN = 20  # names per line
_LONG = 100  # characters of a name
_NO_NAME = set('/\\:*?"<>|')  # not allowed in names of folders on some systems


def validate_names(setting: object) -> list[str]:
    """Return the names in the setting ``data.labels``, in order.

    Raises:
        FedgenError: for an invalid list.
    """
    if not isinstance(setting, list | tuple) or not all(
        type(name) in (str, int) for name in setting
    ):
        raise FedgenError("data.labels", f"cannot be {setting!r}", "list names, e.g. [cat,dog]")
    names = [str(name) for name in setting]
    if not has_names(names):
        remedy = "give each a distinct name that is a valid folder name"
        raise FedgenError("data.labels", f"cannot be {', '.join(names)}", remedy)
    return names


def infer_names(
    data_names: Iterable[str], setting: Sequence[str] | None, remedy: str = ""
) -> list[str]:
    """Return the names of labels in order: those in ``setting``, or all names in the data.

    Args:
        remedy: what else to do about names outside ``setting``.

    Raises:
        FedgenError: for a label outside those in the setting, or an invalid list.
    """
    data_names = set(data_names)
    labels = sort_names(data_names) if setting is None else validate_names(setting)
    _check_known(data_names, labels, remedy)
    return labels


def _check_known(data_names: Iterable[str], names: Sequence[str], remedy: str = "") -> None:
    if unknown := set(data_names).difference(names):
        examples = ", ".join(name[:_LONG] for name in sorted(unknown)[:_SHOWN])
        problem = f"lacks labels of the data: {examples}"
        raise FedgenError("data.labels", problem, f"add them, or move their images away{remedy}")


def has_names(candidates: Sequence[object]) -> bool:
    """Return whether these may name labels: each becomes the name of a folder."""
    names = [name for name in candidates if isinstance(name, str) and 0 < len(name) <= _LONG]
    if any(name.strip(". ") != name or set(name) & _NO_NAME for name in names):
        return False
    return len({name.casefold() for name in names if name.isprintable()}) == len(candidates)


def sort_names(names: Iterable[str]) -> list[str]:
    """Sort distinct names: by value where all are whole numbers, else as text."""
    distinct = set(names)
    if all(_is_number(name) for name in distinct):
        return sorted(distinct, key=lambda name: (int(name), name))
    return sorted(distinct)


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) <= 18


def to_numbers(
    where: str, values: NDArray[np.generic], classes: int, names: Sequence[str] | None = None
) -> NDArray[np.int64]:
    """Return labels as class indices, int64 of shape (n,).

    Args:
        where: file and array, for errors.
        values: shape (n,) or (n, 1): integers, booleans or whole floats from 0 to ``classes`` - 1;
            or labels by name.
        classes: number of labels.
        names: names of the labels, in order, if known. If all of them are whole numbers, integer
            values are matched by name.

    Raises:
        FedgenError: for other arrays, with a remedy for each kind.
    """
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    numeric = values.dtype.kind in "biuf"
    if values.ndim != 1:
        raise FedgenError("data", *_ambiguous(where, values, numeric))
    if values.dtype.kind in "US" or (names and all(_is_number(name) for name in names)):
        return _by_name(where, values, names)
    if not numeric:
        problem = f"{where} contains labels of type {values.dtype}"
        raise FedgenError("data", problem, "give whole numbers from 0, one for each image")
    if values.dtype.kind == "f":
        if missing := int(np.count_nonzero(~np.isfinite(values))):
            problem = f"{where} has {missing:,} images without a label (NaN or infinite)"
            raise FedgenError("data", problem, "remove these images")
        if (values != np.floor(values)).any():
            first = float(values[values != np.floor(values)][0])
            problem = f"{where} contains labels with fractions, e.g. {first:g}"
            raise FedgenError("data", problem, "divide them into classes numbered from 0")
    check_range(where, values, classes, named_labels=names is not None)
    return values.astype(np.int64)


def check_range(
    where: str, values: NDArray[np.generic], classes: int, named_labels: bool = False
) -> None:
    """Raise FedgenError for class indices outside 0..``classes`` - 1.

    Args:
        named_labels: whether ``classes`` is the number of names in ``data.labels``.
    """
    if not len(values):
        return
    least, most = int(values.min()), int(values.max())
    problem = f"{where} has labels from {least} to {most}, outside 0..{classes - 1}"
    if least == -1:
        raise FedgenError("data", problem, "remove unlabelled images (label -1)")
    if least < 0:
        raise FedgenError("data", problem, "number the labels from 0")
    if most == classes and least >= 1:
        raise FedgenError("data", problem, "number the labels from 0: labels - 1")
    if most >= classes:
        remedy = f"set data.classes={most + 1}, or number the labels from 0"
        if named_labels:
            remedy = "name more of them in data.labels, or number the labels from 0"
        raise FedgenError("data", problem, remedy)


_MAX_COMBINED_COLUMNS = 4  # columns of 0 and 1: 16 labels


def combine(
    where: str,
    names: Sequence[str],
    columns: NDArray[np.generic],
    setting: Sequence[str] | None,
    remedy: str = "choose binary columns",
) -> tuple[NDArray[np.int64], list[str]]:
    """Return labels of attributes, int64 of shape (n,), and their names: label b is the combination
    of the attributes k for which bit k of b is set, 2^k labels for k attributes.

    Args:
        where: file, for errors.
        names: public names of the attributes.
        columns: shape (n, k), of 0 and 1.
        setting: names of the labels in this order; None: ``no A`` and ``A``, or ``none``, ``A``,
            ``B``, ``A+B`` and so on.
        remedy: what to do about other values.

    Raises:
        FedgenError: for other values, and more than four attributes.
    """
    if len(names) > _MAX_COMBINED_COLUMNS or len(set(names)) < len(names):
        problem = f"lists {', '.join(names)}"
        limit = f"list at most {_MAX_COMBINED_COLUMNS} columns, each once"
        raise FedgenError("data.label", problem, limit)
    if columns.dtype.kind not in "biuf" or not np.isin(columns, (0, 1)).all():
        problem = f"{where}: {', '.join(names)} contain values other than 0 and 1"
        raise FedgenError("data.label", problem, remedy)
    count = 2 ** len(names)
    if setting is None:
        labels = [
            "+".join(name for bit, name in enumerate(names) if number >> bit & 1)
            for number in range(count)
        ]
        labels[0] = f"no {names[0]}" if count == 2 else "none"
    elif len(labels := validate_names(setting)) != count:
        problem = f"has {len(labels)} names, but the columns {', '.join(names)} have {count}"
        raise FedgenError("data.labels", f"{problem} combinations", "name all, or leave it out")
    bits = np.array([1 << bit for bit in range(len(names))])
    return columns.astype(np.int64) @ bits, labels


def _ambiguous(where: str, values: NDArray[np.generic], numeric: bool) -> tuple[str, str]:
    """Return problem and remedy for labels of another shape than (n,)."""
    problem = f"{where} contains labels of shape {values.shape}"
    if values.ndim != 2 or not numeric or not np.isin(values, (0, 1)).all():
        return problem, "give one whole number for each image, (n,)"
    sums = values.sum(1)
    if (sums == 1).all():
        return f"{problem}, one-hot", "give labels.argmax(1), or choose a column, e.g. data.label=0"
    several = f"{problem}, multi-label ({int(sums.min())} to {int(sums.max())} per image)"
    return several, "choose columns by number, e.g. data.label=0 or data.label=[0,2]"


def _by_name(
    where: str, values: NDArray[np.generic], names: Sequence[str] | None
) -> NDArray[np.int64]:
    texts = [_text(value) for value in values.tolist()]
    if names is None:
        examples = ",".join(name[:_LONG] for name in sort_names(texts)[:_SHOWN])
        problem = f"{where} contains label names that data.labels does not list"
        raise FedgenError("data.labels", problem, f"e.g. data.labels=[{examples}]")
    _check_known(texts, names)
    index = {name: number for number, name in enumerate(names)}
    return np.array([index[text] for text in texts], dtype=np.int64)


def _text(value: object) -> str:
    """Return a label's name; 5.0 is "5"."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(int(value)) if isinstance(value, bool) else str(value)


def identities(where: str, values: NDArray[np.generic]) -> NDArray[np.int64]:
    """Return numbers of writers or persons, int64 of shape (n,).

    Args:
        where: file and array, for errors.
        values: shape (n,) or (n, 1): integers, or names, numbered in sorted order.

    Raises:
        FedgenError: for anything else.
    """
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1 or values.dtype.kind not in "iuUS":
        problem = f"{where} has type {values.dtype} and shape {values.shape}"
        raise FedgenError("data", problem, "give one integer or name per image, (n,)")
    if values.dtype.kind in "US":
        values = np.unique(values, return_inverse=True)[1]
    return values.astype(np.int64)
