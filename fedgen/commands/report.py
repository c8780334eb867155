"""Run ``fedgen report``: write the page of one or more runs; a shorter one for an unfinished
run."""

from __future__ import annotations

from pathlib import Path

import torch
from omegaconf import DictConfig, ListConfig

from fedgen.commands.statements import merge_statements_file
from fedgen.config.schema import AboutRelease
from fedgen.errors import FedgenError
from fedgen.reporting.privacy_statement import unbounded_note
from fedgen.reporting.report import report as page
from fedgen.reporting.so_far import SnapshotReport, render_snapshot_report
from fedgen.run.generator import draw_samples
from fedgen.run.resume import check_unaltered
from fedgen.run.snapshot import is_unfinished, load_snapshot
from fedgen.storage.io import write_atomic
from fedgen.storage.run_dir import RunDir

_COLUMNS = 10


def report(config: DictConfig) -> Path:
    """Write the page.

    Raises:
        FedgenError: for a mistake of the user.
    """
    out = Path(config.out)
    if out.suffix != ".html":
        raise FedgenError("out", f"{out} is no .html file", "give out=FILE.html")
    if config.audience == "server" and out.absolute().parent.name == "public":
        problem = f"{out} lies in a folder that is published, and a server's page is not"
        raise FedgenError("out", problem, "choose another place, or audience=public")
    runs = config.runs if isinstance(config.runs, ListConfig) else [config.runs]
    settings = {str(key): value for key, value in config.about.items()}
    about = merge_statements_file(settings, frozenset(AboutRelease.model_fields))
    paths = [Path(str(run)) for run in runs]
    alone = len(paths) == 1 and config.audience == "server"
    if alone and is_unfinished(paths[0]):
        text = _snapshot_report(paths[0])
    else:
        for path in paths if config.audience == "server" else []:
            _, was, identity = RunDir.open(path, "runs")
            check_unaltered(path, was, identity, "runs")
        text = page(paths, config.audience, about)
    try:
        write_atomic(out, text.encode(), shared=True)
    except OSError as error:
        raise FedgenError("out", f"{out} cannot be written", "choose another place") from error
    return out


def _snapshot_report(path: Path) -> str:
    """Render the HTML page of an unfinished run."""
    snapshot = load_snapshot(path)
    plan, classes = snapshot.setup.method.plan, snapshot.setup.dataset.classes
    streams = snapshot.setup.streams.at("shown")
    labels = torch.arange(classes).repeat_interleave(_COLUMNS)
    images = draw_samples(snapshot.setup.method, snapshot.generator, labels, streams)
    unit, delta = plan.unit.value, snapshot.setup.privacy.delta
    spent = {name: epsilon.value for name, epsilon in snapshot.spent.items()}
    but_for = unbounded_note(len(snapshot.without_bound), len(snapshot.setup.shards))
    facts = snapshot.setup.config, snapshot.note, unit, delta, spent, but_for
    return render_snapshot_report(SnapshotReport(snapshot.run_dir, *facts, images, _COLUMNS))
