"""Read MedMNIST's sets of 2D medical images, from the user's own copy.

Yang et al., MedMNIST v2, Scientific Data 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fedgen.data.catalogue import MEDMNIST, facts_of
from fedgen.data.datasets import Dataset, data_root
from fedgen.data.images import Channels, convert_dataset
from fedgen.data.npz import from_npz
from fedgen.errors import FedgenError


def medmnist(
    root: str | None,
    name: str,
    size: Literal[28, 64, 128, 224] = 28,
    channels: Channels | None = None,
    label: str | Sequence[str] | None = None,
    **_: object,
) -> Dataset:
    """Return a data set from ``NAME.npz`` or, for larger images, ``NAME_64.npz`` and so on. The
    validation split is not used.

    Args:
        name: key of ``catalogue.MEDMNIST``.
        size: side of the images, which selects the file.
        channels: 1: convert to grey; 3: convert to RGB; None: unchanged.
        label: finding, only for ``chestmnist``; several: all combinations (``labels.combine``).

    Raises:
        FedgenError: if the file is missing or invalid, and for an unknown finding.
    """
    facts = facts_of(MEDMNIST, name)
    file = data_root(root) / f"{name}{'' if size == 28 else f'_{size}'}.npz"
    if not file.exists():
        remedy = "download it from medmnist.com, or set data.root to its folder"
        raise FedgenError("data.root", f"there is no {file}", remedy)
    if facts.is_multi_label:
        columns = [facts.labels.index(finding) for finding in _findings(name, label)]
        read = from_npz(name, file, None, columns=columns, column_names=facts.labels)
    elif label is not None:
        raise FedgenError("data.label", f"{name} has one label per image", "leave it out")
    else:
        read = from_npz(name, file, len(facts.labels), names=facts.labels)
    if read.shape[1] != size:
        problem = f"{file} has images of {read.shape[1]} pixels a side, not {size}"
        raise FedgenError("data.size", problem, "download the file of this size")
    return convert_dataset(read, None, channels)


def _findings(name: str, label: str | Sequence[str] | None) -> list[str]:
    known = MEDMNIST[name].labels
    findings = [label] if isinstance(label, str) else list(label or [])
    remedy = f"choose from {', '.join(known)}"
    if not findings:
        raise FedgenError("data.label", f"is not set for {name}", remedy)
    if unknown := [finding for finding in findings if finding not in known]:
        raise FedgenError("data.label", f"{name} has no finding {', '.join(unknown)}", remedy)
    return findings
