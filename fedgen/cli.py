"""Run ``fedgen <command> [hydra overrides]``; report every mistake of the user in one line."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fedgen.allocator import keep_freed_memory
from fedgen.errors import INTERRUPTED, FedgenError, Interrupted, check_system, run_and_report

if TYPE_CHECKING:
    from omegaconf import DictConfig

_HELP = """\
fedgen: private generative models of images, trained from clients' shards, with a provable ε

usage: fedgen <command> [key=value ...]

  fedgen train [-m] [overrides]           train; -m runs every combination of comma-separated values
                                          and of the axes of sweep=NAME, or the rest of them with
                                          run_dir=DIR, and compares; jobs=N in parallel
  fedgen train resume=DIR [runtime=...]   resume an interrupted run; rounds=N extends it, or ends
                                          it early at the ε of all planned rounds
  fedgen account [overrides]              the cost of a run before it starts; output=words|json
  fedgen account spent [data=...]         total ε of all secure runs on a data set
  fedgen account published=all|NAME       published recipes: claimed and proven ε
  fedgen audit [overrides]                attack a client program and a run; audit.canaries=N
                                          audit.releases=N audit.confidence=P
  fedgen attack run=DIR [repetitions=N]   membership inference on a finished run, compared with the
                                          proven bound; canaries=N samples=N jobs=N
  fedgen repeat run=DIR [repetitions=N]   train a rehearsal again with other seeds: the range of
                                          utility to expect of its release; jobs=N
  fedgen benchmark matrix=NAME|FILE.yaml  methods x data x ε x seeds: trains the missing runs, with
                                          run_dir=DIR of an earlier one; jobs=N in parallel
  fedgen debug data=... partition=...     find clients with faulty images or labels, from one noisy
                                          sum of each; corruption.fraction=F plants a fault;
                                          experiment=femnist_debug: detect inverted images by
                                          generators of two groups of clients
  fedgen data check data=... [overrides]  describe a data set, and suggest settings; for its holder:
                                          the counts are private
  fedgen sample run=DIR n=N out=FILE.npz  samples of a finished run; labels=[3,5] only of these;
                                          out=GRID.png, FILE.parquet, or FOLDER of label/00000.png;
                                          npz=dpimagebench writes DPImageBench's gen.npz;
                                          credentials=CERT.pem credentials_key=KEY.pem signs PNGs
  fedgen evaluate run=DIR                 evaluate a finished run again
  fedgen evaluate samples=FILE.npz data=NAME     any samples, including DPImageBench's gen.npz
  fedgen report runs=DIR|[DIR,...] out=FILE.html  one page about them; audience=server|public
                                          about.file=FILE.yaml
  fedgen release run=DIR out=FILE.zip     train a rehearsal again with secret noise and no other
                                          access to the images; pack the publishable files
  fedgen tune grid=FILE.yaml [overrides]  select settings by a noisy score on private data, covered
                                          by the ε of the release; mean_runs=N shape=S
  fedgen verify FILE.zip                  recompute ε of a release from its signed accounts;
                                          signed_by=["SHA256:..."] accepts only these keys
  fedgen new method NAME [kind=sums|dp_sgd] [out=DIR]
                                          a package with your own method, which runs unchanged
  fedgen check method=NAME [overrides]    test the contract of methods: repeated, interrupted
                                          and federated runs; attacks
  fedgen link [hosts=[...]] [port=N]      the SuperLink of the coordinator; accept=KEY.pub admits a
                                          node
  fedgen node [superlink=HOST:PORT] ...   the client of a site; number=N data=...
                                          policy=FILE.yaml ca=FILE key=FILE home=DIR
  fedgen node log [home=DIR] [lines=N]    messages sent by the site, and ε so far
  fedgen <command> --cfg ...              print the resolved settings, run nothing
  fedgen completion                       completion by the TAB key: eval "$(fedgen completion)"
  fedgen --version

settings (defaults in brackets):
  method=<method> [gs_wgan_small]
                         method.<parameter>=...   method/generator=dcgan|resnet
                         method/loss=logistic|hinge|wasserstein, for dpgan and dp_cgan
  warm_up=<warm_up> [none]     for methods of gradient sums
                         warm_up.rounds=N warm_up.noise_multiplier=S warm_up.method.<parameter>=...
  data=<data> [digits]
                         data.root=DIR data.path=FOLDER|[A,B]|FILE.npz|TABLE.csv|NAME
                         data.size=N data.channels=1|3
                         data.classes=N, for an .npz   data.public_rows=N, approximate
                         data.public_persons=N, approximate, for privacy.unit=person
                         data.labels=[A,B]   data.shape=[C,H,W], for public_facts
  partition=<partition> [single]
                         partition.clients=N partition.alpha=A
  privacy=<privacy> [dp]
                         privacy.target_epsilon=E privacy.noise_multiplier=S privacy.delta=D
                         privacy.target_mu=M|target_advantage=A|target_tpr=T, in place of ε;
                         privacy.at_fpr=F, for target_tpr
                         privacy.adversary=server|release privacy.noise=seeded|secure
                         privacy.unit=record|client|person
                         privacy.budget_epsilon=E, of all secure runs on the same data
  runtime=<runtime> [auto: in_process for up to 20 clients, else ray]
                         runtime.threads=N runtime.timeout=SECONDS runtime.min_success=SHARE
                         runtime.checkpoint_every=N
                         runtime.faults.<fault>=PROBABILITY
      in_process         runtime.store=memory|disk
      ray                runtime.address=HOST:PORT runtime.actors=N runtime.cache_gb=N
      deployed           runtime.superlink=HOST:PORT runtime.ca=FILE runtime.rehearses=RUN_DIR
      ray, flower        runtime.num_cpus=N runtime.num_gpus=N
  evaluation=<evaluation> [quick]   evaluation.judge|fid|leakage=true evaluation.jobs=N
  logger=<logger> [tensorboard]   logger.uri=URL for mlflow   logger.online=true for wandb
  experiment=<experiment>
  corruption.fraction=SHARE corruption.fault=FAULT
  debug.reserved_clients=N debug.suspect=SHARE debug.normal=SHARE debug.quantiles=true
                         debug.generators=N, for two groups of clients
  evaluate_every=N held_out=N
  rounds=N seed=N device=auto|cpu|cuda run_dir=PATH sample_every=N log_every=N
"""

_WIDE = 76  # characters of a line of options

_RUN_COMMANDS = ("config", "account", "audit", "debug", "tune")  # with the settings of a run


def main() -> None:
    """Run the console script. SIGTERM ends it like Ctrl-C, with one line."""
    for name in ("stdout", "stderr"):  # if closed by the shell (>&-)
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 (open to the end)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    keep_freed_memory()
    status = run(sys.argv[1:])
    # after an interruption threads of an engine may still wait for clients, and after an account
    # there is nothing to put away: taking torch down alone takes a second
    if status == INTERRUPTED or sys.argv[1:2] == ["account"]:
        with contextlib.suppress(BrokenPipeError):  # the reader has closed the output
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def run(arguments: list[str]) -> int:
    """Run one command line; return the exit status (2 for a mistake of the user)."""
    if arguments == ["--version"]:
        from fedgen.version import VERSION

        print(f"fedgen {VERSION}")
        return 0
    if arguments[:1] in (["completion"], ["--complete"]):
        from fedgen import completion

        names = {word: command.settings for word, command in COMMANDS.items()}
        words = completion.complete(arguments[-1], names) if len(arguments) > 1 else []
        text = completion.SCRIPT if arguments[0] == "completion" else "\n".join(words)
        return run_and_report(partial(print, text, flush=True))
    if not arguments or {"-h", "--help", "help"} & set(arguments):
        return run_and_report(partial(print, help_text(*arguments[:1]), end="", flush=True))
    # threads that spin while they wait make everything crawl when another process wants a core
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return run_and_report(partial(_command, *arguments))


def help_text(command: str = "") -> str:
    """Return the text of ``fedgen --help``: each group with its options, including those of
    extensions.

    Args:
        command: describe only this command, if it exists.
    """
    text = _HELP
    if command in COMMANDS:
        head, _, options = _HELP.partition("settings (defaults")
        uses = re.split(r"\n(?=  fedgen )", head.rstrip())[1:]
        command_uses = [use for use in uses if use.startswith(f"  fedgen {command} ")]
        words = " ".join(itertools.takewhile(str.isalpha, command_uses[0].split()))
        command_uses.append(f"  {words} --cfg".ljust(42) + "its settings and their defaults")
        text = "\n".join(["usage:", *command_uses, ""])
        if COMMANDS[command].settings in _RUN_COMMANDS:
            text += f"\nsettings (defaults{options}"
    return re.sub(r"\b(\w+)=<\1>", lambda match: f"{match[1]}={_list_group(match[1])}", text)


def _list_group(group: str) -> str:
    """Return the options of a group as ``a|b|c``, wrapped."""
    from fedgen.config.extensions import config_folders

    options = {file.stem for place in config_folders() for file in (place / group).glob("*.yaml")}
    lines = [""]
    for name in sorted(options):
        if len(lines[-1]) + len(name) > _WIDE:
            lines.append("")
        lines[-1] += f"{name}|"
    return ("\n" + " " * (len(group) + 3)).join(lines).rstrip("|")


def _command(command: str, *rest: str) -> None:
    check_system()
    try:
        Path.cwd()
    except FileNotFoundError as error:
        problem = "the working directory was deleted"
        raise FedgenError("directory", problem, "cd to one that exists") from error
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"choose {', '.join(COMMANDS)}"
        raise FedgenError(command, "is not a command", f"{hint} (fedgen --help)")
    if command == "data":
        if rest[:1] != ("check",):
            raise FedgenError("data", "has one command", "write fedgen data check data=...")
        rest = rest[1:]
    if command == "new":
        if rest[:1] != ("method",):
            raise FedgenError("new", "has one command", "write fedgen new method NAME")
        rest = rest[1:]
        if rest and "=" not in rest[0] and not rest[0].startswith("-"):
            if any(word.startswith("name=") for word in rest):
                raise FedgenError("name", "is given twice", "leave one out")
            rest = (f"name={rest[0]}", *rest[1:])
    if command == "verify" and rest and "=" not in rest[0] and not rest[0].startswith("-"):
        from fedgen.config.overrides import to_override_value

        rest = (f"package={to_override_value(rest[0])}", *rest[1:])
    inner = {"account": "spent", "node": "log"}.get(command, "")
    first = rest[0] if rest and "=" not in rest[0] else ""
    if first != inner and difflib.get_close_matches(first, [inner]):
        raise FedgenError(f"{command} {first}", "is not a command", f"did you mean {inner}?")
    if command == "account" and rest[:1] == ("spent",):
        rest = ("spent=true", *rest[1:])
        _check_only(rest[1:], ("data", "privacy.delta", "output"), "account spent")
    published = [word for word in rest if word.startswith("published=")]
    if command == "account" and published and published[-1] != "published=null":
        _check_only(rest, ("published", "output"), "account published=...")
    if command == "link":
        keys = {word.partition("=")[0] for word in rest}
        if "name" in keys and "accept" not in keys:
            raise FedgenError("name", "is of accept=KEY.pub, which is not given", "leave it out")
        if "accept" in keys:
            _check_only(rest, ("accept", "name", "home", "port"), "link accept=...")
    if command == "node" and rest[:1] == ("log",):
        rest = ("log=true", *rest[1:])
        _check_only(rest[1:], ("home", "lines"), "node log")
    configs = _configurations(command, rest)
    if "--cfg" in rest:
        print("\n".join(map(_print_resolved, configs)))
        return
    from fedgen.storage.io import private_umask

    try:
        with private_umask():
            if {"-m", "--multirun"} & set(rest):
                from fedgen.commands import sweep

                print(sweep.run(configs, _jobs(rest)))
            else:
                print(COMMANDS[command].run(*configs))
    except Interrupted as error:
        if error.place is None:
            raise
        from fedgen.config.overrides import shell_quote

        words = [*(w for w in rest if not w.startswith("run_dir=")), f"run_dir={error.place}"]
        again = shell_quote(["fedgen", command, *words])
        raise Interrupted(f"{error}; continue with: {again}") from error


def _check_only(words: Sequence[str], keys: Sequence[str], command: str) -> None:
    """Raise FedgenError for a setting that a command does not read."""
    for word in words:
        key = word.partition("=")[0].lstrip("+~")
        is_read = key in keys or key.partition(".")[0] in keys or key == "hydra.searchpath"
        if "=" in word and not is_read:
            problem = f"is not read by fedgen {command}"
            raise FedgenError(key, problem, f"leave it out; it reads {', '.join(keys)}")


def _configurations(command: str, rest: Sequence[str]) -> list[DictConfig]:
    """Return one configuration, or with -m one per combination, each with a run directory."""
    from fedgen.config.compose import compose
    from fedgen.config.overrides import combinations

    overrides = [word for word in rest if word not in ("-m", "--multirun", "--cfg")]
    if not {"-m", "--multirun"} & set(rest):
        config = compose(COMMANDS[command].settings, overrides)
        return [config, *_grid(config, overrides)] if command == "tune" else [config]
    overrides = [word for word in overrides if not word.startswith("jobs=")]
    if command != "train" or any(word.startswith("resume=") for word in overrides):
        what = command if command != "train" else "a resumed run"
        raise FedgenError("-m", f"{what} runs once", "leave it out")
    configs = [compose("config", batch) for batch in combinations(overrides)]
    place = time.strftime("runs/sweep-%Y%m%d-%H%M%S")
    for number, config in enumerate(configs):
        config.run_dir = f"{config.run_dir or place}/{number}"
    return configs


def _grid(config: DictConfig, overrides: Sequence[str]) -> list[DictConfig]:
    """Return the settings of each point of the grid of ``fedgen tune``."""
    from fedgen.commands.tune import OWN_SETTINGS
    from fedgen.config.compose import compose
    from fedgen.config.overrides import grid_points, override_key

    shared = [word for word in overrides if override_key(word) not in OWN_SETTINGS]
    adversary = f"privacy.adversary={config.privacy.adversary}"
    points = grid_points(config.grid)
    return [compose("config", [*point, *shared, adversary]) for point in points]


def _jobs(rest: Sequence[str]) -> int | None:
    """Return ``jobs`` of a sweep.

    Raises:
        FedgenError: if it is not a whole number.
    """
    values = [word.removeprefix("jobs=") for word in rest if word.startswith("jobs=")]
    if not values or values[-1] == "null":
        return None
    if not values[-1].isdecimal():
        problem = f"must be a whole number from 1 to 1024, got {values[-1]}"
        raise FedgenError("jobs", problem, "correct it")
    return int(values[-1])


def _print_resolved(config: DictConfig) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(config, resolve=True).rstrip("\n")


# What each command prints. Each imports what it needs: torch and Flower alone take seconds.


def _train(config: DictConfig) -> str:
    from fedgen.run import train

    return _print_run_dir(train.train(config))


def _print_run_dir(run_dir: Path, *more: str) -> str:
    from fedgen.reporting.summary import summary
    from fedgen.run import data_budget

    return "\n".join([summary(run_dir), *data_budget.total_spend(run_dir), *more])


def _account(config: DictConfig) -> str:
    if config.spent:
        from fedgen.run import data_budget

        return data_budget.account_spent(config)
    if config.resume is not None:
        problem = "is not read by fedgen account"
        raise FedgenError("resume", problem, "give the settings of the run")
    if config.published is not None:
        from fedgen.commands import account_published as published

        return published.account(config)
    from fedgen.commands import account

    return account.account(config)


def _audit(config: DictConfig) -> str:
    from fedgen.commands import audit

    return audit.audit(config).text


def _attack(config: DictConfig) -> str:
    from fedgen.commands import attack

    return attack.attack(config)


def _repeat(config: DictConfig) -> str:
    from fedgen.commands import repeat

    return repeat.repeat(config)


def _check(config: DictConfig) -> str:
    from fedgen.commands import check_method

    return check_method.check(config)


def _data(config: DictConfig) -> str:
    from fedgen.commands import check_data

    return check_data.check(config)


def _sample(config: DictConfig) -> str:
    from fedgen.run import generator

    return str(generator.sample(config))


def _evaluate(config: DictConfig) -> str:
    from fedgen.commands import evaluate

    return evaluate.evaluate(config)


def _benchmark(config: DictConfig) -> str:
    from fedgen.commands import benchmark

    return benchmark.benchmark(config).rstrip("\n")


def _debug(config: DictConfig) -> str:
    from fedgen.commands import debug

    return debug.debug(config)


def _report(config: DictConfig) -> str:
    from fedgen.commands import report

    return str(report.report(config))


def _release(config: DictConfig) -> str:
    from fedgen.commands import release

    run_dir, packed = release.release(config)
    return _print_run_dir(run_dir, f"publish {packed} only; keep everything else on the server")


def _tune(config: DictConfig, *grid: DictConfig) -> str:
    from fedgen.commands import tune

    return tune.tune(config, grid)


def _verify(config: DictConfig) -> str:
    from fedgen.commands import verify

    return verify.verify(config)


def _new(config: DictConfig) -> str:
    from fedgen.commands import new_method

    return new_method.new(config)


def _node(config: DictConfig) -> str:
    if config.log:
        from fedgen.deployment import log

        return log.show(config)
    from fedgen.deployment import node

    return node.node(config)


def _link(config: DictConfig) -> str:
    from fedgen.deployment import link

    return link.link(config)


class _Command(NamedTuple):
    """The file in ``configs`` with the settings of a command, and the function that runs it with
    these settings (``tune``: followed by those of each grid point) and returns its output."""

    settings: str
    run: Callable[..., str]


COMMANDS = {
    "train": _Command("config", _train),
    "account": _Command("account", _account),
    "attack": _Command("attack", _attack),
    "audit": _Command("audit", _audit),
    "check": _Command("audit", _check),
    "repeat": _Command("repeat", _repeat),
    "data": _Command("account", _data),
    "sample": _Command("sample", _sample),
    "evaluate": _Command("evaluate", _evaluate),
    "benchmark": _Command("benchmark", _benchmark),
    "debug": _Command("debug", _debug),
    "report": _Command("report", _report),
    "release": _Command("release", _release),
    "tune": _Command("tune", _tune),
    "verify": _Command("verify", _verify),
    "new": _Command("new", _new),
    "node": _Command("node", _node),
    "link": _Command("link", _link),
}


if __name__ == "__main__":
    main()
