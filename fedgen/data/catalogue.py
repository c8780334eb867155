"""Public facts of data sets that are known by name: labels and sizes of their official splits."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from omegaconf import DictConfig

from fedgen.errors import FedgenError


@dataclass(frozen=True)
class Facts:
    """Public facts of a data set.

    rows: number of training images in the official split.
    classes: number of labels.
    file: stem of the ``.npz`` that is read first.
    """

    rows: int
    classes: int
    file: str


@dataclass(frozen=True)
class MedMnistFacts:
    """Public facts of a data set of MedMNIST.

    rows: number of training images.
    labels: names of the labels in order, or of the binary columns.
    is_multi_label: whether an image may have several labels, in binary columns.
    """

    rows: int
    labels: tuple[str, ...]
    is_multi_label: bool = False


TORCHVISION = {
    "MNIST": Facts(60_000, 10, "mnist"),
    "FashionMNIST": Facts(60_000, 10, "fashion_mnist"),
    "KMNIST": Facts(60_000, 10, "kmnist"),
    "EMNIST-balanced": Facts(112_800, 47, "emnist_balanced"),
    "EMNIST-byclass": Facts(697_932, 62, "emnist_byclass"),
    "EMNIST-bymerge": Facts(697_932, 47, "emnist_bymerge"),
    "EMNIST-digits": Facts(240_000, 10, "emnist_digits"),
    "EMNIST-letters": Facts(124_800, 26, "emnist_letters"),
    "USPS": Facts(7_291, 10, "usps"),
    "CIFAR10": Facts(50_000, 10, "cifar10"),
    "CIFAR100": Facts(50_000, 100, "cifar100"),
    "SVHN": Facts(73_257, 10, "svhn"),
    "STL10": Facts(5_000, 10, "stl10"),
    "EuroSAT": Facts(23_000, 10, "eurosat"),
    "PCAM": Facts(262_144, 2, "pcam"),
    "GTSRB": Facts(26_640, 43, "gtsrb"),
    "Food101": Facts(75_750, 101, "food101"),
    "Imagenette": Facts(9_469, 10, "imagenette"),
}
"""Class in ``torchvision.datasets``, and split if it has several -> facts."""

_ORGANS = (
    "bladder",
    "femur-left",
    "femur-right",
    "heart",
    "kidney-left",
    "kidney-right",
    "liver",
    "lung-left",
    "lung-right",
    "pancreas",
    "spleen",
)
MEDMNIST = {
    "pathmnist": MedMnistFacts(
        89_996,
        (
            "adipose",
            "background",
            "debris",
            "lymphocytes",
            "mucus",
            "smooth muscle",
            "normal colon mucosa",
            "cancer-associated stroma",
            "colorectal adenocarcinoma epithelium",
        ),
    ),
    "chestmnist": MedMnistFacts(
        78_468,
        (
            "atelectasis",
            "cardiomegaly",
            "effusion",
            "infiltration",
            "mass",
            "nodule",
            "pneumonia",
            "pneumothorax",
            "consolidation",
            "edema",
            "emphysema",
            "fibrosis",
            "pleural",
            "hernia",
        ),
        is_multi_label=True,
    ),
    "dermamnist": MedMnistFacts(
        7_007,
        (
            "actinic keratoses and intraepithelial carcinoma",
            "basal cell carcinoma",
            "benign keratosis-like lesions",
            "dermatofibroma",
            "melanoma",
            "melanocytic nevi",
            "vascular lesions",
        ),
    ),
    "octmnist": MedMnistFacts(
        97_477,
        ("choroidal neovascularization", "diabetic macular edema", "drusen", "normal"),
    ),
    "pneumoniamnist": MedMnistFacts(4_708, ("normal", "pneumonia")),
    "retinamnist": MedMnistFacts(1_080, ("0", "1", "2", "3", "4")),
    "breastmnist": MedMnistFacts(546, ("malignant", "normal or benign")),
    "bloodmnist": MedMnistFacts(
        11_959,
        (
            "basophil",
            "eosinophil",
            "erythroblast",
            "immature granulocytes",
            "lymphocyte",
            "monocyte",
            "neutrophil",
            "platelet",
        ),
    ),
    "tissuemnist": MedMnistFacts(
        165_466,
        (
            "collecting duct, connecting tubule",
            "distal convoluted tubule",
            "glomerular endothelial cells",
            "interstitial endothelial cells",
            "leukocytes",
            "podocytes",
            "proximal tubule segments",
            "thick ascending limb",
        ),
    ),
    "organamnist": MedMnistFacts(34_561, _ORGANS),
    "organcmnist": MedMnistFacts(12_975, _ORGANS),
    "organsmnist": MedMnistFacts(13_932, _ORGANS),
}
"""Name -> facts (MedMNIST v2; Yang et al. 2023)."""


F = TypeVar("F", Facts, MedMnistFacts, Facts | MedMnistFacts)
CATALOGUE: Mapping[str, Mapping[str, Facts | MedMnistFacts]] = {
    "torchvision": TORCHVISION,
    "medmnist": MEDMNIST,
}
"""Reader (``data.type``) -> name (``data.name``) -> facts."""


def facts_of(table: Mapping[str, F], name: object) -> F:
    """Return the facts of a data set by name.

    Raises:
        FedgenError: for an unknown name.
    """
    if not isinstance(name, str) or name not in table:
        similar = difflib.get_close_matches(str(name).lower(), map(str.lower, table), 1)
        choices = [known for known in table if known.lower() in similar] or list(table)
        raise FedgenError("data.name", f"there is no {name!r}", f"choose {', '.join(choices)}")
    return table[name]


def public_rows_of(reader: object, name: object) -> int | None:
    """Return the public number of training images of a data set that is known by name; None for
    other readers.

    Args:
        reader: ``data.type``.
        name: ``data.name``.

    Raises:
        FedgenError: for an unknown name.
    """
    if not isinstance(reader, str) or reader not in CATALOGUE:
        return None
    return facts_of(CATALOGUE[reader], name).rows


def data_label(config: DictConfig) -> str:
    """Return a short name of the data set of a run: that of a named set, or the option of the group
    ``data``."""
    option = str(config.names.data)
    if option not in CATALOGUE:
        return option
    name = str(config.data.name)
    return TORCHVISION[name].file if name in TORCHVISION else name
