"""What a site makes of what it is asked: data, held against its policy, before any row is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, generate_private_key
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny

from fedgen import cli
from fedgen.coins import Coins
from fedgen.data.datasets import digits
from fedgen.deployment import policy, request
from fedgen.deployment.policy import Policy, RefusedError
from fedgen.deployment.request import Request
from fedgen.deployment.site import Place, open_run
from fedgen.errors import FedgenError
from fedgen.experiments import settings
from fedgen.experiments.configuration import compose
from fedgen.federation.signing import Signer

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


def place(home: Path, **policy: Any) -> Place:
    allowed = Policy(**{"epsilon": 5.0, "delta": 1e-5, **policy})
    return Place(0, digits(Coins.of(0, "seeded")), home, allowed, SIGNER)


def asked(*words: str, run: str = RUN) -> Request:
    own = [word for word in tiny("dp_merf_small") if not word.startswith("runtime=")]
    config = compose("config", ["method=dp_merf_small", *own, "rounds=3", *PUBLIC, *words])
    noise = settings.in_short(settings.setup(config).privacy.noise_multiplier)
    return Request.of(config, run, "", noise)


def test_a_run_that_is_allowed_is_the_sites_own(tmp_path: Path) -> None:
    """Its noise is solved for here, and what it may cost is on the site's account."""
    here, wanted = place(tmp_path), request.read(asked().text())
    homes, _ = open_run(here, wanted)
    site = homes._site
    assert (site.noise, site.run, site.masks, site.rows) == ("secure", RUN, True, 1)
    assert site.folder == tmp_path / "runs" / RUN
    [entry] = here.account.entries(here.rows.digest)
    assert entry.run == RUN and not entry.over


@pytest.mark.parametrize(
    ("words", "allowed", "why"),
    [
        (["privacy.noise=seeded"], {}, "rehearsals are not allowed"),
        ([], {"epsilon": 4.9}, "would cost ε = 5.00"),
        ([], {"delta": 1e-6}, "above 1e-06"),
        ([], {"methods": ("mixture",)}, "dp_merf_small is not allowed"),
        ([], {"units": ("client",)}, "about a record"),
        ([], {"aggregations": ("local",)}, "aggregation=secure is not allowed"),
        ([], {"least": 3}, "rest on 2 answers"),
        ([], {"colluders": 1}, "0 clients are counted"),
        (["runtime.masks=false"], {}, "shows each answer"),
        (["data.classes=9"], {}, "about 9 labels"),
        (["partition.clients=2", "privacy.least=2"], {"least": 3}, "rest on 2"),
        (["runtime.faults.late=0.1"], {}, "simulations alone"),
    ],
)
def test_what_is_not_allowed_is_refused(
    tmp_path: Path, words: list[str], allowed: dict[str, Any], why: str
) -> None:
    here = place(tmp_path, **allowed)
    with pytest.raises(RefusedError, match=why):
        open_run(here, asked(*words))
    assert not (tmp_path / "spent.sqlite").exists()


def test_the_coordinators_word_for_the_noise_is_not_taken(tmp_path: Path) -> None:
    wanted = asked()
    less = Request(wanted.run, wanted.settings, "", "0.1", wanted.version)
    with pytest.raises(RefusedError, match=r"is solved for here, 0\.1 by fedgen"):
        open_run(place(tmp_path), less)
    bare = {**wanted.settings, "names": {**wanted.settings["names"], "privacy": "none"}}
    bare["privacy"] = {**bare["privacy"], "target_epsilon": None, "noise_multiplier": None}
    with pytest.raises(RefusedError):
        open_run(place(tmp_path), Request(RUN, bare, "", None, wanted.version))


def test_a_run_stays_what_it_was(tmp_path: Path) -> None:
    """Under its name nothing else is answered: the same coins, or what is left of its rows."""
    here, other = place(tmp_path), asked("privacy.target_epsilon=4")
    open_run(here, asked())
    open_run(here, asked())  # after a restart
    with pytest.raises(RefusedError, match="other settings before"):
        open_run(here, other)


def test_all_runs_together_stay_within_a_budget(tmp_path: Path) -> None:
    here = place(tmp_path, budget_epsilon=6.0)
    open_run(here, asked())
    with pytest.raises(RefusedError, match="above 6"):
        open_run(here, asked(run="fedcba9876543210"))


@pytest.mark.parametrize(
    "change",
    [
        {"method": {"_target_": "os.system", "command": "touch owned"}},
        {"data": {"_target_": "fedgen.data.folders.folder", "path": "/etc"}},
        {"start": "${oc.env:HOME}"},
        {"run_dir": 7, "rounds": "many"},
        {"privacy": None},
        {"runtime": {"threads": 10**9}},
        {"partition": {"_target_": "fedgen.data.partition.iid", "clients": 3}},
    ],
)
def test_a_request_is_data_and_never_code(tmp_path: Path, change: dict[str, Any]) -> None:
    wanted = asked()
    changed = Request(RUN, {**wanted.settings, **change}, "", wanted.noise_multiplier, "1")
    with pytest.raises((RefusedError, ValueError)):
        open_run(place(tmp_path), request.read(changed.text()))


LEAVES = st.none() | st.integers() | st.text()


@given(st.recursive(LEAVES, lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
def test_what_is_no_request_is_noticed(found: Any) -> None:
    with pytest.raises(ValueError, match="not a request"):
        request.read(json.dumps(found))


@pytest.mark.parametrize("run", ["../../x", "", "A" * 16, "0" * 65, "01234567/"])
def test_a_runs_name_is_no_path(run: str) -> None:
    wanted = asked()
    other = Request(run, wanted.settings, "", wanted.noise_multiplier, "1")
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
        ("epsilon: 5\ndelta: 1e-5\nmethod: [x]", "policy.method: is no setting"),
        ("epsilon: 5\ndelta: 1e-5\nunits: [person]", "policy.units"),
        ("epsilon: 5\ndelta: 1e-5\naggregations: [trusted]", "policy.aggregations"),
        ("epsilon: 5\ndelta: 1e-5\npeers: [a]", "policy.peers"),
        ("epsilon: 5\ndelta: 1e-5\nrehearsal: 1", "policy.rehearsal"),
        ("epsilon: [", "is no YAML"),
    ],
)
def test_a_policy_that_says_nothing_is_no_policy(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "policy.yaml").write_text(text)
    with pytest.raises(FedgenError, match=why):
        policy.read(tmp_path / "policy.yaml")


def test_a_policy_is_read_as_people_write_it(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(
        "epsilon: 5\ndelta: 1e-5\nunits: [record]\nmethods: [mixture]\npeers: {0: SHA256:x}\n"
    )
    assert policy.read(tmp_path / "policy.yaml") == Policy(
        5, 1e-5, units=("record",), methods=("mixture",), peers={0: "SHA256:x"}
    )


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["node", "superlink=127.0.0.1:1", "policy=none.yaml"], "policy: none.yaml cannot be read"),
        (["node", "superlink=127.0.0.1:1", "data=digits", "ca=none"], "ca: none cannot be read"),
        (["node", "superlink=x", "data=digits", "number=-1"], "number: cannot be -1"),
        (["node", "log", "home=nowhere"], "no node was at home"),
        (["node", "key=policy.yaml"], "key: policy.yaml is no private key"),
        (["link", "accept=policy.yaml"], "accept: policy.yaml is no public key"),
        (["link", "accept=none.pub"], "none.pub cannot be read"),
        (["link", "port=0"], "port: cannot be 0"),
        (["link", "hosts=[]"], "hosts: are none"),
        (["link", "hosts=['ü']"], "hosts: 'ü' is no name"),
        (["link", "days=0"], "days: must be from 1"),
        (["train", "runtime=deployed", "runtime.ca=none"], "take data=public_facts"),
        (["train", *PUBLIC, "runtime=in_process"], "public_facts has no rows"),
        (["train", *PUBLIC, "evaluation=quick", "privacy.noise=seeded"], "no rows here to judge"),
        (["train", *PUBLIC, "runtime.ca=none"], "runtime.ca: none cannot be read"),
        (["train", *PUBLIC, "partition.clients=0"], "partition.clients: must be at least 1"),
        (["train", *PUBLIC, "data.shape=[8,8]"], "data.shape: must be"),
        (["train", *PUBLIC, "runtime.rehearses=none"], "runtime.rehearses: is for seeded"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy.yaml").write_text("epsilon: 5\ndelta: 1e-5\n")
    assert cli.run(words) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert why in line


def test_a_cost_is_known_before_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """By what everybody knows alone."""
    words = [word for word in PUBLIC if not word.startswith("runtime=")]
    assert cli.run(["account", "method=dp_merf_small", "rounds=3", *words, "output=json"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert 0 < row["server_epsilon"] <= 5
