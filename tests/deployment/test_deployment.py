"""A deployment: a link, nodes and a coordinator, each a process with its own folder."""

from __future__ import annotations

import hashlib
import http.client
import json
import signal
import ssl
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from deployed import Deployment, deployment
from flwr.app import Message
from flwr.supercore import heartbeat
from flwr.supercore.runtime import RuntimeHttpClient
from forked import Command
from mutation import kills
from tiny import tiny

from fedgen import cli
from fedgen.deployment.flower_coordinator import serve_request
from fedgen.deployment.flower_link import parse_address
from fedgen.federation import messages
from fedgen.federation.client.app import REFUSED

SECURE = ["privacy.aggregation=secure", "privacy.threshold=all", "privacy.target_epsilon=5"]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployment(tmp_path_factory.mktemp("sites"), 3) as here:
        yield here


def bits(run: Path) -> str:
    return hashlib.sha256((run / "public" / "generator.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("method", "how"),
    [("dp_merf_small", SECURE), ("dpgan_small", SECURE), ("gs_wgan_small", SECURE[2:])],
)
def test_a_rehearsal_is_bit_identical_to_the_simulation(
    sites: Deployment, method: str, how: list[str], tmp_path: Path
) -> None:
    alike = [*tiny(method), f"method={method}", *how, "rounds=3"]
    there = ["data=digits", "partition=iid", f"partition.clients={sites.count}"]
    simulated, run = tmp_path / "simulated", tmp_path / "run"
    words = [*alike, *there, "runtime=in_process", "evaluation=none", f"run_dir={simulated}"]
    assert cli.run(["train", *words]) == 0
    again = [f"runtime.rehearses={simulated}", f"run_dir={run}"]
    assert cli.run(sites.asked(*alike, *again)) == 0
    assert bits(run) == bits(simulated)
    # of the clients nothing is on the coordinator's side; what left each is what arrived
    assert not list((run / "clients").iterdir())
    results = json.loads((run / "results.json").read_text())
    name = json.loads((run / "run.json").read_text())["run"]
    for node in range(sites.count):
        counted = (messages.PREPARE, *messages.IN_A_ROUND)
        left = [each for each in sites.log(node) if each["run"] == name and each["what"] == "left"]
        size = sum(each["bytes"] for each in left if each["kind"] in counted)
        assert size == results["bytes"]["per_client"][str(node)]["up"]
        assert any(each["kind"] == messages.AGREE for each in left) == (how is SECURE)


def test_the_printed_epsilon_is_what_clients_were_charged(
    sites: Deployment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In mode secure: noise of each site, an account of its images, and a log as text."""
    run = tmp_path / "run"
    words = [*tiny("dp_merf_small"), "method=dp_merf_small", *SECURE, "privacy.noise=secure"]
    assert cli.run(sites.asked(*words, "rounds=3", f"run_dir={run}")) == 0
    record = json.loads((run / "privacy.json").read_text())
    assert 0 < record["views"]["server"]["epsilon"] <= 5
    assert record["noise"] == "secure" and record["aggregation"]["masks"] is True
    assert all(client["releases"] == 1 for client in record["clients"].values())
    assert (sites.home(0) / "spent.sqlite").exists()
    capsys.readouterr()
    assert cli.run(["node", "log", f"home={sites.home(0)}", "lines=1000"]) == 0
    output = capsys.readouterr().out
    assert "accepted: dp_merf_small" in output
    assert "sent a noised response" in output and "ε so far 5.00" in output


def test_runs_beyond_a_policy_are_refused(
    sites: Deployment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By each site, before anything about a record leaves it; the reason stays at the site."""
    for number, (words, why) in enumerate(
        [
            ([*SECURE[:2], "privacy.target_epsilon=6"], "the run would cost ε = 6.00"),
            (["privacy.aggregation=trusted", "privacy.adversary=release"], "add the noise itself"),
            ([*SECURE, "privacy.delta=1e-4"], "above 1e-05"),
            ([*SECURE, "runtime.masks=false"], "without masks"),
            ([*SECURE, "data.classes=11"], "expects 11 labels"),
            ([*SECURE, "data.shape=[1,28,28]"], "images of shape [1, 28, 28]"),
        ]
    ):
        run = tmp_path / str(number)
        alike = ["method=dp_merf_small", *tiny("dp_merf_small"), "rounds=2", *words]
        assert cli.run(sites.asked(*alike, f"run_dir={run}")) == 2
        error = capsys.readouterr().err
        assert "3 of 3 clients did not respond to the greeting (refused: clients 0, 1, 2)" in error
        assert why not in error
        for node in range(sites.count):
            last = [each for each in sites.log(node) if each["what"] == "refused"][-1]
            assert why in last["why"]


def test_strangers_reach_only_the_interface_of_nodes(sites: Deployment) -> None:
    """From another address than the link's own machine."""
    context = ssl.create_default_context(cafile=str(sites.ca))

    def status(path: str, source: str) -> int:
        call = http.client.HTTPSConnection(
            "127.0.0.1", sites.port, context=context, source_address=(source, 0)
        )
        call.request("POST" if path != "/health" else "GET", path, body=b"")
        return call.getresponse().status

    for path in ("/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task"):
        assert status(path, "127.0.0.2") == 403
        assert status(path, "127.0.0.1") != 403
    assert status("/health", "127.0.0.2") == 200
    assert status("/v1/fleet/pull-messages", "127.0.0.2") in (400, 401, 415, 422)  # no key
    with pytest.raises((OSError, http.client.HTTPException)):
        plain = http.client.HTTPConnection("127.0.0.1", sites.port, timeout=10)
        plain.request("GET", "/health")
        plain.getresponse()


def test_another_certificate_authority_is_refused(sites: Deployment, tmp_path: Path) -> None:
    from fedgen.deployment.link import certificates

    certificates(tmp_path / "other", ["localhost"], 1)
    words = [word for word in sites.words(0) if not word.startswith(("ca=", "home="))]
    node = Command(["node", *words, f"ca={tmp_path / 'other' / 'ca.crt'}", f"home={tmp_path}"])
    assert node.wait(60) == 2
    assert "its certificate fails verification against ca" in node.errors


def waits(sites: Deployment, key: Path, home: Path) -> None:
    """Return whether a node with this key is not accepted, and says so."""
    words = [w for w in sites.words(0) if not w.startswith(("key=", "home="))]
    node = Command(["node", *words, f"key={key}", f"home={home}"])
    until = time.monotonic() + 180
    while "trying again" not in node.errors:
        assert node.poll() is None and time.monotonic() < until, node.errors
        time.sleep(0.05)
    node.send_signal(9)
    node.wait(30)
    assert not (home / "log.jsonl").exists()


def test_a_node_with_an_unaccepted_key_waits(sites: Deployment, tmp_path: Path) -> None:
    waits(sites, tmp_path / "new.key", tmp_path / "home")


def test_a_key_admits_one_node(sites: Deployment, tmp_path: Path) -> None:
    """While the first is connected, a node with a copy of its key waits."""
    waits(sites, sites.key(0), tmp_path / "home")
    words = [*tiny("dp_merf_small"), "method=dp_merf_small", *SECURE, "rounds=2"]
    assert cli.run(sites.asked(*words, f"run_dir={tmp_path / 'run'}")) == 0


def replies(sites: Deployment, version: str, request: str) -> list[Message]:
    """Return the replies of nodes to the greeting of a run."""
    link = parse_address(f"127.0.0.1:{sites.port}", str(sites.ca))
    with serve_request(link, version, request) as grid:
        end = time.monotonic() + 120
        while len(nodes := list(grid.get_node_ids())) < sites.count:
            assert time.monotonic() < end, f"{len(nodes)} nodes are connected"
            time.sleep(0.1)
        asked = [
            Message(messages.pack_hello(), dst_node_id=node, message_type=messages.HELLO)
            for node in nodes
        ]
        waiting, result = set(grid.push_messages(asked)), []
        while len(result) < len(waiting):
            result += grid.pull_messages(waiting - {r.metadata.reply_to_message_id for r in result})
    return result


@kills("fedgen/deployment/flower_coordinator.py", "if alive.is_running:", "if False:")
def test_the_end_of_a_run_is_no_interruption(
    sites: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower sends SIGINT to a process that sends a heartbeat after the end of its task. Here
    heartbeats follow each other without a pause, also while the end is reported."""
    interruptions: list[int] = []
    monkeypatch.setattr(heartbeat, "HEARTBEAT_DEFAULT_INTERVAL", heartbeat.HEARTBEAT_CALL_TIMEOUT)
    report = RuntimeHttpClient.PushTaskOutput

    def reported_slowly(client: RuntimeHttpClient, request: Any) -> Any:
        answer = report(client, request)
        time.sleep(0.5)
        return answer

    monkeypatch.setattr(RuntimeHttpClient, "PushTaskOutput", reported_slowly)
    before = signal.signal(signal.SIGINT, lambda number, frame: interruptions.append(number))
    try:
        link = parse_address(f"127.0.0.1:{sites.port}", str(sites.ca))
        with serve_request(link, metadata.version("fedgen"), "{}"):
            time.sleep(0.1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not interruptions


@pytest.mark.parametrize("what", ["other code", "no request"])
def test_other_code_and_invalid_runs_are_refused(sites: Deployment, what: str) -> None:
    version = "9.9.9" if what == "other code" else metadata.version("fedgen")
    result = replies(sites, version, "{}")
    assert [reply.error.code for reply in result] == [REFUSED] * sites.count
    why = "other code" if what == "other code" else "not a fedgen run"
    assert why in [each for each in sites.log(0) if each["what"] == "refused"][-1]["why"]


def test_two_nodes_do_not_share_a_folder(sites: Deployment) -> None:
    node = Command(["node", *sites.words(0)])
    assert node.wait(60) == 2
    assert "another node is using" in node.errors


def test_messages_beyond_the_links_limit_are_refused_before_a_charge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with deployment(tmp_path, 1, link=["largest=1"]) as sites:
        for words, problem in (
            (["method=dp_merf_small", "method.features=40000"], "a response of 1.5 MB"),
            (["method=dpgan_small", "method.generator.width=200"], "a query exceeds"),
        ):
            run = tmp_path / words[0]
            words += ["privacy.target_epsilon=5", "rounds=2", f"run_dir={run}"]
            assert cli.run(sites.asked(*words)) == 2
            assert f"runtime.superlink: {problem}" in capsys.readouterr().err
        assert not [each for each in sites.log(0) if each.get("spend")]
