"""``fedgen <command> [hydra overrides]``: composition only, and one line for a user's mistake."""

from __future__ import annotations

import difflib
import itertools
import re
import sys
from typing import TYPE_CHECKING, Any

from fedgen.errors import FedgenError

if TYPE_CHECKING:
    from omegaconf import DictConfig

HELP = """\
fedgen: private generative models of images, trained from clients' shards, with a provable ε

usage: fedgen <command> [key=value ...]

  fedgen train [-m] [overrides]           train; -m runs every combination of comma-separated values
  fedgen train resume=DIR                 go on with a run that was cut off
  fedgen sample run=DIR n=N out=FILE.npz  samples of a finished run
  fedgen evaluate run=DIR                 judge a finished run again
  fedgen <command> --cfg                  print the resolved settings, run nothing

settings (defaults are in brackets):
  method=gs_wgan|gs_wgan_small [gs_wgan_small]     method.<parameter>=...
  data=digits|mnist|fashion_mnist|femnist|celeba|folder [digits]   data.root=DIR
  partition=single|iid|by_writer|dirichlet|shards [single]         partition.clients=N
  privacy=dp|none [dp]   privacy.target_epsilon=10 privacy.noise_multiplier=... privacy.delta=1e-5
                         privacy.adversary=server|release privacy.noise=seeded|secure
  runtime=in_process     runtime.store=memory|disk
  evaluation=quick|full|none [quick]
  rounds=N seed=N device=auto|cpu|cuda run_dir=PATH experiment=NAME
"""


def main() -> None:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Runs one command line; returns its exit status (2 for a user's mistake)."""
    if not arguments or arguments[0] in ("-h", "--help", "help") or "--help" in arguments:
        print(HELP, end="")
        return 0
    command, *rest = arguments
    try:
        return _dispatch(command, rest)
    except FedgenError as error:
        print(f"fedgen: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fedgen: interrupted", file=sys.stderr)
        return 130


def _dispatch(command: str, rest: list[str]) -> int:
    commands = {"train": "config", "sample": "sample", "evaluate": "evaluate"}
    if command not in commands:
        raise FedgenError(
            command, "is no command", f"choose {', '.join(commands)}, or see fedgen --help"
        )
    sweep = "-m" in rest or "--multirun" in rest
    show = "--cfg" in rest
    overrides = [word for word in rest if word not in ("-m", "--multirun", "--cfg")]
    if sweep and command != "train":
        raise FedgenError("-m", f"{command} runs once", "leave it out")
    for number, batch in enumerate(_sweep(overrides) if sweep else [overrides]):
        config = compose(commands[command], batch)
        if sweep and config.run_dir is not None:
            config.run_dir = f"{config.run_dir}/{number}"
        elif sweep:
            config.run_dir = _sweep_place(config, number)
        if show:
            from omegaconf import OmegaConf

            print(OmegaConf.to_yaml(config, resolve=True), end="")
            continue
        if sweep:
            print(f"[{number}] {' '.join(batch)}")
        _execute(command, config)
    return 0


def _execute(command: str, config: DictConfig) -> None:
    import os

    # waiting threads that spin make everything crawl when another process wants a core
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from fedgen.experiments import training

    if command == "train":
        print(training.summary(training.train(config)))
    elif command == "sample":
        print(training.sample(config))
    else:
        print(training.summary(training.evaluate_run(config)))


def compose(name: str, overrides: list[str]) -> DictConfig:
    """The resolved configuration, with the names of the chosen groups under ``names``.

    Raises:
        FedgenError: for an override that does not fit, in one line.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from hydra.errors import HydraException
    from omegaconf import DictConfig, OmegaConf, open_dict
    from omegaconf.errors import OmegaConfBaseException

    for word in overrides:
        if "=" not in word:
            raise FedgenError(word, "is no setting", "write key=value, see fedgen --help")
    try:
        with initialize_config_module("configs", version_base="1.3"):
            whole = hydra_compose(name, overrides, return_hydra_config=True)
            plain = hydra_compose(name, [w for w in overrides if "/" in w or _is_group(w, whole)])
            choices = dict(whole.hydra.runtime.choices)
            config = hydra_compose(name, overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise _in_one_line(error, name, overrides) from error
    names = {key: value for key, value in choices.items() if "/" not in key}
    with open_dict(config):
        config.names = {key: value for key, value in names.items() if isinstance(value, str)}
        if name == "config":
            threads = config.runtime.threads
            config.runtime.threads = _cores() if threads == "auto" else threads
    assert isinstance(config, DictConfig)
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise FedgenError(missing[0], "is not given", f"add {missing[0]}=...")
    _check_types(config, plain)
    return config


def _is_group(word: str, whole: Any) -> bool:
    return word.partition("=")[0].lstrip("+~") in whole.hydra.runtime.choices


def _cores() -> int:
    import os

    return os.cpu_count() or 1


def _check_types(config: DictConfig, plain: DictConfig) -> None:
    """Each value has the type of its default: numbers stay numbers."""
    from omegaconf import DictConfig, OmegaConf

    def walk(part: DictConfig, default: DictConfig, prefix: str) -> None:
        for key in default:
            new, old, name = part[key], default[key], f"{prefix}{key}"
            if isinstance(old, DictConfig):
                if isinstance(new, DictConfig):
                    walk(new, old, f"{name}.")
                continue
            number = isinstance(old, int | float) and not isinstance(old, bool)
            if number and new is not None and (
                isinstance(new, bool) or not isinstance(new, int | float)
                or (isinstance(old, int) and not isinstance(new, int))
            ):
                kind = "a whole number" if isinstance(old, int) else "a number"
                raise FedgenError(name, f"must be {kind}, got {new!r}", f"the default is {old}")
            if isinstance(old, bool) and not isinstance(new, bool):
                raise FedgenError(name, f"must be true or false, got {new!r}", f"default {old}")

    walk(config, plain, "")
    for key, allowed in {"privacy.target_epsilon": True, "privacy.noise_multiplier": True}.items():
        value = OmegaConf.select(config, key)
        if allowed and value is not None and not isinstance(value, int | float):
            raise FedgenError(key, f"must be a number or null, got {value!r}", "e.g. 10")


def _sweep(overrides: list[str]) -> list[list[str]]:
    """Every combination of comma-separated values."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_overrides(overrides)
    options = [
        [f"{each.get_key_element()}={value}" for value in each.sweep_string_iterator()]
        if each.is_sweep_override()
        else [word]
        for each, word in zip(parsed, overrides, strict=True)
    ]
    return [list(batch) for batch in itertools.product(*options)]


_PLACE: list[str] = []


def _sweep_place(config: DictConfig, number: int) -> str:
    import time

    if not _PLACE:
        _PLACE.append(time.strftime(f"runs/sweep-{config.names.data}-%Y%m%d-%H%M%S"))
    return f"{_PLACE[0]}/{number}"


def _in_one_line(error: Exception, name: str, overrides: list[str]) -> FedgenError:
    """Hydra's error as key, problem, remedy."""
    text = str(error)
    group = re.search(r"Could not find '([\w/]+)/([^'/]+)'", text)
    if group:
        options = re.findall(r"^\t(\S+)$", text, re.MULTILINE)
        near = difflib.get_close_matches(group[2], options, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        return FedgenError(
            group[1], f"there is no {group[2]!r}", f"{hint}choose {', '.join(options)}"
        )
    key = re.search(r"Could not override '([^']+)'", text) or re.search(
        r"Key '([^']+)' is not in struct", text
    )
    if key:
        known = _known_keys(name, overrides)
        near = difflib.get_close_matches(key[1], known, 1)
        remedy = f"did you mean {near[0]}?" if near else "see fedgen --help, or --cfg for all"
        return FedgenError(key[1], "is no setting", remedy)
    return FedgenError("override", text.splitlines()[0], "see fedgen --help")


def _known_keys(name: str, overrides: list[str]) -> list[str]:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from omegaconf import DictConfig

    with initialize_config_module("configs", version_base="1.3"):
        config = hydra_compose(name)
    keys: list[str] = []

    def walk(part: DictConfig, prefix: str) -> None:
        for key in part:
            keys.append(f"{prefix}{key}")
            if not part._is_missing(key) and isinstance(part[key], DictConfig):
                walk(part[key], f"{prefix}{key}.")

    walk(config, "")
    return keys


if __name__ == "__main__":
    main()
