"""``fedgen data check``: what a data set holds, before anything trains on it; and what a rehearsal
warns of. For whoever has the rows: counts are private, and go nowhere from here."""

from __future__ import annotations

import numpy as np
from omegaconf import DictConfig, OmegaConf

from fedgen import factories
from fedgen.data.datasets import Dataset
from fedgen.experiments import validation
from fedgen.experiments.configuration import compose
from fedgen.experiments.overrides import in_grammar, in_shell
from fedgen.experiments.settings import Decided, Setup, shared_out, wrong_delta
from fedgen.privacy.budget import delta_problem
from fedgen.privacy.events import Unit


def check(config: DictConfig) -> str:
    """Reads the data set of a configuration, and says what it found and which settings fit.

    Raises:
        FedgenError: for what training would refuse too.
    """
    validation.check(config)
    found, shards = shared_out(config)
    channels, height, width = found.shape
    kind = "grey" if channels == 1 else "RGB"
    rows, test = len(found.labels), len(found.test_labels)
    counts = np.bincount(found.labels, minlength=found.classes)
    lines = [
        f"{found.name}: {rows:,} images to train on, {test:,} to test on, {width}x{height} {kind}",
        f"{found.classes} label{'s' if found.classes > 1 else ''}, with {_each(counts)}",
    ]
    if found.writers is not None:
        of = np.unique(found.writers, return_counts=True)[1]
        lines.append(f"{len(of):,} clients, with {_each(of)}")
    if len(shards) > 1:
        sizes = np.array([len(shard) for shard in shards])
        lines.append(f"partition={config.names.partition}: {len(shards):,} clients, {_each(sizes)}")
    if found.persons is not None and found.shows_persons:
        of = np.unique(found.persons, return_counts=True)[1]
        lines.append(f"{len(of):,} persons, with {_each(of)}")
    if found.names is not None:
        names = ", ".join(found.names[:_SHOWN])
        lines.append(f"labels, published by name (data.names=false: by number): {names}")
    lines += [f"warning: {each}" for each in _warnings(found, counts, test)]
    if (wrong := delta_problem(config.privacy.delta, rows, "image")) is not None:
        lines.append(f"warning: privacy.delta: {wrong[0]}; {wrong[1]}")
    epsilon = f"privacy.target_epsilon={_EPSILON:g}"
    usual = compose("account", [f"data={config.names.data}"])
    fitting = _fitting(found, usual.data.get("public_rows") is not None)
    lines.append(f"fits: fedgen train {in_shell([*_given(config, usual), *fitting, epsilon])}")
    lines.append(
        "(privacy.target_epsilon: yours to choose, 1 is strong if δ is well below 1 / number of "
        f"images; without it, ε is {usual.privacy.target_epsilon:g})"
    )
    lines.append("(method.teacher=none: many times as fast, and better where images are few)")
    lines.append("these numbers are private: they are for whoever has the images alone")
    return "\n".join(lines)


def _warnings(found: Dataset, counts: np.ndarray, test: int) -> list[str]:
    said = []
    if found.classes == 1:
        said.append("all images have one label: nothing tells how useful samples are")
    said += _range(found) + _few(found, counts)
    if test < _FEW:
        said.append(f"{test} test images are few to judge samples by: read the intervals")
    if found.places.moves:
        said.append(
            f"{found.places.moves}: methods of sums take these images, and those that protect "
            "replaced records do not"
        )
    if found.shows_persons and _at_several_clients(found):
        said.append(
            "somebody has images at several clients, whom no client could protect alone: with "
            "privacy.unit=person take partition=single"
        )
    said += _unread(found)
    if found.persons is None:
        said.append("ε is about single images: several of one person are not one record")
    return said


_FEW_FOR_A_TEACHER = 10_000  # its labels are worse than those that samples were drawn for
_FEW = 50
_SHOWN = 20  # names in a line
_DARK = 31  # of 255: a largest pixel that no picture is meant to have
_EPSILON = 5  # what is proposed: no figure follows from it


def _each(counts: np.ndarray) -> str:
    few, most = int(counts.min()), int(counts.max())
    return f"{most:,} images each" if few == most else f"{few:,} to {most:,} images each"


def _few(found: Dataset, counts: np.ndarray) -> list[str]:
    """``counts``: images of each label."""
    rare = np.flatnonzero(counts < _FEW).tolist()
    names = found.names or [f"{label} (counted from 0)" for label in range(found.classes)]
    few = ", ".join(names[label] for label in rare)
    said = f"fewer than {_FEW} images of label {few}: mostly noise at a small ε"
    return [said] if few else []


def _range(found: Dataset) -> list[str]:
    """Warn of pixels that use a small part of 0..255."""
    least, most = (int(each) for each in (found.images.min(), found.images.max()))
    if least == most:
        return [f"all pixels are {most}: the images are blank"]
    if most > _DARK:
        return []
    cause = "masks of 0 and 1" if most == 1 else "12 bits in the low bits, or dark"
    remedy = f"scale them to 0..255, e.g. times {255 // most}"
    return [f"no pixel is above {most} of 255 ({cause}), and samples will be black: {remedy}"]


def _unread(found: Dataset) -> list[str]:
    """Whom an image shows may be told under a name that is not looked for."""
    names = ", ".join(repr(each) for each in found.unread)
    return [f"columns that are not read: {names} (see client, person, split)"] if names else []


def of_delta(ready: Decided) -> list[str]:
    """Warn of a δ that a release refuses."""
    if ready.privacy.noise_multiplier is None:
        return []
    wrong = wrong_delta(ready.privacy, ready.method.plan)
    return [] if wrong is None else [f"warning: privacy.delta: {wrong[0]}; {wrong[1]}"]


def of_the_digits(config: DictConfig) -> list[str]:
    """That a method was chosen with the settings of images of 8x8 pixels, for others."""
    name, own = str(config.names.method), not factories.is_outside(config.method["_target_"])
    if not own or not name.endswith("_small") or config.names.data == "digits":
        return []
    return [f"{name} has the digits' settings: for other images try method=mixture"]


def of_little_use(ready: Setup) -> list[str]:
    """What makes a generator useless whatever the noise. Private, for whoever rehearses on rows of
    their own: a run for release looks at rows for nothing but its training."""
    config, plan = ready.config, ready.method.plan
    if ready.privacy.noise == "secure" or ready.dataset.elsewhere or config.group is not None:
        return []
    rows, said = np.concatenate(ready.shards), [f"warning: {t}" for t in _unread(ready.dataset)]
    assumed = OmegaConf.select(config, "method.rows")
    by = "method.rows" if assumed != config.data.get("public_rows") else "data.public_rows"
    if assumed and plan.unit is Unit.RECORD and not 0.5 <= assumed / len(rows) <= 2:
        said.append(
            f"warning: method.rows = {assumed:,} is far from the number of images there are, and "
            f"samples will be of little use: give a public number near it as {by}"
        )
    counts = np.bincount(ready.dataset.labels[rows], minlength=ready.dataset.classes)
    said += [f"warning: {each}" for each in _range(ready.dataset) + _few(ready.dataset, counts)]
    return said


def _given(config: DictConfig, usual: DictConfig) -> list[str]:
    """The words that say where the data are and how they are read; the others are as usual."""
    words = [f"data={config.names.data}"]
    for key in config.data:
        value = OmegaConf.select(config.data, str(key))
        if value != usual.data.get(key) and key != "public_rows":
            words.append(f"data.{key}={in_grammar(value)}")
    return words


def _fitting(found: Dataset, known: bool) -> list[str]:
    """Overrides that suit these rows; numbers of rows are rounded, since settings are public, or
    known to everybody."""
    count = len(found.labels)
    by = "by_folder" if found.persons is None or found.shows_persons else "by_writer"
    clients = [f"partition={by}", "privacy.aggregation=secure"] if found.writers is not None else []
    persons = []
    if found.persons is not None and found.shows_persons:
        of = np.unique(found.persons, return_counts=True)[1]
        most = 2 ** int(np.log2(np.median(of)))  # roughly: it is public
        count = int(np.minimum(of, most).sum())
        persons = ["privacy.unit=person", f"privacy.images_per_person={most}"]
        clients = [] if _at_several_clients(found) else clients
    about = round(count, 1 - len(str(count)))  # one digit: it becomes public
    rows = [] if known and not persons else [f"data.public_rows={about}"]
    teacher = ["method.teacher=none"] if count < _FEW_FOR_A_TEACHER else []
    return ["method=mixture", *teacher, *rows, *clients, *persons]


def _at_several_clients(found: Dataset) -> bool:
    """Whether somebody has images at more than one client."""
    if found.writers is None or found.persons is None:
        return False
    pairs = np.unique(np.stack([found.persons, found.writers]), axis=1)
    return bool(pairs.shape[1] > len(np.unique(found.persons)))
