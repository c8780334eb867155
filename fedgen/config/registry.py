"""The words that settings may use as ``type``, and the function or class behind each.

Run directories, published generators, matrices and requests of a coordinator may be untrusted. At
each place of the settings, they can choose among the words registered for that place; a word
selects a function of fedgen and is never imported as a name. If the environment declares packages
of the user (``fedgen.config.extensions``), their own functions can be chosen by dotted names.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedgen.config.explain import show_value
from fedgen.config.extensions import is_extension, load_named
from fedgen.config.schema import RUNTIME_INVARIANT
from fedgen.errors import FedgenError

_DISCRIMINATORS = {
    "dcgan": "fedgen.models.dcgan:Critic",
    "cdcgan": "fedgen.models.cdcgan:Discriminator",
}
_STRATEGIES = {
    "one_shot": "fedgen.strategies.one_shot:OneShot",
    "parameter_updates": "fedgen.strategies.parameter_updates:ParameterUpdates",
    "sample_gradients": "fedgen.strategies.sample_gradients:SampleGradients",
}
REGISTRY = {
    "data": {
        "archives": "fedgen.data.archives:archives",
        "camelyon17": "fedgen.data.camelyon17:camelyon17",
        "celeba": "fedgen.data.celeba:celeba",
        "digits": "fedgen.data.digits:digits",
        "femnist": "fedgen.data.femnist:femnist",
        "folder": "fedgen.data.folders:folder",
        "hugging_face": "fedgen.data.hugging_face:hugging_face",
        "medmnist": "fedgen.data.medmnist:medmnist",
        "public_facts": "fedgen.data.datasets:public_facts",
        "torchvision": "fedgen.data.torchvision:torchvision_set",
    },
    "partition": {
        "by_folder": "fedgen.data.partition:by_folder",
        "by_writer": "fedgen.data.partition:by_writer",
        "dirichlet": "fedgen.data.partition:dirichlet",
        "iid": "fedgen.data.partition:iid",
        "nodes": "fedgen.data.partition:nodes",
        "shards": "fedgen.data.partition:shards",
        "single": "fedgen.data.partition:single",
    },
    "runtime": {
        "deployed": "fedgen.deployment.coordinator:run",
        "flower": "fedgen.federation.runtimes.flower_engine:run",
        "in_process": "fedgen.federation.runtimes.in_process:run",
        "ray": "fedgen.federation.runtimes.ray_grid:run",
    },
    "logger": {
        "mlflow": "fedgen.reporting.loggers:mlflow",
        "none": "fedgen.reporting.loggers:none",
        "tensorboard": "fedgen.reporting.loggers:tensorboard",
        "wandb": "fedgen.reporting.loggers:wandb",
    },
    "method": {
        file.stem: f"fedgen.methods.{file.stem}:{file.stem}"
        for file in sorted(Path(__file__).parent.parent.joinpath("methods").glob("*.py"))
        if file.stem not in ("__init__", "api", "plan", "dp_gan_dpac")  # a companion of gs_wgan
    },
    "method.strategy": _STRATEGIES,
    "method.generator": {
        "autoencoder": "fedgen.models.autoencoder:CodeGenerator",
        "cdcgan": "fedgen.models.cdcgan:Generator",
        "dcgan": "fedgen.models.dcgan:Generator",
        "dense": "fedgen.models.dense:Generator",
        "resnet": "fedgen.models.resnet:Generator",
    },
    "method.critic": _DISCRIMINATORS,
    "method.discriminator": _DISCRIMINATORS,
    "method.student": _DISCRIMINATORS,
    "method.loss": {
        "hinge": "fedgen.losses.adversarial:hinge",
        "logistic": "fedgen.losses.adversarial:logistic",
        "wasserstein": "fedgen.losses.adversarial:wasserstein",
    },
    "method.companion": {
        "dual_purpose_classifier": "fedgen.methods.dp_gan_dpac:dual_purpose_classifier"
    },
    "method.companion.classifier": {"dcgan": "fedgen.models.dcgan:Classifier"},
    "method.classifier": {"convnet": "fedgen.models.convnet:ConvNet"},
    "method.autoencoder": {"autoencoder": "fedgen.models.autoencoder:Autoencoder"},
    "method.network": {"unet": "fedgen.models.unet:UNet"},
    "method.sampler": {"edm": "fedgen.losses.edm:Sampler"},
    "evaluation.classifiers.*": {
        "cnn": "fedgen.evaluation.utility:cnn",
        "network": "fedgen.evaluation.utility:network",
        "scikit": "fedgen.evaluation.utility:scikit",
    },
}
"""Place of the settings -> word -> ``module:function`` or ``module:class``."""

CALL_ARGUMENTS: dict[str, frozenset[str] | int] = {
    "data": frozenset({"root", "public_rows", "streams"}),
    "partition": frozenset({"images", "labels", "classes", "writers", "streams"}),
    "runtime": frozenset({"server", "setup", "clients", "rebuild"}),
    "logger": frozenset({"place", "name", "rounds"}),
    "method": frozenset({"facts", "noise_multiplier", "device"}),
    "method.strategy": frozenset({"method", "streams"}),
    "evaluation.classifiers.*": 4,
}
"""Place -> arguments that fedgen supplies at the call, or how many by position; all other
parameters are settings."""

NOT_BOUND = {
    "data": ("root", "public_rows", "public_persons"),
    "runtime": (*RUNTIME_INVARIANT, "store", "cache_gb", "checkpoint_every"),
    "method": ("strategy",),
}
"""Place -> settings that are not bound to its functions: fedgen reads them itself."""

STRATEGIES = ("method.strategy", "warm_up.method.strategy")
"""Places of a word, or of settings with a ``type``."""

MODELS = frozenset(
    {
        "sklearn.discriminant_analysis.LinearDiscriminantAnalysis",
        "sklearn.ensemble.AdaBoostClassifier",
        "sklearn.ensemble.BaggingClassifier",
        "sklearn.ensemble.GradientBoostingClassifier",
        "sklearn.ensemble.RandomForestClassifier",
        "sklearn.linear_model.LogisticRegression",
        "sklearn.naive_bayes.BernoulliNB",
        "sklearn.naive_bayes.GaussianNB",
        "sklearn.neural_network.MLPClassifier",
        "sklearn.svm.LinearSVC",
        "sklearn.tree.DecisionTreeClassifier",
        "xgboost.XGBClassifier",
    }
)
"""Models of other libraries that ``type: scikit`` may train."""


def group_of(place: str) -> str:
    """Return the key of a place in ``REGISTRY``, e.g. ``method`` for ``warm_up.method``."""
    place = place.removeprefix("warm_up.")
    above, _, _ = place.rpartition(".")
    return "evaluation.classifiers.*" if above == "evaluation.classifiers" else place


def words(place: str) -> dict[str, str]:
    """Return the words registered for a place, e.g. ``method.loss`` or ``warm_up.method``."""
    return REGISTRY.get(group_of(place), {})


def check(settings: object, place: str) -> None:
    """Check all types in settings, at any depth, against the registry.

    Args:
        settings: plain dictionaries and lists.
        place: their place in the configuration; empty for a whole one.

    Raises:
        FedgenError: for a type that is not registered for its place; for text with ``${``, which
            would refer to other settings; for a keyword of Hydra.
    """
    for at, value in _entries(settings, place):
        where, _, key = at.rpartition(".")
        if key in ("_target_", "_partial_"):
            remedy = "write type: WORD, or type: PACKAGE.MODULE.FUNCTION for your own package"
            raise FedgenError(at, "is not a setting", remedy)
        if key.startswith("_"):
            raise FedgenError(at, "is not a setting", "leave it out")
        if isinstance(value, str) and "${" in value:
            raise FedgenError(at, "contains ${", "write the value itself")
        if key == "type":
            _check_word(at, value, words(where))
        elif at in STRATEGIES and not (isinstance(value, dict) and "type" in value):
            _check_word(at, value, words(at))


def _check_word(place: str, value: object, choices: dict[str, str]) -> None:
    if (isinstance(value, str) and value in choices) or is_extension(value):
        return
    remedy = f"choose one of {', '.join(choices)}" if choices else "leave it out"
    if isinstance(value, str) and "." in value and not value.startswith("fedgen."):
        remedy = "if it is yours, declare its package: FEDGEN_EXTENSIONS=PACKAGE fedgen ..."
    raise FedgenError(place, f"cannot be {show_value(value)}", remedy)


def check_model(name: object, place: str) -> None:
    """Raise FedgenError for a model that is neither registered nor of a declared package."""
    if not (isinstance(name, str) and name in MODELS) and not is_extension(name):
        remedy = "choose one of configs/evaluation/full.yaml, or declare its package, e.g. "
        remedy += "FEDGEN_EXTENSIONS=sklearn fedgen ..."
        raise FedgenError(place, f"{name!r} is not a registered model", remedy)


def _entries(settings: object, place: str) -> Iterator[tuple[str, object]]:
    """Yield (place, value) of all settings at any depth, outer ones first."""
    if isinstance(settings, dict):
        for name, value in settings.items():
            at = f"{place}.{name}" if place else str(name)
            yield at, value
            yield from _entries(value, at)
    elif isinstance(settings, list):
        for number, value in enumerate(settings):
            yield f"{place}[{number}]", value
            yield from _entries(value, f"{place}[{number}]")


def extension_types(settings: object) -> list[str]:
    """Return the types and strategies of extensions in settings, at any depth."""
    type_names = {
        str(value)
        for place, value in _entries(settings, "")
        if is_extension(value) and (place.endswith(".type") or place in STRATEGIES)
    }
    return sorted(type_names)


def to_plain(config: DictConfig) -> dict[str, Any]:
    """Return settings as plain values."""
    settings: Any = OmegaConf.to_container(config, resolve=True)
    return {str(name): value for name, value in settings.items()}


def load(word: str, place: str) -> Any:
    """Return the function or class behind a word, or with the dotted name of an extension.

    Raises:
        FedgenError: if it is not registered for its place, or cannot be imported.
    """
    _check_word(f"{place}.type", word, words(place))
    module, _, name = words(place).get(word, "").partition(":")
    if module:
        return getattr(importlib.import_module(module), name)
    return load_named(word, f"{place}.type")
