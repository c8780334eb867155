"""A site as a client of runs: its own rows, noise, ledger and account, and nothing elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from dp_accounting import NonPrivateDpEvent

from fedgen.coins import Coins
from fedgen.data.datasets import Dataset, Shard
from fedgen.deployment import policy as policies
from fedgen.deployment.policy import Policy, RefusedError
from fedgen.deployment.request import Request
from fedgen.errors import FedgenError
from fedgen.experiments import settings
from fedgen.experiments.settings import in_short, label_names
from fedgen.experiments.spent import check_budget
from fedgen.federation.client_app import Homes, Site, Terms, died_answering
from fedgen.federation.signing import Signer
from fedgen.files import digest, read_bounded, write_whole
from fedgen.privacy.events import Relation, canonical, with_draws_seen
from fedgen.privacy.releases import Secure
from fedgen.privacy.spent import Entry, SpentFile


@dataclass(frozen=True)
class Place:
    """What a node is home to.

    number: which client it is. rows: its images and labels. home: its folder, of this node alone.
    labels: the names of its labels, in order, where they are known.
    """

    number: int
    rows: Dataset
    home: Path
    policy: Policy
    signer: Signer
    labels: list[str] | None = None

    @property
    def account(self) -> SpentFile:
        """What its rows have cost, over all runs that were for release."""
        return SpentFile(self.home / "spent.sqlite")

    def folder(self, run: str) -> Path:
        """Where it keeps what it needs for a run."""
        return self.home / "runs" / run

    def showed_draws(self, run: str) -> bool:
        """Whether draws of a run count as seen, since a process of this node died over an answer to
        it: what is missing then may show what was drawn."""
        return (self.folder(run) / _SHOWN).exists()


def open_run(place: Place, request: Request) -> tuple[Homes, Relation]:
    """Answers a request: the home of this site's client for a run, and whose neighbours its ε is
    about.

    Raises:
        RefusedError: if the policy does not allow it, or its settings are none; the text is the
            site's own.
    """
    try:
        _count_deaths(place)
        found, relation = _site(place, request)
        return Homes(found), relation
    except RefusedError:
        raise
    except FedgenError as error:
        raise RefusedError(str(error)) from error
    except Exception as error:  # settings that no coordinator of ours would send
        raise RefusedError(f"{type(error).__name__}: {error}") from error


def _site(place: Place, request: Request) -> tuple[Site, Relation]:
    asked, rows = request.config(), place.rows
    policies.check_settings(place.policy, asked)
    clients, public = asked.partition.clients, settings.dataset(asked)
    if (public.classes, public.shape) != (rows.classes, rows.shape):
        raise RefusedError(
            f"the run is about {public.classes} labels of images {list(public.shape)}, here are "
            f"{rows.classes} of {list(rows.shape)}"
        )
    named = label_names(asked)
    if named is not None and named != place.labels:
        here = "no names are given here" if place.labels is None else ", ".join(place.labels)
        raise RefusedError(f"the run is about the labels {', '.join(named)}, here: {here}")
    if place.policy.peers is not None and clients != len(place.policy.peers):
        raise RefusedError(
            f"the run has {clients} clients, and there are {len(place.policy.peers)}"
        )
    if not 0 <= place.number < clients:
        raise RefusedError(f"the run has {clients} clients, and this is number {place.number}")
    known = len(rows.labels) if clients == 1 else None  # as in a simulation of one client
    found = settings.decided(asked, clients, known, public.classes, public.shape)
    if in_short(found.noise) != request.noise_multiplier:
        raise RefusedError(
            f"noise multiplier {in_short(found.noise)} is solved for here, "
            f"{request.noise_multiplier} by fedgen {request.version} there"
        )
    settings.check_places(asked, rows, found.method.plan)
    plan, privacy, account = found.method.plan, found.privacy, None
    most, gaps = canonical(plan.server(privacy.budget.rows)), place.showed_draws(request.run)
    counted = replace(found, method=found.with_gaps()) if gaps else found
    policies.check_cost(place.policy, asked, counted)
    _check_same_as_before(place, request)
    Coins.of(asked.seed, privacy.noise)  # what cannot be built is refused before it is charged
    program = found.program()
    if privacy.noise == "secure":
        if _without_bound(place):
            raise RefusedError(
                "a computation over these rows failed in an earlier run, and what that told has no "
                "bound: see errors.jsonl"
            )
        account, folder = place.account, str(place.folder(request.run).absolute())
        kinds = plan.unit, plan.relation
        cost = with_draws_seen(most) if gaps else most
        entry = Entry(request.run, _ROWS, _ROWS, folder, *kinds, cost)
        budget = place.policy.budget_epsilon
        account.enter(entry, partial(check_budget, budget, privacy.delta), anew=gaps)
    write_whole(place.folder(request.run) / _REQUEST, request.text().encode())
    shard = Shard(torch.from_numpy(rows.images), torch.from_numpy(rows.labels))
    terms = Terms(
        privacy.budget.rows,
        request.run,
        limits=most,
        aggregation=plan.aggregation,
        holds=privacy.noise == "secure" and plan.sends_again,
        masks=isinstance(plan.aggregation, Secure),
        signer=place.signer,
        about=request.text().encode(),
        rehearsal=_no_secret(public),
        marks=privacy.noise == "secure" and found.gaps_show,
    )
    made = Site(
        program=lambda: program,
        shard=lambda client: shard,
        seed=asked.seed,
        branch=request.branch if privacy.noise == "seeded" else "",
        noise=privacy.noise,
        folder=place.folder(request.run),
        terms=terms,
        in_memory=False,
        cache_bytes=0.0,
        threads=asked.runtime.threads,
        spent=account,
    )
    return made, plan.relation


_ROWS = digest(b"the rows of this node")
"""All runs count together, whatever becomes of the rows in between."""

_SHOWN = "unanswered"


def _count_deaths(place: Place) -> None:
    """Counts the draws of runs as seen that a process of this node died over an answer to, whoever
    asks for what next. No answer is on its way meanwhile."""
    for folder in (place.home / "runs").glob("*"):
        if place.showed_draws(folder.name) or not died_answering(folder / str(place.number)):
            continue
        for entry in place.account.entries(_ROWS):
            if entry.run == folder.name:
                place.account.widen(entry.run, with_draws_seen(entry.most))
        (folder / _SHOWN).touch()


def _without_bound(place: Place) -> bool:
    """Whether some run has spent what has no bound."""
    entries = place.account.entries(_ROWS)
    return any(NonPrivateDpEvent() in s for each in entries for s in each.charged.values())


def _no_secret(public: Dataset) -> Shard:
    """Rows that a question may fail on: of each label black images and white ones, as many as a
    draw of rows takes some of."""
    labels = torch.arange(public.classes).repeat(2 * _COPIES)
    images = torch.zeros((len(labels), *public.shape), dtype=torch.uint8)
    images[len(labels) // 2 :] = 255
    return Shard(images, labels)


_COPIES = 10  # of a black and of a white image, of each label


_REQUEST = "request.json"


def _check_same_as_before(place: Place, request: Request) -> None:
    """Raises RefusedError if a run of this name was another one: under the same coins, or with
    what is left of its budget, another question would be answered."""
    path, now = place.folder(request.run) / _REQUEST, request.text().encode()
    if path.exists() and (path.stat().st_size != len(now) or read_bounded(path, len(now)) != now):
        raise RefusedError(f"run {request.run} was asked for with other settings before")
