"""The contract of all methods, which are found by their settings files."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import safetensors.torch
from mutation import kills
from omegaconf import OmegaConf
from tiny import (
    CASES,
    METHODS,
    PARTITIONS,
    PROGRAMS,
    Train,
    adversary,
    rounds_override,
    tiny,
    trusting,
)

from fedgen import cli
from fedgen.commands.check_method import check_run
from fedgen.config.compose import compose
from fedgen.privacy.accounting import epsilon
from fedgen.privacy.events import Relation, canonical, from_json, total
from fedgen.randomness import RandomStreams
from fedgen.reporting.registry_entry import MANDATORY
from fedgen.run import train as training
from fedgen.run.setup import setup
from fedgen.storage.run_dir import RunDir


def record(run: Path, name: str) -> dict:
    return json.loads((run / f"{name}.json").read_text())


def rounds_of(method: str) -> int:
    """Return the rounds of a run of two; some methods have a fixed number."""
    config = compose("config", [f"method={method}", *tiny(method), *rounds_override(method, 2)])
    return setup(config).privacy.budget.rounds


@pytest.fixture(scope="session")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Train a method on a partition, two rounds at ε = 3; shared by all tests that only read it."""
    place = tmp_path_factory.mktemp("ordinary")

    @cache
    def run(method: str, clients: str) -> Path:
        words = [
            f"method={method}",
            *tiny(method),
            *PARTITIONS[clients],
            *rounds_override(method, 2),
        ]
        own = ["privacy.target_epsilon=3", "sample_every=1"]
        where = f"run_dir={place / method / clients}"
        return training.train(compose("config", [*words, *own, where]))

    return run


@pytest.mark.parametrize(("method", "clients"), CASES)
class TestEveryMethod:
    @kills(
        "fedgen/methods/families/dp_sgd.py",
        "        return repeat(mechanism.event(), steps)",
        "        return repeat(mechanism.event(), max(1, steps - 1))",
        case="psg_small-one",
    )
    def test_spend_stays_within_the_plan(
        self, ordinary: Callable[[str, str], Path], method: str, clients: str
    ) -> None:
        run = ordinary(method, clients)
        privacy = record(run, "privacy")
        assert 0 < privacy["views"]["release"]["epsilon"] <= 3
        if trusting(method):
            assert not privacy["views"]["server"]["epsilon"]  # 0: no cohort had a member
            assert "trust" in privacy["views"]["server"]["reason"]
        else:
            assert 0 < privacy["views"]["server"]["epsilon"] <= 3
        assert privacy["rounds"] == rounds_of(method)

    @kills(
        "fedgen/run/privacy_record.py",
        "bounds = epsilons(list(spends.values()), self.privacy.delta, plan.relation)",
        "bounds = epsilons(list(spends.values()), 2 * self.privacy.delta, plan.relation)",
        case="dpgan_small-one",
    )
    def test_it_passes_the_checks_of_fedgen_check(
        self, ordinary: Callable[[str, str], Path], method: str, clients: str
    ) -> None:
        run = ordinary(method, clients)
        results = check_run(RunDir(run), OmegaConf.load(run / "config.yaml"))
        assert [result.name for result in results if result.passed is not True] == []

    def test_the_ledger_of_each_client_has_its_releases(
        self, ordinary: Callable[[str, str], Path], method: str, clients: str
    ) -> None:
        """With one kind of event, the printed ε is exactly that of the ledger; with several, it
        may count releases that were not made."""
        run = ordinary(method, clients)
        printed = record(run, "privacy")
        for client, page in printed["clients"].items():
            lines = (run / "clients" / client / "ledger.jsonl").read_text().splitlines()[1:]
            assert len(lines) == page["releases"]
            spend = total([canonical(from_json(json.loads(line)["event"])) for line in lines])
            exact = epsilon(spend, printed["delta"], Relation(printed["relation"])).or_infinity
            server = math.inf if page["server"] is None else page["server"]
            assert len(spend) > 1 or server == pytest.approx(exact, rel=1e-9) or not spend

    def test_a_run_directory_is_complete(
        self, ordinary: Callable[[str, str], Path], method: str, clients: str
    ) -> None:
        run = ordinary(method, clients)
        last_round = min(2, int(OmegaConf.load(run / "config.yaml").rounds))
        for name in (
            "config.yaml",
            "metrics.jsonl",
            "privacy.json",
            "results.json",
            "epsilon.png",
            f"samples/round_{last_round:06}.png",
            "checkpoints/checkpoint.json",
            "public/generator.safetensors",
            "public/samples.png",
            "public/PRIVACY.md",
        ):
            assert (run / name).stat().st_size > 0, name
        weights = safetensors.torch.load((run / "public" / "generator.safetensors").read_bytes())
        assert all(bool(value.isfinite().all()) for value in weights.values())
        assert not list(run.glob("clients/*/*.safetensors")), "critics do not outlive the run"
        results = record(run, "results")
        count = len(results["bytes"]["per_client"])
        assert results["clients"] == count == len(record(run, "privacy")["clients"])
        assert results["bytes"]["up"] == sum(
            client["up"] for client in results["bytes"]["per_client"].values()
        )
        assert math.isfinite(results["rounds_per_second"])


@pytest.mark.parametrize("method", PROGRAMS)
def test_a_run_stops_before_it_would_overspend(
    train: Train, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With noise for 6 rounds. A method with a single query continues and spends no more."""
    settings = [f"method={method}", *PARTITIONS["several"], "privacy.target_epsilon=2"]
    words = [*tiny(method), *settings, *rounds_override(method, 6)]
    assert cli.run(["account", *words, "output=json"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    noise = row["noise_multiplier"]
    run = train(*settings, *rounds_override(method, 20), f"privacy.noise_multiplier={noise}")
    privacy = record(run, "privacy")
    asks_once = compose("config", [f"method={method}"]).method.strategy == "one_shot"
    assert asks_once or privacy["rounds"] < 20
    assert 1 < privacy["views"][adversary(method)]["epsilon"] <= 2


@pytest.mark.parametrize("method", PROGRAMS)
def test_without_privacy_there_is_no_epsilon(train: Train, method: str) -> None:
    run = train(
        f"method={method}", *PARTITIONS["several"], "privacy=none", *rounds_override(method, 2)
    )
    privacy = record(run, "privacy")
    assert privacy["views"]["server"]["epsilon"] is None
    assert "no" in privacy["views"]["server"]["reason"]
    assert "no bound" in (run / "public" / "PRIVACY.md").read_text()


@kills(
    "fedgen/run/privacy_record.py",
    "others_bounded = len(unbounded) < len(spends) and NonPrivateDpEvent() not in self.planned(1)",
    "others_bounded = len(unbounded) < len(spends)",
)
def test_without_privacy_clients_without_queries_have_no_epsilon(train: Train) -> None:
    """The next round may query them."""
    words = ["method=fedavg_gan", *PARTITIONS["several"], "rounds=1", "method.cohort_size=1"]
    for seed in range(20):  # until the draw has some of the clients, and not all
        run = train(*words, "privacy=none", f"seed={seed}", name=str(seed))
        privacy = record(run, "privacy")
        result = [client["server"] for client in privacy["clients"].values()]
        if None in result and 0.0 in result:
            break
    assert None in result and 0.0 in result
    assert [view["epsilon"] for view in privacy["views"].values()] == [None, None]
    assert not privacy["without_bound"], "no client failed"


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        (method, kind)
        for method in PROGRAMS
        for kind in ("local", "secure", "trusted")
        if kind != ("trusted" if trusting(method) else "local")  # as in all runs above
    ],
)
def test_every_aggregation_stays_within_the_budget(train: Train, method: str, kind: str) -> None:
    """Each method under each aggregation, against its adversary."""
    own = ["method.sampled_by=clients"] if trusting(method) else []
    who = "release" if kind == "trusted" else "server"
    settings = [
        f"privacy.aggregation={kind}",
        f"privacy.adversary={who}",
        *rounds_override(method, 2),
    ]
    words = [*PARTITIONS["several"], *own, *settings, "privacy.target_epsilon=3"]
    if method == "dp_merf_ae_small":
        words.append("rounds=4")
    run = train(f"method={method}", *words)
    privacy = record(run, "privacy")
    assert privacy["aggregation"]["kind"] == kind
    assert 0 < privacy["views"]["release"]["epsilon"] <= 3
    if kind == "trusted":
        assert privacy["views"]["server"]["epsilon"] is None
        assert "trust" in privacy["views"]["server"]["reason"]
    else:
        assert 0 < privacy["views"]["server"]["epsilon"] <= 3
    result = (run / "public" / "PRIVACY.md").read_text()
    assert ("Who added the noise" in result) == (kind != "local")
    more = privacy["aggregation"].get("if_more_collude", [])
    assert [each["epsilon"] > 3 * 0.99 for each in more] == [True] * len(more)
    assert len(more) == (2 if kind == "secure" else 0)


@pytest.mark.parametrize("method", [m for m in METHODS if m not in PROGRAMS])
def test_every_settings_file_runs(train: Train, method: str) -> None:
    noise = ["privacy.target_epsilon=null", "privacy.noise_multiplier=5"]
    privacy = record(train(f"method={method}", *rounds_override(method, 2), *noise), "privacy")
    assert 0 < privacy["views"]["server"]["epsilon"] <= 10


@kills(
    "fedgen/federation/rounds.py",
    "self.state.samples[client] + len(indices) > budget.samples_per_client",
    "self.state.samples[client] > budget.samples_per_client",
)
def test_a_client_sampled_often_ends_the_run_before_it_overspends(train: Train) -> None:
    """Each query sample goes to a sampled client; the most sampled client ends the run."""
    settings = ["method.routing=per_sample", "privacy.adversary=server", "rounds=40"]
    noise = ["privacy.target_epsilon=2", "privacy.noise_multiplier=10"]
    run = train(*PARTITIONS["several"], *settings, *noise)
    privacy = record(run, "privacy")
    assert "exceed the budget of client" in privacy["stopped"]
    assert 1 < privacy["views"]["server"]["epsilon"] <= 2


@pytest.mark.parametrize("method", PROGRAMS)
def test_public_contains_nothing_about_single_clients(
    ordinary: Callable[[str, str], Path], method: str
) -> None:
    run = ordinary(method, "several")
    assert sorted(p.name for p in (run / "public").iterdir()) == [
        "PRIVACY.md",
        "README.md",
        "generator.json",
        "generator.safetensors",
        "samples.png",
    ]


KIND = "about.controller_type=Industry"


@kills(
    "fedgen/reporting/registry_entry.py",
    'ε against it is not part of the release."',
    'ε: {record[views][server][epsilon]}".format(record=record)',
    case="gs_wgan_small",
)
@pytest.mark.parametrize("method", PROGRAMS)
def test_the_publication_does_not_depend_on_secret_samples(train: Train, method: str) -> None:
    """Two runs of the same settings with different cohorts publish the same ε, statement, signed
    bounds and registry entry, and their packages verify."""
    drawn = [word for word in ["method.routing=per_sample"] if word in tiny(method, word)]
    settings = [*drawn, *rounds_override(method, 2), "privacy.noise=secure"]
    texts = set()
    for name in ("a", "b"):
        run = train(f"method={method}", *PARTITIONS["several"], *settings, name=name)
        privacy = record(run, "privacy")
        [account] = json.loads((run / "public" / "account.json").read_text())["accounts"]
        bounds = json.dumps(json.loads(account["text"])["bounds"])
        assert privacy["views"]["release"]["epsilon"] is not None
        words = ["release", f"run={run}", f"out={run}.zip", "audit=false"]
        assert cli.run([*words, *(f"about.{key}=text" for key in MANDATORY), KIND]) == 0
        with zipfile.ZipFile(f"{run}.zip") as packed:
            entry = packed.read(f"{name}/registry.yaml").decode().partition("\n")[2]
        texts.add((run / "public" / "PRIVACY.md").read_text() + bounds + entry)
        server = privacy["views"]["server"]["epsilon"]
        assert server == privacy["views"]["release"]["epsilon"] or str(server)[:6] not in entry
    assert len(texts) == 1


def test_nothing_is_written_before_the_plan_is_valid(tmp_path: Path) -> None:
    place = tmp_path / "run"
    status = cli.run(["train", "privacy.delta=2", f"run_dir={place}"])
    assert status == 2
    assert not place.exists()


SAMPLED = {
    # sums in place of steps
    "dp_wgan_gp_small": [*PARTITIONS["several"], "privacy.aggregation=secure"],
    "fedavg_gan": [
        *PARTITIONS["several"],
        "privacy.aggregation=secure",
        "method.sampled_by=clients",
        "method.cohort_size=2",
    ],
}


class Round(int):
    """A round that is recognised in a domain, whatever its number."""


@kills(
    "fedgen/methods/fedavg_gan.py",
    'streams.at_round("delta", round_)',
    'streams.at("delta", round_)',
    case="fedavg_gan",
)
@kills(
    "fedgen/methods/families/gan.py",
    'streams.at_round("sum", round_)',
    'streams.at("sum", round_)',
    case="dp_wgan_gp_small",
)
@kills(
    "fedgen/methods/families/gan.py",
    'streams.at_round("steps", round_).at(',
    'streams.at("steps", round_).at(',
    case="dpgan_small",
)
@pytest.mark.parametrize("method", PROGRAMS)
def test_secret_samples_do_not_depend_on_the_round(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash may return a run to an earlier round, and the repeated response must have the samples
    of the interrupted one: no domain of a secret stream contains the round."""
    words = [f"method={method}", *tiny(method), *SAMPLED.get(method, []), "audit.canaries=0"]
    ready, named = setup(compose("audit", words)), []
    bits, generator = RandomStreams.secret_bits, RandomStreams.secret

    def secret_bits(streams: RandomStreams, count: int, *domain: object) -> object:
        named.append((*streams.secret_domain, *domain))
        return bits(streams, count, *domain)  # type: ignore[arg-type]

    def secret(streams: RandomStreams, *domain: object) -> object:
        named.append((*streams.secret_domain, *domain))
        return generator(streams, *domain)  # type: ignore[arg-type]

    monkeypatch.setattr(RandomStreams, "secret_bits", secret_bits)
    monkeypatch.setattr(RandomStreams, "secret", secret)
    for worst in ready.at_noise(1.0).worst_cases():
        state, shard = worst.first
        streams = RandomStreams.from_seed(0, "secure").at("client", 0).at_release(5)
        round_ = Round(worst.round)
        ready.at_noise(1.0).client.respond(state, worst.query, shard, round_, streams)
    assert not [part for domain in named for part in domain if isinstance(part, Round)]
    assert method not in ("dpgan_small", "fedavg_gan") or named
