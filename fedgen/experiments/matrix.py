"""A matrix of runs, methods x data x epsilon x seeds: a file that may be somebody else's, what it
may say, and its runs."""

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

from fedgen.errors import FedgenError
from fedgen.experiments.configuration import compose
from fedgen.experiments.overrides import group_folders, key_of, named
from fedgen.files import read_yaml
from fedgen.reporting.run_dir import schema

_SEE = "see configs/matrix/digits.yaml"
_KEY = re.compile(r"\+{0,2}(?!hydra)[A-Za-z_][\w./]*=")


@dataclass(frozen=True)
class Point:
    """One run: where it is in the matrix, its directory, and the words of its settings, but for
    the seed."""

    method: str
    data: str
    epsilon: float | None
    seed: int
    run_dir: Path
    words: list[str]

    @property
    def name(self) -> str:
        """Its run directory's."""
        return self.run_dir.name

    @cached_property
    def config(self) -> DictConfig:
        """Its configuration, composed when it is asked for: a matrix has many points."""
        config = _composed(*self.words).copy()
        config.seed = self.seed
        config.run_dir = str(self.run_dir)  # no word: a path may have what Hydra takes for its own
        return config


@cache
def _composed(*words: str) -> DictConfig:
    return compose("config", list(words))


def target_name(epsilon: float | None) -> str:
    """As it stands in a run's name: 10 and 10.0 are the same."""
    if epsilon is None:
        return "inf"
    return f"{epsilon:g}" if float(f"{epsilon:g}") == epsilon else str(epsilon)


def read_matrix(name: str) -> DictConfig:
    """A matrix by its name in ``configs/matrix``, or by its file.

    Raises:
        FedgenError: if there is none.
    """
    path = Path(name) if name.endswith(".yaml") else named("matrix", name)
    try:
        matrix = OmegaConf.create(read_yaml(path))
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        problem = f"{path} cannot be read: {str(error).splitlines()[0]}"
        raise FedgenError("matrix", problem, _SEE) from error
    return _checked(matrix, f"{path}: ", "matrix.")


def _checked(matrix: Any, where: str, prefix: str) -> DictConfig:
    """A matrix as it should be, of settings alone: Hydra's other words, and options that are paths,
    have it import and read what they name. Raises FedgenError for another."""
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
    for word in _words(matrix):
        group = key_of(word) in group_folders() or "/" in key_of(word)
        named = re.fullmatch(r"[\w-]+", word.partition("=")[2])
        called = "._" in key_of(word)
        if not _KEY.match(word) or "$" in word or called or (group and not named):
            problem = f"{where}{word!r} is no word of a matrix"
            raise FedgenError(f"{prefix}settings", problem, _SEE)
    return matrix


def _check_names(plain: object, where: str) -> None:
    """Raises FedgenError for a key that is no text: a schema looks at no other."""
    for key, value in plain.items() if isinstance(plain, dict) else ():
        if not isinstance(key, str):
            raise FedgenError("matrix", f"{where}{key!r} is no name", f"quote it; {_SEE}")
        _check_names(value, where)


def _words(matrix: DictConfig) -> Iterator[str]:
    yield from matrix.settings
    for method in matrix.methods.values():
        for name, words in method.items():
            if name == "settings" or str(name).startswith("on_"):
                yield from words


def cut(matrix: DictConfig, config: DictConfig) -> DictConfig:
    """The part of a matrix that the command asks for."""
    matrix = matrix.copy()
    for axis in ("data", "epsilons", "seeds", "methods"):
        chosen = config[axis]
        if chosen is None:
            continue
        if not isinstance(chosen, ListConfig) or not chosen or len(set(chosen)) < len(chosen):
            problem = f"must be a list of different values, got {chosen!r}"
            raise FedgenError(axis, problem, f"e.g. {axis}=[...]")
        if axis == "methods":
            unknown = [each for each in chosen if each not in matrix.methods]
            if unknown:
                known = ", ".join(matrix.methods)
                raise FedgenError(axis, f"there is no {unknown[0]!r}", f"choose of {known}")
            matrix.methods = {each: matrix.methods[each] for each in chosen}
        else:
            matrix[axis] = chosen
    return _checked(matrix, "", "")


def points_of(matrix: DictConfig, place: Path) -> Iterator[Point]:
    """All points of a matrix, seeds last: a first table of all methods is there soon."""
    axes = matrix.seeds, matrix.data, matrix.epsilons, matrix.methods.items()
    for seed, data, epsilon, (method, chosen) in itertools.product(*axes):
        words = [*matrix.settings, *chosen.settings, *chosen.get(f"on_{data}", [])]
        none = "privacy=none" if epsilon is None else f"privacy.target_epsilon={epsilon}"
        name = f"{method}-{data}-{target_name(epsilon)}-{seed}"
        words += [f"data={data}", none]
        yield Point(str(method), data, epsilon, seed, place / name, words)


def check_here(point: Point) -> None:
    """Raises FedgenError for a point that sends rows, or what is logged, to another machine, or
    spends what an experiment does not."""
    for key in ("runtime.address", "runtime.superlink", "logger.uri", "logger.online"):
        if OmegaConf.select(point.config, key):
            problem = f"{point.name} names {key}, which is no word of a matrix"
            raise FedgenError("matrix", problem, "leave it out, or run it by fedgen train")
    if point.config.privacy.noise == "secure":
        problem = f"{point.name} would spend privacy for good, and a matrix is for experiments"
        raise FedgenError("matrix", problem, "leave out privacy.noise, or run it by fedgen train")
