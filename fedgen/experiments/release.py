"""``fedgen release``: from a rehearsal to what is handed out."""

from __future__ import annotations

import errno
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedgen.errors import FedgenError, Interrupted
from fedgen.experiments.configuration import compose
from fedgen.experiments.identity import check_here, left_open, opened
from fedgen.experiments.training import train
from fedgen.files import check_no_links, share, temporary_path
from fedgen.privacy.budget import delta_problem
from fedgen.reporting.run_dir import RunDir


def release(config: DictConfig) -> tuple[Path, Path]:
    """Trains once more with the settings of a seeded run, with coins of the system's and nothing
    that looks at private rows beside the training, and packs what may be handed out. A run whose
    noise was secret is packed as it is.

    Returns:
        The run directory, and the packed file.

    Raises:
        FedgenError: for a run that cannot be released.
    """
    out = Path(config.out)
    if out.suffix != ".zip" or out.exists():
        problem = f"{out} exists" if out.suffix == ".zip" else f"{out} is no .zip file"
        raise FedgenError("out", problem, "give a new out=FILE.zip")
    _check_place(out)
    run_dir, was, identity = opened(Path(config.run), "run")
    if not run_dir.finished:
        problem, remedy = f"{run_dir.path} is not finished", f"fedgen train resume={run_dir.path}"
        raise FedgenError("run", problem, remedy)
    run = run_dir.path
    privacy = run_dir.privacy()
    if wrong := delta_problem(privacy["delta"], privacy.get("protected"), privacy["unit"]):
        raise FedgenError("privacy.delta", wrong[0], f"train anew, {wrong[1]}")
    if was.privacy.noise == "seeded":
        try:
            run = train(_for_release(was, identity, config))
        except FedgenError as error:
            if error.key == "privacy.budget_epsilon":  # which is called otherwise here
                raise FedgenError("budget_epsilon", error.problem, error.remedy) from error
            raise
        except Interrupted as error:
            told = f"{error}, then pack it: fedgen release run=... out={out}"
            raise Interrupted(told) from error
    _pack(RunDir(run), out)
    return run, out


def _check_place(out: Path) -> None:
    """Raises FedgenError where nothing can be written: before anything is spent."""
    try:
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise FedgenError("out", f"{out} cannot be written", "choose another place") from error


def _for_release(was: DictConfig, identity: dict[str, Any], asked: DictConfig) -> DictConfig:
    """The settings of a rehearsal, for a release.

    Raises:
        FedgenError: for what is none: without noise, begun with foreign weights, or an audit.
    """
    for what, found in (
        ("has no noise", was.names.privacy == "none"),
        ("began with another run's weights, and has no ε", was.start is not None),
        ("was an audit, with canaries among the rows", was.get("audit") is not None),
        ("was one of several generators for debugging", was.group is not None),
    ):
        if found:
            raise FedgenError("run", what, "rehearse what you will release, by fedgen train")
    again = "train by fedgen train privacy.noise=secure evaluation=none runtime.address={}; pack it"
    check_here(was, again)
    now = was.copy()
    for key, value in left_open(Path(asked.run), was, identity, "run").items():  # solved for anew
        OmegaConf.update(now, key, value)
    quiet = compose("config", ["evaluation=none"])
    now.evaluation, now.names.evaluation = quiet.evaluation, "none"
    now.evaluate_every, now.held_out, now.corruption.fraction = 0, 0, 0.0
    now.runtime.faults = quiet.runtime.faults
    now.privacy.noise, now.privacy.budget_epsilon = "secure", asked.budget_epsilon
    now.run_dir = asked.run_dir
    return now


def _pack(run: RunDir, out: Path) -> None:
    """What is published of a run, whole or not at all.

    Raises:
        FedgenError: if it is not what the run wrote, or there is no room for it.
    """
    check_no_links(run.public, "run")
    run.check_digests("run")
    try:
        with temporary_path(out) as new, zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as opened_:
            for file in run.published:
                member = zipfile.ZipInfo(f"{out.stem}/{file.name}")  # of 1980: no time is told
                member.compress_type, member.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
                opened_.writestr(member, file.read_bytes())
            opened_.close()
            if out.exists():
                raise FileExistsError(errno.EEXIST, "it exists now", str(new))
            share(new)
            new.rename(out)
    except OSError as error:
        problem = f"{out} cannot be written ({error.strerror}); the release is made and paid for"
        remedy = f"pack it: fedgen release run={run.path} out=FILE.zip"
        raise FedgenError("out", problem, remedy) from error
