"""Run the client of a site: its own records, noise, ledger and account."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from dp_accounting import NonPrivateDpEvent
from omegaconf import DictConfig

from fedgen.data.datasets import Dataset, Shard
from fedgen.deployment import policy as policies
from fedgen.deployment.policy import Policy, RefusedError
from fedgen.deployment.request import Request
from fedgen.errors import FedgenError
from fedgen.federation.client.context import ClientContexts, ClientSetup, RunTerms
from fedgen.federation.secagg.signing import Signer
from fedgen.federation.signed_accounts import AccountTerms
from fedgen.privacy.aggregation import Secure
from fedgen.privacy.events import Relation, Spend, canonical, with_sampling_revealed
from fedgen.privacy.ledger import died_while_responding
from fedgen.privacy.spend_db import Entry, SpendDb
from fedgen.randomness import RandomStreams
from fedgen.run import setup
from fedgen.run.data_budget import check_budget
from fedgen.run.noise_domain import rounded_noise
from fedgen.run.setup import ResolvedMethod, label_names
from fedgen.storage.io import digest, read_bounded, write_atomic


@dataclass(frozen=True)
class SiteFolder:
    """Folder and data of a node.

    number: number of its client.
    dataset: its images and labels.
    home: its folder, used by this node only.
    labels: names of its labels in order, if known.
    """

    number: int
    dataset: Dataset
    home: Path
    policy: Policy
    signer: Signer
    labels: list[str] | None = None

    @property
    def account(self) -> SpendDb:
        """Return the record of spend of all secure runs on its records."""
        return SpendDb(self.home / "spent.sqlite")

    def folder(self, run: str) -> Path:
        """Return its folder for a run."""
        return self.home / "runs" / run

    def has_dropout(self, run: str) -> bool:
        """Return whether the cohorts of a run count as revealed, because a process of this node
        died during a response: its absence may reveal what was sampled."""
        marks = self.folder(run) / str(self.number)
        return self.account.has_dropout(run) or died_while_responding(marks)


def open_run(site: SiteFolder, request: Request) -> tuple[ClientContexts, Relation]:
    """Respond to a request: return the client context of this site for a run, and the neighbouring
    relation of its ε.

    Raises:
        RefusedError: if the policy refuses it, or its settings are invalid; the message stays at
            the site.
    """
    try:
        _count_marks(site)
        client_setup, relation = _build_setup(site, request)
        contexts = ClientContexts(client_setup)
        contexts.get(site.number)  # an invalid ledger or key is found now
        return contexts, relation
    except RefusedError:
        raise
    except FedgenError as error:
        raise RefusedError(str(error)) from error
    except Exception as error:  # settings that no fedgen coordinator sends
        raise RefusedError(f"{type(error).__name__}: {error}") from error


def _check_match(place: SiteFolder, config: DictConfig, public: Dataset) -> None:
    """Refuse a run with other labels, another shape of images or other clients than the site."""
    rows, clients = place.dataset, config.partition.clients
    if (public.classes, public.shape) != (rows.classes, rows.shape):
        raise RefusedError(
            f"the run expects {public.classes} labels and images of shape {list(public.shape)}; "
            f"this site has {rows.classes} labels and shape {list(rows.shape)}"
        )
    named = label_names(config)
    if named is not None and named != place.labels:
        site_labels = "no names" if place.labels is None else ", ".join(place.labels)
        raise RefusedError(
            f"the run expects the labels {', '.join(named)}; this site has {site_labels}"
        )
    if place.policy.peers is not None and clients != len(place.policy.peers):
        raise RefusedError(
            f"the run has {clients} clients, but the policy lists {len(place.policy.peers)} peers"
        )
    if not 0 <= place.number < clients:
        raise RefusedError(f"the run has {clients} clients, and this is number {place.number}")


def _build_setup(place: SiteFolder, request: Request) -> tuple[ClientSetup, Relation]:
    config, rows = request.config(), place.dataset
    policies.check_settings(place.policy, config)
    clients, public = config.partition.clients, setup.dataset(config)
    _check_match(place, config, public)
    setup.check_persons(config, rows, [np.arange(len(rows.labels))])
    record_count = len(rows.labels) if clients == 1 else None  # as in a simulation of one client
    resolved = setup.resolve_method(config, clients, record_count, public.classes, public.shape)
    if rounded_noise(resolved.noise) != request.noise_multiplier:
        raise RefusedError(
            f"noise multiplier {rounded_noise(resolved.noise)} is calibrated on this site, "
            f"{request.noise_multiplier} by fedgen {request.version} on the server"
        )
    setup.check_shards_fit(config, rows, resolved.method.plan)
    plan, privacy, account = resolved.method.plan, resolved.privacy, None
    most = canonical(plan.server_event(privacy.budget.samples_per_client))
    if has_dropout := place.has_dropout(request.run):
        place.account.record_dropout(request.run)
    counted = replace(resolved, method=resolved.with_dropouts()) if has_dropout else resolved
    policies.check_cost(place.policy, config, counted)
    _check_same_request(place, request)
    # before the run is registered: an invalid seed or program is refused at no cost
    RandomStreams.from_seed(config.seed, privacy.noise)
    program = resolved.program()
    if privacy.noise == "secure":
        if _has_unbounded_spend(place):
            raise RefusedError(
                "a computation over these images failed in an earlier run, and what its failure "
                "revealed has no bound: see errors.jsonl"
            )
        account, folder = place.account, str(place.folder(request.run).absolute())
        kinds = plan.unit, plan.relation
        reserve = with_sampling_revealed(most) if resolved.dropouts_reveal_cohorts else None
        entry = Entry(request.run, _ROWS, _ROWS, folder, *kinds, most, reserve=reserve)
        budget = place.policy.budget_epsilon
        account.register(entry, partial(check_budget, budget, privacy.delta))
    write_atomic(place.folder(request.run) / _REQUEST, request.text().encode())
    shard = rows.shard(np.arange(len(rows.labels)))
    terms = _terms(place, request, resolved, public, clients, most)
    client_setup = ClientSetup(
        program=lambda: program,
        shard=lambda client: shard,
        seed=config.seed,
        domain=request.domain if privacy.noise == "seeded" else "",
        noise=privacy.noise,
        folder=place.folder(request.run),
        terms=terms,
        in_memory=False,
        cache_bytes=0.0,
        threads=config.runtime.threads,
        spend_db=account,
    )
    return client_setup, plan.relation


def _terms(
    place: SiteFolder,
    request: Request,
    resolved: ResolvedMethod,
    public: Dataset,
    clients: int,
    most: Spend,
) -> RunTerms:
    """Return the terms of a run, under which at most ``most`` is spent."""
    plan, privacy = resolved.method.plan, resolved.privacy
    is_secure = privacy.noise == "secure"
    return RunTerms(
        privacy.budget.samples_per_client,
        request.run,
        limits=most,
        aggregation=plan.aggregation,
        stores_response=is_secure and plan.resends_responses,
        masked_sums=isinstance(plan.aggregation, Secure),
        signer=place.signer,
        accepted_request=request.text().encode(),
        rehearsal=_rehearsal_shard(public),
        reserves=is_secure and resolved.dropouts_reveal_cohorts,
        account=AccountTerms(
            request.run,
            hashlib.sha256(request.text().encode()).hexdigest(),
            clients,
            privacy.noise,
            plan,
            partial(place.has_dropout, request.run),
        ),
    )


_ROWS = digest(b"the rows of this node")
"""Data digest of all runs of a node: their spends add up even if its records change."""


def _count_marks(place: SiteFolder) -> None:
    """Record the dropouts of runs of 0.1.0, which only marked their folders."""
    known = place.account.entries(_ROWS) if place.account.path.exists() else ()
    for entry in known:
        if entry.reserve is None and place.has_dropout(entry.run):
            reserve = with_sampling_revealed(entry.max_spend)
            place.account.register(replace(entry, reserve=reserve), lambda entry, others: None)
            place.account.record_dropout(entry.run)


def _has_unbounded_spend(place: SiteFolder) -> bool:
    """Return whether the spend of some run has no bound."""
    entries = place.account.entries(_ROWS)
    return any(NonPrivateDpEvent() in s for entry in entries for s in entry.charged.values())


def _rehearsal_shard(public: Dataset) -> Shard:
    """Return public images on which a query may fail: black and white images per label, enough for
    sampling to select some."""
    labels = torch.arange(public.classes).repeat(2 * _COPIES)
    images = torch.zeros((len(labels), *public.shape), dtype=torch.uint8)
    images[len(labels) // 2 :] = 255
    return Shard(images, labels, torch.arange(len(labels)))


_COPIES = 10  # black images, and as many white ones, per label


_REQUEST = "request.json"


def _check_same_request(place: SiteFolder, request: Request) -> None:
    """Raise RefusedError if a run with this name had a different request: with the same streams or
    the rest of its budget, a different query would be answered."""
    path, now = place.folder(request.run) / _REQUEST, request.text().encode()
    if path.exists() and (path.stat().st_size != len(now) or read_bounded(path, len(now)) != now):
        raise RefusedError(f"run {request.run} was requested with different settings before")
