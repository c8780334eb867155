"""Where numbers and pictures go while a run trains, beside ``metrics.jsonl``: TensorBoard, MLflow,
Weights & Biases, or nowhere else. All of them write into the run directory, or beside it, and send
nothing of it unless a setting says where; what these libraries would tell their makers is switched
off. What is logged may follow from private rows (``held_out``): it is for whoever trains."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgen.errors import FedgenError
from fedgen.files import digest


@dataclass(frozen=True)
class Logger:
    """scalar: (name, value, round). image: (name, pixels (h, w, channels) uint8, round)."""

    scalar: Callable[[str, float, int], Any]
    image: Callable[[str, NDArray[np.uint8], int], Any]
    close: Callable[[], Any]


def none(place: Path, name: str, rounds: int) -> Logger:
    """Logs nothing."""
    del place, name, rounds
    return Logger(lambda *_: None, lambda *_: None, lambda: None)


def tensorboard(place: Path, name: str, rounds: int) -> Logger:
    """Event files for TensorBoard.

    Args:
        place: the run directory. name: of the run.
        rounds: how many are done: what was logged later, before a run was cut off, is left out.
    """
    del name
    from torch.utils.tensorboard import SummaryWriter

    board: Any = SummaryWriter(str(place), purge_step=rounds + 1)

    def image(name: str, pixels: NDArray[np.uint8], round_: int) -> None:
        board.add_image(name, pixels, round_, dataformats="HWC")

    return Logger(board.add_scalar, image, board.close)


def mlflow(place: Path, name: str, rounds: int, *, uri: str | None, project: str) -> Logger:
    """An MLflow run; one that goes on is the same one.

    Args:
        uri: of a tracking server, which then learns what is logged; None: ``mlflow.db`` in the run
            directory.
        project: the experiment's name.

    Raises:
        FedgenError: without MLflow, or if it cannot be reached.
    """
    del rounds
    if uri is not None and not isinstance(uri, str):
        raise FedgenError("logger.uri", f"cannot be {uri!r}", "give a tracking server's, or null")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    try:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
    except ImportError as error:
        raise _lacking("mlflow") from error
    here = place.absolute()
    artifacts = None if uri else (here / "mlflow").as_uri()
    try:
        client = MlflowClient(uri or f"sqlite:///{here}/mlflow.db")
        found = client.get_experiment_by_name(project)
        of = found.experiment_id if found else client.create_experiment(project, artifacts)
        tags = {"fedgen.run": _of(name, place)}
        known = client.search_runs([of], f"tags.`fedgen.run` = '{_of(name, place)}'")
        info = known[0].info if known else client.create_run(of, tags=tags).info
    except (MlflowException, OSError) as error:
        problem = f"{uri or here} cannot be logged to ({type(error).__name__})"
        raise FedgenError("logger.uri", problem, "give a tracking server's, or null") from error
    run: str = info.run_id
    if artifacts is not None and not str(info.artifact_uri).startswith(f"{artifacts}/"):
        problem = f"{here}/mlflow.db would put pictures elsewhere ({info.artifact_uri})"
        raise FedgenError("logger", problem, "move it away")

    def scalar(name: str, value: float, round_: int) -> None:
        client.log_metric(run, name, value, step=round_)

    def image(name: str, pixels: NDArray[np.uint8], round_: int) -> None:
        client.log_image(run, pixels, key=name, step=round_)

    return Logger(scalar, image, lambda: client.set_terminated(run))


def wandb(place: Path, name: str, rounds: int, *, online: bool, project: str) -> Logger:
    """A run of Weights & Biases; one that goes on is the same one.

    Args:
        place: the run directory; ``PLACE.wandb`` beside it is for W&B's files.
        online: whether what is logged is sent to the server that one is logged in to; else it stays
            there, for ``wandb sync``.
        project: its name there.

    Raises:
        FedgenError: without wandb, or if nobody is logged in.
    """
    del rounds
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    try:
        import wandb as library
    except ImportError as error:
        raise _lacking("wandb") from error
    beside = place.with_name(f"{place.name}.wandb")  # it makes links, and a run has none
    beside.mkdir(exist_ok=True)
    chosen = library.Settings(
        silent=True, console="off", x_disable_stats=True, disable_git=True, symlink=False
    )
    try:
        run = library.init(
            project=project,
            dir=str(beside),
            mode="online" if online else "offline",
            id=_of(name, place),
            resume="allow",
            settings=chosen,
        )
    except library.Error as error:
        problem = f"cannot log to Weights & Biases ({type(error).__name__})"
        remedy = "log in by wandb login, or set it to false"
        raise FedgenError("logger.online", problem, remedy) from error

    def scalar(name: str, value: float, round_: int) -> None:
        run.log({name: value}, step=round_)

    def image(name: str, pixels: NDArray[np.uint8], round_: int) -> None:
        run.log({name: library.Image(pixels.squeeze())}, step=round_)

    return Logger(scalar, image, run.finish)


def _of(name: str, place: Path) -> str:
    """What tells a run from others of its settings."""
    return digest(name.encode(), str(place.absolute()).encode())[:32]


def _lacking(package: str) -> FedgenError:
    return FedgenError("logger", f"needs {package}", f'pip install "fedgen[{package}]"')
