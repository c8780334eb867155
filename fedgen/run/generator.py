"""Load generators and draw samples."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from fedgen.config import registry
from fedgen.config.build import build
from fedgen.config.device import resolve_device
from fedgen.config.renamed import with_present_names
from fedgen.data.labels import has_names
from fedgen.errors import FedgenError
from fedgen.methods.api import Method, PublicFacts, Tensors
from fedgen.randomness import RandomStreams
from fedgen.reporting.content_credentials import png_signer
from fedgen.reporting.dataset_card import card, croissant
from fedgen.reporting.figures import DIGITAL_SOURCE_TYPE, sample_grid, write_image
from fedgen.reporting.parquet import write_parquet
from fedgen.reporting.progress import RunProgress
from fedgen.run.setup import Setup, published_names
from fedgen.run.snapshot import is_unfinished, load_snapshot
from fedgen.storage.io import check_no_links, read_bounded, read_json, share, temporary_path
from fedgen.storage.packages import unpacked
from fedgen.storage.run_dir import RunDir
from fedgen.version import VERSION

SCHEMA = 4
"""Schema of ``generator.json``."""

_SCHEMA_OF_FORMER_NAMES = 3  # as 4, with names of settings as in 0.1.0

_CLIENTS = 10**9
_COLUMNS = 10  # columns of a grid
_MOST = 10**7  # limit on samples per command


@dataclass(frozen=True)
class PublishedGenerator:
    """A published generator: the method that samples with ``weights``, the number of labels, the
    shape of images (c, h, w), and the names of labels if they were published."""

    method: Method
    weights: Tensors
    classes: int
    shape: tuple[int, int, int]
    labels: list[str] | None


def judged_samples(
    ready: Setup, generator: Tensors, count: int, progress: RunProgress
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the samples by which a run is evaluated, with uniform labels."""
    streams, classes = ready.streams.at("evaluation"), ready.dataset.classes
    labels = torch.randint(0, classes, (count,), generator=streams.public("labels"))
    images = draw_samples(ready.method, generator, labels, streams.at("samples"), progress)
    return images, labels.numpy()


def draw_samples(
    method: Method,
    generator: Tensors,
    labels: Tensor,
    streams: RandomStreams,
    progress: RunProgress | None = None,
) -> NDArray[np.uint8]:
    """Return samples (n, channels, height, width) uint8, generated in batches of 1,000."""
    batches: list[Tensor] = []
    for number, part in enumerate(torch.split(labels, 1000)):
        batches.append(method.server.sample(generator, part, streams.at("batch", number)))
        if progress is not None:
            done = number * 1000 + len(part)
            progress.show("samples", done, len(labels), "", end=False)
    drawn = torch.cat(batches)
    if not bool(drawn.isfinite().all()):
        problem = "the generator produces non-finite pixels"
        raise FedgenError("run", problem, "restore it, or request it from its author")
    images: NDArray[np.uint8] = (drawn * 255).round().to(torch.uint8).numpy()
    return images


def describe(ready: Setup, sha256: str, record: Mapping[str, Any]) -> str:
    """Return the public parameters that are needed to sample from the weights. Architectures are
    stored as names of registered components, not as Python paths.

    Args:
        sha256: digest of the file of the weights.
        record: privacy record, of which the parts for a reader of the release are included, and
            the facts for the registry.
    """
    method = OmegaConf.to_container(ready.config.method, resolve=True)
    assert isinstance(method, dict)
    facts = {
        "classes": ready.dataset.classes,
        "labels": published_names(ready),
        "shape": list(ready.dataset.shape),
    }
    view = record["views"]["release"]
    published_keys = ("delta", "unit", "relation", "noise")
    privacy = {key: record[key] for key in published_keys if key in record}
    if record["without_bound"]:  # ε covers the other clients
        lost, clients = len(record["without_bound"]), len(record["clients"])
        privacy["without_bound"] = {"clients": lost, "of": clients}
    warm_up = OmegaConf.to_container(ready.config.warm_up, resolve=True)
    assert isinstance(warm_up, dict)
    began = {} if warm_up["method"] is None else {"warm_up": _without_strategies(warm_up)}
    description = {
        "schema": SCHEMA,
        "method": _without_strategies(method),
        **began,
        **facts,
        "generator_sha256": sha256,
        "privacy": {
            **{key: view[key] for key in ("epsilon", "guarantee", "group_epsilon")},
            **privacy,
        },
        **({"registry": record["registry"]} if "registry" in record else {}),
        "fedgen": VERSION,
        "date": date.today().isoformat(),
    }
    return json.dumps(description, indent=2) + "\n"


def read_description(folder: Path, key: str) -> dict[str, Any]:
    """Read ``generator.json`` of a published folder.

    Raises:
        FedgenError: if it cannot be read or has a different schema; named by ``key``.
    """
    path = folder / "generator.json"
    try:
        description = read_json(path)
        schema = description["schema"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = "give a finished run, its public folder, or a ZIP file of fedgen release"
        problem = f"{path} cannot be read"
        if not folder.is_dir():
            problem = f"{folder} is not a folder" if folder.exists() else f"there is no {folder}"
        elif within := sorted(file.parent for file in folder.glob("*/generator.json"))[:1]:
            remedy = f"did you mean {within[0]}?"
        raise FedgenError(key, problem, remedy) from error
    if schema == _SCHEMA_OF_FORMER_NAMES and isinstance(description.get("method"), dict):
        return {
            **description,
            "schema": SCHEMA,
            "method": with_present_names(description["method"], "method"),
        }
    if schema != SCHEMA:
        problem = f"{path} has schema {schema!r}, not {SCHEMA}"
        raise FedgenError(key, problem, "open it by the version of fedgen that wrote it")
    return dict(description)


def load_generator(path: Path, device: str) -> PublishedGenerator:
    """Load the generator of a finished run, of its ``public`` folder, or of a package of ``fedgen
    release``. Folder and package are untrusted data: only registered components, and those of
    declared extensions, are built, and the weights must match the description.

    Raises:
        FedgenError: if there is no valid generator.
    """
    with unpacked(path, "run") as folder:
        return _load_generator(folder, device)


def _load_generator(path: Path, device: str) -> PublishedGenerator:
    folder = path / "public" if (path / "public").is_dir() else path
    if os.path.lexists(folder / "generator.json"):  # another folder may contain links
        check_no_links(folder, "run")
    description = read_description(folder, "run")
    try:
        data = read_bounded(folder / "generator.safetensors", _LARGEST)
        weights = safetensors.torch.load(data)
        # the number of clients is not published; larger than any cohort
        facts = PublicFacts(_CLIENTS, None, *_sizes(description["classes"], description["shape"]))
        names = _names(description.get("labels"), facts.classes)
        settings = description["method"]
        _check_lists(settings)
        _check_registered(settings, path)
        make = build(settings, "method")
        with (
            _parameter_limit(_MAX_ENTRIES * len(weights)),
            torch.device("meta"),
        ):  # only sizes: they may have any value
            server = make(facts=facts, noise_multiplier=None, device="meta").server
            expected = server.generator(server.init(RandomStreams.from_seed(0, "seeded")))
    except FedgenError as error:
        if not error.key.startswith(("method", "data.")):
            raise
        problem = f"{folder / 'generator.json'} was altered ({error.key}: {error.problem})"
        raise FedgenError("run", problem, "restore it") from error
    except Exception as error:  # untrusted settings may raise anything
        gone = isinstance(error, FileNotFoundError)
        remedy = f"finish it: fedgen train resume={path}" if gone else "restore it"
        raise FedgenError("run", f"{path} has no readable generator", remedy) from error
    sha256 = hashlib.sha256(data).hexdigest()
    of_run = RunDir(path).results()["generator_sha256"] if (path / "results.json").exists() else ""
    if sha256 != description.get("generator_sha256") or (of_run and sha256 != of_run):
        raise FedgenError(
            "run",
            f"{folder / 'generator.safetensors'} was changed after the run wrote it",
            "restore it",
        )
    shapes = [
        {n: (v.shape, v.dtype) for n, v in tensors.items()} for tensors in (weights, expected)
    ]
    if shapes[0] != shapes[1] or not all(bool(v.isfinite().all()) for v in weights.values()):
        problem = f"{folder / 'generator.safetensors'} does not match generator.json"
        raise FedgenError("run", problem, "restore it")
    device = resolve_device(device)
    method: Method = make(facts=facts, noise_multiplier=None, device=device)
    weights = {name: value.to(device) for name, value in weights.items()}
    return PublishedGenerator(method, weights, facts.classes, facts.shape, names)


_LARGEST = 2**34  # limit on the weights, in bytes
_MAX_ENTRIES = (
    100  # limit relative to the weights of the generator, for other networks of the method
)


@contextlib.contextmanager
def _parameter_limit(parameters: int) -> Iterator[None]:
    """Raise ValueError once networks register more parameters than this: an untrusted file may
    request any number of layers."""
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


def _without_strategies(settings: Any) -> Any:
    """Return settings without the strategies, which generators do not need."""
    if not isinstance(settings, dict):
        return settings
    return {n: _without_strategies(value) for n, value in settings.items() if n != "strategy"}


def _check_registered(settings: Any, path: Path) -> None:
    """Raise FedgenError for a type that is not registered, and not of a declared extension."""
    try:
        registry.check(settings, "method")
    except FedgenError as error:
        problem = f"{path} was altered, or needs an extension ({error.key}: {error.problem})"
        extension_remedy = f"; {error.remedy}" if "FEDGEN_EXTENSIONS" in error.remedy else ""
        raise FedgenError("run", problem, f"restore it{extension_remedy}") from error


def _check_lists(settings: Any) -> None:
    """Raise ValueError for a list longer than that of any setting."""
    if isinstance(settings, list) and len(settings) > _MOST_LISTED:
        raise ValueError
    if isinstance(settings, dict | list):
        for value in settings.values() if isinstance(settings, dict) else settings:
            _check_lists(value)


_MOST_LISTED = 256  # limit on the entries of a setting, e.g. widths of layers


def _sizes(classes: Any, shape: Any) -> tuple[int, tuple[int, int, int]]:
    """Raise ValueError for sizes that no data set has."""
    channels, high, wide = shape
    if not all(isinstance(n, int) and 0 < n <= 2**16 for n in (classes, channels, high, wide)):
        raise ValueError
    return classes, (channels, high, wide)


def _names(names: Any, classes: int) -> list[str] | None:
    """Raise ValueError unless these are valid names of the labels: each may become the name of a
    folder."""
    if names is None:
        return None
    if not isinstance(names, list) or len(names) != classes or not has_names(names):
        raise ValueError
    return names


def labels_of(
    published: PublishedGenerator, count: Any, labels: Any, streams: RandomStreams
) -> Tensor:
    """Return the labels of samples: uniform over ``labels`` (numbers or names) or over all labels;
    for a set of images, each image once.

    Raises:
        FedgenError: for unknown labels, or more samples than a set has.
    """
    if not isinstance(count, int | np.integer) or count is True or not 1 <= count <= _MOST:
        problem = f"must be a whole number from 1 to {_MOST}, got {count!r}"
        raise FedgenError("n", problem, "e.g. n=1000")
    classes, names = published.classes, published.labels or []
    listed = isinstance(labels, Sequence) and len(labels) > 0 and not isinstance(labels, str)
    if labels is not None and not listed:
        or_names = f", or {', '.join(names)}" if names else ""
        problem = f"must be a list of numbers from 0 to {classes - 1}{or_names}; got {labels!r}"
        raise FedgenError("labels", problem, "e.g. labels=[0,1]")
    among = range(classes) if labels is None else [_number(n, classes, names) for n in labels]
    count = int(count)
    distinct, drawn = published.method.server.distinct_images, streams.public("labels")
    if distinct is None:
        return torch.tensor(list(among))[torch.randint(0, len(among), (count,), generator=drawn)]
    order = torch.randperm(distinct, generator=drawn) % classes  # equally many per label
    order = order[torch.isin(order, torch.tensor(list(among)))]
    if count > len(order):
        problem = f"{count} of a set of {len(order)} images"
        raise FedgenError("n", problem, f"take at most {len(order)}: that is all of them")
    return order[:count]


def _number(label: Any, classes: int, names: Sequence[str]) -> int:
    """Return the number of a label given by number or name."""
    if str(label) in names:  # names take precedence, because a name may be a number
        return names.index(str(label))
    is_integer = isinstance(label, Integral) and not isinstance(label, bool)
    if not is_integer or not 0 <= int(label) < classes:
        or_names = f", or {', '.join(names)}" if names else ""
        problem = f"must be a list of numbers from 0 to {classes - 1}{or_names}; got {label}"
        remedy = "e.g. labels=[0,1]" if names else "e.g. labels=[0,1]; this run has no label names"
        raise FedgenError("labels", problem, remedy)
    return int(label)


def sample(config: DictConfig) -> str:
    """Write samples of a run: images (n, channels, height, width) uint8 and labels (n,) in an .npz,
    or with ``npz=dpimagebench`` the same as x, float32 in [0, 1], and y, as DPImageBench reads; a
    grid as a .png; a .parquet of images and labels in the format of the Hugging Face hub; or a
    folder of ``label/00000.png`` that ``data=folder`` reads, with the names of labels if they were
    published, a dataset card and Croissant metadata. All are marked as synthetic: PNGs by XMP
    metadata, the others by the entry ``digital_source_type``. With ``credentials``, PNGs are signed
    (``content_credentials``). Requires only the ``public`` folder or a package; an unfinished run
    requires its directory and its data. Return the location as text."""
    out, streams = Path(config.out), RandomStreams.from_seed(config.seed, "seeded").at("sample")
    if not out.suffix and out.exists():
        raise FedgenError("out", f"{out} exists", "give a folder that does not")
    if out.suffix not in ("", ".npz", ".png", ".parquet"):
        problem = f"{out} is neither .npz, .png, .parquet nor a folder"
        remedy = "give out=FILE.npz, out=GRID.png, out=FILE.parquet or out=FOLDER"
        raise FedgenError("out", problem, remedy)
    if config.npz != "fedgen" and out.suffix != ".npz":
        raise FedgenError("npz", f"does not apply to out={out}", "give out=FILE.npz")
    path, text, description = Path(config.run), str(out), None
    if is_unfinished(path):
        snapshot = load_snapshot(path)
        names = published_names(snapshot.setup)
        classes, shape = snapshot.setup.dataset.classes, snapshot.setup.dataset.shape
        published = PublishedGenerator(
            snapshot.setup.method, snapshot.generator, classes, shape, names
        )
        text = f"{out}\n{snapshot.note}"
    else:
        with unpacked(path, "run") as place:
            published = _load_generator(place, config.device)
            folder = place / "public" if (place / "public").is_dir() else place
            description = read_description(folder, "run")
    sign = _signer(config, out, description)
    labels = labels_of(published, config.n, config.labels, streams)
    if out.suffix == ".png":
        labels = labels.sort(stable=True).values
    with RunProgress(stderr=True) as progress:
        images = draw_samples(published.method, published.weights, labels, streams, progress)
    try:
        with temporary_path(
            out, folder=not out.suffix
        ) as new:  # atomic: an existing file is kept on failure
            if config.npz == "dpimagebench":
                _write_dpimagebench(images, labels, new)
            else:
                _write(out.suffix, images, labels, published, new)
            if description is not None and not out.suffix:
                _describe_folder(description, new, out.name, len(images))
            if sign is not None:
                for image in [new] if out.suffix else sorted(new.rglob("*.png")):
                    sign(image)
            for entry in (new, *new.rglob("*")):
                share(entry)
            new.rename(out)
    except OSError as error:
        why = f" ({error.strerror})" if error.strerror else ""
        problem = f"{out} cannot be written{why}"
        raise FedgenError("out", problem, "choose another place") from error
    return text


def _signer(
    config: DictConfig, out: Path, description: dict[str, Any] | None
) -> Callable[[Path], None] | None:
    """Return a function that signs a PNG; None without ``credentials``."""
    if config.credentials is None and config.credentials_key is None:
        return None
    if config.credentials is None or config.credentials_key is None:
        missing = "credentials" if config.credentials is None else "credentials_key"
        remedy = "give credentials and credentials_key together"
        raise FedgenError(missing, "is missing", remedy)
    if out.suffix not in ("", ".png"):
        problem = f"applies to PNG files, not to out={out}"
        raise FedgenError("credentials", problem, "give out=GRID.png or out=FOLDER")
    return png_signer(Path(config.credentials), Path(config.credentials_key), description)


def _write_dpimagebench(images: NDArray[np.uint8], labels: Tensor, new: Path) -> None:
    origin, floats = np.array(DIGITAL_SOURCE_TYPE), images.astype(np.float32) / 255
    np.savez_compressed(new, x=floats, y=labels.numpy(), digital_source_type=origin)


def _write(
    suffix: str, images: NDArray[np.uint8], labels: Tensor, published: PublishedGenerator, new: Path
) -> None:
    """Write samples in the format of a suffix, "" for a folder."""
    if suffix == ".npz":
        origin = np.array(DIGITAL_SOURCE_TYPE)
        np.savez_compressed(new, images=images, labels=labels.numpy(), digital_source_type=origin)
    elif suffix == ".png":
        sample_grid(images, min(len(images), _COLUMNS), new)
    elif suffix == ".parquet":
        names = published.labels or [str(n) for n in range(published.classes)]
        write_parquet(images, labels.tolist(), names, new)
    else:
        _write_folder(images, labels.tolist(), published.labels, new)


def _describe_folder(description: dict[str, Any], new: Path, name: str, count: int) -> None:
    """Write a dataset card and Croissant metadata into a folder of samples.

    Raises:
        FedgenError: for an altered ``generator.json``.
    """
    labels = [entry.name for entry in sorted(new.iterdir())]
    try:
        texts = {
            "README.md": card(description, labels, count),
            "croissant.json": croissant(description, name),
        }
    except (KeyError, TypeError, ValueError) as error:
        problem = f"generator.json has no valid privacy section ({error})"
        raise FedgenError("run", problem, "restore the original file") from error
    for file, text in texts.items():
        (new / file).write_text(text)


def _write_folder(
    images: NDArray[np.uint8], labels: list[int], names: list[str] | None, out: Path
) -> None:
    """Write one file per image, in a folder per label. File names are unique, because
    ``data=folder`` identifies records by them."""
    width = len(str(max(labels)))  # names sort in the order of labels
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        place = out / (f"{label:0{width}d}" if names is None else names[label])
        place.mkdir(parents=True, exist_ok=True)
        write_image(image, place / f"{number:05d}.png")
