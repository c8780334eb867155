"""Secure sums in a run: their clients, the noise of each, and refusals before a run."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given
from hypothesis import strategies as st
from mutation import kills
from tiny import SETTINGS, SHARD, STREAMS, Train, fingerprint, tiny

from fedgen import cli
from fedgen.config.compose import compose
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.federation import messages
from fedgen.federation.client import app as client_app_module
from fedgen.federation.client.app import client_app
from fedgen.federation.client.context import ClientContext, RunTerms
from fedgen.federation.client.state_store import ClientStore
from fedgen.federation.failures import NoResponseError
from fedgen.federation.flower_compat import identify_process, set_message_id
from fedgen.federation.messages import Response
from fedgen.federation.rounds import Rounds
from fedgen.federation.runtimes.in_process import InProcessGrid
from fedgen.federation.secagg import server as sums_module
from fedgen.federation.secagg.masking import KEY_BYTES, SEALED_BYTES, Masker, mask_context
from fedgen.federation.secagg.secret_sharing import SHARE_BYTES
from fedgen.federation.secagg.server import clients_in, present
from fedgen.methods.api import Method, PublicFacts
from fedgen.methods.gs_wgan import gs_wgan
from fedgen.privacy.aggregation import Secure
from fedgen.privacy.events import Relation, RevealedSampling, Unit, canonical
from fedgen.privacy.ledger import Ledger
from fedgen.run import setup as settings
from fedgen.run import train as training

SUMS = ["partition=iid", "partition.clients=5", "privacy.aggregation=secure"]
DPGAN = ["method=dpgan_small", *SUMS]


def make(
    clients: int = 6, noise: float = 1.0, *, requires_all: bool = True, **changed: object
) -> Method:
    facts = PublicFacts(
        clients, None, 10, (1, 8, 8), aggregation_kind="secure", requires_all=requires_all
    )
    return gs_wgan(facts, noise, **{**SETTINGS, "routing": "mean", **changed})  # type: ignore[arg-type]


# --- what a client adds ---------------------------------------------------------------------------


@kills(
    "fedgen/federation/messages.py",
    "*([str(cohort).encode()] if cohort else [])",
    "*([str(cohort).encode()] if cohort == 1 else [])",
)
def test_another_cohort_has_other_streams(tmp_path: Path) -> None:
    """The same query for a sum with other clients: under the same streams, the difference of two
    sums would be a contribution."""
    method = make()
    server, result = method.server.init(STREAMS), []
    query = method.server.query(server, 0, STREAMS)
    assert query is not None
    for cohort in ([0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 3]):
        ledger = Ledger(tmp_path / f"{len(result)}.jsonl", "run", 0, seeded=True)
        store = ClientStore(tmp_path, in_memory=True)
        terms = RunTerms(100, aggregation=Secure(4, 4, 0))
        home = ClientContext(0, method.client, SHARD, STREAMS, store, ledger, terms)
        grid = InProcessGrid(client_app(lambda _, home=home: home), 1, 60, serialize=False)
        content = messages.add_cohort(messages.pack_query(0, query), cohort)
        asked = Message(content, dst_node_id=2, message_type=messages.ASK)
        [reply] = grid.send_and_receive([asked])
        result.append(messages.read_response(reply, Secure(4, 4, 0)).arrays["answer"])
    assert np.array_equal(result[0], result[2])
    assert (result[0] != result[1]).mean() > 0.9


@kills(
    "fedgen/methods/families/critic_ensemble.py",
    "shape, outputs(), response_streams, contributes=not is_removed",
    "shape, outputs(), response_streams, contributes=True",
)
def test_unsampled_clients_and_clients_without_records_add_noise_alone() -> None:
    """Their words have the noise of a share; a contribution would be a hundred times as large."""
    never = make(10**6, 1e-2, sampled_by="clients", routing="per_step", responders=1)
    empty = make(noise=1e-2)
    for method, shard in ((never, SHARD), (empty, Shard(SHARD.images[:0], SHARD.labels[:0]))):
        query = method.server.query(method.server.init(STREAMS), 0, STREAMS)
        assert query is not None
        words = [
            method.client.respond({}, query, shard, 0, STREAMS.at("try", n)).arrays["answer"]
            for n in range(20)
        ]
        extent, sums = method.plan.value_ranges[0], method.plan.aggregation
        assert isinstance(sums, Secure)
        values = np.array([method.aggregate([each], 0, STREAMS).numpy() for each in words])
        statistic = (values**2).sum() / sums.share_std(extent[0]) ** 2
        assert abs(statistic / values.size - 1) < 6 * math.sqrt(2 / values.size)
        mean = np.abs(values.mean(0)).max() / sums.share_std(extent[0])
        assert mean < 6 / math.sqrt(len(words))


def test_the_sum_of_shards_is_that_of_one_client() -> None:
    """With every record in every batch, ten shards sum to the mean gradient of one client with all
    records, up to noise."""
    from functools import partial

    from fedgen.methods.dpgan import dpgan
    from fedgen.models import cdcgan

    def of(clients: int) -> Method:
        kind = "secure" if clients > 1 else "trusted"
        facts = PublicFacts(
            clients,
            None,
            10,
            (1, 8, 8),
            aggregation_kind=kind,
            threshold=clients if clients > 1 else None,
        )
        return dpgan(
            facts,
            1e-3,
            generator=partial(cdcgan.Generator, width=4),
            discriminator=partial(cdcgan.Discriminator, width=3),
            latent=4,
            batch=60,
            fakes=6,
            sampling_rate=1.0,
            discriminator_steps=2,
            accuracy_floor=0.6,
            accuracy_ema=0.9,
            discriminator_learning_rate=1e-3,
            generator_learning_rate=1e-3,
            betas=(0.5, 0.9),
            clip=0.5,
            ema=0.0,
            mode_seeking=0.0,
            precision="float32",
            device="cpu",
        )

    result = []
    for clients in (1, 10):
        method = of(clients)
        query = method.server.query(method.server.init(STREAMS), 0, STREAMS)
        assert query is not None
        shards = [Shard(SHARD.images[c::clients], SHARD.labels[c::clients]) for c in range(clients)]
        answers = [
            method.client.respond({}, query, shard, 0, STREAMS.at("client", c)).arrays["answer"]
            for c, shard in enumerate(shards)
        ]
        result.append(method.aggregate(answers, 0, STREAMS) / clients)
    std = 1e-3 * 0.5 / 60
    assert float((result[0] - result[1]).abs().max()) < 8 * 2 * std
    assert float(result[0].norm()) > 100 * std


# --- of whom a sum is -----------------------------------------------------------------------------


@kills(
    "fedgen/federation/secagg/server.py",
    "if not response.arrays and client not in counts",
    "if not response.arrays and client in counts",
)
def test_a_lost_partial_sum_loses_its_clients() -> None:
    """An actor sends one sum for its clients. If that message is lost, none of them responded, and
    all of their noise is missing."""
    event = GaussianDpEvent(1.0)
    words = {"answer": np.zeros((1, 3), np.int32)}
    here = {
        c: Response(words if c == 0 else {}, event, Unit.CLIENT, (0, 1) if c == 0 else ())
        for c in (0, 1)
    }
    there = {
        c: Response(words if c == 2 else {}, event, Unit.CLIENT, (2, 3, 4, 5) if c == 2 else ())
        for c in (2, 3, 4, 5)
    }
    whole = {**here, **there}
    result, lost = present(whole)
    assert set(result) == set(range(6)) == set(clients_in(result)) and not lost
    result, lost = present({c: answer for c, answer in whole.items() if c != 0})
    assert set(result) == {2, 3, 4, 5} == set(clients_in(result)) and lost == [1]
    result, lost = present({c: answer for c, answer in whole.items() if c != 2})
    assert set(result) == {0, 1} and lost == [3, 4, 5]
    twice = {**whole, **{5: Response(words, event, Unit.CLIENT, (5, 0))}}
    with pytest.raises(NoResponseError, match="two partial sums"):
        present(twice)


@kills(
    "fedgen/federation/messages.py",
    ("{reply.metadata.reply_to_message_id: (client, reply) for client, reply in replies}"),
    "dict(enumerate(replies))",
)
def test_actors_add_up_words() -> None:
    """Other parts of the replies do not change, and failures and other shapes stay separate."""
    identify_process(run_id=1)

    def question(name: str) -> Message:
        asked = Message(messages.pack_hello(), dst_node_id=2, message_type=messages.ASK)
        set_message_id(asked, name)
        return asked

    rng, replies, total = np.random.default_rng(0), [], np.zeros((2, 5), np.uint32)
    for client in range(4):
        words = rng.integers(0, 2**32, (2, 5), dtype=np.uint32)
        total += words
        answer = Response({"answer": words.view(np.int32)}, GaussianDpEvent(2.0), Unit.CLIENT)
        reply = Message(messages.pack_response(answer), reply_to=question(str(client)))
        replies.append((client, reply))
    odd = Response({"answer": np.zeros((1, 5), np.int32)}, GaussianDpEvent(2.0), Unit.CLIENT)
    replies.append((4, Message(messages.pack_response(odd), reply_to=question("4"))))
    replies.append(replies[1])  # once more: it counts once
    size = messages.count_bytes(replies[0][1])
    summed = messages.sum_responses(replies)
    assert messages.count_bytes(summed[0]) == size, "the list of summed clients counts"
    result = [messages.read_response(each, Secure(5, 5, 0)) for each in summed]
    assert [bool(each.arrays) for each in result] == [True, False, False, False, True]
    assert result[0].clients == (0, 1, 2, 3) and result[4].clients == (4,)
    assert np.array_equal(result[0].arrays["answer"].view(np.uint32), total)
    assert all(each.event == GaussianDpEvent(2.0) for each in result)


@kills(
    "fedgen/federation/runtimes/in_process.py",
    "if self._sums_responses:\n            return",
    "if not self._sums_responses:\n            return",
)
def test_one_process_sums_responses_in_groups_of_256() -> None:
    """600 responses reach the server as three sums."""
    app, ones = ClientApp(), np.ones((1, 4), np.int32)

    @app.query("ask")
    def respond(message: Message, context: Context) -> Message:
        response = Response({"answer": ones}, GaussianDpEvent(1.0), Unit.CLIENT)
        return Message(messages.pack_response(response), reply_to=message)

    grid = InProcessGrid(app, 600, 60, serialize=False, sums=True)
    content = messages.pack_hello()
    sent = [
        Message(content, dst_node_id=node, message_type=messages.ASK)
        for node in grid.get_node_ids()
    ]
    replies = list(grid.send_and_receive(sent))
    result = [messages.read_response(reply, Secure(600, 600, 0)) for reply in replies]
    sums = [response for response in result if response.arrays]
    assert [len(response.clients) for response in sums] == [256, 256, 88]
    assert sum(int(response.arrays["answer"].sum()) for response in sums) == 4 * 600
    assert len(result) == 600


@kills(
    "fedgen/run/train.py",
    "if self.run_dir.record_sum(query, of) != of:",
    "if self.run_dir.record_sum(query, of) is None:",
)
def test_a_seeded_run_does_not_sum_one_query_over_two_cohorts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies after a round with all clients, and resumes with a silent one: the two sums under the
    same streams would differ by that client's contribution."""
    run, whole = tmp_path / "run", Rounds._round

    def dies(own: Rounds, server_round: int, *rest: object) -> object:
        if server_round == 2:
            raise RuntimeError("killed")
        return whole(own, server_round, *rest)  # type: ignore[arg-type]

    words = [*DPGAN, "rounds=6", "runtime.checkpoint_every=4", f"run_dir={run}"]
    with monkeypatch.context() as killer, pytest.raises(RuntimeError, match="killed"):
        killer.setattr(Rounds, "_round", dies)
        training.train(compose("config", [words[0], *tiny("dpgan_small"), *words[1:]]))
    lines = (run / "sums.jsonl").read_text().splitlines()
    assert len(lines) == 2
    asked, _ = json.loads(lines[0])
    (run / "sums.jsonl").write_text(json.dumps([asked, "others"]) + "\n" + lines[1] + "\n")
    assert cli.run(["train", f"resume={run}"]) == 2
    (run / "sums.jsonl").write_text("\n".join(lines) + "\n")
    assert cli.run(["train", f"resume={run}"]) == 0
    assert len((run / "sums.jsonl").read_text().splitlines()) == 6


@kills(
    "fedgen/federation/client/app.py",
    ("server_round <= max(ctx.responded_round, -1 if last_round is None else last_round):\n"),
    ("server_round < min(ctx.responded_round, 0 if last_round is None else last_round):\n"),
)
def test_a_responder_announces_no_other_keys_for_the_round(tmp_path: Path) -> None:
    """A second sum over other clients would differ from the first by a contribution."""
    method, sums = make(), Secure(4, 4, 0)
    ledger = Ledger(tmp_path / "l.jsonl", "run", 0, seeded=True)
    store = ClientStore(tmp_path, in_memory=True)
    terms = RunTerms(100, "r", aggregation=sums, masked_sums=True)
    home = ClientContext(0, method.client, SHARD, STREAMS, store, ledger, terms)
    grid = InProcessGrid(client_app(lambda _: home), 1, 60, serialize=False)
    query = method.server.query(method.server.init(STREAMS), 0, STREAMS)
    assert query is not None
    question = messages.framed_digest(messages.pack_query(0, query))
    context = mask_context("r", 0, question)
    others = {c: Masker(c, sums, context) for c in (1, 2, 3)}

    def ask(kind: str, content: object) -> Message:
        [reply] = grid.send_and_receive([Message(content, dst_node_id=2, message_type=kind)])  # type: ignore[call-overload]
        return reply

    announced = ask(messages.KEYS, messages.pack_keys_for(0, question))
    keys = messages.read_texts(announced, KEY_BYTES)
    keys |= {c: each.announce() for c, each in others.items()}
    assert not ask(messages.SHARES, messages.pack_texts(0, keys)).has_error()
    inbox = {c: each.seal_shares(keys)[0] for c, each in others.items()}
    assert not ask(messages.OPEN, messages.pack_texts(0, inbox)).has_error()
    content = messages.pack_query(0, query)
    assert not ask(messages.ASK, content).has_error()
    assert ask(messages.ASK, content).has_error()
    assert ask(messages.KEYS, messages.pack_keys_for(0, question)).has_error()
    assert not ask(messages.KEYS, messages.pack_keys_for(1, question)).has_error()


@kills("fedgen/federation/rounds.py", "for leaves in (spend, revealed))", "for leaves in (spend,))")
def test_a_run_sampled_by_clients_continues_after_a_dropout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its samples may be revealed: rounds before and after count without amplification, and clients
    report so."""
    run = tmp_path / "run"
    draws = ["method.sampled_by=clients", "method.routing=per_step", "method.responders=3"]
    words = ["method=gs_wgan_small", *SUMS, *draws, "rounds=6", "runtime.checkpoint_every=2"]
    settings = ["train", *tiny("gs_wgan_small", *draws), *words, f"run_dir={run}"]
    whole = client_app_module._respond

    def silent(home: ClientContext, message: Message) -> RecordDict:
        if (home.index, messages.read_round(message)) == (1, 3):
            raise RuntimeError("silent")
        return whole(home, message)

    with monkeypatch.context() as once:
        once.setitem(client_app_module._HANDLERS, messages.ASK, silent)
        assert cli.run(settings) == 2
    assert cli.run(["train", f"resume={run}"]) == 0
    record = json.loads((run / "privacy.json").read_text())
    assert record["without_bound"] == []
    kinds = {e["event"] for c in record["clients"].values() for e, _ in c["events"]}
    assert kinds == {"revealed_draw"}
    assert record["views"]["server"]["amplified_by"] is None


@kills(
    "fedgen/methods/families/critic_ensemble.py",
    ('or the sampled ones); without records, none."""\n        if not len(shard):'),
    ('or the sampled ones); without records, none."""\n        if len(shard) < 0:'),
)
def test_a_client_without_records_contributes_nothing() -> None:
    """The neighbour under removal of a whole client, in each call."""
    program, none = make(warm_start=2).client, Shard(SHARD.images[:0], SHARD.labels[:0])
    assert program.prepare(0, none, STREAMS) == {}
    method = make()
    images = method.server.broadcast(method.server.init(STREAMS), 0, STREAMS)
    assert program.train({}, images, none, 0, STREAMS) == {}


def test_dropouts_under_masks_do_not_end_a_run(train: Train) -> None:
    """At each stage of the protocol; the noise counts on four of five."""
    words = ["runtime.masks=true", "runtime.min_success=0.8", "privacy.threshold=4", "rounds=8"]
    faults = ["runtime.faults.returns_error=0.01", "runtime.faults.nan=0.01", "seed=5"]
    run = train(*DPGAN, *words, *faults)
    failures = [json.loads(line) for line in (run / "failures.jsonl").read_text().splitlines()]
    assert failures
    record = json.loads((run / "privacy.json").read_text())
    assert record["rounds"] == 8
    assert 0 < record["views"]["server"]["epsilon"] <= 10


# --- what it costs --------------------------------------------------------------------------------


@kills(
    "fedgen/methods/families/ensemble_privacy.py",
    "noise_adds_up = federated and aggregation.is_local and",
    "noise_adds_up = federated and",
)
def test_the_event_is_that_of_the_sum() -> None:
    """All clients respond, and one is removed as a whole: one Gaussian per query sample, against
    all adversaries."""
    plan = make(clients=9, noise=3.0).plan
    assert plan.relation is Relation.ADD_OR_REMOVE_ONE and plan.release_event is None
    assert canonical(plan.server_event(12)) == {GaussianDpEvent(3.0): 12}
    assert plan.value_ranges[0][0] == pytest.approx(3.0)  # sensitivity C
    drawn = make(clients=9, noise=3.0, routing="per_step", responders=4).plan
    assert drawn.relation is Relation.REPLACE_ONE and drawn.release_event is not None
    assert canonical(drawn.server_event(12)) == {GaussianDpEvent(3.0): 12}
    [(event, count)] = canonical(drawn.release_event(2)).items()
    assert (event.source_dataset_size, event.sample_size, count) == (9, 4, 2)
    assert event.event.noise_multiplier == pytest.approx(3.0 / math.sqrt(6))
    assert drawn.value_ranges[0][0] == pytest.approx(6.0)  # sensitivity 2C
    assert drawn.aggregation == Secure(4, 3, 0)


@kills(
    "fedgen/privacy/batch_sampling.py",
    ("        if self.hidden:\n            return PoissonSampledDpEvent(self.rate, gated)"),
    ("        if self.rate < 1:\n            return PoissonSampledDpEvent(self.rate, gated)"),
)
def test_sampling_by_clients_amplifies_unless_one_fails() -> None:
    words = {"sampled_by": "clients", "routing": "per_step", "responders": 3}
    plan = make(clients=9, noise=3.0, **words).plan
    [(event, count)] = canonical(plan.server_event(12)).items()
    assert isinstance(event, PoissonSampledDpEvent)
    assert (event.sampling_probability, count) == (3 / 9, 2)
    assert event.event.noise_multiplier == pytest.approx(3.0 / math.sqrt(6))
    assert plan.amplified_by["server"] and plan.release_event is None
    assert plan.aggregation == Secure(9, 6, 0)  # all of them send
    facts = PublicFacts(9, None, 10, (1, 8, 8))
    alone = gs_wgan(facts, 3.0, **{**SETTINGS, **words}).plan  # type: ignore[arg-type]
    assert alone.amplified_by == plan.amplified_by and alone.release_event is None
    plan = make(clients=9, noise=3.0, requires_all=False, **words).plan
    assert all(isinstance(event, RevealedSampling) for event in canonical(plan.server_event(12)))
    assert plan.amplified_by["server"] is None


# --- what is refused ------------------------------------------------------------------------------


@kills("fedgen/run/setup.py", "    if answers < aggregation.threshold:", "    if answers < 1:")
@pytest.mark.parametrize(
    ("words", "key", "message"),
    [
        (["method=dpgan_small", "privacy.aggregation=secure"], "privacy.aggregation", "one"),
        ([*DPGAN, "privacy.threshold=2"], "privacy.threshold", "2 of 5"),
        ([*DPGAN, "privacy.threshold=6"], "privacy.threshold", "6 of 5"),
        ([*DPGAN, "privacy.threshold=most"], "privacy.threshold", "a number or all"),
        ([*DPGAN, "privacy.colluders=4"], "privacy.threshold", "4 colluders"),
        ([*DPGAN, "privacy.colluders=-1"], "privacy.colluders", "0 or more"),
        ([*DPGAN, "privacy.aggregation=maybe"], "privacy.aggregation", "local, secure or trusted"),
        ([*DPGAN, "runtime.min_success=0.5"], "runtime.min_success", "2.5 of 5"),
        (["method=dp_sinkhorn_small", *SUMS, "privacy.unit=client"],
         "privacy.unit", "cannot be client"),
        ([*DPGAN, "privacy.threshold=7"], "privacy.threshold", "7 of 5"),
        (["method=gs_wgan_small", *SUMS, "method.routing=per_sample"],
         "privacy.aggregation", "every query sample"),
        (["method=gs_wgan_small", *SUMS, "method.routing=mean", "privacy.unit=record"],
         "privacy.unit", "record"),
        (["method=gs_wgan_small", "method.sampled_by=clients"], "method.sampled_by", "per round"),
        ([*DPGAN, "runtime.masks=maybe"], "runtime.masks", "cannot be"),
        (
            ["method=fedavg_gan", *SUMS, "method.cohort_size=2"],
            "privacy.aggregation",
            "sampled_by=clients",
        ),
        (["method=dp_merf_small", "partition=iid", "partition.clients=5", "runtime.masks=true"],
         "runtime.masks", "secure sum"),
    ],
)  # fmt: skip
def test_invalid_settings_are_refused_before_a_run(
    words: list[str], key: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["account", *words]) == 2
    error = capsys.readouterr().err
    assert key in error and message in error and len(error.splitlines()) == 1


def test_masks_stay_in_their_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*DPGAN, "runtime=flower", "runtime.masks=true", f"run_dir={tmp_path / 'run'}"]
    assert cli.run(["train", *words]) == 2
    assert "runtime.masks" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_account_names_the_source_of_the_noise(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["account", *DPGAN, "method.sampling_rate=0.0445", "rounds=5"]) == 0
    output = capsys.readouterr().out
    assert "by each client (local): ε = 10.00 (server)" in output
    assert "by all clients together (secure): ε = 10.00 (server)" in output
    assert "by an aggregator (trusted): ε = ∞ (server), 10.00 (release)" in output
    fedavg = ["method=fedavg_gan", *SUMS[:2], "method.cohort_size=2", "privacy.adversary=release"]
    assert cli.run(["account", *fedavg, "rounds=5"]) == 0
    assert "secure): not possible" in capsys.readouterr().out


@pytest.mark.parametrize("aggregation", ["local", "secure"])
@pytest.mark.parametrize("method", ["dp_merf_small", "dpgan_small", "psg_small"])
def test_client_level_protects_a_client_with_any_records(
    train: Train, method: str, aggregation: str
) -> None:
    """By as much noise as is proven for steps without sampling."""
    words = [f"method={method}", *SUMS[:2], f"privacy.aggregation={aggregation}"]
    run = train(*words, "privacy.unit=client", "rounds=3")
    record = json.loads((run / "privacy.json").read_text())
    assert record["unit"] == "client" and record["aggregation"]["kind"] == aggregation
    assert record["views"]["server"]["epsilon"] == pytest.approx(10, abs=0.01)
    assert record["views"]["server"]["accountant"] == "Gaussian, exact"
    assert record["views"]["server"]["amplified_by"] is None
    assert "all images of one client" in (run / "public" / "PRIVACY.md").read_text()


@kills(
    "fedgen/methods/families/noisy_sums.py",
    "aggregation = self.facts.aggregation(self.facts.clients, limit)",
    "aggregation = self.facts.aggregation(self.facts.clients)",
)
def test_the_embedding_of_a_client_is_in_the_ball() -> None:
    from fedgen.methods.api import PublicFacts
    from fedgen.methods.dp_merf import FourierFeatures, embedding
    from fedgen.methods.families.noisy_sums import SumMechanisms, SumSequence
    from fedgen.privacy.aggregation import Trusted

    facts = PublicFacts(4, None, 10, (1, 8, 8), aggregation_kind="trusted", unit=Unit.CLIENT)
    of_rows = FourierFeatures(40, 5.0, 64, "cpu")
    asked = embedding(SumMechanisms(facts, 1.0, 60), of_rows, 10, lambda _, images: images)
    assert asked.mechanism.aggregation == Trusted(1.0)  # which clips again
    client = SumSequence((asked,), "cpu").client
    query = messages.Query({"embedding": torch.zeros(1)}, {"seed": torch.tensor(3)})
    for rows in (0, 1, 7, 60):
        shard = Shard(SHARD.images[:rows], SHARD.labels[:rows])
        result = client.respond({}, query, shard, 0, STREAMS).arrays["answer"]
        assert np.linalg.norm(result.astype(float)) <= 1
        assert rows == 0 or np.linalg.norm(result) > 0.1


@kills(
    "fedgen/methods/families/noisy_sums.py",
    "            if query.name not in queried:",
    "            if False:",
)
def test_a_sum_without_an_attack_is_named() -> None:
    from fedgen.methods.dp_merf import FourierFeatures, embedding
    from fedgen.methods.families.noisy_sums import SumMechanisms, SumSequence

    sums = SumMechanisms(PublicFacts(1, 60, 10, (1, 8, 8)), 1.0, 60)
    first = embedding(sums, FourierFeatures(40, 5.0, 64, "cpu"), 10, lambda _, images: images)
    sequence = SumSequence((first, replace(first, name="another")), "cpu")
    tried = ({}, SHARD), ({}, SHARD)
    worst = sequence.worst_case("embedding", {"seed": torch.tensor(3)}, *tried)
    plan = sequence.plan("none", None, None)
    server = settings.setup(compose("config", tiny("dp_merf_small"))).method.server
    made = sequence.build(server, plan, 1, lambda: [worst])
    with pytest.raises(FedgenError, match=r"the sum 'another'.*sequence\.worst_case\('another'"):
        made.worst_cases()
    both = replace(worst, query=messages.Query({"another": torch.zeros(1)}, {}))
    assert len(sequence.build(server, plan, 1, lambda: [worst, both]).worst_cases()) == 2


@kills(
    "fedgen/run/setup.py",
    "        plan = resolved.method.plan\n",
    "        plan = resolved.at_noise(None).plan\n",
)
def test_canaries_of_a_run_are_its_neighbours() -> None:
    """Under removal of a whole client, a client that is not among the canaries has no records."""
    words = [*tiny("gs_wgan_small"), *SUMS, "method.routing=mean", "audit.canaries=4"]
    ready = settings.setup(compose("audit", ["method=gs_wgan_small", *words]))
    assert ready.canaries is not None
    absent = int((~ready.canaries.present).sum())
    assert 0 < absent == sum(len(shard) == 0 for shard in ready.shards)


LIAR = 3


def _lie(how: str, honest: RecordDict, place: int, seen: dict[int, bytes]) -> RecordDict:
    """Return client 3's reply in place of an honest one. ``seen``: client 0's keys."""
    if how == "nothing":
        return RecordDict()
    if how.startswith("rejects"):
        rejected = {"rejects one": [0], "rejects all": [0, 1, 2, 4], "rejects itself": [LIAR]}
        return messages.pack_rejected(place, rejected[how])
    length = SHARE_BYTES if how == "wrong shares" else KEY_BYTES if "key" in how else SEALED_BYTES
    texts = messages.read_texts(Message(honest, 1, "query"), length)
    first = min(texts)
    flipped = {c: text[:-1] + bytes([text[-1] ^ 1]) for c, text in texts.items()}
    lies = {
        "zero keys": {LIAR: bytes(KEY_BYTES)},
        "one key for both": {LIAR: 2 * texts[first][:32] + bytes(32)},
        "keys of client 0": {0: texts[first]},
        "copied keys": seen,
        "no keys": {},
        "no shares": {},
        "some shares": {first: texts[first]},
        "shares for a stranger": {**texts, 9: texts[first]},
        "broken seals": flipped,
        "one broken seal": {**texts, first: flipped[first]},
        "wrong shares": flipped,
    }
    return messages.pack_texts(place, lies[how])


@pytest.mark.parametrize(
    ("kind", "how", "failure", "named"),
    [
        (messages.KEYS, "zero keys", "malformed", {LIAR}),
        (messages.KEYS, "one key for both", "malformed", {LIAR}),
        (messages.KEYS, "keys of client 0", "malformed", {LIAR}),
        (messages.KEYS, "no keys", "malformed", {LIAR}),
        (messages.KEYS, "copied keys", "copied", {0, LIAR}),
        (messages.SHARES, "no shares", "malformed", {LIAR}),
        (messages.SHARES, "some shares", "malformed", {LIAR}),
        (messages.SHARES, "shares for a stranger", "malformed", {LIAR}),
        (messages.SHARES, "broken seals", "contradicted", {LIAR}),
        (messages.SHARES, "one broken seal", "contradicted", {0, LIAR}),
        (messages.SHARES, "rejects all", "malformed", {LIAR}),  # where nothing is signed
        (messages.OPEN, "rejects itself", "malformed", {LIAR}),
        (messages.KEYS, "nothing", "malformed", {LIAR}),
        (messages.SHARES, "nothing", "malformed", {LIAR}),
        (messages.OPEN, "nothing", "malformed", {LIAR}),
        (messages.OPEN, "rejects all", "contradicted", {LIAR}),
        (messages.OPEN, "rejects one", "contradicted", {0, LIAR}),
    ],
)
def test_a_protocol_violator_is_named_and_excluded(
    kind: str,
    how: str,
    failure: str,
    named: set[int],
    train: Train,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sum of the others is opened in each round, and an honest client is named only if it
    cannot be distinguished from the violator. Excluded clients are not charged."""
    whole, keys = client_app_module._HANDLERS[kind], client_app_module._HANDLERS[messages.KEYS]
    seen: dict[int, bytes] = {}

    def lies(home: ClientContext, message: Message) -> RecordDict:
        honest = whole(home, message)
        if home.index == 0 and whole is keys:
            text = messages.read_texts(Message(honest, 1, "query"), KEY_BYTES)
            seen.update({LIAR: text[0]})
        if home.index != LIAR:
            return honest
        return _lie(how, honest, messages.read_round(message), seen)

    monkeypatch.setitem(client_app_module._HANDLERS, kind, lies)
    words = ["partition=iid", "partition.clients=5", "privacy.aggregation=secure"]
    words += ["privacy.threshold=3", "runtime.masks=true", "runtime.min_success=0.6", "rounds=2"]
    run = train("method=dpgan_small", *words)
    failures = [json.loads(line) for line in (run / "failures.jsonl").read_text().splitlines()]
    assert {each["kind"] for each in failures} == {failure}
    assert sorted(each["client"] for each in failures) == sorted([*named, *named])
    record = json.loads((run / "privacy.json").read_text())
    for client in range(5):
        assert (record["clients"][str(client)]["releases"] > 0) == (client not in named)


def test_wrong_revealed_shares_change_no_sum(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["partition=iid", "partition.clients=4", "privacy.aggregation=secure", "rounds=2"]
    words += ["privacy.threshold=3", "runtime.masks=true"]
    honest = train("method=dpgan_small", *words)
    whole = client_app_module._HANDLERS[messages.REVEAL]

    def lies(home: ClientContext, message: Message) -> RecordDict:
        reply = whole(home, message)
        if home.index != LIAR:
            return reply
        return _lie("wrong shares", reply, messages.read_round(message), {})

    monkeypatch.setitem(client_app_module._HANDLERS, messages.REVEAL, lies)
    lied = train("method=dpgan_small", *words, name="lied")
    assert fingerprint(lied)["generator"] == fingerprint(honest)["generator"]
    if (file := lied / "failures.jsonl").exists():  # none where the other shares came first
        failures = [json.loads(line) for line in file.read_text().splitlines()]
        assert {each["kind"] for each in failures} == {"wrong share"}
        assert LIAR in {each["client"] for each in failures}


@given(st.dictionaries(st.integers(0, 8), st.sets(st.integers(0, 8)), max_size=9), st.data())
def test_all_rejections_are_resolved_and_no_honest_client_is_excluded_alone(
    rejections: dict[int, set[int]], data: st.DataObject
) -> None:
    """For any false rejections, as long as they are too few to prove a violation."""
    certain = data.draw(st.integers(1, 9))
    out = sums_module._violators(rejections, certain)
    for client, others in rejections.items():
        assert client in out or others <= out
    liars = data.draw(st.sets(st.integers(0, 8), max_size=certain - 1))
    lied = {
        client: {other for other in others if client in liars or other in liars}
        for client, others in rejections.items()
    }
    for client in sums_module._violators(lied, certain) - liars:
        pairs = [c for c, others in lied.items() if client in others] + [*lied.get(client, ())]
        assert liars.intersection(pairs) & sums_module._violators(lied, certain)


@kills("fedgen/federation/secagg/server.py", "if count >= certain}", "if count >= 2}")
def test_two_violators_cannot_exclude_an_honest_client_alone() -> None:
    assert sums_module._violators({3: {0}, 4: {0}}, 3) == {0, 3, 4}
    assert sums_module._violators({3: {0, 1, 2}}, 3) == {3}


@kills("fedgen/federation/secagg/server.py", "        clients=tuple(sorted(responses)),\n", "")
def test_a_masked_sum_includes_all_responders(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recorded clients of a sum do not depend on masks."""
    words = ["partition=iid", "partition.clients=4", "privacy.aggregation=secure", "rounds=2"]
    runs = [
        train("method=dpgan_small", *words, f"runtime.masks={masks}", name=masks)
        for masks in ("true", "false")
    ]
    opened = [[json.loads(x) for x in (run / "sums.jsonl").open()] for run in runs]
    assert opened[0] == opened[1]


def test_an_impossible_sum_is_not_attributed_to_records() -> None:
    """If the words of one client are arbitrary, the client cannot be identified, and the error says
    so."""
    sums = Secure(4, 3, 0)
    words = np.full((1, 4), 2**31 - 1, np.int32)
    with pytest.raises(FedgenError, match=r"a client sent invalid values.*fedgen node log"):
        sums.total([words], 1.0, STREAMS)


def test_large_sums_use_64_bits(train: Train) -> None:
    """With and without masks, and on the wire: the same generator, with the width chosen by the
    plan."""
    words = ["partition=iid", "partition.clients=3", "privacy.aggregation=secure", "rounds=2"]
    words += ["privacy.target_epsilon=null", "privacy.noise_multiplier=1e-7"]
    plan = settings.setup(compose("config", [*tiny("dpgan_small"), "method=dpgan_small", *words]))
    assert plan.method.plan.aggregation == Secure(3, 2, 0, 64)
    runs = [
        train("method=dpgan_small", *words, f"runtime.masks={masks}", name=masks)
        for masks in ("true", "false")
    ]
    digests = {json.loads((r / "results.json").read_text())["generator_sha256"] for r in runs}
    assert len(digests) == 1


def test_ten_thousand_clients_fit() -> None:
    """At the noise of ε = 10, a sum of 10,000 contributions does not fit in 32 bits."""
    assert not Secure(10_000, 10_000, 0).fits(0.2, 10_000)
    assert Secure(10_000, 10_000, 0, 64).fits(0.2, 10_000)
