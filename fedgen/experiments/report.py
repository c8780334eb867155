"""``fedgen report``: where the page comes from, and where it goes; of a run that is not over, a
shorter one of how it stood."""

from __future__ import annotations

from pathlib import Path

import torch
from omegaconf import DictConfig, ListConfig

from fedgen.errors import FedgenError
from fedgen.experiments.generation import draw_samples
from fedgen.experiments.identity import check_unaltered
from fedgen.experiments.unfinished import is_unfinished, unfinished
from fedgen.files import write_whole
from fedgen.reporting.report import report as page
from fedgen.reporting.run_dir import RunDir
from fedgen.reporting.so_far import SoFar, so_far
from fedgen.reporting.words import without_bound

_COLUMNS = 10


def report(config: DictConfig) -> Path:
    """Writes the page.

    Raises:
        FedgenError: for a mistake of the user's.
    """
    out = Path(config.out)
    if out.suffix != ".html":
        raise FedgenError("out", f"{out} is no .html file", "give out=FILE.html")
    if config.audience == "server" and out.absolute().parent.name == "public":
        problem = f"{out} lies in a folder that is published, and a server's page is not"
        raise FedgenError("out", problem, "choose another place, or audience=public")
    runs = config.runs if isinstance(config.runs, ListConfig) else [config.runs]
    about = {str(key): value for key, value in config.about.items()}
    paths = [Path(str(run)) for run in runs]
    alone = len(paths) == 1 and config.audience == "server"
    if alone and is_unfinished(paths[0]):
        text = _so_far(paths[0])
    else:
        for path in paths if config.audience == "server" else []:
            _, was, identity = RunDir.open(path, "runs")
            check_unaltered(path, was, identity, "runs")
        text = page(paths, config.audience, about)
    try:
        write_whole(out, text.encode(), shared=True)
    except OSError as error:
        raise FedgenError("out", f"{out} cannot be written", "choose another place") from error
    return out


def _so_far(path: Path) -> str:
    """The page of a run that is not over."""
    made = unfinished(path)
    plan, classes = made.ready.method.plan, made.ready.dataset.classes
    coins = made.ready.coins.at("shown")
    labels = torch.arange(classes).repeat_interleave(_COLUMNS)
    images = draw_samples(made.ready.method, made.generator, labels, coins)
    unit, delta = plan.unit.value, made.ready.privacy.delta
    spent = {name: found.value for name, found in made.spent.items()}
    but_for = without_bound(len(made.without_bound), len(made.ready.shards))
    told = made.ready.config, made.note, unit, delta, spent, but_for
    return so_far(SoFar(made.run_dir, *told, images, _COLUMNS))
