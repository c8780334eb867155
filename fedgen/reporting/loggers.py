"""Loggers for numbers and pictures during training, in addition to ``metrics.jsonl``: TensorBoard,
MLflow, Weights & Biases, or none. They write into the run directory or next to it, and send data
elsewhere only if a setting says so; telemetry of these libraries is disabled. Logged values may
depend on private records (``held_out``): they are for the operator of the training."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgen.errors import FedgenError
from fedgen.storage.io import digest


@dataclass(frozen=True)
class Logger:
    """scalar: (name, value, round). image: (name, pixels (h, w, channels) uint8, round)."""

    scalar: Callable[[str, float, int], Any]
    image: Callable[[str, NDArray[np.uint8], int], Any]
    close: Callable[[], Any]


def none(place: Path, name: str, rounds: int) -> Logger:
    """Log nothing."""
    del place, name, rounds
    return Logger(lambda *_: None, lambda *_: None, lambda: None)


def tensorboard(place: Path, name: str, rounds: int) -> Logger:
    """Write event files for TensorBoard.

    Args:
        place: run directory.
        name: name of the run.
        rounds: finished rounds; later entries, from before an interruption, are dropped.
    """
    del name
    from torch.utils.tensorboard import SummaryWriter

    # files are read in the order of their names, which clocks decide: a first file that is read
    # second must not drop anything
    resumed = any(place.glob("events.out.tfevents.*"))
    board: Any = SummaryWriter(str(place), purge_step=rounds + 1 if resumed else None)

    def image(name: str, pixels: NDArray[np.uint8], round_: int) -> None:
        board.add_image(name, pixels, round_, dataformats="HWC")

    return Logger(board.add_scalar, image, board.close)


def mlflow(place: Path, name: str, rounds: int, *, uri: str | None, project: str) -> Logger:
    """Log to an MLflow run; a resumed run keeps the same one.

    Args:
        uri: tracking server, which then receives everything logged; None: ``mlflow.db`` in the run
            directory.
        project: name of the experiment.

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
        raise _missing_package("mlflow") from error
    directory = place.absolute()
    artifacts = None if uri else (directory / "mlflow").as_uri()
    try:
        client = MlflowClient(uri or f"sqlite:///{directory}/mlflow.db")
        experiment = client.get_experiment_by_name(project)
        of = (
            experiment.experiment_id if experiment else client.create_experiment(project, artifacts)
        )
        tags = {"fedgen.run": _log_to(name, place)}
        runs = client.search_runs([of], f"tags.`fedgen.run` = '{_log_to(name, place)}'")
        info = runs[0].info if runs else client.create_run(of, tags=tags).info
    except (MlflowException, OSError) as error:
        problem = f"{uri or directory} cannot be logged to ({type(error).__name__})"
        raise FedgenError("logger.uri", problem, "give a tracking server's, or null") from error
    run: str = info.run_id
    if artifacts is not None and not str(info.artifact_uri).startswith(f"{artifacts}/"):
        problem = f"{directory}/mlflow.db would put pictures elsewhere ({info.artifact_uri})"
        raise FedgenError("logger", problem, "move it away")

    def scalar(name: str, value: float, round_: int) -> None:
        client.log_metric(run, name, value, step=round_)

    def image(name: str, pixels: NDArray[np.uint8], round_: int) -> None:
        client.log_image(run, pixels, key=name, step=round_)

    return Logger(scalar, image, lambda: client.set_terminated(run))


def wandb(place: Path, name: str, rounds: int, *, online: bool, project: str) -> Logger:
    """Log to a run of Weights & Biases; a resumed run keeps the same one.

    Args:
        place: run directory; ``PLACE.wandb`` next to it is for files of W&B.
        online: whether logs are sent to the server of the current login; otherwise they stay in
            ``PLACE.wandb``, for ``wandb sync``.
        project: name of the project.

    Raises:
        FedgenError: without wandb, or without a login.
    """
    del rounds
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    try:
        import wandb as library
    except ImportError as error:
        raise _missing_package("wandb") from error
    directory = place.with_name(f"{place.name}.wandb")  # it has links, which a run must not
    directory.mkdir(exist_ok=True)
    settings = library.Settings(
        silent=True, console="off", x_disable_stats=True, disable_git=True, symlink=False
    )
    try:
        run = library.init(
            project=project,
            dir=str(directory),
            mode="online" if online else "offline",
            id=_log_to(name, place),
            resume="allow",
            settings=settings,
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


def _log_to(name: str, place: Path) -> str:
    """Return an identifier that distinguishes a run from others with the same settings."""
    return digest(name.encode(), str(place.absolute()).encode())[:32]


def _missing_package(package: str) -> FedgenError:
    return FedgenError("logger", f"needs {package}", f'pip install "fedgen[{package}]"')
