"""Run ``fedgen release``: from a rehearsal to a published package."""

from __future__ import annotations

import errno
import hashlib
import json
import tempfile
import zipfile
from functools import reduce
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedgen import verify
from fedgen.commands import verify as verify_command
from fedgen.commands.attack import LIKELIHOOD_RATIOS
from fedgen.commands.audit import audit_release
from fedgen.commands.repeat import describe_range
from fedgen.commands.statements import merge_statements_file
from fedgen.config.compose import compose
from fedgen.errors import FedgenError, Interrupted
from fedgen.federation.secagg.signing import Signer
from fedgen.federation.signed_accounts import sign
from fedgen.privacy.budget import delta_problem
from fedgen.privacy.events import describe
from fedgen.privacy.guarantee import percent
from fedgen.privacy.ledger import elementwise_max, spend_from_json
from fedgen.reporting import registry_entry
from fedgen.reporting.headline import ABOUT
from fedgen.reporting.registry_entry import CONTROLLER_TYPES, SECTORS
from fedgen.run import setup
from fedgen.run.generator import read_description
from fedgen.run.resume import check_runtime_is_local, open_run, settings_before_derivation
from fedgen.run.train import train
from fedgen.storage.io import (
    check_no_links,
    fedgen_home,
    parse_json,
    read_json,
    share,
    temporary_path,
)
from fedgen.storage.keys import MACHINE_KEY, load_or_create_key
from fedgen.storage.run_dir import RunDir
from fedgen.version import VERSION

_GATE_FPR = 0.01  # false positive rate at which ``max_attack_tpr`` applies


def release(config: DictConfig) -> tuple[Path, Path]:
    """Train once more with the settings of a seeded run and random streams of the operating system,
    with no access to private images except training, and pack the release. A run with secret noise
    is packed unchanged.

    Returns:
        The run directory, and the packed file.

    Raises:
        FedgenError: for a run that cannot be released.
    """
    out = Path(config.out)
    if out.suffix != ".zip" or out.exists():
        problem = f"{out} exists" if out.suffix == ".zip" else f"{out} is not a .zip file"
        raise FedgenError("out", problem, "give a new out=FILE.zip")
    _check_place(out)
    run_dir, was, identity = open_run(Path(config.run), "run")
    if not run_dir.trained:  # evaluated or not
        problem, remedy = f"{run_dir.path} is not finished", f"fedgen train resume={run_dir.path}"
        raise FedgenError("run", problem, remedy)
    run = run_dir.path
    privacy = run_dir.privacy()
    if was.get("score") is not None and "selection" not in privacy:
        problem = f"{run} is an unselected run of fedgen tune and must stay secret"
        remedy = "release the run in the folder selected, after fedgen tune has finished"
        raise FedgenError("run", problem, remedy)
    if wrong := delta_problem(privacy["delta"], privacy.get("protected"), privacy["unit"]):
        raise FedgenError("privacy.delta", wrong[0], f"train anew, {wrong[1]}")
    warnings = run_dir.results().get("data_warnings", []) if run_dir.finished else []
    if warnings and not config.accept_warnings:
        problem = f"is not set, and the rehearsal has the warning: {warnings[0]}"
        remedy = "rehearse with other settings, or set it to true"
        raise FedgenError("accept_warnings", problem, remedy)
    _check_attacks(run_dir, config.max_attack_tpr)
    again = None
    if was.privacy.noise == "seeded":
        again = _release_config(was, identity, config)
    about = _about(config)
    if again is not None:
        for line in describe_range(run_dir):
            print(line)
        try:
            run = train(again)
        except FedgenError as error:
            if error.key == "privacy.budget_epsilon":  # named differently here
                raise FedgenError("budget_epsilon", error.problem, error.remedy) from error
            raise
        except Interrupted as error:
            message = f"{error}, then pack it: fedgen release run=... out={out}"
            raise Interrupted(message) from error
    _check_account(RunDir(run))
    try:
        _pack(RunDir(run), out, _audit(run, config.audit), about)
    except KeyboardInterrupt:
        message = f"interrupted before it was packed; pack it: fedgen release run={run} out={out}"
        raise Interrupted(message) from None
    return run, out


def _check_attacks(run: RunDir, max_tpr: float | None) -> None:
    """Raise FedgenError unless the upper confidence limit of the true positive rate of each attack
    of ``fedgen attack`` at 1 % false positives is at most ``max_tpr``."""
    if max_tpr is None:
        return
    key = "max_attack_tpr"
    if (results := run.attack_results(key)) is None:
        problem = f"{run.path} has no attack results for its generator"
        raise FedgenError(key, problem, f"run fedgen attack run={run.path}")
    if lacking := [name for name in LIKELIHOOD_RATIOS if name not in results["attacks"]]:
        problem = f"{run.path} was attacked without {lacking[0]}"
        raise FedgenError(key, problem, f"run fedgen attack run={run.path} without repetitions=0")
    for name, points in results["attacks"].items():
        limits = [point["high"] for point in points if point["fpr"] == _GATE_FPR]
        if not limits:
            problem = f"{name}: too few non-members to measure a false positive rate of 1 %"
            remedy = "give fedgen attack more repetitions or a larger test split, or omit this"
            raise FedgenError(key, problem, remedy)
        if limits[0] > max_tpr:
            problem = (
                f"{name}: the true positive rate at 1 % false positives may be "
                f"{percent(limits[0])}, above {percent(max_tpr)}"
            )
            raise FedgenError(key, problem, "train with more noise")


def _check_account(run: RunDir) -> None:
    """Raise FedgenError if the published files of a run changed, or lack signed accounts, which
    0.1.0 did not write."""
    run.check_digests("run")
    if not (run.public / "account.json").exists():
        remedy = f"fedgen train resume={run.path} signs them"
        raise FedgenError("run", f"{run.path} has no signed accounts", remedy)


def _audit(run: Path, mode: bool | str) -> dict[str, Any] | None:
    """Return the content of ``audit.json``; None if the audit is skipped."""
    if mode is False:
        return None
    try:
        ready = setup.setup(open_run(run, "run")[1])
    except FedgenError as error:
        if mode == "auto":  # e.g. the data set was moved since
            print(f"audit skipped: {error}")
            return None
        raise
    return audit_release(ready, run, mode)


def _about(config: DictConfig) -> dict[str, Any] | None:
    """Return the statements of the publisher; None for a release without a registry entry.

    Raises:
        FedgenError: if required statements are missing; the error lists all of them.
    """
    if not config.registry:
        return None
    settings: dict[str, Any] = {str(key): value for key, value in config.about.items()}
    about = merge_statements_file(settings, frozenset(ABOUT))
    for key, choices in (("controller_type", CONTROLLER_TYPES), ("sector", SECTORS)):
        if about[key] is not None and about[key] not in choices:
            problem = f"{about[key]!r} is not a valid value"
            raise FedgenError(
                f"about.{key}", problem, f"use {', '.join(choices[:-1])} or {choices[-1]}"
            )
    if lacking := registry_entry.missing_statements(about):
        raise FedgenError(
            "about",
            f"required statements are missing: {'; '.join(lacking)}",
            "set about.KEY=TEXT or about.file=FILE.yaml; registry=false packs without an entry "
            "for the registry",
        )
    return about


def _check_place(out: Path) -> None:
    """Raise FedgenError if nothing can be written, before anything is spent."""
    try:
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise FedgenError("out", f"{out} cannot be written", "choose another place") from error


def _release_config(was: DictConfig, identity: dict[str, Any], config: DictConfig) -> DictConfig:
    """Return the settings of a rehearsal for a release.

    Raises:
        FedgenError: for a run without noise, with initial weights of another run, of an audit or of
            fedgen debug, or on a runtime elsewhere.
    """
    for what, applies in (
        ("has no noise", was.names.privacy == "none"),
        ("began with another run's weights, and has no ε", was.start is not None),
        ("was an audit, with canaries among the images", was.get("audit") is not None),
        ("was one of several generators for debugging", was.group is not None),
    ):
        if applies:
            raise FedgenError("run", what, "rehearse the release with fedgen train")
    if was.get("score") is not None:
        problem = "was selected by fedgen tune with seeded noise"
        raise FedgenError("run", problem, "repeat fedgen tune with privacy.noise=secure")
    again = "train by fedgen train privacy.noise=secure evaluation=none runtime.address={}; pack it"
    check_runtime_is_local(was, again)
    now = was.copy()
    for key, value in settings_before_derivation(
        Path(config.run), was, identity, "run"
    ).items():  # calibrated again
        OmegaConf.update(now, key, value)
    quiet = compose("config", ["evaluation=none"])
    now.evaluation, now.names.evaluation = quiet.evaluation, "none"
    now.evaluate_every, now.held_out, now.corruption.fraction = 0, 0, 0.0
    now.runtime.faults = quiet.runtime.faults
    now.privacy.noise, now.privacy.budget_epsilon = "secure", config.budget_epsilon
    now.run_dir = config.run_dir
    return now


def _package_files(
    run: RunDir, audited: dict[str, Any] | None, about: dict[str, Any] | None
) -> dict[str, bytes]:
    """Return the files of a package: the published ones, the script that verifies it, and a
    manifest of their digests, signed by this machine."""
    files = {path.name: path.read_bytes() for path in run.published}
    files["verify.py"] = Path(verify.__file__).read_bytes()
    if audited is not None:
        files["audit.json"] = (json.dumps(audited, indent=1) + "\n").encode()
    if about is not None:
        files["registry.yaml"] = _registry_entry(run, about).encode()
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    _, _, identity = RunDir.open(run.path, "run")
    manifest = {
        "format": verify.RELEASE,
        "run": identity["run"],
        "fedgen": VERSION,
        "files": digests,
    }
    key = load_or_create_key(fedgen_home() / MACHINE_KEY)
    entry = sign(json.dumps(manifest, sort_keys=True), Signer(key, None))
    return {**files, verify.MANIFEST: json.dumps(entry, indent=1).encode()}


def _registry_entry(run: RunDir, about: dict[str, Any]) -> str:
    """Return the entry of a run for the registry. Its events are those that its participants
    signed for readers of the release."""
    account = read_json(run.public / "account.json")
    try:  # of participants, who may have signed anything
        texts = [parse_json(signed_text["text"]) for signed_text in account["accounts"]]
        spends = [spend_from_json(text["bounds"][-1]["events"]) for text in texts]
        events = describe(reduce(elementwise_max, spends))
    except verify.MALFORMED as error:
        problem = f"{run.path} has no account with a bound, or an invalid one"
        raise FedgenError("run", problem, "see fedgen verify, after registry=false") from error
    _, _, identity = RunDir.open(run.path, "run")
    environment = identity.get("environment", {"fedgen": VERSION})
    generator = read_description(run.public, "run")
    facts = registry_entry.facts(run.privacy(), generator, events, environment)
    return registry_entry.entry(about, facts, account["run"])


def _pack(
    run: RunDir, out: Path, audited: dict[str, Any] | None, about: dict[str, Any] | None
) -> None:
    """Pack the published files of a run atomically.

    Args:
        audited: content of ``audit.json``, if its client program was attacked.
        about: statements of the publisher; None: no registry entry.

    Raises:
        FedgenError: if they differ from what the run wrote, or there is not enough space.
    """
    check_no_links(run.public, "run")
    run.check_digests("run")
    try:
        with temporary_path(out) as new, zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as opened_:
            for name, content in _package_files(run, audited, about).items():
                member = zipfile.ZipInfo(f"{out.stem}/{name}")  # dated 1980: reveals no time
                member.compress_type, member.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
                opened_.writestr(member, content)
            opened_.close()
            verify_command.check_packed(new, run.path)
            if out.exists():
                raise FileExistsError(errno.EEXIST, "it exists now", str(new))
            share(new)
            new.rename(out)
    except OSError as error:
        problem = (
            f"{out} cannot be written ({error.strerror}); the release was computed and "
            "its ε is spent"
        )
        remedy = f"pack it: fedgen release run={run.path} out=FILE.zip"
        raise FedgenError("out", problem, remedy) from error
