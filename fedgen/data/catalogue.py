"""Public facts of data sets that are known by name: labels and sizes of their official splits."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from fedgen.errors import FedgenError


@dataclass(frozen=True)
class Facts:
    """Public facts of a data set.

    rows: number of training images in the official split.
    classes: number of labels.
    file: name of an ``.npz`` with the data set, without its ending.
    """

    rows: int
    classes: int
    file: str


@dataclass(frozen=True)
class MedicalFacts:
    """Public facts of a data set of MedMNIST.

    rows: number of training images.
    labels: names of the labels in order, or of the binary columns.
    has_columns: whether labels are binary columns, one for each finding.
    """

    rows: int
    labels: tuple[str, ...]
    has_columns: bool = False


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
    "pathmnist": MedicalFacts(
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
    "chestmnist": MedicalFacts(
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
        has_columns=True,
    ),
    "dermamnist": MedicalFacts(
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
    "octmnist": MedicalFacts(
        97_477,
        ("choroidal neovascularization", "diabetic macular edema", "drusen", "normal"),
    ),
    "pneumoniamnist": MedicalFacts(4_708, ("normal", "pneumonia")),
    "retinamnist": MedicalFacts(1_080, ("0", "1", "2", "3", "4")),
    "breastmnist": MedicalFacts(546, ("malignant", "normal or benign")),
    "bloodmnist": MedicalFacts(
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
    "tissuemnist": MedicalFacts(
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
    "organamnist": MedicalFacts(34_561, _ORGANS),
    "organcmnist": MedicalFacts(12_975, _ORGANS),
    "organsmnist": MedicalFacts(13_932, _ORGANS),
}
"""Name -> facts (MedMNIST v2; Yang et al. 2023)."""


NAMED: Mapping[object, Mapping[str, Facts | MedicalFacts]] = {
    "torchvision": TORCHVISION,
    "medmnist": MEDMNIST,
}
"""Reader (``data.type``) -> name (``data.name``) -> facts."""


def rows_of(reader: object, name: object) -> int | None:
    """Return the public number of training images of a data set that is known by name; None: the
    reader reads others.

    Args:
        reader: ``data.type``.
        name: ``data.name``.

    Raises:
        FedgenError: for an unknown name.
    """
    table = NAMED.get(reader)
    if table is None:
        return None
    if name not in table:
        similar = difflib.get_close_matches(str(name).lower(), map(str.lower, table), 1)
        guess = [known for known in table if known.lower() in similar]
        remedy = f"choose {', '.join(table)}"
        problem = f"there is no {name!r}" + (f"; did you mean {guess[0]}?" if guess else "")
        raise FedgenError("data.name", problem, remedy)
    return table[str(name)].rows
