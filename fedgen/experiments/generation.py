"""Samples of a generator."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from fedgen import factories
from fedgen.coins import Coins
from fedgen.data.labels import are_names
from fedgen.errors import FedgenError
from fedgen.experiments import building
from fedgen.experiments.building import build
from fedgen.experiments.settings import Setup, published_names
from fedgen.experiments.unfinished import is_unfinished, unfinished
from fedgen.files import check_no_links, read_bounded, read_json, share, temporary_path
from fedgen.method import Method, PublicFacts, Tensors
from fedgen.reporting.figures import sample_grid, write_image
from fedgen.reporting.parquet import write_parquet
from fedgen.reporting.progress import RunProgress
from fedgen.reporting.run_dir import RunDir
from fedgen.version import VERSION

SCHEMA = 3
"""Of ``generator.json``."""

_CLIENTS = 10**9
_COLUMNS = 10  # of a grid
_MOST = 10**7  # samples at once


@dataclass(frozen=True)
class Published:
    """What a run published: the method that draws samples of ``weights``, the number of labels,
    images' shape (c, h, w), and the labels' names, where the run was told them (``data.labels``:
    none is read off the rows)."""

    method: Method
    weights: Tensors
    classes: int
    shape: tuple[int, int, int]
    labels: list[str] | None


def judged_samples(
    ready: Setup, generator: Tensors, count: int, progress: RunProgress
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The samples that a run is judged by, with uniform labels."""
    coins, classes = ready.coins.at("evaluation"), ready.dataset.classes
    labels = torch.randint(0, classes, (count,), generator=coins.public("labels"))
    images = draw_samples(ready.method, generator, labels, coins.at("samples"), progress)
    return images, labels.numpy()


def draw_samples(
    method: Method,
    generator: Tensors,
    labels: Tensor,
    coins: Coins,
    progress: RunProgress | None = None,
) -> NDArray[np.uint8]:
    """Samples (n, channels, height, width) uint8, made in batches of 1,000."""
    batches: list[Tensor] = []
    for number, part in enumerate(torch.split(labels, 1000)):
        batches.append(method.server.sample(generator, part, coins.at("batch", number)))
        if progress is not None:
            done = number * 1000 + len(part)
            progress.show("samples", done, len(labels), "", end=False)
    drawn = torch.cat(batches)
    if not bool(drawn.isfinite().all()):
        problem = "the generator produces non-finite pixels"
        raise FedgenError("run", problem, "restore it, or ask who made it")
    images: NDArray[np.uint8] = (drawn * 255).round().to(torch.uint8).numpy()
    return images


def describe(ready: Setup, sha256: str, record: Mapping[str, Any]) -> str:
    """What is needed beside the weights to draw samples: public parameters alone. Architectures go
    by words, not by what Python would import. ``sha256``: of the weights' file; ``record``: of
    privacy, of which what holds for whoever has the folder is said."""
    method = OmegaConf.to_container(ready.config.method, resolve=True)
    assert isinstance(method, dict)
    facts = {
        "classes": ready.dataset.classes,
        "labels": published_names(ready),
        "shape": list(ready.dataset.shape),
    }
    known = ("delta", "unit", "relation", "noise", "images_per_person")
    privacy = {key: record[key] for key in known if key in record}
    if record["without_bound"]:  # epsilon is about the others
        lost, clients = len(record["without_bound"]), len(record["clients"])
        privacy["without_bound"] = {"clients": lost, "of": clients}
    warm_up = OmegaConf.to_container(ready.config.warm_up, resolve=True)
    assert isinstance(warm_up, dict)
    began = {} if warm_up["method"] is None else {"warm_up": _in_words(warm_up)}
    told = {
        "schema": SCHEMA,
        "method": _in_words(method),
        **began,
        **facts,
        "generator_sha256": sha256,
        "privacy": {"epsilon": record["views"]["release"]["epsilon"], **privacy},
        "fedgen": VERSION,
        "date": date.today().isoformat(),
    }
    return json.dumps(told, indent=2) + "\n"


def described(folder: Path, key: str) -> dict[str, Any]:
    """What ``generator.json`` in a published folder says.

    Raises:
        FedgenError: for one that cannot be read, or is of another schema; named by ``key``.
    """
    path = folder / "generator.json"
    try:
        found = read_json(path)
        schema = found["schema"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = "give a finished run, or its public folder"
        problem = f"{path} cannot be read"
        if not folder.is_dir():
            problem = f"{folder} is no folder" if folder.exists() else f"there is no {folder}"
            zipped = folder.exists() and folder.suffix == ".zip"
            remedy = "unpack it first" if zipped else remedy
        elif within := sorted(each.parent for each in folder.glob("*/generator.json"))[:1]:
            remedy = f"did you mean {within[0]}?"
        raise FedgenError(key, problem, remedy) from error
    if schema != SCHEMA:
        problem = f"{path} has schema {schema!r}, not {SCHEMA}"
        raise FedgenError(key, problem, "open it by the version of fedgen that wrote it")
    return dict(found)


def load_generator(path: Path, device: str) -> Published:
    """The generator of a finished run, or of its ``public`` folder handed out. It is data that
    somebody may have changed: nothing but what fedgen itself builds is built, and the weights must
    be those described.

    Raises:
        FedgenError: if there is none.
    """
    folder = path / "public" if (path / "public").is_dir() else path
    check_no_links(folder, "run")
    found = described(folder, "run")
    try:
        data = read_bounded(folder / "generator.safetensors", _LARGEST)
        weights = safetensors.torch.load(data)
        # how many clients there were is not told; more than a draw could be of
        facts = PublicFacts(_CLIENTS, None, *_sizes(found["classes"], found["shape"]))
        names = _names(found.get("labels"), facts.classes)
        settings = _in_targets(found["method"])
        factories.check(settings, "method")
        building.check_parameters("method", OmegaConf.create(settings))
        make = build(settings, "method", without=("strategy",))
        with (
            _at_most(_MANY * len(weights)),
            torch.device("meta"),
        ):  # sizes alone: they may be anything
            server = make(facts=facts, noise_multiplier=None, device="meta").server
            expected = server.generator(server.init(Coins.of(0, "seeded")))
    except FedgenError:
        raise
    except Exception as error:  # whatever its settings make of themselves
        gone = isinstance(error, FileNotFoundError)
        remedy = f"finish it: fedgen train resume={path}" if gone else "restore it"
        raise FedgenError("run", f"{path} has no readable generator", remedy) from error
    sha256 = hashlib.sha256(data).hexdigest()
    of_run = RunDir(path).results()["generator_sha256"] if (path / "results.json").exists() else ""
    if sha256 != found.get("generator_sha256") or (of_run and sha256 != of_run):
        raise FedgenError(
            "run", f"{folder / 'generator.safetensors'} is not what the run wrote", "restore it"
        )
    shapes = [{n: (v.shape, v.dtype) for n, v in each.items()} for each in (weights, expected)]
    if shapes[0] != shapes[1] or not all(bool(v.isfinite().all()) for v in weights.values()):
        problem = f"{folder / 'generator.safetensors'} does not hold what generator.json describes"
        raise FedgenError("run", problem, "restore it")
    device = building.device(device)
    method: Method = make(facts=facts, noise_multiplier=None, device=device)
    weights = {name: each.to(device) for name, each in weights.items()}
    return Published(method, weights, facts.classes, facts.shape, names)


_LARGEST = 2**34  # bytes of weights
_MANY = 100  # times the weights of a generator: other networks of its method


@contextlib.contextmanager
def _at_most(parameters: int) -> Iterator[None]:
    """Raises ValueError once networks register more parameters than this: an untrusted file may
    set any number of layers."""
    left = [parameters]

    def registered(*_: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise ValueError("more parameters than there are weights for")

    hook = torch.nn.modules.module.register_module_parameter_registration_hook(registered)
    try:
        yield
    finally:
        hook.remove()


_ROOMS = ("fedgen.methods.", "fedgen.models.", "fedgen.losses.")


def _word(target: str) -> str:
    """A factory's short name."""
    for room in _ROOMS:
        target = target.removeprefix(room)
    return target


def _in_words(settings: Any) -> Any:
    """Settings with the short names of what they have called."""
    if not isinstance(settings, dict):
        return settings
    kept = {n: v for n, v in settings.items() if n not in ("_target_", "_partial_", "strategy")}
    told = {"name": _word(settings["_target_"])} if "_target_" in settings else {}
    return told | {name: _in_words(value) for name, value in kept.items()}


def _in_targets(told: Any) -> Any:
    """The inverse of ``_in_words``. Raises ValueError for what it does not make."""
    if isinstance(told, dict):
        known = {_word(name): name for name in factories.own() if name.startswith(_ROOMS)}
        settings = {key: _in_targets(value) for key, value in told.items() if key != "name"}
        if any(key.startswith("_") for key in settings):
            raise ValueError
        if "name" not in told:  # numbers by name, nothing that is built
            return settings
        name = told["name"]
        if not isinstance(name, str):
            raise ValueError
        return {"_target_": known.get(name, name), "_partial_": True, **settings}
    if isinstance(told, list):
        if len(told) > _MOST_LISTED:
            raise ValueError
        return [_in_targets(each) for each in told]
    if isinstance(told, str) and "${" in told:
        raise ValueError
    return told


_MOST_LISTED = 256  # entries of a setting, e.g. widths of layers


def _sizes(classes: Any, shape: Any) -> tuple[int, tuple[int, int, int]]:
    """Raises ValueError for numbers that no data set has."""
    channels, high, wide = shape
    if not all(isinstance(n, int) and 0 < n <= 2**16 for n in (classes, channels, high, wide)):
        raise ValueError
    return classes, (channels, high, wide)


def _names(told: Any, classes: int) -> list[str] | None:
    """Raises ValueError for what are no names of so many labels: each may become a folder's."""
    if told is None:
        return None
    if not isinstance(told, list) or len(told) != classes or not are_names(told):
        raise ValueError
    return told


def labels_of(published: Published, count: Any, chosen: Any, coins: Coins) -> Tensor:
    """The labels of so many samples: uniform among those ``chosen``, numbers or names, or all; of a
    set, each of its images once.

    Raises:
        FedgenError: for labels that there are not, or more than a set has.
    """
    if not isinstance(count, int | np.integer) or count is True or not 1 <= count <= _MOST:
        problem = f"must be a whole number from 1 to {_MOST}, got {count!r}"
        raise FedgenError("n", problem, "e.g. n=1000")
    classes, names = published.classes, published.labels or []
    listed = isinstance(chosen, Sequence) and len(chosen) > 0 and not isinstance(chosen, str)
    if chosen is not None and not listed:
        known = f", or {', '.join(names)}" if names else ""
        problem = f"must be a list of numbers from 0 to {classes - 1}{known}; got {chosen!r}"
        raise FedgenError("labels", problem, "e.g. labels=[0,1]")
    among = range(classes) if chosen is None else [_number(n, classes, names) for n in chosen]
    count = int(count)
    distinct, drawn = published.method.server.distinct, coins.public("labels")
    if distinct is None:
        return torch.tensor(list(among))[torch.randint(0, len(among), (count,), generator=drawn)]
    order = torch.randperm(distinct, generator=drawn) % classes  # as many of each label
    order = order[torch.isin(order, torch.tensor(list(among)))]
    if count > len(order):
        problem = f"{count} of a set of {len(order)} images"
        raise FedgenError("n", problem, f"take at most {len(order)}: that is all of them")
    return order[:count]


def _number(label: Any, classes: int, names: Sequence[str]) -> int:
    """The number of a label that is given by number or by name."""
    if str(label) in names:  # a name before a number: names may be numbers of their own
        return names.index(str(label))
    whole = isinstance(label, Integral) and not isinstance(label, bool)
    if not whole or not 0 <= int(label) < classes:
        known = f", or {', '.join(names)}" if names else ""
        problem = f"must be a list of numbers from 0 to {classes - 1}{known}; got {label}"
        remedy = "e.g. labels=[0,1]" if names else "e.g. labels=[0,1]; this run has no label names"
        raise FedgenError("labels", problem, remedy)
    return int(label)


def sample(config: DictConfig) -> str:
    """Writes samples of a run: images (n, channels, height, width) uint8 and labels (n,)
    of an .npz; a grid, as one .png; a .parquet of images and labels, as Hugging Face's hub has it;
    or a folder of ``label/00000.png``, as ``data=folder`` reads it, by the labels' names if these
    were published. Needs its ``public`` folder alone; of a run that is not over its directory and
    its data. Where they are, in words."""
    out, coins = Path(config.out), Coins.of(config.seed, "seeded").at("sample")
    if not out.suffix and out.exists():
        raise FedgenError("out", f"{out} exists", "give a folder that does not")
    if out.suffix not in ("", ".npz", ".png", ".parquet"):
        problem = f"{out} is neither .npz, .png, .parquet nor a folder"
        remedy = "give out=FILE.npz, out=GRID.png, out=FILE.parquet or out=FOLDER"
        raise FedgenError("out", problem, remedy)
    path, told = Path(config.run), str(out)
    if is_unfinished(path):
        made = unfinished(path)
        names = published_names(made.ready)
        classes, shape = made.ready.dataset.classes, made.ready.dataset.shape
        published = Published(made.ready.method, made.generator, classes, shape, names)
        told = f"{out}\n{made.note}"
    else:
        published = load_generator(path, config.device)
    labels = labels_of(published, config.n, config.labels, coins)
    if out.suffix == ".png":
        labels = labels.sort(stable=True).values
    with RunProgress(stderr=True) as progress:
        images = draw_samples(published.method, published.weights, labels, coins, progress)
    try:
        with temporary_path(out, folder=not out.suffix) as new:  # whole, or what was there stays
            _write(out.suffix, images, labels, published, new)
            for each in (new, *new.rglob("*")):
                share(each)
            new.rename(out)
    except OSError as error:
        why = f" ({error.strerror})" if error.strerror else ""
        problem = f"{out} cannot be written{why}"
        raise FedgenError("out", problem, "choose another place") from error
    return told


def _write(
    suffix: str, images: NDArray[np.uint8], labels: Tensor, published: Published, new: Path
) -> None:
    """Write samples in the format of a suffix, "" for a folder."""
    if suffix == ".npz":
        np.savez_compressed(new, images=images, labels=labels.numpy())
    elif suffix == ".png":
        sample_grid(images, min(len(images), _COLUMNS), new)
    elif suffix == ".parquet":
        names = published.labels or [str(n) for n in range(published.classes)]
        write_parquet(images, labels.tolist(), names, new)
    else:
        _write_folder(images, labels.tolist(), published.labels, new)


def _write_folder(
    images: NDArray[np.uint8], labels: list[int], names: list[str] | None, out: Path
) -> None:
    """One file for each image, in a folder of its label. No two files share a name: ``data=folder``
    tells records by it."""
    width = len(str(max(labels)))  # so that names sort as labels do
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        place = out / (f"{label:0{width}d}" if names is None else names[label])
        place.mkdir(parents=True, exist_ok=True)
        write_image(image, place / f"{number:05d}.png")
