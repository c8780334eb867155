"""Descriptions of a folder of samples, as others read them."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import mlcroissant
import pytest
import yaml
from mutation import kills
from tiny import Train

from fedgen import cli


@kills("fedgen/reporting/dataset_card.py", '"^(.+)/[^/]+$"', '"^.+/([^/]+)$"')
def test_tools_read_a_folder_of_samples(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlcroissant and ``datasets`` load all images with their labels."""
    run, out = train("method=dp_merf_small", "rounds=4", "privacy.noise=secure"), tmp_path / "out"
    assert cli.run(["sample", f"run={run}", "n=40", f"out={out}"]) == 0
    files = sorted(out.rglob("*.png"))
    dataset = mlcroissant.Dataset(str(out / "croissant.json"))
    assert not dataset.metadata.ctx.issues.errors
    monkeypatch.chdir(out)
    records = list(dataset.records("samples"))
    assert sorted(record["samples/label"].decode() for record in records) == [
        path.parent.name for path in files
    ]
    assert all(record["samples/image"].size == (8, 8) for record in records)
    _, head, body = (out / "README.md").read_text().split("---\n", 2)
    assert "synthetic" in yaml.safe_load(head)["tags"]
    epsilon = json.loads((run / "privacy.json").read_text())["views"]["release"]["epsilon"]
    assert f"({epsilon:.2f}, 1e-05)-differentially private per record" in body
    loaded = datasets.load_dataset(str(out), split="train", cache_dir=str(tmp_path / "cache"))
    assert len(loaded) == 40 and set(loaded.features) == {"image", "label"}


def test_samples_of_an_experiment_and_of_an_altered_file(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = train("method=dp_merf_small", "rounds=4"), tmp_path / "out"
    words = ["sample", f"run={run}", "n=10"]
    assert cli.run([*words, f"out={out}"]) == 0
    assert "An experiment, not for release" in (out / "README.md").read_text()
    file = run / "public" / "generator.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "privacy": {"noise": "secure", "epsilon": "much"}}))
    assert cli.run([*words, f"out={tmp_path / 'other'}"]) == 2
    error = capsys.readouterr().err
    assert "no valid privacy section" in error and len(error.splitlines()) == 1
    assert not (tmp_path / "other").exists()
