"""Data sets: uint8 images, real labels, a real test split, and writers where there are any.

Found in this order under ``data.root`` (default: the environment variable FEDGEN_DATA, else
``~/.cache/fedgen``): ``NAME.npz`` with the arrays named below; the folder that torchvision keeps;
torchvision's download.

``NAME.npz``: ``train_images`` (n, h, w) or (n, h, w, 3) uint8, ``train_labels`` (n,) integers, and
the same with ``test_``; optional ``train_writer`` (n,), whose a row is, and ``train_person`` (n,),
whom it shows: without it, its writer.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgen.coins import Coins
from fedgen.data.labels import are_names, check_range, identities, named, numbers
from fedgen.data.rows import row_coins
from fedgen.errors import FedgenError
from fedgen.files import cache, digest, read_arrays, read_bounded, share, temporary_path, user_umask

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Shard:
    """Rows of one client: images (n, channels, height, width) uint8 and labels (n,) int64."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def times(self, count: int) -> Shard:
        """Each row so often."""
        if count == 1:
            return self
        return Shard(self.images.repeat(count, 1, 1, 1), self.labels.repeat(count))

    def rows(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Images as floats in [0, 1] and labels of some rows; any shape of index."""
        index = index.to(self.images.device)
        return self.images[index].to(torch.float32) / 255, self.labels[index]

    def on(self, device: str) -> Shard:
        """The same rows on a device, where they stay."""
        if device not in self._elsewhere:
            images, labels = (each.to(device) for each in (self.images, self.labels))
            self._elsewhere[device] = self if images is self.images else Shard(images, labels)
        return self._elsewhere[device]

    def kept(self, key: str, make: Callable[[], Tensor]) -> Tensor:
        """What follows from the rows and from ``key``, made once: the last such is kept."""
        if self._last.get("key") != key:
            self._last.update(key=key, found=make())
        found: Tensor = self._last["found"]
        return found

    @cached_property
    def _last(self) -> dict[str, Any]:
        return {}

    @cached_property
    def _elsewhere(self) -> dict[str, Shard]:
        return {}


@dataclass(frozen=True)
class Places:
    """Record identity and row order of a data set.

    Under replace-one, methods that split rows by their number (GS-WGAN's critics) assume that
    replacing one record leaves the row numbers of all others unchanged.

    record: identity of a record; neighbouring data sets differ in one such record.
    order: key that determines the row number.
    moves: why replacing a record may renumber others, with a remedy in parentheses; else "".
    """

    record: str
    order: str
    moves: str = ""


@dataclass(frozen=True)
class Dataset:
    """A data set in memory.

    images, labels: the private training rows, (n, channels, height, width) uint8 and (n,) int64.
    test_images, test_labels: the real test split.
    writers: who made each training row, (n,) int64, or None.
    classes: number of labels.
    places: identity and order of the records.
    persons: whom each training row shows, (n,) int64, or None: by one number, one person.
    unread: names of what was told of rows beside that, and is not looked at.
    names: names of the labels, in order, if these are public.
    """

    name: str
    images: Images
    labels: Labels
    test_images: Images
    test_labels: Labels
    writers: Labels | None
    classes: int
    places: Places
    persons: Labels | None = None
    unread: tuple[str, ...] = ()
    names: tuple[str, ...] | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width)."""
        _, channels, height, width = self.images.shape
        return channels, height, width

    @property
    def elsewhere(self) -> bool:
        """Whether the rows are not here (``public_facts``)."""
        return not len(self.labels)

    @cached_property
    def digest(self) -> str:
        """A digest of all training rows in their order, and whom they show, computed once; it
        belongs to the server side."""
        writers = b"" if self.writers is None else self.writers.tobytes()
        rows = digest(self.images.tobytes(), self.labels.tobytes(), writers)
        if self._by_writer or self.persons is None:
            return rows
        return digest(rows.encode(), self.persons.tobytes())

    @cached_property
    def account(self) -> str:
        """What the rows are accounted by over all runs: which images they are, in any order and
        with any labels, whomever they show."""
        return digest(*(each.encode() for each in sorted(self._digests)))

    @property
    def account_of_all(self) -> str:
        """The same of them and the test split's: where names decide which rows train, other names
        leave others."""
        test = [digest(image.tobytes()) for image in self.test_images]
        return digest(*(each.encode() for each in sorted([*self._digests, *test])))

    def digest_of(self, groups: Iterable[Labels]) -> str:
        """A digest of which images are together in groups of training rows, in any order."""
        images = self._digests
        told = [sorted(images[row] for row in group) for group in groups]
        return digest(*(digest(*(i.encode() for i in each)).encode() for each in sorted(told)))

    @cached_property
    def _digests(self) -> list[str]:
        return [digest(image.tobytes()) for image in self.images]

    @property
    def _by_writer(self) -> bool:
        """Whether whom a row shows is who made it."""
        return self.persons is self.writers

    @property
    def shows_persons(self) -> bool:
        """Whether somebody said whom each row shows."""
        return self.persons is not None and not self._by_writer

    def holding_out(self, count: int, coins: Coins) -> Dataset:
        """The data set with ``count`` training rows, by public coins, in place of its test split:
        nobody trains on them.

        Raises:
            FedgenError: if that leaves no row.
        """
        if count == 0:
            return self
        if count >= len(self.labels):
            raise FedgenError(
                "held_out", f"{count} of {len(self.labels)} rows leave none to train on", "lower it"
            )
        order = torch.randperm(len(self.labels), generator=coins.public("held out")).numpy()
        out, rest = np.sort(order[:count]), np.sort(order[count:])
        writers = None if self.writers is None else self.writers[rest]
        persons = None if self.persons is None else self.persons[rest]
        return Dataset(
            self.name,
            self.images[rest],
            self.labels[rest],
            self.images[out],
            self.labels[out],
            writers,
            self.classes,
            self.places,
            writers if self._by_writer else persons,
            self.unread,
            self.names,
        )

    def shard(self, index: Labels) -> Shard:
        """The given training rows."""
        return Shard(torch.from_numpy(self.images[index]), torch.from_numpy(self.labels[index]))


def root_of(root: str | None) -> Path:
    """Where data is looked for."""
    return Path(root or os.environ.get("FEDGEN_DATA") or cache()).expanduser()


def public_facts(
    classes: int, shape: Sequence[int], labels: Sequence[str] | None = None, **_: object
) -> Dataset:
    """What everybody knows of images that lie elsewhere: no row is here.

    Args:
        classes: number of labels.
        shape: (channels, height, width) of each image.
        labels: names of the labels, in order, if these are told.

    Raises:
        FedgenError: for what no images have.
    """
    if not 1 <= classes <= _MOST_CLASSES:
        problem = f"must be from 1 to {_MOST_CLASSES:,}, got {classes}"
        raise FedgenError("data.classes", problem, "give the number of labels")
    if labels is not None and len(named(labels)) != classes:
        raise FedgenError("data.classes", f"is {classes}, of {len(labels)} labels", "correct it")
    if len(shape) != 3 or shape[0] not in (1, 3) or not all(8 <= n <= 1024 for n in shape[1:]):
        problem = f"must be [1 or 3, height, width], got {list(shape)}"
        raise FedgenError("data.shape", problem, "e.g. [3,64,64]")
    images, nothing = np.empty((0, *shape), np.uint8), np.empty(0, np.int64)
    places = Places("as at its node", "the node's own data")
    return Dataset("public_facts", images, nothing, images, nothing, None, classes, places)


_MOST_CLASSES = 10_000


def digits(coins: Coins, **_: object) -> Dataset:
    """scikit-learn's bundled 8x8 digits (UCI, 1,797 rows): 1,437 to train, 360 to test, by public
    coins."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    scaled = np.rint(images * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    order = torch.randperm(len(labels), generator=coins.public("digits", "split")).numpy()
    train, test = order[:1437], order[1437:]
    return checked(
        "digits",
        scaled[train],
        labels[train],
        scaled[test],
        labels[test],
        None,
        10,
        Places("a row of scikit-learn's file", "a fixed permutation of row numbers"),
    )


def torchvision_set(name: str, root: str | None, kind: str, **_: object) -> Dataset:
    """MNIST or Fashion-MNIST: ``NAME.npz``, else torchvision's files, else its download.

    Args:
        name: ``mnist`` or ``fashion_mnist``.
        kind: torchvision's class, ``MNIST`` or ``FashionMNIST``.
    """
    folder = root_of(root)
    if (folder / f"{name}.npz").exists():
        return from_npz(name, folder / f"{name}.npz", 10)
    import torchvision

    load = getattr(torchvision.datasets, kind)
    try:
        with user_umask():
            train, test = (load(str(folder), train=part, download=True) for part in (True, False))
    except (RuntimeError, OSError) as error:
        raise FedgenError(
            "data.root",
            f"{name} is neither in {folder} nor could it be downloaded",
            f"put {name}.npz or torchvision's files there, or connect to a network",
        ) from error
    return checked(
        name,
        train.data.numpy()[:, None],
        train.targets.numpy(),
        test.data.numpy()[:, None],
        test.targets.numpy(),
        None,
        10,
        Places("a row of torchvision's file", "its number"),
    )


def femnist(
    coins: Coins,
    root: str | None,
    classes: int = 62,
    least_rows: int = 1,
    disjoint_from_mnist: bool = False,
    **_: object,
) -> Dataset:
    """Federated EMNIST (LEAF) from ``femnist.npz``: ``images``, ``labels`` 0..61, ``writer``; black
    on white in the file, white on black here, as MNIST has it. Where there is no such file it is
    made of ``flwrlabs/femnist``, by flwr-datasets.

    A tenth of each writer's rows is the test split, by public coins keyed by the writer and the
    row: no other row moves it.

    Args:
        classes: 10 (digits), 36 (letters of either case merged) or 62.
        least_rows: of the label set, to train on: writers with fewer take no part. That one who
            takes part has as many is public.
        disjoint_from_mnist: leaves out writers of MNIST's digits, told by ``writer_nist_id`` (of
            each writer of the file) and ``mnist.npz``.
    """
    file = root_of(root) / "femnist.npz"
    if not file.exists():
        femnist_from_hub(file)
    arrays = _arrays(file, ["images", "labels", "writer"])
    images = 255 - as_images(file, arrays["images"])
    labels = numbers(f"{file}, labels", arrays["labels"], 62)
    writers = identities(f"{file}, writer", arrays["writer"])
    if not len(images) == len(labels) == len(writers):
        raise FedgenError("data", f"{file} has not one label and writer per image", "correct it")
    test = np.zeros(len(writers), dtype=bool)
    order = np.argsort(writers, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(writers[order])) + 1):
        names = "femnist", "split", int(writers[rows[0]])
        test[rows] = row_coins(images[rows], labels[rows], coins, *names) < 0.1
    if classes == 10:
        kept = labels < 10
        images, labels, writers, test = images[kept], labels[kept], writers[kept], test[kept]
    elif classes == 36:
        labels = np.where(labels >= 36, labels - 26, labels)
    elif classes != 62:
        raise FedgenError("data.classes", f"{classes} is no label set of femnist", "10, 36 or 62")
    if least_rows < 1:
        raise FedgenError("data.least_rows", f"must be at least 1, got {least_rows}", "raise it")
    there_are, counts = np.unique(writers[~test], return_counts=True)
    there = np.isin(writers, there_are[counts >= least_rows])
    if disjoint_from_mnist:
        there &= ~np.isin(writers, _writers_of_mnist(file, arrays))
    if not there[~test].any():
        raise FedgenError("data.least_rows", "leaves no writer", "lower it")
    images, labels, writers, test = images[there], labels[there], writers[there], test[there]
    of = writers[~test]
    return checked(
        "femnist",
        images[~test],
        labels[~test],
        images[test],
        labels[test],
        of,
        classes,
        Places(
            "an image with its label and writer",
            "its number in the file among the rows that train",
            "which rows train follows from what is in them (partition=by_writer protects writers)",
        ),
        of,
    )


def _writers_of_mnist(file: Path, arrays: dict[str, NDArray[np.generic]]) -> Labels:
    """Writers of femnist who wrote digits of MNIST, by NIST's numbers."""
    other = file.with_name("mnist.npz")
    if "writer_nist_id" not in arrays or not other.exists():
        raise FedgenError(
            "data.disjoint_from_mnist",
            f"needs writer_nist_id in {file}, and {other} with writers",
            "set it to false",
        )
    digits = _arrays(other, ["train_writer", "test_writer"])
    known = np.concatenate([digits["train_writer"], digits["test_writer"]])
    return np.flatnonzero(np.isin(arrays["writer_nist_id"], known))


def femnist_from_hub(file: Path) -> None:
    """Makes ``femnist.npz`` of Hugging Face's ``flwrlabs/femnist``, whose writers are told by
    ``writer_id``.

    Raises:
        FedgenError: without flwr-datasets, or if it cannot be downloaded.
    """
    try:
        from flwr_datasets import FederatedDataset

        rows = FederatedDataset(dataset="flwrlabs/femnist", partitioners={}).load_split("train")
        arrays = femnist_arrays(rows)
    except Exception as error:
        raise FedgenError(
            "data.root",
            f"femnist.npz is not in {file.parent}, nor could it be downloaded "
            f"({type(error).__name__})",
            "put it there (arrays images, labels, writer), point data.root to it, or connect to a "
            'network and pip install "fedgen[femnist]"',
        ) from error
    with temporary_path(file) as fresh:
        np.savez_compressed(fresh, **arrays)  # type: ignore[arg-type]
        share(fresh)
        fresh.replace(file)


def femnist_arrays(rows: Iterable[Mapping[str, Any]]) -> dict[str, NDArray[np.generic]]:
    """The arrays of ``femnist.npz`` from rows with ``image`` (PIL, greyscale), ``character``
    (0..61) and ``writer_id`` (``f0005_26``: NIST's number of the writer first)."""
    images, labels, names = [], [], []
    for row in rows:
        images.append(np.asarray(row["image"].convert("L"), dtype=np.uint8))
        labels.append(int(row["character"]))
        names.append(str(row["writer_id"]))
    known, writers = np.unique(np.array(names), return_inverse=True)
    numbers = [int(name.lstrip("f").partition("_")[0]) for name in known]
    return {
        "images": np.stack(images),
        "labels": np.array(labels, dtype=np.uint8),
        "writer": writers.astype(np.int16),
        "writer_ids": known,
        "writer_nist_id": np.array(numbers, dtype=np.int16),
    }


_MAX_LIST_BYTES = 2**26


def celeba(root: str | None, **_: object) -> Dataset:
    """Load CelebA at 32x32 with gender as the label, from the user's own copy in torchvision's
    layout: ``celeba/img_align_celeba/*.jpg``, ``celeba/list_attr_celeba.txt`` and
    ``celeba/list_eval_partition.txt``. The validation split is not used.

    Raises:
        FedgenError: if files are missing or malformed.
    """
    from fedgen.data.images import read_images

    folder = root_of(root) / "celeba"
    try:
        names, male = _celeba_attribute(folder / "list_attr_celeba.txt", "Male")
        parts = dict(map(str.split, _lines(folder / "list_eval_partition.txt")))
        part = np.array([int(parts[name]) for name in names])
        if any(Path(name).name != name for name in names):
            raise ValueError("an image name contains a path")
        if not {0, 2} <= set(part.tolist()):
            raise ValueError("a split is empty")
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise FedgenError(
            "data.root",
            f"no readable CelebA in {folder} ({type(error).__name__})",
            "put your own copy there: img_align_celeba/, list_attr_celeba.txt, "
            "list_eval_partition.txt",
        ) from error

    def images_of(rows: NDArray[np.bool_]) -> Images:
        files = [(n, folder / "img_align_celeba" / n) for n in np.array(names)[rows].tolist()]
        return read_images(folder, files, 32, 3, key="data.root")

    train, test = part == 0, part == 2
    places = Places("a line of list_attr_celeba.txt", "its number")
    return checked(
        "celeba", images_of(train), male[train], images_of(test), male[test], None, 2, places
    )


def _celeba_attribute(file: Path, attribute: str) -> tuple[list[str], Labels]:
    lines = _lines(file)
    column = lines[1].split().index(attribute)
    rows = [line.split() for line in lines[2:] if line.strip()]
    values = np.array([int(row[1 + column] == "1") for row in rows], dtype=np.int64)
    return [row[0] for row in rows], values


def _lines(file: Path) -> list[str]:
    return read_bounded(file, _MAX_LIST_BYTES).decode().splitlines()


def centre_square(image: object, size: int) -> Images:
    """The middle of an image, (size, size) or (size, size, channels)."""
    from PIL import Image, ImageOps

    assert isinstance(image, Image.Image)
    fitted = ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)
    return np.asarray(fitted, dtype=np.uint8)


def from_npz(
    name: str,
    file: Path,
    classes: int,
    key: str = "data.root",
    names: Sequence[str] | None = None,
) -> Dataset:
    """The data set in an npz file, as in the module's text; ``key``: the setting that named it,
    ``names``: of the labels, in order."""
    arrays = _arrays(file, ["train_images", "train_labels", "test_images", "test_labels"], key)
    writers, persons = (
        None if name not in arrays else identities(f"{file}, {name}", arrays[name])
        for name in ("train_writer", "train_person")
    )
    labels, test_labels = (
        numbers(f"{file}, {name}", arrays[name], classes, names)
        for name in ("train_labels", "test_labels")
    )
    moves = ""
    if classes > 1 and len(labels) > classes and (np.diff(labels) >= 0).all():
        moves = "rows are sorted by label (shuffle the rows of the file)"
    return checked(
        name,
        as_images(file, arrays["train_images"]),
        labels,
        as_images(file, arrays["test_images"]),
        test_labels,
        writers,
        classes,
        Places("a row of the file", "its number", moves),
        persons=writers if persons is None else persons,
        names=names,
    )


def _arrays(
    file: Path, needed: list[str], key: str = "data.root"
) -> dict[str, NDArray[np.generic]]:
    """The arrays of an npz file, never unpickled."""
    try:
        with file.open("rb") as opened:
            found = read_arrays(opened)
    except MemoryError as error:
        raise FedgenError(key, f"{file}: {error}", "take part of it") from error
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise FedgenError(
            key, f"{file} is not a readable npz file ({error})", "write it anew"
        ) from error
    missing = [name for name in needed if name not in found]
    if missing:
        raise FedgenError(
            key, f"{file} lacks {', '.join(missing)}", f"it needs {', '.join(needed)}"
        )
    if any(found[name].size == 0 for name in needed):
        raise FedgenError(key, f"{file} has no rows", "give it some")
    return found


def as_images(file: Path | str, images: NDArray[np.generic]) -> Images:
    """(n, h, w), (n, h, w, channels) or (n, channels, h, w) uint8 to the last of these."""
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise FedgenError(
            "data",
            f"{file} holds images of type {images.dtype} and shape {images.shape}",
            "they must be uint8, 0 to 255, (n, height, width), with 3 last or with channels second",
        )
    if images.ndim == 4 and images.shape[1] in (1, 3) and images.shape[3] not in (1, 3):
        return np.ascontiguousarray(images.astype(np.uint8, copy=False))
    channels_last = images[..., None] if images.ndim == 3 else images
    return np.ascontiguousarray(channels_last.transpose(0, 3, 1, 2).astype(np.uint8, copy=False))


def checked(
    name: str,
    images: NDArray[np.generic],
    labels: NDArray[np.generic],
    test_images: NDArray[np.generic],
    test_labels: NDArray[np.generic],
    writers: NDArray[np.generic] | None,
    classes: int,
    places: Places,
    persons: NDArray[np.generic] | None = None,
    unread: tuple[str, ...] = (),
    names: Sequence[str] | None = None,
) -> Dataset:
    """A data set of these arrays.

    Args:
        places: identity and order of the records.
        persons: whom each row shows; ``writers`` itself where that is who made it.

    Raises:
        FedgenError: if they are none.
    """
    if images.ndim == 4 and images.shape[-1] == 3 and images.shape[1] != 3:
        images, test_images = images.transpose(0, 3, 1, 2), test_images.transpose(0, 3, 1, 2)
    if (
        images.ndim != 4
        or images.shape[1] not in (1, 3)
        or images.shape[2] != images.shape[3]
        or images.shape[1:] != test_images.shape[1:]
    ):
        raise FedgenError(
            "data",
            f"{name} has images of shape {images.shape[1:]} to train on and "
            f"{test_images.shape[1:]} to test on",
            "they must be square, with one or three channels, and the same in both splits",
        )
    given = {"images": images, "labels": labels, "clients": writers, "persons": persons}
    sizes = {what: len(each) for what, each in given.items() if each is not None}
    tests = {"images": len(test_images), "labels": len(test_labels)}
    for split, found in (("to train on", sizes), ("to test on", tests)):
        if len(set(found.values())) > 1:
            counted = ", ".join(f"{count:,} {what}" for what, count in found.items())
            problem = f"{name} has {counted} {split}"
            raise FedgenError("data", problem, "give one of each for every image")
    for split_labels in (labels, test_labels):
        check_range(name, split_labels, classes)
    if names is not None and not are_names(names):
        problem = f"{name} has label names that are not valid folder names"
        remedy = "rename the labels, set data.labels=[...], or set data.names=false"
        raise FedgenError("data.names", problem, remedy)
    of = None if writers is None else writers.astype(np.int64)
    shown = None if persons is None else persons.astype(np.int64)
    return Dataset(
        name,
        np.ascontiguousarray(images, dtype=np.uint8),
        labels.astype(np.int64),
        np.ascontiguousarray(test_images, dtype=np.uint8),
        test_labels.astype(np.int64),
        of,
        classes,
        places,
        of if persons is writers else shown,
        unread,
        None if names is None else tuple(names),
    )
