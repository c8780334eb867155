"""``fedgen check``: does a method keep what each method promises?

Short runs in a folder that is thrown away, and attacks on the client program. What cannot be found
out from outside is said too: nobody but its author knows which neighbours are a method's worst.
"""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig, open_dict
from torch import Tensor

from fedgen.coins import Coins
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError, Interrupted
from fedgen.experiments import settings
from fedgen.experiments.audit import Sight, attack, check_audit, sights, telling_noise
from fedgen.experiments.configuration import compose
from fedgen.experiments.generation import draw_samples, labels_of, load_generator
from fedgen.experiments.settings import Setup
from fedgen.experiments.training import train
from fedgen.federation.client_app import ERRORS, last_error
from fedgen.federation.failures import UnansweredError
from fedgen.method import Method
from fedgen.privacy.accounting import epsilon
from fedgen.privacy.events import Relation, Unit, canonical, from_json, total
from fedgen.privacy.releases import Local, Release
from fedgen.reporting.progress import RunProgress, epsilon_in_words
from fedgen.reporting.run_dir import RunDir

_CLIENTS = 4
_BESIDE = 300  # rows beside one more
_DRAWS = 100  # that may leave it out
_HARDLY_ANY = 1e-4  # noise, over the sensitivity
_NUMBERS = 3000  # of noise, to measure it by: to a hundredth
_TOLERATED = 1.1  # of a bound
UNSEEN = """\
not checked, as only the author knows: that the neighbours in worst_cases are the worst there are,
and that the server knows nothing of the clients but their answers"""


@dataclass(frozen=True)
class Finding:
    """How a promise came out; ``held``: None where it could not be found out."""

    promise: str
    said: str
    held: bool | None


def check(config: DictConfig) -> str:
    """Runs and attacks a method with these settings; what was found, in words.

    Raises:
        FedgenError: for a setting that does not work, or if a promise is broken.
    """
    for key in ("resume", "run_dir", "start", "group"):
        if config[key] is not None:
            problem = "is of one run, and a check makes several and keeps none"
            raise FedgenError(key, problem, "leave it out")
    if config.privacy.noise != "seeded":
        problem = "is for releases: a check repeats runs"
        raise FedgenError("privacy.noise", problem, "leave it out")
    check_audit(config.audit)
    if not config.audit.releases:
        raise FedgenError("audit.releases", "there is nothing to attack by", "e.g. 4000")
    own = config.copy()
    with open_dict(own):
        del own.audit  # no canaries among the rows
    with tempfile.TemporaryDirectory() as folder:
        try:
            settings.setup(own).method.worst_cases()  # before minutes of runs
            found = [*_runs(_few(own), Path(folder)), *_attacks(own, config.audit)]
        except Interrupted:
            raise Interrupted("interrupted; a check keeps nothing, begin it again") from None
        except FedgenError as error:
            for file in Path(folder).glob(f"*/clients/*/{ERRORS}"):  # they go with the folder
                if (last := last_error(file)) is not None:
                    print("".join(last["trace"]), end="")
            if not isinstance(error, UnansweredError):
                raise
            cause = error.remedy.partition("(see ")[0].strip()  # the rest names what is gone now
            raise FedgenError("method", error.problem, f"{cause}; mend it") from error
    signs = {True: "holds ", False: "BROKEN", None: "open  "}
    lines = [f"{signs[each.held]}  {each.promise}: {each.said}" for each in found]
    broken = [each for each in found if each.held is False]
    text = "\n".join([*lines, UNSEEN])
    if broken:
        print(text)
        problem = f"{config.names.method} breaks {len(broken)} of {len(found)} promises"
        raise FedgenError("method", problem, "mend it before anybody trusts its ε")
    return text


def _few(config: DictConfig) -> DictConfig:
    """The settings of a run that is judged by nobody."""
    few = config.copy()
    quiet = compose("config", ["evaluation=none", "runtime=in_process"])
    few.evaluation, few.names.evaluation = quiet.evaluation, "none"
    few.evaluate_every, few.sample_every, few.log_every = 0, 1, 1
    with open_dict(few):
        own = {key: few.runtime[key] for key in quiet.runtime if key in few.runtime}
        few.runtime = {**quiet.runtime, **own, "_target_": quiet.runtime["_target_"]}
        few.runtime.checkpoint_every = 1
    few.names.runtime = "in_process"
    return few


# --- runs -----------------------------------------------------------------------------------------


def _runs(config: DictConfig, folder: Path) -> list[Finding]:
    first = _trained(config, folder / "first")
    moved = config.copy()
    moved.runtime.store, moved.runtime.serialize = "disk", True
    return [
        _within_its_budget(first, config),
        _adds_up(first),
        _draws_samples(first),
        _same(_trained(config, folder / "again"), first, "a run repeats"),
        _same(_trained(moved, folder / "moved"), first, "states on disk change nothing"),
        _goes_on(config, folder / "cut", first),
        *_several(config, folder),
    ]


def _trained(config: DictConfig, place: Path) -> RunDir:
    here = config.copy()
    here.run_dir = str(place)
    print(f"a run, {place.name}:", flush=True)
    return RunDir(train(here))


def _within_its_budget(run: RunDir, config: DictConfig) -> Finding:
    """Against whom the budget is meant for."""
    who, target = config.privacy.adversary, config.privacy.target_epsilon
    found = run.privacy()["views"][who]["epsilon"]
    said = f"ε {epsilon_in_words(found)} against {who}, of {target}"
    if target is None:
        return Finding("a run stays within its budget", f"{said}: none is set", None)
    return Finding("a run stays within its budget", said, found is not None and found <= target)


def _adds_up(run: RunDir) -> Finding:
    """What is printed is no less than what the lines of each client's ledger come to."""
    printed, lines = run.privacy(), 0
    relation, promise = Relation(printed["relation"]), "ledgers add up to what is printed"
    for client, page in printed["clients"].items():
        told = (run.clients / client / "ledger.jsonl").read_text().splitlines()[1:]
        spend = total([canonical(from_json(json.loads(line)["event"])) for line in told])
        lines += len(told)
        least = epsilon(spend, printed["delta"], relation).or_infinity if spend else 0.0
        server = math.inf if page["server"] is None else page["server"]
        if server < least * (1 - 1e-9):
            said = f"client {client} has {epsilon_in_words(server)}, and spent {least:.4g}"
            return Finding(promise, said, False)
    return Finding(promise, f"{lines} releases", True)


def _draws_samples(run: RunDir) -> Finding:
    """By ``public/`` alone."""
    found = load_generator(run.public, "cpu")
    method, generator = found.method, found.weights
    coins = Coins.of(0, "seeded").at("sample")
    count = method.server.distinct or 10 * found.classes
    labels = labels_of(found, count, None, coins)
    images = method.server.sample(generator, labels, coins)
    fits = bool(images.isfinite().all() and images.min() >= 0 and images.max() <= 1)
    again = draw_samples(method, generator, labels, coins)
    fits &= np.array_equal(again, draw_samples(method, generator, labels, coins))
    said = f"{count} of shape {tuple(images.shape[1:])}, from public/ alone"
    return Finding("samples are images, and repeat", said, fits)


def _same(run: RunDir, first: RunDir, promise: str) -> Finding:
    of_first, of_run = first.results()["generator_sha256"], run.results()["generator_sha256"]
    same = of_first == of_run and first.privacy()["views"] == run.privacy()["views"]
    return Finding(promise, "to the same bit" if same else "to another generator", same)


def _goes_on(config: DictConfig, place: Path, first: RunDir) -> Finding:
    """Interrupted at the second picture, as by Ctrl-C, and resumed."""
    here, seen = config.copy(), []
    here.run_dir = str(place)

    def cut(*told: object) -> None:
        seen.append(told)
        if len(seen) == 2:
            raise KeyboardInterrupt

    print("a run, cut off and resumed:", flush=True)
    promise = "a run that was cut off goes on"
    try:
        train(here, watch=cut)
    except Interrupted:
        if len(seen) < 2:  # really by Ctrl-C
            raise
        return _same(RunDir(train(compose("config", [f"resume='{place}'"]))), first, promise)
    return Finding(promise, "too short to be cut off: take more rounds", None)


def _several(config: DictConfig, folder: Path) -> list[Finding]:
    """Several clients, by themselves and with secure sums: what a method cannot do, it says."""
    words = ["partition=iid", f"partition.clients={_CLIENTS}"]
    shared = config.copy()
    with open_dict(shared):
        shared.partition = compose("config", words).partition
    shared.names.partition = "iid"
    found = []
    for kind, who in ((config.privacy.aggregation, "several clients"), ("secure", "secure sums")):
        here = shared.copy()
        here.privacy.aggregation = kind
        promise = f"{who} stay within the budget"
        try:
            run = _trained(here, folder / who.replace(" ", "-"))
        except FedgenError as error:
            found.append(Finding(promise, f"refused ({error})", None))
            continue
        budget = _within_its_budget(run, here)
        found.append(Finding(promise, budget.said, budget.held))
    return found


# --- attacks --------------------------------------------------------------------------------------


def _attacks(config: DictConfig, audit: DictConfig) -> list[Finding]:
    """Of each kind of question and each view: with the noise that is claimed, and with half."""
    ready = settings.setup(config)
    found = [_among_many(ready, kind) for kind in range(len(ready.method.worst_cases()))]
    for sight in sights(ready.method):
        for kind, worst in enumerate(ready.method.worst_cases()):
            name = f"{sight.name}, {next(iter(worst.query.rows))}"
            noise = audit.noise_multiplier or telling_noise(ready, sight, kind)
            above, said = _attacked(ready, sight, kind, (noise, noise), audit)
            found.append(Finding(f"no attack refutes the proof ({name})", said, not above))
            if worst.fixed:  # whatever the run's is
                continue
            caught, less = _attacked(ready, sight, kind, (noise, noise / 2), audit)
            less += "" if caught else ": too weak an attack to tell, as where a draw hides much"
            found.append(Finding(f"half of the noise is noticed ({name})", less, caught or None))
    return found


def _among_many(ready: Setup, kind: int) -> Finding:
    """One row more beside many of the data set's: white, black, noise, or of another label, each as
    the last, so that all others keep their places."""
    loud, quiet = ready.at_noise(1.0), ready.at_noise(_HARDLY_ANY)
    worst = loud.worst_cases()[kind]
    promise = f"a row more among many moves no more ({next(iter(worst.query.rows))})"
    local = isinstance(loud.plan.aggregation, Local) and loud.plan.unit is Unit.RECORD
    if worst.fixed:
        return Finding(promise, "not tried: a warm-up's noise is its own", None)
    if not local or loud.plan.relation is not Relation.ADD_OR_REMOVE_ONE or worst.event is None:
        return Finding(promise, "tried where a client answers with a noised sum of rows", None)
    [leaf] = canonical(worst.event)  # one Gaussian, on all rows or on drawn ones
    proven = 1 / getattr(leaf, "event", leaf).noise_multiplier
    whole = ready.dataset.shard(ready.shards[0])
    images, labels = whole.images[:_BESIDE], whole.labels[:_BESIDE]
    source = ready.coins.at("check").public("rows")

    def sent(made: Method, more: list[tuple[Tensor, int]], coins: int) -> NDArray[np.float64]:
        rows = torch.cat([images, *(row[None] for row, _ in more)])
        shard = Shard(rows, torch.cat([labels, torch.tensor([each for _, each in more]).long()]))
        here = ready.coins.at("check", kind, coins)
        answer = made.client.answer({}, worst.query, shard, worst.round, here)
        assert isinstance(answer, Release)
        return np.asarray(answer.arrays["answer"], float).ravel()

    noise = torch.randint(0, 256, images.shape[1:], generator=source, dtype=torch.uint8)
    tried = [*(torch.full_like(noise, grey) for grey in (255, 219, 0)), noise, images[0]]
    for coins in range(_DRAWS):  # until they draw the row
        without = sent(quiet, [], coins)
        if np.abs(sent(quiet, [(noise, int(labels[-1]))], coins) - without).max() > 0:
            break
    else:
        return Finding(promise, f"no draw of {_DRAWS} took the row", None)
    enough = range(-(-_NUMBERS // without.size))
    std = float(np.std([sent(loud, [], each) - sent(quiet, [], each) for each in enough]))
    most = max(
        float(np.linalg.norm(sent(quiet, [(row, label)], coins) - without)) / std / proven
        for row in tried
        for label in (int(labels[-1]), (int(labels[-1]) + 1) % ready.dataset.classes)
    )
    said = f"{most:.2f} of what is counted, at most"
    return Finding(promise, said, most < _TOLERATED)


def _attacked(
    ready: Setup, sight: Sight, kind: int, noise: tuple[float, float], audit: DictConfig
) -> tuple[bool, str]:
    """Whether a program is refuted that says so much noise, and really has so much; how nearly."""
    claimed, really = map(ready.at_noise, noise)
    with RunProgress() as progress:
        points = attack(
            really,
            claimed.plan,
            claimed.worst_cases()[kind],
            sight,
            releases=audit.releases,
            confidence=audit.confidence,
            delta=ready.config.privacy.delta,
            coins=ready.coins.at("check", sight.name, kind),
            told=lambda done: progress.show("simulated releases", done, 2 * audit.releases, ""),
        )
    most = max(points, key=lambda point: point.lower_bound / (point.proven or 1))
    proven = epsilon_in_words(most.proven)
    said = f"the attack shows ε ≥ {most.lower_bound:.2f}, proven for what it sees is {proven}"
    return any(point.broken for point in points), said
