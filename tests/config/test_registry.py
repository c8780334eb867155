"""Settings name registered words, and each registered word is used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from mutation import kills

from fedgen.config import validation
from fedgen.config.build import build
from fedgen.config.compose import compose
from fedgen.config.extensions import CONFIGS, extensions
from fedgen.config.parameters import parameters
from fedgen.config.registry import MODELS, REGISTRY, check, extension_types, load, words
from fedgen.errors import FedgenError
from fedgen.evaluation.utility import scikit

WORDS = [(place, word) for place, known in REGISTRY.items() for word in known]


@pytest.mark.parametrize(("place", "word"), WORDS)
def test_registered_functions_are_typed(place: str, word: str) -> None:
    """Each parameter has a type, against which settings are checked."""
    function = load(word, place.replace("*", "x"))
    assert callable(function)
    assert [name for name, hint in parameters(function).hints.items() if hint is Any] == []


def of_settings() -> Iterator[tuple[str, str, str]]:
    """Yield (place, key, word) of all types, strategies and models in fedgen's settings."""

    def walk(settings: Any, place: str) -> Iterator[tuple[str, str, str]]:
        for key, value in settings.items() if isinstance(settings, dict) else ():
            if key in ("type", "model"):
                yield place, key, value
            elif key == "strategy":
                yield f"{place}.strategy", "type", value
            else:
                yield from walk(value, f"{place}.{key}")

    for group in ("data", "partition", "runtime", "logger", "method", "evaluation"):
        for file in (CONFIGS / group).rglob("*.yaml"):
            place = ".".join(file.relative_to(CONFIGS).parent.parts)
            yield from walk(yaml.safe_load(file.read_text()), place)


def test_settings_use_each_word_in_its_group() -> None:
    """One table may serve several groups: a student can have the network of a critic."""
    result = set(of_settings())
    assert {value for _, key, value in result if key == "model"} == MODELS
    types = {(place, value) for place, key, value in result if key == "type"}
    assert [each for each in types if each[1] not in words(each[0])] == []
    used = {REGISTRY.get(place, REGISTRY["evaluation.classifiers.*"])[w] for place, w in types}
    assert {target for known in REGISTRY.values() for target in known.values()} == used


@pytest.mark.parametrize("former", ["_target_", "_partial_"])
def test_former_keys_name_the_present_key(former: str) -> None:
    with pytest.raises(FedgenError, match=rf"^data\.{former}: is not a setting; write type: WORD"):
        check({former: "package.module.function"}, "data")


def test_a_word_is_never_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even a module in the working directory, unless the environment declares it."""
    (tmp_path / "digits.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert build({"type": "digits"}, "data").func.__module__ == "fedgen.data.digits"  # type: ignore[attr-defined]
    for word in ("digits.digits", "digits:digits", "os.system", "os:system", "", "Digits"):
        with pytest.raises(FedgenError, match=r"^data\.type: cannot be"):
            build({"type": word}, "data")


def own_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Declare a package whose module imports others, as most do."""
    (folder / "ext").mkdir()
    (folder / "ext" / "__init__.py").touch()
    (folder / "ext" / "parts.py").write_text(
        "import subprocess\nfrom subprocess import Popen\n\nNUMBER = 3\n\n"
        "def halves(**settings):\n    return settings\n"
    )
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("FEDGEN_EXTENSIONS", "ext")


@kills("fedgen/config/extensions.py", 'defined != name.partition(".")[0]', "False")
def test_a_declared_package_provides_only_its_own_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file from elsewhere cannot name what a declared package imports."""
    own_package(tmp_path, monkeypatch)
    nested = {"type": "ext.parts.halves", "many": [{"type": "ext.parts.halves", "k": 2}]}
    made = build(nested, "partition")()
    assert made["many"][0]() == {"k": 2}
    for name in ("Popen", "subprocess", "NUMBER", "subprocess.Popen", "missing", "__doc__"):
        refused = r"^partition\.type: ext\.parts\..* (is no function or class|cannot be imported)"
        with pytest.raises(FedgenError, match=refused):
            build({"type": f"ext.parts.{name}"}, "partition")
        with pytest.raises(FedgenError, match=r"ext\.parts\."):
            scikit(np.zeros((2, 1, 8, 8), np.uint8), np.arange(2), 2, 0, model=f"ext.parts.{name}")


@kills(
    "fedgen/config/registry.py",
    '(place.endswith(".type") or place in STRATEGIES)',
    'place.endswith(".type")',
)
def test_all_code_of_extensions_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_package(tmp_path, monkeypatch)
    settings = {"method": {"type": "ext.a.b", "strategy": "ext.c.d", "loss": {"type": "hinge"}}}
    assert extension_types(settings) == ["ext.a.b", "ext.c.d"]


@pytest.mark.parametrize("declared", ["a.b", "..", "a/b"])
def test_a_package_has_one_name(declared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGEN_EXTENSIONS", declared)
    with pytest.raises(FedgenError, match=r"^FEDGEN_EXTENSIONS: .* is not the name of a package"):
        extensions()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("data.type=femnist", "data.type: is determined by data=digits; choose data=femnist"),
        ("method.type=dpgan", "choose method=dpgan"),
        ("method.strategy=null", "method.strategy: cannot be null"),
        ("~logger=tensorboard", "logger: cannot be removed"),
        ("+seed=5", "seed: is a setting already"),
        ("+evaluation.classifiers.x=5", r"evaluation.classifiers.x: cannot be 5"),
        ("+evaluation.classifiers.x={epochs:3}", "evaluation.classifiers.x.type: is missing"),
        ("+evaluation.classifiers.type=cnn", "evaluation.classifiers.type: cannot be 'cnn'"),
        ("method.type=fedgen.methods.mixture.mixture", "choose one of central_images"),
    ],
)
def test_a_type_of_another_group_is_one_line(word: str, message: str) -> None:
    with pytest.raises(FedgenError) as error:
        validation.check(compose("config", [word]))
    assert message in str(error.value)


def test_only_classes_of_a_declared_package_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of it is not called with values from a file."""
    monkeypatch.setenv("FEDGEN_EXTENSIONS", "sklearn")
    rows = np.zeros((2, 1, 8, 8), np.uint8), np.arange(2)
    with pytest.raises(FedgenError, match="has not scikit-learn's interface"):
        scikit(*rows, 2, 0, model="sklearn.datasets.fetch_openml", name="x")
