"""``fedgen report``: where the page comes from, and where it goes."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, ListConfig

from fedgen.errors import FedgenError
from fedgen.files import write_whole
from fedgen.reporting.report import report as page


def report(config: DictConfig) -> Path:
    """Writes the page.

    Raises:
        FedgenError: for a mistake of the user's.
    """
    out = Path(config.out)
    if out.suffix != ".html":
        raise FedgenError("out", f"{out} is no .html file", "give out=FILE.html")
    if config.audience not in ("server", "public"):
        problem = f"cannot be {config.audience!r}"
        raise FedgenError("audience", problem, "choose server or public")
    runs = config.runs if isinstance(config.runs, ListConfig) else [config.runs]
    about = {str(key): value for key, value in config.about.items()}
    text = page([Path(str(run)) for run in runs], config.audience, about)
    try:
        write_whole(out, text.encode())
    except OSError as error:
        raise FedgenError("out", f"{out} cannot be written", "choose another place") from error
    return out
