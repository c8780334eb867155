"""Data sets: layouts, shapes, labels, and one line for files that cannot be read."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from mutation import kills
from PIL import Image

from fedgen import cli
from fedgen.data.celeba import celeba
from fedgen.data.datasets import Shard
from fedgen.data.digits import digits
from fedgen.data.femnist import femnist, femnist_arrays
from fedgen.data.folders import folder
from fedgen.data.torchvision import torchvision_set
from fedgen.errors import FedgenError
from fedgen.randomness import RandomStreams

REAL = os.environ.get("FEDGEN_DATA")


def test_digits(streams: RandomStreams) -> None:
    data = digits(streams)
    assert data.images.shape == (1437, 1, 8, 8)
    assert data.test_images.shape == (360, 1, 8, 8)
    assert data.images.dtype == np.uint8
    assert data.images.max() == 255
    assert set(data.labels) == set(range(10))


def test_a_shard_gives_floats_in_the_unit_interval(streams: RandomStreams) -> None:
    shard = digits(streams).shard(np.arange(5))
    images, labels = shard.rows(torch.tensor([[0, 1], [2, 4]]))
    assert images.shape == (2, 2, 1, 8, 8)
    assert labels.shape == (2, 2)
    assert images.min() >= 0
    assert images.max() <= 1
    assert len(shard) == 5


def test_mnist_from_npz(data_root: Path) -> None:
    data = torchvision_set(str(data_root), "MNIST")
    assert data.images.shape == (60, 1, 28, 28)
    assert data.writers is not None
    assert len(set(data.writers)) == 6


def test_mnist_from_the_files_of_torchvision(tmp_path: Path) -> None:
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for part, rows in (("train", 6), ("t10k", 4)):
        images, labels = np.zeros((rows, 28, 28), np.uint8), np.arange(rows, dtype=np.uint8)
        head = np.array([2051, rows, 28, 28], ">i4").tobytes()
        (folder / f"{part}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        head = np.array([2049, rows], ">i4").tobytes()
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(head + labels.tobytes())
    data = torchvision_set(str(tmp_path), "MNIST")
    assert data.images.shape == (6, 1, 28, 28)
    assert list(data.test_labels) == [0, 1, 2, 3]


@kills(
    "fedgen/run/setup.py",
    "    if held.example_keys.moves and by_place:",
    "    if held.example_keys.moves and not by_place:",
)
def test_methods_that_need_fixed_positions_refuse_femnist(
    data_root: Path, streams: RandomStreams, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which images of femnist train depends on their content: replacing one may leave fewer, and
    changes the subsets of all critics. Writers keep their positions."""
    with np.load(data_root / "femnist.npz") as file:
        arrays = dict(file)
    counts = set()
    for value in range(30):
        arrays["images"][7] = value
        np.savez(data_root / "femnist.npz", **arrays)
        counts.add(len(femnist(streams, str(data_root)).labels))
    assert len(counts) == 2
    words = ["data=femnist", f"data.root={data_root}", "method.critics=4"]
    assert cli.run(["account", "method=gs_wgan_small", *words]) == 2
    assert "depends on image content" in capsys.readouterr().err
    for fits in (["method=gs_wgan_small", "partition=by_writer"], ["method=dpgan_small"]):
        assert cli.run(["account", *fits, *words[:2]]) == 0, capsys.readouterr().err


def test_femnist_label_sets_and_polarity(data_root: Path, streams: RandomStreams) -> None:
    with np.load(data_root / "femnist.npz") as file:
        dark = file["images"].mean()
    for classes in (10, 36, 62):
        data = femnist(streams, str(data_root), classes)
        assert data.labels.max() < classes
        assert data.writers is not None
        assert len(data.writers) == len(data.labels)
    assert np.concatenate([data.images, data.test_images]).mean() == pytest.approx(255 - dark)
    with pytest.raises(FedgenError, match=r"data\.classes"):
        femnist(streams, str(data_root), 11)


def test_celeba_in_its_layout(tmp_path: Path) -> None:
    root = tmp_path / "celeba"
    (root / "img_align_celeba").mkdir(parents=True)
    names = [f"{i:06d}.jpg" for i in range(1, 7)]
    for i, name in enumerate(names):
        Image.new("RGB", (178, 218), (i * 40, 0, 0)).save(root / "img_align_celeba" / name)
    rows = "\n".join(f"{name} 1 {1 if i % 2 else -1}" for i, name in enumerate(names))
    (root / "list_attr_celeba.txt").write_text(f"6\nYoung Male\n{rows}\n")
    parts = zip(names, [0, 0, 0, 1, 2, 2], strict=True)
    (root / "list_eval_partition.txt").write_text("\n".join(f"{n} {p}" for n, p in parts))
    data = celeba(str(tmp_path))
    assert data.images.shape == (3, 3, 32, 32)
    assert list(data.labels) == [0, 1, 0]
    assert list(data.test_labels) == [0, 1]
    assert data.classes == 2 and data.names == ("no Male", "Male")
    assert celeba(str(tmp_path), size=64).shape == (3, 64, 64)
    both = celeba(str(tmp_path), ["Young", "Male"])
    assert list(both.labels) == [1, 3, 1] and both.names == ("none", "Young", "Male", "Young+Male")
    with pytest.raises(FedgenError, match=r"data\.label: CelebA has no attribute Old"):
        celeba(str(tmp_path), "Old")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("list_attr_celeba.txt", "1\nYoung Male\n../../secret.png 1 1\n"),
        ("list_attr_celeba.txt", "1\nYoung\n000001.jpg 1\n"),
        ("list_attr_celeba.txt", ""),
        ("list_attr_celeba.txt", None),
        ("list_eval_partition.txt", "000001.jpg 0 0\n"),
        ("list_eval_partition.txt", None),
    ],
)
def test_invalid_lists_of_celeba_are_one_line(
    name: str, content: str | None, tmp_path: Path
) -> None:
    """Among them one that names a file elsewhere, and a pipe without a writer."""
    test_celeba_in_its_layout(tmp_path)
    file = tmp_path / "celeba" / name
    file.unlink()
    if content is None:
        os.mkfifo(file)
    else:
        file.write_text(content)
    with pytest.raises(FedgenError, match=r"data\.root: no readable CelebA"):
        celeba(str(tmp_path))


def test_the_number_of_labels_does_not_follow_from_private_images(
    tmp_path: Path, streams: RandomStreams
) -> None:
    with pytest.raises(FedgenError, match=r"data\.classes"):
        folder(streams, None, npz(tmp_path / "a.npz"))


@pytest.mark.parametrize("classes", [10, 62])
def test_images_of_one_writer_do_not_reassign_those_of_others(
    data_root: Path, streams: RandomStreams, classes: int
) -> None:
    """Shards of all others stay the same if a writer has more or other images."""

    def shards() -> dict[int, bytes]:
        data = femnist(streams, str(data_root), classes)
        assert data.writers is not None
        return {int(w): data.images[data.writers == w].tobytes() for w in np.unique(data.writers)}

    before = shards()
    with np.load(data_root / "femnist.npz") as file:
        arrays = dict(file)
    fresh = np.zeros((5, 28, 28), np.uint8)
    np.savez(
        data_root / "femnist.npz",
        images=np.concatenate([fresh, arrays["images"][3:]]),
        labels=np.concatenate([np.arange(5), arrays["labels"][3:]]),
        writer=np.concatenate([np.zeros(5, np.int16), arrays["writer"][3:]]),
    )
    after = shards()
    assert before[0] != after[0]
    assert all(before[w] == after[w] for w in before if w != 0)


def npz(path: Path, **changed: np.ndarray) -> str:
    arrays = {
        "train_images": np.zeros((4, 8, 8), np.uint8),
        "train_labels": np.arange(4),
        "test_images": np.zeros((2, 8, 8), np.uint8),
        "test_labels": np.arange(2),
        **changed,
    }
    np.savez(path, **{name: value for name, value in arrays.items() if value is not None})
    return str(path)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("last", [True, False])
def test_a_users_npz_with_channels(
    channels: int, last: bool, tmp_path: Path, streams: RandomStreams
) -> None:
    """In the layouts of image libraries, of torch and of ``fedgen sample``."""
    images = np.random.default_rng(0).integers(0, 256, (6, channels, 8, 8), dtype=np.uint8)
    given = images.transpose(0, 2, 3, 1) if last else images
    result = {"train_images": given[:4], "test_images": given[4:]}
    data = folder(streams, None, npz(tmp_path / "a.npz", **result), classes=4)
    assert data.shape == (channels, 8, 8)
    assert data.classes == 4
    assert (np.concatenate([data.images, data.test_images]) == images).all()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"train_images": np.zeros((4, 8, 9), np.uint8)}, "square"),
        ({"train_images": np.zeros((4, 8, 8), np.float32)}, "must be uint8"),
        ({"train_images": np.zeros((4, 8, 8, 2), np.uint8)}, "square"),
        ({"train_labels": np.arange(3)}, "4 images, 3 labels to train on"),
        ({"train_labels": np.arange(4) - 1}, "outside 0..3; remove unlabelled images"),
        ({"train_labels": np.arange(4) - 5}, "outside 0..3; number the labels from 0"),
        ({"train_labels": np.arange(4) + 1}, "outside 0..3; number the labels from 0: labels - 1"),
        ({"train_labels": np.arange(4) * 2}, "outside 0..3; set data.classes=7"),
        ({"train_labels": np.full(4, 2**64 - 1, np.uint64)}, "outside 0..3"),
        ({"train_labels": np.arange(4) + 10**6}, "outside 0..3"),
        ({"test_labels": np.arange(2) + 10**6}, "outside 0..3"),
        ({"train_images": np.uint8(3)}, "images of type"),
        ({"test_labels": np.int64(3)}, r"shape \(\); give one whole number for each image"),
        ({"train_labels": np.arange(4) / 2}, "fractions.*divide them into classes"),
        ({"train_labels": np.array([0, np.nan, 1, 2])}, "1 images without a label"),
        ({"train_labels": np.eye(4, dtype=np.uint8)}, r"one-hot; give labels.argmax\(1\)"),
        ({"train_labels": np.eye(4)}, r"one-hot; give labels.argmax\(1\)"),
        ({"train_labels": np.tri(4, dtype=bool)}, r"multi-label \(1 to 4 per image\); choose"),
        ({"train_labels": np.zeros((1, 4), int)}, r"multi-label \(0 to 0 per image\)"),
        ({"train_labels": np.full((4, 3), 7)}, r"shape \(4, 3\); give one whole number"),
        ({"train_labels": np.array(["a", "b", "c", "d"])}, r"e.g. data.labels=\[a,b,c,d\]"),
        ({"train_labels": np.array([b"a", b"b", b"c", b"d"])}, r"e.g. data.labels=\[a,b,c,d\]"),
        ({"train_labels": np.zeros(4, complex)}, "labels of type complex128"),
        ({"train_writer": np.arange(4) / 2}, "train_writer has type float64"),
        ({"train_person": np.zeros((4, 2), int)}, r"train_person has .*shape \(4, 2\)"),
        ({"train_labels": None}, "lacks train_labels"),
        ({"train_images": np.zeros((0, 8, 8), np.uint8)}, r"data\.path: .* has no images"),
        ({"test_images": np.zeros((2, 12, 12), np.uint8)}, "same in both"),
    ],
)
def test_an_invalid_npz_is_refused(
    tmp_path: Path, streams: RandomStreams, changed: dict, words: str
) -> None:
    with pytest.raises(FedgenError, match=words):
        folder(streams, None, npz(tmp_path / "a.npz", **changed), classes=4)


@pytest.mark.parametrize("kind", [np.uint8, np.int64, np.float32, bool])
@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_labels_of_every_type_mean_the_same(
    tmp_path: Path, streams: RandomStreams, kind: type, shape: tuple[int, ...]
) -> None:
    """MedMNIST stores (n, 1); others store floats or booleans."""
    train = np.array([1, 0, 1, 0]).astype(kind).reshape(shape)
    data = folder(streams, None, npz(tmp_path / "a.npz", train_labels=train), classes=4)
    assert data.labels.dtype == np.int64
    assert data.labels.tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("values", [[5, 0, 10, 5], [5.0, 0.0, 10.0, 5.0], ["5", "0", "10", "5"]])
def test_label_names_are_numbered_in_their_order(
    tmp_path: Path, streams: RandomStreams, values: list
) -> None:
    arrays = {"train_labels": np.array(values), "test_labels": np.array(values[:2])}
    file = npz(tmp_path / "a.npz", **arrays)
    data = folder(streams, None, file, labels=[0, 5, 10])
    assert data.labels.tolist() == [1, 0, 2, 1]
    assert data.names == ("0", "5", "10")
    with pytest.raises(FedgenError, match=r"data\.labels: lacks labels of the data: 10"):
        folder(streams, None, file, labels=[0, 5])


def test_writers_may_be_names(tmp_path: Path, streams: RandomStreams) -> None:
    writers = np.array([["b"], ["a"], ["b"], ["c"]])
    data = folder(streams, None, npz(tmp_path / "a.npz", train_writer=writers), classes=4)
    assert data.writers is not None and data.writers.tolist() == [1, 0, 1, 2]


def test_positions_in_a_sorted_file_are_not_fixed(tmp_path: Path, streams: RandomStreams) -> None:
    """If one record of such a file changes its label, those between move."""
    images = np.zeros((6, 8, 8), np.uint8)
    for labels, moves in (([0, 0, 1, 1, 2, 2], True), ([0, 1, 0, 1, 2, 2], False)):
        train = {"train_images": images, "train_labels": np.array(labels)}
        data = folder(streams, None, npz(tmp_path / "a.npz", **train), classes=3)
        assert bool(data.example_keys.moves) == moves


def test_pickled_data_is_never_loaded(tmp_path: Path, streams: RandomStreams) -> None:
    bad = npz(tmp_path / "a.npz", train_labels=np.array([{}, {}, {}, {}], dtype=object))
    with pytest.raises(FedgenError, match="not a readable npz"):
        folder(streams, None, bad, classes=4)


@pytest.mark.skipif(not REAL, reason="needs the real data in FEDGEN_DATA")
def test_the_real_data_sets(streams: RandomStreams) -> None:
    mnist = torchvision_set(None, "MNIST")
    assert mnist.images.shape == (60000, 1, 28, 28)
    assert mnist.writers is not None
    assert len(set(mnist.writers)) == 539
    assert mnist.images.mean() / 255 == pytest.approx(0.1307, abs=1e-4)
    fashion = torchvision_set(None, "FashionMNIST")
    assert list(np.bincount(fashion.labels)) == [6000] * 10
    written = femnist(streams, None, 62)
    # of 87,391, but for writers whose only rows are in the test split
    assert len(written.labels) + len(written.test_labels) == 87390
    assert written.images.mean() < 127


def test_writers_with_few_images_do_not_participate(
    data_root: Path, streams: RandomStreams
) -> None:
    whole = femnist(streams, str(data_root), 62)
    assert whole.writers is not None
    names, rows = np.unique(whole.writers, return_counts=True)
    least = int(rows.max())
    result = femnist(streams, str(data_root), 62, least_rows=least)
    assert result.writers is not None
    assert set(result.writers) == set(names[rows >= least])
    for name in set(result.writers):  # included writers keep their training and test images
        kept = result.images[result.writers == name]
        assert np.array_equal(kept, whole.images[whole.writers == name])
    with pytest.raises(FedgenError, match="leaves no writer"):
        femnist(streams, str(data_root), 62, least_rows=1000)


def test_writers_of_mnist_do_not_participate(data_root: Path, streams: RandomStreams) -> None:
    """Those of MNIST are numbered 0 to 5 here, those of femnist 3 to 8."""
    with pytest.raises(FedgenError, match="writer_nist_id"):
        femnist(streams, str(data_root), 62, disjoint_from_mnist=True)
    with np.load(data_root / "femnist.npz") as file:
        arrays = dict(file)
    numbers = np.arange(3, 9, dtype=np.int16)
    np.savez(data_root / "femnist.npz", **arrays, writer_nist_id=numbers)
    with np.load(data_root / "mnist.npz") as file:
        digits = dict(file)
    np.savez(data_root / "mnist.npz", **digits, test_writer=np.full(20, 8, dtype=np.int16))
    result = femnist(streams, str(data_root), 62, disjoint_from_mnist=True)
    assert result.writers is not None
    assert set(result.writers) == {3, 4}  # NIST's 6 and 7: 3, 4, 5 train MNIST and 8 tests it


def test_images_of_the_hub_become_the_file(tmp_path: Path, streams: RandomStreams) -> None:
    rng = np.random.default_rng(0)
    rows = [
        {
            "image": Image.fromarray(rng.integers(0, 256, (28, 28), dtype=np.uint8)),
            "character": number % 62,
            "writer_id": f"f{2100 + number % 3:04d}_{number % 3:02d}",
        }
        for number in range(90)
    ]
    arrays = femnist_arrays(rows)
    assert arrays["writer_nist_id"].tolist() == [2100, 2101, 2102]
    np.savez(tmp_path / "femnist.npz", **arrays)  # type: ignore[arg-type]
    data = femnist(streams, str(tmp_path), 62)
    assert data.writers is not None
    assert sorted(set(data.writers)) == [0, 1, 2]
    assert len(data.labels) + len(data.test_labels) == 90


def test_a_missing_file_without_a_network_has_a_remedy(
    tmp_path: Path, streams: RandomStreams
) -> None:
    with pytest.raises(FedgenError, match="nor could it be downloaded"):
        femnist(streams, str(tmp_path), 62)
    assert not list(tmp_path.iterdir())


def test_images_on_a_device_stay_there() -> None:
    shard = Shard(torch.arange(8, dtype=torch.uint8).view(2, 1, 2, 2), torch.tensor([3, 4]))
    assert shard.on("cpu") is shard
    there = shard.on("meta")
    assert there.images.device.type == there.labels.device.type == "meta"
    assert shard.on("meta") is there
    images, labels = there.rows(torch.tensor([1]))
    assert images.device.type == labels.device.type == "meta"
