"""Former names of settings name the present one."""

from __future__ import annotations

import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf
from tiny import Train, tiny

import fedgen
from fedgen.config import registry
from fedgen.config.compose import compose
from fedgen.config.renamed import RENAMED
from fedgen.errors import FedgenError

ROOT = Path(__file__).parents[2]
METHODS = (
    "mixture",
    "gs_wgan",
    "dp_merf",
    "dp_gan_dpac",
    "dpdm",
    "fedavg_gan",
    "g_pate",
    "datalens",
)


@cache
def default(choice: str) -> DictConfig:
    """Return the settings of a method, or of ``fedgen debug``."""
    return compose("debug", []) if choice == "debug" else compose("config", [f"method={choice}"])


def having(key: str) -> str:
    """Return a choice of the group that has the setting."""
    choices = ["debug"] if key.startswith("debug.") else METHODS
    return next(
        each for each in choices if OmegaConf.select(default(each), key, default=_NONE) is not _NONE
    )


_NONE = object()


@pytest.mark.parametrize("former", RENAMED)
def test_a_former_name_names_the_present_one(former: str) -> None:
    choice, present = having(RENAMED[former]), RENAMED[former]
    name, words = ("debug", []) if choice == "debug" else ("config", [f"method={choice}"])
    with pytest.raises(FedgenError, match=rf"^{former}: was renamed; use {present}$"):
        compose(name, [*words, f"{former}=1"])


def test_a_former_name_within_a_warm_up_names_the_present_one() -> None:
    present = "warm_up.method.private_classifier"
    with pytest.raises(FedgenError, match=rf"^warm_up.method.teacher: was renamed; use {present}$"):
        compose("config", ["warm_up=mixture", "warm_up.method.teacher=none"])


@pytest.mark.parametrize("method", ["mixture_small", "dpdm_small", "dp_hp_small"])
def test_a_generator_published_with_former_names_gives_the_same_samples(
    method: str, train: Train, tmp_path: Path
) -> None:
    run = train(f"method={method}", *tiny(method), "evaluation=none")
    former = tmp_path / "former"
    shutil.copytree(run / "public", former)
    file = former / "generator.json"
    description = json.loads(file.read_text())
    names = {present: name for name, present in RENAMED.items()}

    def with_former_names(settings: dict[str, Any], place: str) -> dict[str, Any]:
        renamed = {}
        for name, value in settings.items():
            key = f"{place}.{name}"
            if name == "type":
                function = registry.words(place)[value].rpartition(".")[2].replace(":", ".")
                renamed["name"] = function
                continue
            nested = with_former_names(value, key) if isinstance(value, dict) else value
            renamed[names.get(key, key).rpartition(".")[2]] = nested
        return renamed

    description |= {"schema": 3, "method": with_former_names(description["method"], "method")}
    if method == "dpdm_small":  # which had a rate, not a number of records
        assert description["method"].pop("rows") == 1437
        description["method"]["sampling_rate"] = 0.1
    if method == "mixture_small":
        assert description["method"]["name"] == "mixture.mixture"
        assert {"cosines", "teacher"} <= set(description["method"])
        assert "levels" in description["method"]["shares"]
    file.write_text(json.dumps(description))
    images = [fedgen.load(place).samples(20).images for place in (run, former)]
    assert (images[0] == images[1]).all()


@pytest.mark.parametrize("name", [[], {}, 1, None])
def test_a_damaged_former_description_is_refused(
    name: object, train: Train, tmp_path: Path
) -> None:
    run = train("method=dp_merf_small", "evaluation=none", "rounds=1")
    file = run / "public" / "generator.json"
    description = json.loads(file.read_text())
    description |= {"schema": 3, "method": {**description["method"], "name": name}}
    del description["method"]["type"]
    file.write_text(json.dumps(description))
    with pytest.raises(FedgenError):
        fedgen.load(run / "public")


def test_no_page_and_no_settings_file_uses_a_former_name() -> None:
    former = "|".join(map(re.escape, RENAMED))
    pattern = re.compile(rf"(?<![\w.])(?:{former})(?![\w.])")
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.json")]
    files += [*(ROOT / "examples").rglob("*.*"), *(ROOT / "fedgen" / "configs").rglob("*.yaml")]
    assert not [
        (str(file), pattern.findall(file.read_text()))
        for file in files
        if pattern.search(file.read_text())
    ]
