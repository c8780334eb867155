"""What a site does with a request: checked as data, against its policy, before it reads a
record."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, generate_private_key
from dp_accounting import NonPrivateDpEvent
from flwr.app import ConfigRecord, Context, Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from mutation import kills
from omegaconf import OmegaConf
from tiny import PROGRAMS, rounds_override, tiny, trusting

from fedgen import cli
from fedgen.config.compose import compose
from fedgen.data.digits import digits
from fedgen.deployment import log, policy, request
from fedgen.deployment.flower_coordinator import bundle_hash
from fedgen.deployment.flower_node import Run
from fedgen.deployment.log import Log
from fedgen.deployment.node import _NodeServer
from fedgen.deployment.policy import Policy, RefusedError
from fedgen.deployment.request import Request
from fedgen.deployment.site import _ROWS, SiteFolder, open_run
from fedgen.errors import FedgenError
from fedgen.federation import messages
from fedgen.federation.client.app import (
    FAILED,
    REFUSED,
    client_app,
)
from fedgen.federation.client.context import SAMPLING_KEY
from fedgen.federation.flower_compat import identify_process
from fedgen.federation.secagg.masking import KEY_BYTES, SEALED_BYTES
from fedgen.federation.secagg.signing import CREDENTIAL_BYTES, Signer, fingerprint
from fedgen.methods.api import Method
from fedgen.privacy.aggregation import LOCAL
from fedgen.privacy.events import Spend, Unit, canonical, with_sampling_revealed
from fedgen.privacy.ledger import Account, spend_from_json
from fedgen.randomness import RandomStreams
from fedgen.run import setup
from fedgen.run.noise_domain import rounded_noise

PUBLIC = [
    "data=public_facts",
    "data.classes=10",
    "data.shape=[1,8,8]",
    "data.public_rows=1437",
    "partition=nodes",
    "partition.clients=3",
    "evaluation=none",
    "runtime=deployed",
    "privacy.noise=secure",
    "privacy.target_epsilon=5",
    "privacy.aggregation=secure",
]
SIGNER = Signer(generate_private_key(SECP384R1()), None)
RUN = "0123456789abcdef"


def place(home: Path, **policy: Any) -> SiteFolder:
    allowed = Policy(**{"epsilon": 5.0, "delta": 1e-5, **policy})
    return SiteFolder(0, digits(RandomStreams.from_seed(0, "seeded")), home, allowed, SIGNER)


def prepared(*words: str, run: str = RUN, method: str = "dp_merf_small") -> tuple[Request, Method]:
    """Return a request that arrived, and its method."""
    own = [word for word in tiny(method) if not word.startswith("runtime=")]
    config = compose(
        "config", [f"method={method}", *own, *rounds_override(method, 3), *PUBLIC, *words]
    )
    ready = setup.setup(config)
    noise = rounded_noise(ready.privacy.noise_multiplier)
    return request.read(Request.from_config(config, run, "", noise).text()), ready.method


def asked(*words: str, run: str = RUN, method: str = "dp_merf_small") -> Request:
    return prepared(*words, run=run, method=method)[0]


def test_an_allowed_run_is_prepared_by_the_site(tmp_path: Path) -> None:
    """The site solves for its noise, and reserves the cost in its account."""
    here, wanted = place(tmp_path), request.read(asked().text())
    homes, _ = open_run(here, wanted)
    site = homes._setup
    assert site.noise == "secure"
    assert (site.terms.run, site.terms.masked_sums, site.terms.samples) == (RUN, True, 1)
    assert site.folder == tmp_path / "runs" / RUN
    [entry] = here.account.entries(_ROWS)
    assert entry.run == RUN and not entry.is_finished


@kills(
    "fedgen/deployment/site.py",
    "setup.check_persons(config, rows, [np.arange(len(rows.labels))])",
    "pass",
)
@pytest.mark.parametrize("clients", [1, 3])
def test_a_site_protects_its_own_persons(clients: int, tmp_path: Path) -> None:
    """It accounts per person, and refuses if its data have no persons."""
    words = [f"partition.clients={clients}", "privacy.unit=person", "data.public_persons=300"]
    if clients == 1:
        words.append("privacy.aggregation=local")
    wanted, here = asked(*words), place(tmp_path, aggregations=("local", "secure"))
    with pytest.raises(RefusedError, match="do not name the person in each image"):
        open_run(here, wanted)
    persons = np.random.default_rng(0).integers(0, 300, len(here.dataset.labels))
    here = replace(here, dataset=replace(here.dataset, persons=persons))
    with pytest.raises(RefusedError, match="about a person, which is not allowed"):
        open_run(replace(here, policy=replace(here.policy, units=("record",))), wanted)
    contexts, _ = open_run(here, wanted)
    held_persons = contexts._setup.shard(0).persons
    assert held_persons is not None and np.array_equal(held_persons.numpy(), persons)
    [entry] = here.account.entries(_ROWS)
    assert entry.unit is Unit.PERSON and contexts._setup.terms.account is not None
    assert contexts._setup.terms.account.plan.unit is Unit.PERSON


def test_teachers_without_records_are_refused_by_the_only_site(tmp_path: Path) -> None:
    """As in a simulation: the coordinator does not know the number of records."""
    words = ["partition.clients=1", "privacy.aggregation=local"]
    here = place(tmp_path, aggregations=("local",))
    for critics, refused in ((1437, False), (1438, True)):
        more = [f"method.critics={critics}", f"method.critics_per_step={critics}"]
        wanted = asked(*words, *more, method="datalens_small", run=f"{critics:016x}")
        if refused:
            with pytest.raises(RefusedError, match="1438 critics exceed 1437 records"):
                open_run(here, wanted)
        else:
            open_run(here, wanted)


@kills(
    "fedgen/deployment/policy.py", "if cost.or_infinity > policy.epsilon:", "if cost.value is None:"
)
@kills("fedgen/deployment/policy.py", "if not config.runtime.masks:", "if False:")
@pytest.mark.parametrize(
    ("words", "allowed", "why"),
    [
        (["privacy.noise=seeded"], {}, "rehearsals are not allowed"),
        ([], {"epsilon": 4.9}, "would cost ε = 5.00"),
        ([], {"delta": 1e-6}, "above 1e-06"),
        ([], {"methods": ("mixture",)}, "method dp_merf_small is not allowed"),
        ([], {"units": ("client",)}, "about a record"),
        ([], {"aggregations": ("local",)}, "aggregation=secure is not allowed"),
        ([], {"threshold": 3}, "need only 2 responses"),
        ([], {"colluders": 1}, "0 clients are counted"),
        (["runtime.masks=false"], {}, "reveals each response"),
        (["data.classes=9"], {}, "expects 9 labels"),
        (["partition.clients=2", "privacy.threshold=2"], {"threshold": 3}, "need only 2 responses"),
    ],
)
def test_runs_beyond_the_policy_are_refused(
    tmp_path: Path, words: list[str], allowed: dict[str, Any], why: str
) -> None:
    here = place(tmp_path, **allowed)
    with pytest.raises(RefusedError, match=why):
        open_run(here, asked(*words))
    assert not (tmp_path / "spent.sqlite").exists()


def test_a_node_without_releases_has_a_log(tmp_path: Path) -> None:
    config = OmegaConf.create({"home": str(tmp_path), "lines": 10})
    with pytest.raises(FedgenError, match="no node has used"):
        log.show(config)
    (tmp_path / "lock").touch()
    assert log.show(config) == "this node has sent nothing yet"


def test_labels_in_another_order_are_refused(tmp_path: Path) -> None:
    """If the site has names; a site without names is asked about their number."""
    names = [f"digit {n}" for n in range(10)]
    there = asked(f"data.labels=[{','.join(names)}]")
    swapped = replace(place(tmp_path), labels=[*names[1::-1], *names[2:]])
    with pytest.raises(RefusedError, match=r"labels digit 0, digit 1, .*site has digit 1, digit 0"):
        open_run(swapped, there)
    open_run(replace(place(tmp_path), labels=names), there)
    with pytest.raises(RefusedError, match="this site has no names"):
        open_run(place(tmp_path), there)


@kills(
    "fedgen/deployment/site.py",
    "if rounded_noise(resolved.noise) != request.noise_multiplier:",
    "if False:",
)
def test_the_noise_of_the_coordinator_is_not_trusted(tmp_path: Path) -> None:
    wanted = asked()
    less = replace(wanted, noise_multiplier="0.1")
    with pytest.raises(RefusedError, match=r"is calibrated on this site, 0\.1 by fedgen"):
        open_run(place(tmp_path), less)
    none = {**wanted.settings["privacy"], "target_epsilon": None, "noise_multiplier": None}
    bare = replace(
        wanted,
        names={**wanted.names, "privacy": "none"},
        settings={**wanted.settings, "privacy": none},
        noise_multiplier=None,
    )
    with pytest.raises(RefusedError):
        open_run(place(tmp_path), bare)


@kills(
    "fedgen/deployment/site.py",
    (
        "if path.exists() and (path.stat().st_size != len(now) or read_bounded(path, "
        "len(now)) != now):"
    ),
    "if False:",
)
def test_a_run_cannot_change(tmp_path: Path) -> None:
    """Another request under its name is refused: it would have the same streams, or the rest of its
    budget."""
    here, other = place(tmp_path), asked("privacy.target_epsilon=4")
    open_run(here, asked())
    open_run(here, asked())  # after a restart
    with pytest.raises(RefusedError, match="different settings before"):
        open_run(here, other)


@kills(
    "fedgen/deployment/site.py",
    ("account.register(entry, partial(check_budget, budget, privacy.delta))"),
    ("account.register(entry, lambda x, _: check_budget(budget, privacy.delta, x, []))"),
)
def test_all_runs_together_stay_within_a_budget(tmp_path: Path) -> None:
    here = place(tmp_path, budget_epsilon=6.0)
    open_run(here, asked())
    with pytest.raises(RefusedError, match="above 6"):
        open_run(here, asked(run="fedcba9876543210"))


@pytest.mark.parametrize(
    "change",
    [
        {"method": {"type": "os.system", "command": "touch owned"}},
        {"method": {"type": "folder", "path": "/etc", "root": None}},
        {"method": {"generator": {"type": "folder", "path": "/etc"}}},
        {"method": {"type": "dpgan"}},
        {"method": {"rows": "${oc.env:HOME}"}},
        {"warm_up": {"method": {"type": "mixture"}}},
        {"data": {"classes": 10, "shape": [1, 8, 8]}},
        {"data": {"classes": 10, "shape": [1, 8, 8], "public_rows": 1437, "path": "/etc"}},
        {"evaluation": {"fid": True, "inception_weights": "/dev/zero"}},
        {"rounds": "many"},
        {"rounds": 10**9},
        {"privacy": {}},
        {"runtime": {"threads": 10**9, "min_success": 1, "masks": True}},
        {"partition": {"clients": "many"}},
        {"method": {"rows": [[[[[[[[[[[[[[1]]]]]]]]]]]]]]}},
    ],
)
def test_a_request_is_data_and_never_code(tmp_path: Path, change: dict[str, Any]) -> None:
    wanted = asked()
    for group, inside in change.items():
        before = wanted.settings.get(group)
        merged = {**before, **inside} if group in ("method", "warm_up") else inside
        wanted = replace(wanted, settings={**wanted.settings, group: merged})
    with pytest.raises((RefusedError, ValueError)):
        open_run(place(tmp_path), request.read(wanted.text()))


@pytest.mark.parametrize("seed", [2**70, 2**63, -(2**64)])
def test_a_request_that_is_refused_uses_no_budget(tmp_path: Path, seed: int) -> None:
    here = place(tmp_path)
    wanted = asked()
    bad = replace(wanted, settings={**wanted.settings, "seed": seed})
    with pytest.raises((RefusedError, ValueError)):
        open_run(here, request.read(bad.text()))
    assert not here.account.entries(_ROWS)
    assert not (here.home / "runs").exists() or not list((here.home / "runs").iterdir())
    open_run(here, wanted)
    assert len(here.account.entries(_ROWS)) == 1


LEAVES = st.none() | st.integers() | st.text()


@given(st.recursive(LEAVES, lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
def test_invalid_requests_are_detected(result: Any) -> None:
    with pytest.raises(ValueError, match="not a request"):
        request.read(json.dumps(result))


@kills(
    "fedgen/config/registry.py",
    "return REGISTRY.get(group_of(place), {})",
    "return {word: name for each in REGISTRY.values() for word, name in each.items()}",
)
@kills("fedgen/deployment/request.py", "if local_type != requested_type:", "if False:")
def test_a_method_is_that_of_its_name(tmp_path: Path) -> None:
    """Policies allow names: methods and their parts are built from registered names alone."""
    wanted = asked()
    own = [word for word in tiny("dp_hp_small") if not word.startswith("runtime=")]
    other = compose("config", ["method=dp_hp_small", *own, "rounds=3", *PUBLIC]).method
    whole: Any = OmegaConf.to_container(other, resolve=True)
    named = replace(wanted, settings={**wanted.settings, "method": whole})
    with pytest.raises(RefusedError, match="differs from dp_merf_small"):
        open_run(place(tmp_path), named)
    part = {"type": "folder", "path": str(tmp_path), "root": None}
    method = {**wanted.settings["method"], "generator": part}
    with pytest.raises(RefusedError, match="cannot be 'folder'"):
        open_run(place(tmp_path), replace(wanted, settings={**wanted.settings, "method": method}))


@pytest.mark.parametrize("run", ["../../x", "", "A" * 16, "0" * 65, "01234567/"])
def test_the_name_of_a_run_is_not_a_path(run: str) -> None:
    wanted = asked()
    other = replace(wanted, run=run)
    with pytest.raises(ValueError, match="not a request"):
        request.read(other.text())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no settings"),
        ("epsilon: 5", "policy.delta: is not given"),
        ("epsilon: -1\ndelta: 1e-5", "policy.epsilon: cannot be -1"),
        ("epsilon: .inf\ndelta: 1e-5", "policy.epsilon"),
        ("epsilon: true\ndelta: 1e-5", "policy.epsilon"),
        ("epsilon: 5\ndelta: 1", "policy.delta"),
        ("epsilon: 5\ndelta: 0.9", "policy.delta: 0.9 is above 0.01"),
        ("epsilon: 5\ndelta: 1_0e-5", "policy.delta: cannot be '1_0e-5'"),
        ('epsilon: "1_0"\ndelta: 1e-5', "policy.epsilon: cannot be '1_0'"),
        ("epsilon: 5\ndelta: 1e-5\nmethod: [x]", "policy.method: is not a setting"),
        ("epsilon: 5\ndelta: 1e-5\nunits: [patient]", "policy.units"),
        ("epsilon: 5\ndelta: 1e-5\naggregations: [trusted]", "policy.aggregations"),
        ("epsilon: 5\ndelta: 1e-5\npeers: [a]", "policy.peers"),
        ("epsilon: 5\ndelta: 1e-5\nrehearsal: 1", "policy.rehearsal"),
        ("epsilon: 5\ndelta: 1e-5\nmethods: [mixtur]", "list of: central_images, "),
        ("epsilon: 5\ndelta: 1e-5\nmethods: []", "policy.methods"),
        ("epsilon: 5\ndelta: 1e-5\nunits: [[a]]", "policy.units"),
        ("epsilon: 5\ndelta: 1e-5\npeers: {0: a, 1: a}", "a fingerprint is listed twice"),
        ("epsilon: [", "is no YAML"),
    ],
)
def test_an_empty_policy_is_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "policy.yaml").write_text(text)
    with pytest.raises(FedgenError, match=why):
        policy.read(tmp_path / "policy.yaml")


def test_policies_accept_usual_notations(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(
        "epsilon: 5\ndelta: 1e-5\nunits: [record]\nmethods: [mixture]\npeers: {0: SHA256:x}\n"
    )
    assert policy.read(tmp_path / "policy.yaml") == Policy(
        5, 1e-5, 5, units=("record",), methods=("mixture",), peers={0: "SHA256:x"}
    )


NODE = ["node", "superlink=127.0.0.1:1", "data=digits"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([*NODE, "policy=none.yaml"], "policy: none.yaml cannot be read"),
        ([*NODE, "ca=none"], "ca: none cannot be read"),
        ([*NODE, "ca=policy.yaml"], "ca: contains no certificate"),
        ([*NODE, "ca=null"], "ca: must be text"),
        ([*NODE, "number=-1"], "number: must be 0 or more"),
        ([*NODE, "superlink=x"], "superlink: cannot be x"),
        ([*NODE, "superlink=https://x:1"], "superlink: cannot be https://x:1"),
        ([*NODE, "data=folder", "data.path=."], "data.labels: are not set"),
        ([*NODE, "policy=peers.yaml"], "policy.peers: do not list the key of this node, 0"),
        ([*NODE, "data=public_facts", "data.classes=2", "data.shape=[1,8,8]"], "has no images"),
        (["node", "log", "home=nowhere"], "no node has used"),
        (["node", "key=policy.yaml"], "key: policy.yaml is not a private key"),
        (["link", "accept=policy.yaml"], "accept: policy.yaml is no public key"),
        (["link", "accept=none.pub"], "none.pub cannot be read"),
        (["link", "port=0"], "port: must be at least 1"),
        *(
            (["link", f"hosts=[{host}]"], "is not a valid host name")
            for host in ("'ü'", "''", "'a b'", "link.org:9092", "'https://link.org'")
        ),
        (["link", "hosts=[10]"], "hosts: must be text, got 10; quote it: '10'"),
        (["link", "days=0"], "days: must be at least 1"),
        (["train", "runtime=deployed", "runtime.ca=none"], "take data=public_facts"),
        (["train", *PUBLIC, "runtime=in_process"], "public_facts has no images"),
        (
            ["train", *PUBLIC, "evaluation=quick", "privacy.noise=seeded"],
            "no images to evaluate with",
        ),
        (["train", *PUBLIC, "runtime.ca=none"], "runtime.ca: none cannot be read"),
        (["train", *PUBLIC, "partition.clients=0"], "partition.clients: must be positive"),
        (["train", *PUBLIC, "data.shape=[8,8]"], "data.shape: must be"),
        (["train", *PUBLIC, "runtime.rehearses=none"], "runtime.rehearses: is for seeded"),
    ],
)
def test_invalid_policies_are_one_line(
    words: list[str],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy.yaml").write_text("epsilon: 5\ndelta: 1e-5\n")
    (tmp_path / "peers.yaml").write_text("epsilon: 5\ndelta: 1e-5\npeers: {1: SHA256:x}\n")
    assert cli.run(words) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert why in line


def test_a_cost_is_known_before_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """From public settings alone."""
    words = [word for word in PUBLIC if not word.startswith("runtime=")]
    assert cli.run(["account", "method=dp_merf_small", "rounds=3", *words, "output=json"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert 0 < row["server_epsilon"] <= 5


# --- a coordinator that does not follow the protocol ----------------------------------------------

CLIENTS = 3
KEYS = [generate_private_key(SECP384R1()) for _ in range(CLIENTS)]
PEERS = {client: fingerprint(key.public_key()) for client, key in enumerate(KEYS)}
LONG = KEY_BYTES + CREDENTIAL_BYTES


class Site:
    """One of three honest sites, and its ClientApp, as a coordinator reaches it."""

    def __init__(self, number: int, home: Path, wanted: Request) -> None:
        self.number = number
        allowed = Policy(5.0, 1e-5, peers=PEERS)
        rows, signer = digits(RandomStreams.from_seed(0, "seeded")), Signer(KEYS[number], PEERS)
        self.homes, _ = open_run(SiteFolder(number, rows, home, allowed, signer), wanted)
        self._app = client_app(self.homes)

    def __call__(self, kind: str, content: RecordDict) -> Message:
        message = Message(content, dst_node_id=2, message_type=kind)
        config = {"partition-id": self.number}
        return self._app(message, Context(1, 2, config, RecordDict(), {}))

    @property
    def spend(self) -> Account:
        return self.homes.get(self.number).ledger.account()


def three(tmp_path: Path, *words: str, method: str = "dp_merf_small") -> tuple[list[Site], Method]:
    identify_process(1)
    wanted, made = prepared(*words, method=method)
    sites = [Site(client, tmp_path / str(client), wanted) for client in range(CLIENTS)]
    return sites, made


def dealt(
    sites: Sequence[Site], questions: Sequence[RecordDict], server_round: int = 0
) -> dict[int, dict[int, bytes]]:
    """Request keys and shares for one query each."""
    book: dict[int, bytes] = {}
    for site, question in zip(sites, questions, strict=True):
        asked = messages.pack_keys_for(server_round, messages.framed_digest(question))
        book |= messages.read_texts(site(messages.KEYS, asked), LONG)
    result = {}
    for site in sites:
        reply = site(messages.SHARES, messages.pack_texts(server_round, book))
        if not reply.has_error() and not messages.read_rejected(reply):
            result[site.number] = messages.read_texts(reply, SEALED_BYTES)
    return result


def opened(site: Site, sealed: dict[int, bytes], server_round: int = 0) -> bool:
    """Return whether a site opened all shares that it received."""
    reply = site(messages.OPEN, messages.pack_texts(server_round, sealed))
    return not reply.has_error() and not messages.read_rejected(reply)


def question(method: Method, server_round: int = 0) -> RecordDict:
    streams = RandomStreams.from_seed(0, "seeded")
    query = method.server.query(method.server.init(streams), server_round, streams)
    assert query is not None
    content = messages.pack_query(server_round, query)
    return messages.add_cohort(content, list(range(CLIENTS)))


def inbox(
    shares: dict[int, dict[int, bytes]], site: Site, but: Sequence[int] = ()
) -> dict[int, bytes]:
    return {
        other: each[site.number]
        for other, each in shares.items()
        if site.number in each and other not in but
    }


@kills(
    "fedgen/federation/secagg/masking.py",
    ("if not responders & set(self._graph.neighbours(self.client)) <= set(self._shares):"),
    "if False:",
)
def test_no_share_is_sent_without_its_masks(tmp_path: Path) -> None:
    """The coordinator withholds one neighbour's seal from a client and queries it all the same: the
    mask between them would be missing on one side."""
    sites, method = three(tmp_path)
    asked = question(method)
    shares = dealt(sites, [asked] * 3)
    for site, but in zip(sites, ([2], [], []), strict=True):
        assert opened(site, inbox(shares, site, but))
        assert not site(messages.ASK, asked).has_error()
    for answered, silent in (([0, 2], [1]), ([0, 1, 2], [])):
        lists = messages.pack_responders(0, answered, silent)
        signed: dict[int, bytes] = {}
        for client in answered:
            reply = sites[client](messages.AGREE, lists)
            if not reply.has_error():
                signed |= messages.read_texts(reply, CREDENTIAL_BYTES)
        result = sites[0](messages.REVEAL, messages.with_texts(lists, signed))
        assert result.has_error()


@kills(
    "fedgen/federation/secagg/masking.py",
    'return f"{run}/{server_round}/{query}".encode()',
    'return f"{run}/{server_round}".encode()',
)
def test_sites_with_different_queries_share_no_masks(tmp_path: Path) -> None:
    sites, method = three(tmp_path)
    asked = question(method)
    facts = asked.config_records["facts"]
    other = RecordDict({**asked, "facts": ConfigRecord({**facts, "cohort": "another"})})
    assert dealt(sites, [asked, asked, other]) == {}


@kills("fedgen/deployment/site.py", "accepted_request=request.text().encode(),", "")
def test_sites_with_different_runs_share_no_masks(tmp_path: Path) -> None:
    """Under one name: other numbers of records, other noise."""
    sites, method = three(tmp_path)
    others, _ = three(tmp_path / "b", "data.public_rows=2000")
    asked = question(method)
    assert dealt([sites[0], others[1], others[2]], [asked] * 3) == {}


@kills("fedgen/federation/client/app.py", "if masker.context != context:", "if False:")
def test_another_query_than_keys_were_announced_for_is_refused(tmp_path: Path) -> None:
    sites, method = three(tmp_path)
    asked = question(method)
    shares = dealt(sites, [asked] * 3)
    facts = asked.config_records["facts"]
    other = RecordDict({**asked, "facts": ConfigRecord({**facts, "cohort": "another"})})
    assert opened(sites[0], inbox(shares, sites[0]))
    assert sites[0](messages.ASK, other).has_error()
    assert sites[0].spend.releases == 0


@kills("fedgen/federation/client/app.py", "if not masker.is_ready:", "if masker is None:")
def test_no_response_before_the_shares_are_opened(tmp_path: Path) -> None:
    """Nor is there a charge, also after an invalid seal."""
    sites, method = three(tmp_path)
    asked = question(method)
    shares = dealt(sites, [asked] * 3)
    assert sites[0](messages.ASK, asked).has_error()
    sealed = inbox(shares, sites[0])
    sealed[1] = sealed[1][:-1] + bytes([sealed[1][-1] ^ 1])
    reply = sites[0](messages.OPEN, messages.pack_texts(0, sealed))
    assert messages.read_rejected(reply) == {1}
    assert sites[0](messages.ASK, asked).has_error()
    assert sites[0].spend.releases == 0


def test_the_log_names_what_a_site_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Log(tmp_path).response_sent("run", messages.OPEN, 40, {}, None, {2, 1})
    assert cli.run(["node", "log", f"home={tmp_path}"]) == 0
    assert "rejected the signature or sealed share of clients 1, 2" in capsys.readouterr().out


@kills("fedgen/deployment/site.py", "limits=most,", "limits=None,")
@kills("fedgen/federation/client/app.py", "or query.count < 1", "or False")
@pytest.mark.parametrize("count", [0, 1])
def test_charges_do_not_depend_on_the_coordinators_count(tmp_path: Path, count: int) -> None:
    """Rounds beyond the plan, and queries that claim no records."""
    sites, made = three(tmp_path, method="dpgan_small")
    home = sites[0].homes.get(0)
    home.terms = replace(
        home.terms, samples=1000
    )  # as if rows did not say how much an answer costs
    for server_round in range(6):
        asked = question(made, server_round)
        rows = messages.unpack_arrays(asked.array_records["rows"])
        few = messages.pack_arrays({name: each[:count] for name, each in rows.items()})
        asked = RecordDict({**asked, "rows": few})
        shares = dealt(sites, [asked] * 3, server_round)
        opened(sites[0], inbox(shares, sites[0]), server_round)
        sites[0](messages.ASK, asked)
    assert sites[0].spend.releases == (3 if count else 0)
    assert sites[0].spend.spend == (canonical(made.plan.server_event(3)) if count else {})


WITH_SUMS = [each for each in PROGRAMS if not trusting(each)]


@pytest.mark.parametrize("method", WITH_SUMS)
def test_honest_queries_are_answered(tmp_path: Path, method: str) -> None:
    """For each method: the trial on public records refuses none."""
    try:
        sites, made = three(tmp_path, method=method)
    except FedgenError as error:
        assert error.key == "privacy.aggregation", error
        pytest.skip("its answers do not add up")
    streams = RandomStreams.from_seed(0, "seeded")
    for number in range(made.client.prepare_steps):
        for site in sites:
            assert not site(messages.PREPARE, messages.pack_round(number)).has_error()
    broadcast = messages.pack_arrays(made.server.broadcast(made.server.init(streams), 0, streams))
    if len(broadcast):
        for site in sites:
            content = messages.pack_broadcast(0, broadcast)
            assert not site(messages.TRAIN, content).has_error()
    asked = question(made)
    shares = dealt(sites, [asked] * 3)
    assert opened(sites[0], inbox(shares, sites[0]))
    reply = sites[0](messages.ASK, asked)
    assert not reply.has_error()


@kills("fedgen/deployment/site.py", "rehearsal=_rehearsal_shard(public),", "")
def test_a_query_that_fails_on_some_labels_reads_no_private_record(tmp_path: Path) -> None:
    """Weights that lack a label would fail only on its records, which would reveal that there are
    some."""
    sites, method = three(tmp_path, method="dp_wgan_gp_small")
    asked = question(method)
    shared = messages.unpack_arrays(asked.array_records["shared"])
    name = next(n for n, v in sorted(shared.items()) if v.ndim and v.shape[0] == 10)
    cut = messages.pack_arrays({**shared, name: shared[name][:5]})
    asked = RecordDict({**asked, "shared": cut})
    shares = dealt(sites, [asked] * 3)
    assert opened(sites[0], inbox(shares, sites[0]))
    reply = sites[0](messages.ASK, asked)
    assert reply.has_error()
    assert sites[0].spend.spend == {}, "it was tried on rows that are no secret"
    whole = question(method)
    endless = {**shared, name: shared[name] * float("inf")}
    for bad in (endless, {k: v for k, v in shared.items() if k != name}):
        asked = RecordDict({**whole, "shared": messages.pack_arrays(bad)})
        dealt(sites, [asked] * 3, 0)
        assert sites[0](messages.ASK, asked).has_error()
        assert sites[0].spend.spend == {}


def test_a_failure_over_private_records_ends_all_responses(tmp_path: Path) -> None:
    """In every run on these records: a failure may reveal something about them, and may do so
    once."""
    here = place(tmp_path)
    homes, _ = open_run(here, asked())
    homes.get(0).ledger.charge(0, "failed", 0, NonPrivateDpEvent())
    with pytest.raises(RefusedError, match="has no bound"):
        open_run(here, asked(run="fedcba9876543210"))


@kills(
    "fedgen/deployment/site.py",
    "Entry(request.run, _ROWS, _ROWS,",
    "Entry(request.run, rows.digest, _ROWS,",
)
def test_changed_records_keep_their_recorded_spend(tmp_path: Path) -> None:
    here = place(tmp_path, budget_epsilon=6.0)
    open_run(here, asked())
    rows = here.dataset
    fewer = replace(rows, images=rows.images[1:], labels=rows.labels[1:])
    with pytest.raises(RefusedError, match="above 6"):
        open_run(replace(here, dataset=fewer), asked(run="fedcba9876543210"))


class Line:
    """A connection that knows one run."""

    node = 1

    def __init__(self, wanted: Request, bundle: str | None = None) -> None:
        self._run = Run(wanted.text(), bundle or bundle_hash(metadata.version("fedgen")))

    def run(self, run_id: int) -> Run:
        return self._run


def answered(served: _NodeServer, line: Line, kind: str, content: RecordDict) -> Message:
    identify_process(1)
    message = Message(content, dst_node_id=2, message_type=kind)
    return served._respond(message, line)  # type: ignore[arg-type]


def test_no_message_stops_a_node(tmp_path: Path) -> None:
    """Unknown kinds and invalid contents: the reply is a code, and the node continues."""
    served, line = _NodeServer(place(tmp_path)), Line(asked())
    for kind in ("query.nonsense", messages.ASK, messages.SHARES, messages.RESTORE):
        reply = answered(served, line, kind, messages.pack_hello())
        assert reply.error.code == FAILED
    hello = answered(served, line, messages.HELLO, messages.pack_hello())
    assert messages.read_partition(hello) == 0
    codes = [each.get("error") for each in map(json.loads, (tmp_path / "log.jsonl").open())]
    assert codes == [None, FAILED, FAILED, FAILED, FAILED, None]


@kills(
    "fedgen/deployment/node.py",
    "            if name not in self._homes or self._homes[name] is not None:",
    "            if name not in self._homes:",
)
def test_a_repeated_round_is_charged_again(tmp_path: Path) -> None:
    """After the coordinator died, a new Flower run has the same name. Its noise and samples are
    new: what two responses have in common would be known twice, and charged once."""
    served = _NodeServer(place(tmp_path, aggregations=("local",)))
    words = ["privacy.aggregation=local", "rounds=12"]
    wanted, made = prepared(*words, method="dpgan_small")
    line, public = Line(wanted), RandomStreams.from_seed(0, "seeded")
    weights = messages.pack_arrays(made.server.broadcast(made.server.init(public), 0, public))

    def round_0() -> Message:
        answered(served, line, messages.TRAIN, messages.pack_broadcast(0, weights))
        return answered(served, line, messages.ASK, question(made))

    def streams() -> RandomStreams:
        client = served._homes[RUN].get(0)  # type: ignore[union-attr]
        return client.streams.at_release(client.ledger.releases)

    first, flipped = round_0(), streams()
    assert answered(served, line, messages.RESTORE, messages.pack_round(0)).has_content()
    assert round_0().has_error()
    served._names.clear()  # as for another number of Flower's
    assert answered(served, line, messages.RESTORE, messages.pack_round(0)).has_content()
    second = round_0()
    assert served._ledger(RUN).account().releases == 2
    one, two = (messages.read_response(each, LOCAL).arrays["answer"] for each in (first, second))
    assert np.mean(one == two) < 0.01
    places = [each.secret("routing", 0).random() for each in (flipped, streams())]
    assert places[0] != places[1]


def test_a_failure_over_private_records_is_the_last_message_of_a_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial on public records did not fail."""
    served, wanted = _NodeServer(place(tmp_path)), asked("privacy.aggregation=local")
    served._place = place(tmp_path, aggregations=("local",))
    line = Line(wanted)
    assert not answered(served, line, messages.HELLO, messages.pack_hello()).has_error()
    home = served._homes[RUN].get(0)  # type: ignore[union-attr]
    whole = home.program.respond

    def fails(state: object, query: object, shard: object, *rest: object) -> object:
        if shard is home.shard:
            raise ValueError("a label that there is not")
        return whole(state, query, shard, *rest)  # type: ignore[arg-type]

    home.program = replace(home.program, respond=fails)  # type: ignore[arg-type]
    _, made = three(tmp_path / "others")
    reply = answered(served, line, messages.ASK, question(made))
    assert reply.error.code == FAILED
    for kind in (messages.ASK, messages.HELLO):
        assert answered(served, line, kind, question(made)).error.code == REFUSED
    with pytest.raises(RefusedError, match="has no bound"):
        open_run(served._place, asked("privacy.aggregation=local", run="fedcba9876543210"))


@kills("fedgen/deployment/site.py", "*kinds, most, reserve=reserve)", "*kinds, most)")
@kills("fedgen/deployment/site.py", "reserves=is_secure and", "reserves=False and")
def test_a_death_during_a_response_voids_amplification(tmp_path: Path) -> None:
    """If each site samples its own participation, a missing response may reveal the sample, to the
    account of the site and to that of the coordinator. A death between responses reveals
    nothing."""
    words = [
        "method.sampled_by=clients",
        "method.cohort_size=2",
        "privacy.colluders=0",
        "rounds=12",
    ]
    wanted, made = prepared("privacy.target_epsilon=4", *words, method="fedavg_gan")
    planned = canonical(made.plan.server_event(12))
    roomy = place(tmp_path, units=("client",), epsilon=100.0)
    strict = replace(roomy, policy=replace(roomy.policy, epsilon=4.0))

    def cost() -> Spend:
        [entry] = roomy.account.entries(_ROWS)
        return entry.spend

    def ask(server_round: int, dies: bool = False) -> None:
        """Query a new process."""
        homes, _ = open_run(roomy, wanted)
        home = homes.get(0)
        home.terms, whole = replace(home.terms, masked_sums=False), home.program.respond

        def killed(state: object, query: object, shard: object, *rest: object) -> object:
            if shard is home.shard and dies:
                raise SystemExit  # not handled anywhere, like a kill
            return whole(state, query, shard, *rest)  # type: ignore[arg-type]

        home.program = replace(home.program, respond=killed)  # type: ignore[arg-type]
        message = Message(question(made, server_round), dst_node_id=2, message_type=messages.ASK)
        context = Context(1, 2, {"partition-id": 0}, RecordDict(), {})
        assert client_app(lambda _: home)(message, context).has_content()

    identify_process(1)
    ask(0)
    ask(1)
    assert cost() == planned
    with pytest.raises(SystemExit):
        ask(2, dies=True)
    seen = with_sampling_revealed(planned)
    assert cost() == seen != planned, "before anything else happens"
    with pytest.raises(RefusedError, match="above 4"):
        open_run(strict, wanted)
    assert cost() == seen, "as it is refused, too"
    cheap, _ = prepared("privacy.target_epsilon=0.5", *words, "rounds=1", method="fedavg_gan")
    with pytest.raises(RefusedError, match="different settings before"):
        open_run(roomy, cheap)
    assert cost() == seen, "whatever is asked under its name"
    ask(3)
    ask(4)
    assert cost() == seen, "and stays so"


@kills(
    "fedgen/deployment/node.py",
    ("        return with_sampling_revealed(spend) if self._place.has_dropout(name) else spend"),
    "        return spend",
)
@kills("fedgen/deployment/site.py", "        _count_marks(site)", "        pass")
@pytest.mark.parametrize("known", [True, False], ids=["by its account", "by a mark"])
def test_a_death_counts_before_another_run_is_accepted(known: bool, tmp_path: Path) -> None:
    """Also if the first run is never resumed, and in the log if it is."""
    words = [
        "method.sampled_by=clients",
        "method.cohort_size=2",
        "privacy.colluders=0",
        "rounds=12",
    ]
    words += ["privacy.target_epsilon=4", "privacy.threshold=all"]
    first, made = prepared(*words, method="fedavg_gan")
    second, _ = prepared(*words, method="fedavg_gan", run="fedcba9876543210")
    here = place(tmp_path, units=("client",), epsilon=100.0, budget_epsilon=6.0)
    open_run(here, first)
    (here.folder(RUN) / "0" / "answering").touch()
    if known:  # as a process leaves it that is killed
        here.account.reserve(RUN, 0)
    else:  # of 0.1.0
        with closing(sqlite3.connect(here.account.path)) as opened, opened:
            opened.execute("DELETE FROM gaps")
    with pytest.raises(RefusedError, match="above 6"):
        open_run(here, second)
    free = replace(here, policy=replace(here.policy, budget_epsilon=None))
    (here.folder(RUN) / "0" / SAMPLING_KEY).rename(tmp_path / "key")
    with pytest.raises(RefusedError, match=rf"{SAMPLING_KEY}: is missing"):
        open_run(free, first)
    (tmp_path / "key").rename(here.folder(RUN) / "0" / SAMPLING_KEY)
    served, line = _NodeServer(free), Line(first)
    assert answered(served, line, messages.HELLO, messages.pack_hello()).has_content()
    home = served._homes[RUN].get(0)  # type: ignore[union-attr]
    home.terms = replace(home.terms, masked_sums=False)
    assert answered(served, line, messages.ASK, question(made)).has_content()
    *_, last = map(json.loads, (tmp_path / "log.jsonl").open())
    spent = spend_from_json(last["spend"])
    assert spent and spent == with_sampling_revealed(spent)


@kills("fedgen/federation/client/app.py", "if ctx.terms.rehearsal is None:", "if True:")
def test_training_failures_are_not_sent(tmp_path: Path) -> None:
    """If the broadcast lacks labels that one site needs, a failure would reveal that the site has
    them, without a charge."""
    served = _NodeServer(place(tmp_path, aggregations=("local",), units=("client", "record")))
    words = ["privacy.aggregation=local", "privacy.adversary=server", "rounds=2"]
    wanted, made = prepared(*words, method="gs_wgan_small")
    line, streams = Line(wanted), RandomStreams.from_seed(0, "seeded")
    for number in range(made.client.prepare_steps):
        part = messages.pack_round(number)
        assert answered(served, line, messages.PREPARE, part).has_content()
    too_far = messages.pack_round(made.client.prepare_steps)
    assert answered(served, line, messages.PREPARE, too_far).has_error()
    broadcast = made.server.broadcast(made.server.init(streams), 0, streams)
    few = messages.pack_arrays({name: each[:1] for name, each in broadcast.items()})
    reply = answered(served, line, messages.TRAIN, messages.pack_broadcast(0, few))
    assert reply.has_content()
    assert served._ledger(RUN).account().spend == {}
    assert list((tmp_path / "runs" / RUN).glob("*/errors.jsonl"))
