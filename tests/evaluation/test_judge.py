"""The classifier that evaluates samples of a data set, and the metrics computed with it."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from mutation import kills
from tiny import STREAMS, Train

from fedgen import cli
from fedgen.config.compose import compose
from fedgen.data.digits import digits
from fedgen.evaluation.judge import evaluation_net, features_and_probabilities
from fedgen.randomness import RandomStreams
from fedgen.run import setup


def test_the_classifier_is_trained_once(tmp_path: Path) -> None:
    data = digits(STREAMS)
    net = evaluation_net(data.images, data.labels, 10, tmp_path)
    whole, parts = (
        features_and_probabilities(net, data.test_images),
        [features_and_probabilities(net, row[None]) for row in data.test_images],
    )
    assert np.allclose(whole[0], np.concatenate([part[0] for part in parts]), atol=1e-5), (
        "each image by itself: normalisation uses training statistics"
    )
    [kept] = tmp_path.iterdir()
    before = kept.stat().st_mtime_ns
    again = evaluation_net(data.images, data.labels, 10, tmp_path)
    assert kept.stat().st_mtime_ns == before
    features, result = features_and_probabilities(net, data.test_images)
    assert features.shape == (360, 128)
    assert np.allclose(result, features_and_probabilities(again, data.test_images)[1], atol=1e-5)
    assert np.allclose(result.sum(1), 1)
    assert (result.argmax(1) == data.test_labels).mean() > 0.95
    evaluation_net(data.images[:30], data.labels[:30], 10, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.slow
def test_a_run_has_the_figures_of_the_classifier(
    train: Train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FEDGEN_CACHE", str(tmp_path / "cache"))
    words = ["evaluation=quick", "evaluation.samples=300", "evaluation.classifiers.cnn.epochs=1"]
    run = train("rounds=1", *words, "evaluation.judge=true", "evaluation.leakage=true")
    record = json.loads((run / "results.json").read_text())
    scores = record["inception_score"]
    assert scores["test"]["mean"] > 3 > scores["generated"]["mean"] >= 1
    assert scores["judge_accuracy"] > 0.95
    assert record["fcd"]["train"] < record["fcd"]["generated"] / 10  # the generator is untrained
    assert 0 <= record["precision"] <= 1
    assert record["recall"] < 0.5
    assert record["memorization"]["n"] == 300
    assert record["membership"]["members"] == record["membership"]["others"] == 360
    assert sorted(p.name for p in (run / "evaluation").iterdir()) == [
        "distances.png",
        "nearest.png",
    ]
    assert not list((run / "public").glob("nearest*"))
    # an evaluation leaves nothing of the one before it
    assert cli.run(["evaluate", f"run={run}", "evaluation=none"]) == 0
    again = json.loads((run / "results.json").read_text())
    assert not {"fcd", "recall", "membership", "inception_score"} & set(again)
    assert again["gen2real"] == {}
    assert not (run / "evaluation").exists()


def test_samples_of_other_software_are_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real training images as samples: the copy attack is detected."""
    data, path = digits(RandomStreams.from_seed(0, "seeded").at("data")), tmp_path / "copies.npz"
    np.savez(path, images=data.images[:300, 0], labels=data.labels[:300])
    words = ["evaluate", f"samples={path}", "data=digits", "evaluation.leakage=true"]
    assert cli.run([*words, "evaluation.classifiers.cnn.epochs=2"]) == 0
    output = capsys.readouterr().out
    assert "copies of training images" in output
    record = json.loads((tmp_path / "copies_evaluation" / "evaluation.json").read_text())
    assert record["gen2real"]["logistic_regression"]["mean"] > 0.85
    assert record["gen2real"]["cnn"]["n"] == 300
    assert record["memorization"]["copied"] > 0.99
    assert record["memorization"]["p_value"] < 1e-10
    assert record["membership"]["auc"] > 0.55
    assert (tmp_path / "copies_evaluation" / "nearest.png").exists()


RIGHT = ["samples={path}", "data=digits"]
FID = ["evaluation.fid=true", "evaluation.inception_weights=no"]


@pytest.mark.parametrize(
    ("words", "key", "problem"),
    [
        ([], "run", "exclude each other"),
        (["samples={path}"], "data", "the training data"),
        (["samples=no.npz", "data=digits"], "samples", "there is no file no.npz"),
        (["samples={empty}", "data=digits"], "samples", "no arrays"),
        (["samples={array}", "data=digits"], "samples", "no arrays"),
        (["samples={public}", "data=digits"], "samples", "may be published"),
        ([*RIGHT, "evaluation.judge=true"], "samples", "too few"),
        (["samples={path}", "data=mnist"], "samples", "uint8 (n, 1, 28, 28)"),
        (["samples={other}", "data=digits"], "samples", "no label from 0 to 9"),
        ([*RIGHT, "evaluation=none"], "evaluation.samples", "cannot be evaluated"),
        ([*RIGHT, "evaluation.real2real=false"], "evaluation.real2gen", "real2real is false"),
        (
            [*RIGHT, "evaluation=dpimagebench", "evaluation.classifiers.resnet.depth=11"],
            "evaluation.classifiers.resnet.depth",
            "resnet has 6 n + 2 layers, got 11; e.g. 14",
        ),
        (
            [*RIGHT, "evaluation=dpimagebench", "evaluation.classifiers.resnext.batch=1"],
            "evaluation.classifiers.resnext.batch",
            "must be at least 2",
        ),
        ([*RIGHT, "evaluation.real2gen=[svm]"], "evaluation.real2gen", "not a known classifier"),
        ([*RIGHT, *FID], "evaluation.inception_weights", "cannot be read"),
    ],
)
def test_invalid_settings_are_refused(
    words: list[str],
    key: str,
    problem: str,
    tmp_path: Path,
    data_root: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    images, labels = np.zeros((20, 8, 8), np.uint8), np.arange(20) % 10
    path, other = tmp_path / "right.npz", tmp_path / "wrong.npz"
    np.savez(path, images=images, labels=labels)
    np.savez(other, images=images, labels=labels + 5)
    empty, array, public = tmp_path / "e.npz", tmp_path / "a.npy", tmp_path / "public" / "s.npz"
    empty.touch()
    np.save(array, images)
    public.parent.mkdir()
    (public.parent / "PRIVACY.md").touch()
    places = {"path": path, "other": other, "empty": empty, "array": array, "public": public}
    given = [word.format(**places) for word in words]
    root = [f"data.root={data_root}"] if "data=mnist" in words else []
    assert cli.run(["evaluate", *given, *root]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"fedgen: {key}: ")
    assert problem in error
    assert error.count("\n") == 1


def test_files_of_dpimagebench_are_read_and_written(train: Train, tmp_path: Path) -> None:
    """The same samples in either form have the same results."""
    run, records = train(), []
    for form in ("fedgen", "dpimagebench"):
        path = tmp_path / form / "gen.npz"
        path.parent.mkdir()
        words = [f"run={run}", "n=60", f"npz={form}", f"out={path}"]
        assert cli.run(["sample", *words]) == 0
        words = ["data=digits", "evaluation.classifiers.cnn.epochs=1", "evaluation.jobs=1"]
        assert cli.run(["evaluate", f"samples={path}", *words]) == 0
        record = json.loads((tmp_path / form / "gen_evaluation" / "evaluation.json").read_text())
        records.append({key: value for key, value in record.items() if key != "samples"})
    assert records[0] == records[1]
    with np.load(tmp_path / "dpimagebench" / "gen.npz") as arrays:
        assert arrays["x"].dtype == np.float32 and arrays["x"].shape == (60, 1, 8, 8)
        assert arrays["x"].min() >= 0 and arrays["x"].max() <= 1 and arrays["y"].shape == (60,)
    assert cli.run(["sample", f"run={run}", "npz=dpimagebench", f"out={tmp_path}/a.png"]) == 2


@pytest.mark.parametrize("value", [1.01, -0.01, np.nan, np.inf, 7])
def test_samples_outside_of_the_unit_interval_are_refused(
    value: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = np.zeros((20, 1, 8, 8), type(value) if value == 7 else np.float32)
    images[3, 0, 2, 2] = value
    np.savez(tmp_path / "gen.npz", x=images, y=np.arange(20) % 10)
    assert cli.run(["evaluate", f"samples={tmp_path}/gen.npz", "data=digits"]) == 2
    assert capsys.readouterr().err.startswith("fedgen: samples: ")


@kills("fedgen/storage/io.py", "if any(member.compress_type not in PLAIN_ZIP", "if any(False")
def test_damaged_files_and_other_compression_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """bzip2 inflates without a limit."""
    path = tmp_path / "gen.npz"
    np.savez_compressed(path, images=np.ones((20, 1, 8, 8), np.uint8), labels=np.arange(20) % 10)
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        arrays = {member.filename: archive.read(member) for member in archive.infolist()}
    content[62:72] = b"\xff" * 10  # after the header of the first member
    path.write_bytes(bytes(content))
    assert cli.run(["evaluate", f"samples={path}", "data=digits"]) == 2
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as archive:
        for name, array in arrays.items():
            archive.writestr(name, array)
    assert cli.run(["evaluate", f"samples={path}", "data=digits"]) == 2
    lines = capsys.readouterr().err.strip().split("\n")
    assert len(lines) == 2 and all(line.startswith("fedgen: samples: ") for line in lines)


def test_the_order_of_a_file_does_not_matter(tmp_path: Path) -> None:
    """Up to random streams: an inception score is a mean over splits, and some classifiers see the
    first images first."""
    data = digits(RandomStreams.from_seed(0, "seeded").at("data"))
    path, words = tmp_path / "sorted.npz", ["data=digits", "evaluation.judge=true"]
    order = np.argsort(data.labels, kind="stable")
    np.savez(path, images=data.images[order], labels=data.labels[order])
    assert (
        cli.run(["evaluate", f"samples={path}", *words, "evaluation.classifiers.cnn.epochs=1"]) == 0
    )
    record = json.loads((tmp_path / "sorted_evaluation" / "evaluation.json").read_text())
    assert record["inception_score"]["generated"]["mean"] > 4  # in the order of labels: below 2
    assert record["precision"] > 0.7


def test_the_requested_number_of_samples_of_a_file_is_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sampled from the whole file, in whatever order its labels are."""
    data = digits(RandomStreams.from_seed(0, "seeded").at("data"))
    order = np.argsort(data.labels, kind="stable")
    path = tmp_path / "sorted.npz"
    np.savez(path, images=data.images[order], labels=data.labels[order])
    words = ["evaluation.samples=200", "evaluation.classifiers.cnn.epochs=1"]
    assert cli.run(["evaluate", f"samples={path}", "data=digits", *words]) == 0
    assert f"200 of {len(order):,} samples" in capsys.readouterr().out
    record = json.loads((tmp_path / "sorted_evaluation" / "evaluation.json").read_text())
    assert (record["judged"], record["of"]) == (200, len(order))
    logistic = record["gen2real"]["logistic_regression"]
    assert logistic["n"] == 200
    assert min(logistic["per_class"]) > 0.4


def test_all_seeds_have_the_same_test_split() -> None:
    first, second = (
        setup.dataset(compose("config", [f"seed={seed}", "data=digits"])) for seed in (0, 1)
    )
    assert np.array_equal(first.test_images, second.test_images)
