"""Federated EMNIST (LEAF): handwritten characters by writer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgen.data.datasets import (
    Dataset,
    ExampleKeys,
    Images,
    Labels,
    as_images,
    build_dataset,
    data_root,
)
from fedgen.data.labels import identities, to_numbers
from fedgen.data.npz import npz_arrays
from fedgen.data.record_streams import example_uniforms
from fedgen.errors import FedgenError
from fedgen.randomness import RandomStreams
from fedgen.storage.io import share, temporary_path


def _test_split(
    images: Images, labels: Labels, writers: Labels, streams: RandomStreams
) -> NDArray[np.bool_]:
    test = np.zeros(len(writers), dtype=bool)
    order = np.argsort(writers, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(writers[order])) + 1):
        names = "femnist", "split", int(writers[rows[0]])
        test[rows] = example_uniforms(images[rows], labels[rows], streams, *names) < 0.1
    return test


def femnist(
    streams: RandomStreams,
    root: str | None,
    classes: int = 62,
    least_rows: int = 1,
    disjoint_from_mnist: bool = False,
    **_: object,
) -> Dataset:
    """Return Federated EMNIST (LEAF) from ``femnist.npz``: ``images``, ``labels`` 0..61,
    ``writer``; black on white in the file, white on black here, as in MNIST. A missing file is
    created from ``flwrlabs/femnist`` by flwr-datasets.

    A tenth of the images of each writer is the test split, by public streams keyed by the writer
    and the image: no other image affects the choice.

    Args:
        classes: 10 (digits), 36 (letters with cases merged) or 62.
        least_rows: minimum number of training images within the chosen label set; writers with
            fewer are excluded. That an included writer has as many is public.
        disjoint_from_mnist: excludes writers of MNIST digits, identified by ``writer_nist_id`` (of
            each writer of the file) and ``mnist.npz``.
    """
    file = data_root(root) / "femnist.npz"
    if not file.exists():
        femnist_from_hub(file)
    arrays = npz_arrays(file, ["images", "labels", "writer"])
    images = 255 - as_images(file, arrays["images"])
    labels = to_numbers(f"{file}, labels", arrays["labels"], 62)
    writers = identities(f"{file}, writer", arrays["writer"])
    if not len(images) == len(labels) == len(writers):
        raise FedgenError("data", f"{file} has not one label and writer per image", "correct it")
    test = _test_split(images, labels, writers, streams)
    if classes == 10:
        kept = labels < 10
        images, labels, writers, test = images[kept], labels[kept], writers[kept], test[kept]
    elif classes == 36:
        labels = np.where(labels >= 36, labels - 26, labels)
    elif classes != 62:
        raise FedgenError("data.classes", f"{classes} is no label set of femnist", "10, 36 or 62")
    if least_rows < 1:
        raise FedgenError("data.least_rows", f"must be at least 1, got {least_rows}", "raise it")
    writer_ids, counts = np.unique(writers[~test], return_counts=True)
    included = np.isin(writers, writer_ids[counts >= least_rows])
    if disjoint_from_mnist:
        included &= ~np.isin(writers, _writers_of_mnist(file, arrays))
    if not included[~test].any():
        raise FedgenError("data.least_rows", "leaves no writer", "lower it")
    images, labels, writers, test = (
        images[included],
        labels[included],
        writers[included],
        test[included],
    )
    of = writers[~test]
    return build_dataset(
        "femnist",
        images[~test],
        labels[~test],
        images[test],
        labels[test],
        of,
        classes,
        ExampleKeys(
            "an image with its label and writer",
            "its position in the file among the training images",
            "the training split depends on image content (partition=by_writer protects writers)",
        ),
        of,
    )


def _writers_of_mnist(file: Path, arrays: dict[str, NDArray[np.generic]]) -> Labels:
    """Return the writers of femnist who wrote digits of MNIST, by NIST's numbers."""
    other = file.with_name("mnist.npz")
    if "writer_nist_id" not in arrays or not other.exists():
        raise FedgenError(
            "data.disjoint_from_mnist",
            f"needs writer_nist_id in {file}, and {other} with writers",
            "set it to false",
        )
    digits = npz_arrays(other, ["train_writer", "test_writer"])
    mnist_writers = np.concatenate([digits["train_writer"], digits["test_writer"]])
    return np.flatnonzero(np.isin(arrays["writer_nist_id"], mnist_writers))


def femnist_from_hub(file: Path) -> None:
    """Create ``femnist.npz`` from ``flwrlabs/femnist`` on Hugging Face, whose writers are
    identified by ``writer_id``.

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
    """Return the arrays of ``femnist.npz`` from rows with ``image`` (PIL, greyscale), ``character``
    (0..61) and ``writer_id`` (``f0005_26``: NIST's number of the writer first)."""
    images, labels, names = [], [], []
    for row in rows:
        images.append(np.asarray(row["image"].convert("L"), dtype=np.uint8))
        labels.append(int(row["character"]))
        names.append(str(row["writer_id"]))
    writer_ids, writers = np.unique(np.array(names), return_inverse=True)
    numbers = [int(name.lstrip("f").partition("_")[0]) for name in writer_ids]
    return {
        "images": np.stack(images),
        "labels": np.array(labels, dtype=np.uint8),
        "writer": writers.astype(np.int16),
        "writer_ids": writer_ids,
        "writer_nist_id": np.array(numbers, dtype=np.int16),
    }
