"""Persons in images: by the names of files, and warnings of implausible ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePosixPath

import numpy as np
from numpy.typing import NDArray

from fedgen.data.images import DecodedFiles, mask, shorten
from fedgen.data.tables import Listing, Record
from fedgen.errors import FedgenError

FOLDER, TAG = "folder", "tag:"
"""Values of ``data.person``: folders of persons; prefix of a DICOM keyword."""

_PERSON_PREFIX = r"^([^_.-]*[0-9])[_-]"  # of file names such as P12_3.png


def match_persons(listed: Listing, expression: str) -> list[Record]:
    """Return the records with the person that the first group of an expression finds in the name of
    each file.

    Raises:
        FedgenError: for an invalid expression, or files that it does not match.
    """
    records = listed.records
    remedy = "give tag:KEYWORD, folder, or a regular expression with a group: '^(P[0-9]+)_'"
    if listed.unread:
        remedy = f"name a column, e.g. {', '.join(listed.unread)}, or give such an expression"
    try:
        pattern = re.compile(expression)
    except re.error as error:
        problem = f"{expression[:100]!r} is neither a column nor a regular expression ({error})"
        raise FedgenError("data.person", problem, remedy) from error
    if pattern.groups < 1:
        problem = f"{expression[:100]!r} is neither a column nor a regular expression with a group"
        raise FedgenError("data.person", problem, remedy)
    names = [PurePosixPath(record.name).name for record in records]
    matches = [pattern.search(name) for name in names]
    persons = [match[1] if match else None for match in matches]
    if lacking := [name for name, person in zip(names, persons, strict=True) if not person]:
        problem = f"does not match {len(lacking)} of {len(records)} file names, such as "
        problem += f"{mask(lacking[0])} (letters and digits replaced)"
        raise FedgenError("data.person", problem, "change the expression, or rename the files")
    return [replace(r, person=str(p)) for r, p in zip(records, persons, strict=True)]


def suggest_person(files: Sequence[Record], decoded: DecodedFiles) -> str:
    """Return a value of ``data.person`` if several images may show one person, by the names of
    their files or because a file contains several; else an empty text."""
    if decoded.all_dicom:
        return f"{TAG}PatientID"
    names = [PurePosixPath(record.name).name for record in files]
    found = [match[1] for name in names if (match := re.search(_PERSON_PREFIX, name))]
    if len(found) == len(names) and 1 < len(set(found)) < 0.9 * len(found):
        return _PERSON_PREFIX
    return "(.+)" if len(decoded.images) > len(files) else ""  # a person per file


def person_warnings(records: Sequence[Record], test: NDArray[np.bool_]) -> tuple[str, ...]:
    """Return warnings about implausible persons."""
    training, tested = (
        {r.person for r, is_test in zip(records, test, strict=True) if is_test == split}
        for split in (False, True)
    )
    warnings = []
    if len(training | tested) == 1:
        warnings.append("all images are of one person: check data.person")
    if both := len(training & tested):
        persons = "a person has" if both == 1 else f"{both} persons have"
        warnings.append(f"{persons} images in both splits: test results will be optimistic")
    return tuple(warnings)


def label_warnings(listed: Listing, are_folders: bool) -> tuple[str, ...]:
    """Return a warning if folders of persons were probably taken for those of labels."""
    few = len(listed.records) < _FEW_IMAGES * len(listed.labels)
    if not (are_folders and listed.clients > 1 and few and len(listed.labels) >= _MANY_LABELS):
        return ()
    names = shorten(listed.labels[:3])
    return (
        f"the labels {names} and others look like persons: for LABEL/PERSON/ set "
        "data.person=folder and data.labels=[...]",
    )


_FEW_IMAGES, _MANY_LABELS = 10, 10
