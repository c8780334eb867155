"""Read a matrix of runs, methods x data x epsilon x seeds, from a file that may be untrusted, and
expand it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import jsonschema
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from fedgen.config.compose import compose
from fedgen.config.extensions import config_folders
from fedgen.config.overrides import config_name, group_folders, override_key
from fedgen.errors import FedgenError
from fedgen.storage.io import read_yaml
from fedgen.storage.schemas import schema

_SEE = "see configs/matrix/digits.yaml"
_KEY = re.compile(r"\+{0,2}(?!hydra)[A-Za-z_][\w./]*=")


@dataclass(frozen=True)
class GridPoint:
    """A run: its position in the matrix, its directory, and its overrides except the seed."""

    method: str
    data: str
    epsilon: float | None
    seed: int
    run_dir: Path
    overrides: list[str]

    @property
    def name(self) -> str:
        """Return the name of its run directory."""
        return self.run_dir.name

    @cached_property
    def config(self) -> DictConfig:
        """Return its configuration, composed on first access, because a matrix has many points."""
        config = _composed_config(*self.overrides).copy()
        config.seed = self.seed
        # not an override: a path may contain Hydra's special characters
        config.run_dir = str(self.run_dir)
        return config


@cache
def _composed_config(*words: str) -> DictConfig:
    return compose("config", list(words))


def target_name(epsilon: float | None) -> str:
    """Return ε as in the name of a run: 10 and 10.0 are equal."""
    if epsilon is None:
        return "inf"
    return f"{epsilon:g}" if float(f"{epsilon:g}") == epsilon else str(epsilon)


def read_matrix(name: str | None) -> DictConfig:
    """Read a matrix by name in ``configs/matrix``, or by file.

    Raises:
        FedgenError: if there is none, or if it contains anything but settings.
    """
    if name is None:
        names = sorted({path.stem for place in config_folders() for path in place.glob("matrix/*")})
        problem = "is required, because a benchmark trains dozens of runs"
        raise FedgenError("matrix", problem, f"choose {', '.join(names)}, or a FILE.yaml")
    path = Path(name) if name.endswith(".yaml") else config_name("matrix", name)
    try:
        matrix = OmegaConf.create(read_yaml(path))
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        problem = f"{path} cannot be read: {str(error).splitlines()[0]}"
        raise FedgenError("matrix", problem, _SEE) from error
    return _validated(matrix, f"{path}: ", "matrix.")


def _validated(matrix: Any, where: str, prefix: str) -> DictConfig:
    """Return a valid matrix that contains settings only: other keywords of Hydra, and options that
    are paths, would import and read what they name.

    Raises:
        FedgenError: for any other content.
    """
    try:
        plain = OmegaConf.to_container(matrix, resolve=True)
        _check_names(plain, where)
        jsonschema.validate(plain, schema("matrix"))
    except OmegaConfBaseException as error:
        problem = f"{where}{str(error).splitlines()[0]}"
        raise FedgenError("matrix", problem, _SEE) from error
    except jsonschema.ValidationError as error:
        key = prefix + ".".join(map(str, error.absolute_path))
        raise FedgenError(key.rstrip("."), f"{where}{error.message}", _SEE) from error
    assert isinstance(matrix, DictConfig)
    for word in _all_overrides(matrix):
        group = override_key(word) in group_folders() or "/" in override_key(word)
        named = re.fullmatch(r"[\w-]+", word.partition("=")[2])
        called = override_key(word).endswith((".type", ".strategy"))
        if not _KEY.match(word) or "$" in word or called or (group and not named):
            problem = f"{where}{word!r} is not allowed in a matrix"
            raise FedgenError(f"{prefix}settings", problem, _SEE)
    return matrix


def _check_names(plain: object, where: str) -> None:
    """Raise FedgenError for a key that is not a string: a schema checks only string keys."""
    for key, value in plain.items() if isinstance(plain, dict) else ():
        if not isinstance(key, str):
            raise FedgenError("matrix", f"{where}{key!r} is not a valid name", f"quote it; {_SEE}")
        _check_names(value, where)


def _all_overrides(matrix: DictConfig) -> Iterator[str]:
    yield from matrix.settings
    for method in matrix.methods.values():
        for name, words in method.items():
            if name == "settings" or str(name).startswith("on_"):
                yield from words


def select(matrix: DictConfig, config: DictConfig) -> DictConfig:
    """Return the part of a matrix that the command requests."""
    matrix = matrix.copy()
    for axis in ("data", "epsilons", "seeds", "methods"):
        values = config[axis]
        if values is None:
            continue
        if not isinstance(values, ListConfig) or not values or len(set(values)) < len(values):
            problem = f"must be a list of different values, got {values!r}"
            raise FedgenError(axis, problem, f"e.g. {axis}=[...]")
        if axis == "methods":
            unknown = [method for method in values if method not in matrix.methods]
            if unknown:
                options = ", ".join(matrix.methods)
                raise FedgenError(axis, f"there is no {unknown[0]!r}", f"choose from {options}")
            matrix.methods = {method: matrix.methods[method] for method in values}
        else:
            matrix[axis] = values
    return _validated(matrix, "", "")


def expand(matrix: DictConfig, place: Path) -> Iterator[GridPoint]:
    """Return all points of a matrix, seeds last: a first table of all methods is available
    early."""
    axes = matrix.seeds, matrix.data, matrix.epsilons, matrix.methods.items()
    for seed, data, epsilon, (method, method_settings) in itertools.product(*axes):
        words = [
            *matrix.settings,
            *method_settings.settings,
            *method_settings.get(f"on_{data}", []),
        ]
        none = "privacy=none" if epsilon is None else f"privacy.target_epsilon={epsilon}"
        name = f"{method}-{data}-{target_name(epsilon)}-{seed}"
        words += [f"data={data}", none]
        yield GridPoint(str(method), data, epsilon, seed, place / name, words)


def check_runnable(point: GridPoint) -> None:
    """Raise FedgenError for a point that sends images or logs to another machine, or spends the
    privacy budget of the data."""
    for key in ("runtime.address", "runtime.superlink", "logger.uri", "logger.online"):
        if OmegaConf.select(point.config, key):
            problem = f"{point.name} sets {key}, which is not allowed in a matrix"
            raise FedgenError("matrix", problem, "leave it out, or run it by fedgen train")
    if point.config.privacy.noise == "secure":
        problem = f"{point.name} sets privacy.noise=secure, and a matrix is for experiments"
        raise FedgenError("matrix", problem, "leave out privacy.noise, or run it by fedgen train")
