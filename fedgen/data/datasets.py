"""Data sets: uint8 images, labels, a test split, and writers where known.

Files are searched under ``data.root`` (default: the environment variable FEDGEN_DATA, else
``~/.cache/fedgen``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgen.data.labels import check_range, has_names, validate_names
from fedgen.data.record_streams import example_content, example_key, keyed_digest
from fedgen.errors import FedgenError
from fedgen.randomness import RandomStreams
from fedgen.storage.io import cache, digest

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Shard:
    """Records of one client: images (n, channels, height, width) uint8 and labels (n,) int64.

    persons: number of the person in each record (n,) int64; None: unknown.
    """

    images: Tensor
    labels: Tensor
    persons: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def by_person(self) -> tuple[Labels, Labels] | None:
        """See ``fedgen.privacy.batch_sampling.Records``."""
        if self.persons is None:
            return None
        persons = self.persons.numpy()
        counts = np.unique(persons, return_counts=True)[1]
        return np.argsort(persons, kind="stable"), np.concatenate([[0], np.cumsum(counts)])

    def repeat_per_person(self, count: int) -> Shard:
        """Return each record ``count`` times, as ``count`` records of one person."""
        images, labels = self.images.repeat(count, 1, 1, 1), self.labels.repeat(count)
        return Shard(images, labels, torch.arange(len(self)).repeat(count))

    def rows(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return images as floats in [0, 1] and labels of some records; the index may have any
        shape."""
        index = index.to(self.images.device)
        return self.images[index].to(torch.float32) / 255, self.labels[index]

    def on(self, device: str) -> Shard:
        """Return the same records on a device; the copy is kept."""
        if device not in self._elsewhere:
            images, labels = (tensor.to(device) for tensor in (self.images, self.labels))
            is_here = images is self.images
            self._elsewhere[device] = self if is_here else Shard(images, labels, self.persons)
        return self._elsewhere[device]

    def cached(self, key: str, make: Callable[[], Tensor]) -> Tensor:
        """Return ``make()``, which depends only on the records and on ``key``; kept for the last
        key."""
        if self._last.get("key") != key:
            self._last.update(key=key, value=make())
        value: Tensor = self._last["value"]
        return value

    @cached_property
    def _last(self) -> dict[str, Any]:
        return {}

    @cached_property
    def _elsewhere(self) -> dict[str, Shard]:
        return {}


@dataclass(frozen=True)
class ExampleKeys:
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

    images, labels: private training records, (n, channels, height, width) uint8 and (n,) int64.
    test_images, test_labels: test split.
    writers: writer of each training image, (n,) int64, or None.
    classes: number of labels.
    example_keys: identity and order of the records.
    persons: person in each training image, (n,) int64, or None: equal numbers are one person.
    unread_columns: names of further columns, which are ignored.
    names: names of the labels in order, if public.
    data_warnings: warnings about persons or labels, shown to the holder of the images alone.
    suggested_person: value of ``data.person`` that probably gives the person in each image; empty:
        none, or persons are given.
    """

    name: str
    images: Images
    labels: Labels
    test_images: Images
    test_labels: Labels
    writers: Labels | None
    classes: int
    example_keys: ExampleKeys
    persons: Labels | None = None
    unread_columns: tuple[str, ...] = ()
    names: tuple[str, ...] | None = None
    data_warnings: tuple[str, ...] = ()
    suggested_person: str = ""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (channels, height, width)."""
        _, channels, height, width = self.images.shape
        return channels, height, width

    @property
    def is_remote(self) -> bool:
        """Return whether the images are elsewhere (``public_facts``)."""
        return not len(self.labels)

    @cached_property
    def digest(self) -> str:
        """Return a digest of all training records in order, and of their persons, computed once; it
        stays on the server."""
        writers = b"" if self.writers is None else self.writers.tobytes()
        rows = digest(self.images.tobytes(), self.labels.tobytes(), writers)
        if self._by_writer or self.persons is None:
            return rows
        return digest(rows.encode(), self.persons.tobytes())

    @cached_property
    def images_digest(self) -> str:
        """Return the digest by which records are accounted over all runs: the set of images,
        regardless of order, labels and persons."""
        return digest(*(image_digest.encode() for image_digest in sorted(self._digests)))

    @property
    def account_of_all(self) -> str:
        """Return the same digest over training and test images together: it also identifies runs on
        another split of the same images, because names of files determine the split."""
        test = [digest(image.tobytes()) for image in self.test_images]
        return digest(*(image_digest.encode() for image_digest in sorted([*self._digests, *test])))

    def digest_of(self, groups: Iterable[Labels]) -> str:
        """Return a digest of the grouping of training images, regardless of order."""
        images = self._digests
        digests_by_group = [sorted(images[row] for row in group) for group in groups]
        return digest(
            *(
                digest(*(i.encode() for i in digests)).encode()
                for digests in sorted(digests_by_group)
            )
        )

    @cached_property
    def _digests(self) -> list[str]:
        return [digest(image.tobytes()) for image in self.images]

    @property
    def _by_writer(self) -> bool:
        """Return whether the person in an image is its writer."""
        return self.persons is self.writers

    @property
    def has_persons(self) -> bool:
        """Return whether the person in each image is given."""
        return self.persons is not None and not self._by_writer

    def hold_out(
        self,
        count: int,
        streams: RandomStreams,
        public_rows: int | None = None,
        by_person: bool = False,
    ) -> Dataset:
        """Return the data set with ``count`` training images, chosen by public streams, in place of
        its test split; they are excluded from training.

        If persons are given, whole persons are held out, about ``count`` of ``public_rows`` images,
        each by a digest of its own images: removing a person moves no other.

        Args:
            public_rows: public number near that of the training images; None: their number, on
                which the choice then depends.
            by_person: whether persons are held out even if they are the writers.

        Raises:
            FedgenError: if that leaves no records.
        """
        if count == 0:
            return self
        if count >= len(self.labels):
            raise FedgenError(
                "held_out",
                f"{count} of {len(self.labels)} images leave none to train on",
                "lower it",
            )
        if self.has_persons or (by_person and self.persons is not None):
            is_out = self._held_out_persons(count / (public_rows or len(self.labels)), streams)
            out, rest = np.flatnonzero(is_out), np.flatnonzero(~is_out)
            if not len(out) or not len(rest):
                problem = f"{count} of {len(self.labels)} images hold out all persons, or none"
                raise FedgenError("held_out", problem, "raise it if none, lower it if all")
        else:
            order = torch.randperm(len(self.labels), generator=streams.public("held out")).numpy()
            out, rest = np.sort(order[:count]), np.sort(order[count:])
        writers = None if self.writers is None else self.writers[rest]
        persons = None if self.persons is None else self.persons[rest]
        return replace(
            self,
            images=self.images[rest],
            labels=self.labels[rest],
            test_images=self.images[out],
            test_labels=self.labels[out],
            writers=writers,
            persons=writers if self._by_writer else persons,
        )

    def _held_out_persons(self, share: float, streams: RandomStreams) -> NDArray[np.bool_]:
        """Return a mask (n,) of the images of persons that are held out, each with this
        probability."""
        assert self.persons is not None
        key = example_key(streams, "held out", "persons")
        is_out = np.zeros(len(self.labels), bool)
        for person in np.unique(self.persons):
            rows = np.flatnonzero(self.persons == person)
            contents = [example_content(self.images[row], int(self.labels[row])) for row in rows]
            person_digest = keyed_digest(
                key, b"".join(sorted(keyed_digest(key, c) for c in contents))
            )
            is_out[rows] = int.from_bytes(person_digest[:6], "little") / 2**48 < share
        return is_out

    def shard(self, index: Labels) -> Shard:
        """Return the given training records."""
        images, labels = torch.from_numpy(self.images[index]), torch.from_numpy(self.labels[index])
        persons = None if self.persons is None else torch.from_numpy(self.persons[index])
        return Shard(images, labels, persons)


def data_root(root: str | None) -> Path:
    """Return the folder that is searched for data."""
    return Path(root or os.environ.get("FEDGEN_DATA") or cache()).expanduser()


def public_facts(
    classes: int, shape: Sequence[int], labels: Sequence[str] | None = None, **_: object
) -> Dataset:
    """Return public facts about images that are elsewhere; no record is here.

    Args:
        classes: number of labels.
        shape: (channels, height, width) of each image.
        labels: names of the labels in order, if given.

    Raises:
        FedgenError: for invalid facts.
    """
    if not 1 <= classes <= _MOST_CLASSES:
        problem = f"must be from 1 to {_MOST_CLASSES:,}, got {classes}"
        raise FedgenError("data.classes", problem, "give the number of labels")
    if labels is not None and len(validate_names(labels)) != classes:
        raise FedgenError("data.classes", f"is {classes}, of {len(labels)} labels", "correct it")
    if len(shape) != 3 or shape[0] not in (1, 3) or not all(8 <= n <= 1024 for n in shape[1:]):
        problem = f"must be [1 or 3, height, width], got {list(shape)}"
        raise FedgenError("data.shape", problem, "e.g. [3,64,64]")
    images, nothing = np.empty((0, *shape), np.uint8), np.empty(0, np.int64)
    places = ExampleKeys("as at its node", "the node's own data")
    return Dataset("public_facts", images, nothing, images, nothing, None, classes, places)


_MOST_CLASSES = 10_000


def as_images(file: Path | str, images: NDArray[np.generic]) -> Images:
    """Convert (n, h, w), (n, h, w, channels) or (n, channels, h, w) uint8 to the last form."""
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise FedgenError(
            "data",
            f"{file} contains images of type {images.dtype} and shape {images.shape}",
            "they must be uint8, 0 to 255, (n, height, width), with 3 last or with channels second",
        )
    if images.ndim == 4 and images.shape[1] in (1, 3) and images.shape[3] not in (1, 3):
        return np.ascontiguousarray(images.astype(np.uint8, copy=False))
    channels_last = images[..., None] if images.ndim == 3 else images
    return np.ascontiguousarray(channels_last.transpose(0, 3, 1, 2).astype(np.uint8, copy=False))


def build_dataset(
    name: str,
    images: NDArray[np.generic],
    labels: NDArray[np.generic],
    test_images: NDArray[np.generic],
    test_labels: NDArray[np.generic],
    writers: NDArray[np.generic] | None,
    classes: int,
    places: ExampleKeys,
    persons: NDArray[np.generic] | None = None,
    unread: tuple[str, ...] = (),
    names: Sequence[str] | None = None,
    data_warnings: tuple[str, ...] = (),
    suggested_person: str = "",
) -> Dataset:
    """Return a data set of these arrays.

    Args:
        places: identity and order of the records.
        persons: person in each image; ``writers`` if that is its writer.

    Raises:
        FedgenError: if they are invalid.
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
    arrays = {"images": images, "labels": labels, "clients": writers, "persons": persons}
    _check_lengths(name, arrays, {"images": test_images, "labels": test_labels})
    if not len(labels):
        problem = f"{name} has no training images and {len(test_labels):,} test images"
        remedy = "provide both splits: folders train/ and test/, a column split, or archives"
        raise FedgenError("data", problem, remedy)
    for split_labels in (labels, test_labels):
        check_range(name, split_labels, classes)
    if names is not None and not has_names(names):
        problem = f"{name} has label names that are not valid folder names"
        remedy = "rename the labels, set data.labels=[...], or set data.names=false"
        raise FedgenError("data.names", problem, remedy)
    writer_numbers = None if writers is None else writers.astype(np.int64)
    person_numbers = None if persons is None else persons.astype(np.int64)
    return Dataset(
        name,
        np.ascontiguousarray(images, dtype=np.uint8),
        labels.astype(np.int64),
        np.ascontiguousarray(test_images, dtype=np.uint8),
        test_labels.astype(np.int64),
        writer_numbers,
        classes,
        places,
        writer_numbers if persons is writers else person_numbers,
        unread,
        None if names is None else tuple(names),
        data_warnings,
        suggested_person,
    )


def _check_lengths(
    name: str,
    train: Mapping[str, NDArray[np.generic] | None],
    test: Mapping[str, NDArray[np.generic]],
) -> None:
    """Raise FedgenError unless each split has as many of everything."""
    for split, arrays in (("to train on", train), ("to test on", test)):
        sizes = {what: len(array) for what, array in arrays.items() if array is not None}
        if len(set(sizes.values())) > 1:
            counted = ", ".join(f"{count:,} {what}" for what, count in sizes.items())
            problem = f"{name} has {counted} {split}"
            raise FedgenError("data", problem, "give one of each for every image")
