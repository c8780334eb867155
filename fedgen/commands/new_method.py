"""Run ``fedgen new method``: create a package with a method that runs unchanged."""

from __future__ import annotations

import importlib.util
import keyword
import re
from importlib import resources
from pathlib import Path

from omegaconf import DictConfig

from fedgen.config.extensions import config_folders
from fedgen.errors import FedgenError
from fedgen.storage.io import user_umask

_FILES = {
    "{kind}.py.txt": "{name}/{name}.py",
    "{kind}.yaml.txt": "{name}/configs/method/{name}.yaml",
    "test_method.py.txt": "test_{name}.py",
}


def new(config: DictConfig) -> str:
    """Write the files of a method ``config.name`` of kind ``config.kind`` into the folder
    ``config.out``; return the next steps.

    Raises:
        FedgenError: for a name that is invalid or taken, or a folder that has one of these files or
            cannot be written.
    """
    name = str(config.name)
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        problem = f"{name!r} is not a valid name for a Python package"
        raise FedgenError("name", problem, "use lowercase letters, digits and _")
    method_names = {path.stem for place in config_folders() for path in place.glob("method/*.yaml")}
    out = Path(config.out).expanduser()
    hidden = importlib.util.find_spec(name) is not None and not (out / name).exists()
    if name in method_names or hidden or name == "tests":
        raise FedgenError("name", f"{name!r} is taken", "choose another")
    wanted = {out / place.format(name=name): source for source, place in _FILES.items()}
    for path in wanted:
        if path.exists():
            raise FedgenError("out", f"{path} exists", "choose another name or folder")
    templates = resources.files("fedgen.commands") / "templates"
    try:
        with user_umask():
            (out / name / "configs" / "method").mkdir(parents=True, exist_ok=True)
            (out / name / "__init__.py").touch()
            for path, source in wanted.items():
                text = (templates / source.format(kind=config.kind)).read_text()
                with path.open("x") as file:
                    file.write(text.replace("NAME", name))
    except OSError as error:
        problem = f"{out} cannot be written ({error.strerror})"
        raise FedgenError("out", problem, "choose another folder") from error
    wrote = [f"wrote {path}" for path in sorted(wanted)]
    check = f"fedgen check method={name}" + (" rounds=20" if config.kind == "dp_sgd" else "")
    next_steps = [*([f"cd {out}"] if str(out) != "." else []), f"export FEDGEN_EXTENSIONS={name}"]
    next_steps += [f"fedgen train method={name}", check, "pytest"]
    return "\n".join([*wrote, "next:", *(f"  {line}" for line in next_steps)])
