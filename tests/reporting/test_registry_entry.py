"""Entries for the registry of deployments, and the statements of their publisher."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from mutation import kills
from tiny import Train

from fedgen import cli
from fedgen.reporting.registry_entry import MANDATORY

ABOUT = {key: f"text of {key}" for key in MANDATORY} | {"controller_type": "Industry"}

# Allowed and required keys per section, from the registry's schemas/deployments-schema.yaml
# (github.com/opendp/deployments-registry-data, the version with ``dp_variant``)
ALLOWED = {
    "basic": "name data_curators description intended_use data_product_type data_product_region "
    "data_product_sector publication_date",
    "dp_variant": "variant_name data_domain unprotected_quantities",
    "privacy_loss": "privacy_unit privacy_unit_details number_of_privacy_units privacy_parameters "
    "privacy_parameters_details",
    "deployment_model": "model_name model_name_details trust_assumptions actors release_type "
    "release_type_details data_source_type data_source_type_details access_type "
    "access_type_details",
    "implementation": "preprocessing_and_hyperparameter_tuning mechanisms composition "
    "post_processing justification utility additional_information",
    "administrative": "evidence_sources status registry_authors tier",
}
REQUIRED = {
    "basic": set(ALLOWED["basic"].split()) - {"data_product_sector"},
    "administrative": {"status", "registry_authors", "tier"},
}
CHOICES = {
    ("basic", "data_product_type"): {"Machine learning model", "Synthetic data", "Dataset"},
    ("dp_variant", "variant_name"): {"Approximate DP"},
    ("deployment_model", "model_name"): {"Local", "Central", "Shuffle", "Federated"},
    ("deployment_model", "release_type"): {"One release", "Many releases"},
    ("deployment_model", "data_source_type"): {"Static", "Dynamic"},
    ("deployment_model", "access_type"): {"Interactive", "Non-interactive"},
    ("administrative", "status"): {"Draft"},
}


def release_entry(run: Path, *words: str) -> dict[str, Any]:
    """Release a run; return its entry."""
    out = run.with_suffix(".zip")
    assert cli.run(["release", f"run={run}", f"out={out}", "audit=false", *words]) == 0
    assert cli.run(["verify", str(out)]) == 0
    with zipfile.ZipFile(out) as archive:
        entry: dict[str, Any] = yaml.safe_load(archive.read(f"{run.name}/registry.yaml"))
    return entry


@kills("fedgen/reporting/registry_entry.py", '"epsilon": release["epsilon"]', '"epsilon": 0.1')
@pytest.mark.parametrize("aggregation", ["local", "secure", "trusted"])
def test_an_entry_fits_the_schema_of_the_registry(
    train: Train, tmp_path: Path, aggregation: str
) -> None:
    several = ["partition=iid", "partition.clients=4", f"privacy.aggregation={aggregation}"]
    adversary = "release" if aggregation == "trusted" else "server"
    run = train(
        "method=dp_merf_small", "rounds=4", "privacy.noise=secure", "privacy.target_epsilon=2",
        f"privacy.adversary={adversary}", *([] if aggregation == "local" else several),
    )  # fmt: skip
    file = tmp_path / "about.yaml"
    file.write_text(yaml.safe_dump({**ABOUT, "region": "elsewhere", "sector": "Healthcare"}))
    entry = release_entry(run, f"about.file={file}", "about.region=here")
    assert set(entry) == {"url_slug", "deployment"}
    sections = entry["deployment"]
    assert set(sections) == set(ALLOWED)
    for name, content in sections.items():
        assert set(content) <= set(ALLOWED[name].split())
        assert set(content) >= REQUIRED.get(name, set())
    for (name, key), choices in CHOICES.items():
        assert sections[name][key] in choices
    record = json.loads((run / "privacy.json").read_text())
    stated = {"epsilon": record["views"]["release"]["epsilon"], "delta": 1e-5}
    assert sections["privacy_loss"]["privacy_parameters"] == stated
    basic = sections["basic"]
    assert basic["data_product_region"] == "here" and basic["data_product_sector"] == "Healthcare"
    curator = {"data_curator_name": ABOUT["controller"], "data_curator_type": "Industry"}
    assert basic["data_curators"] == [curator]
    trust = sections["deployment_model"]["trust_assumptions"]
    assert ("aggregator" in trust) == (aggregation == "trusted")
    assert ("each added a share" in trust) == (aggregation == "secure")
    model = sections["deployment_model"]["model_name"]
    assert model == ("Central" if aggregation == "local" else "Federated")


@kills("fedgen/reporting/registry_entry.py", 'if record["noise"] == "seeded":', "if False:")
def test_a_run_records_facts_for_the_registry(train: Train) -> None:
    """In ``privacy.json`` and in ``public/``, by the keys of the registry."""
    for noise, key in (("secure", "operating system"), ("seeded", "not for release")):
        words = ["method=dp_merf_small", "rounds=4", f"privacy.noise={noise}"]
        run = train(*words, name=noise)
        record = json.loads((run / "privacy.json").read_text())
        public = json.loads((run / "public" / "generator.json").read_text())
        facts = record["registry"]
        assert public["registry"] == facts
        for name, content in facts.items():
            assert set(content) <= set(ALLOWED[name].split())
        epsilon = record["views"]["release"]["epsilon"]
        assert facts["privacy_loss"]["privacy_parameters"]["epsilon"] == epsilon
        assert key in facts["implementation"]["mechanisms"]
        assert "PyTorch" in facts["implementation"]["mechanisms"]
    run = train("method=dp_merf_small", "rounds=4", "privacy=none", name="without")
    assert "registry" not in json.loads((run / "privacy.json").read_text())


def test_missing_statements_are_listed_at_once_before_training(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = train("method=dp_merf_small", "rounds=4"), tmp_path / "a.zip"
    words = ["release", f"run={run}", f"out={out}", f"run_dir={tmp_path / 'new'}"]
    given = [f"about.{key}=x" for key in ("name", "region")]
    assert cli.run([*words, *given]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    for key in MANDATORY:
        assert (f"about.{key} (" in error) == (key not in ("name", "region"))
    file = tmp_path / "about.yaml"
    for text, more, problem in (
        ("- 1\n", [], "is not a mapping"),
        ("date: today\n", [], "contains unknown keys: date"),
        ("x: !!python/object:os.system {}\n", [], "about.file: "),
        (
            yaml.safe_dump({**ABOUT, "controller_type": "x"}),
            [],
            "use Government, Industry or Nonprofit",
        ),
        (yaml.safe_dump(ABOUT), ["about.sector=x"], "about.sector: "),
    ):
        file.write_text(text)
        assert cli.run([*words, f"about.file={file}", *more]) == 2
        assert problem in capsys.readouterr().err
    assert cli.run([*words, f"about.file={tmp_path / 'no'}"]) == 2
    assert not out.exists() and not (tmp_path / "new").exists()
