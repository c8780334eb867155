"""Warm starts: both phases are charged, and training between them sends no query."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from forked import Command
from mutation import kills
from tiny import PROGRAMS, Train, fingerprint, tiny

from fedgen import cli
from fedgen.config.compose import compose
from fedgen.errors import FedgenError
from fedgen.models.functional import Tensors, part
from fedgen.privacy.accounting import epsilon
from fedgen.privacy.events import canonical
from fedgen.run.setup import Setup, setup

WARM = ["warm_up=central_images", "warm_up.method.images=2"]
WARM += ["warm_up.rounds=3", "warm_up.batch=10", "rounds=8"]
SMALL = ["data=digits", "method.network.attention=[4]"]
NAME = "central_images"
SUMS = ["dpgan", "dp_cgan", "dp_wgan_gp", "psg", "dpdm"]


def test_the_cost_of_dp_feta_is_the_known_one() -> None:
    """9.2757 by PLD at the published settings; without the first stage it would be less."""
    rate = f"method.sampling_rate={4000 / 60000}"
    config = compose("config", ["experiment=dp_feta_mnist", *SMALL, rate])
    plan = setup(config).method.plan
    spend = canonical(plan.server_event(plan.queries_in(config.rounds)))
    result = epsilon(spend, 1e-5, plan.relation)
    assert result.value == pytest.approx(9.2757, abs=5e-3)
    assert result.second_opinion == pytest.approx(10.0, abs=1e-2)


@kills(
    "fedgen/methods/families/pretraining.py",
    ("return ComposedDpEvent([first(self.first_queries), then(releases - self.first_queries)])"),
    "return then(releases - self.first_queries)",
)
def test_both_phases_are_in_the_plan() -> None:
    plan = setup(compose("config", words("dpdm_small"))).method.plan
    assert plan.queries_in(8) == 5
    for asked, counts in ((1, [1]), (2, [2]), (3, [2, 1]), (5, [2, 3])):
        assert list(canonical(plan.server_event(asked)).values()) == counts


def words(method: str) -> list[str]:
    return [f"method={method}", *tiny(method), *WARM]


@pytest.mark.parametrize("method", [m for m in PROGRAMS if not m.startswith(tuple(SUMS))])
def test_other_methods_are_refused_in_one_line(method: str) -> None:
    with pytest.raises(FedgenError) as refused:
        setup(compose("config", words(method)))
    assert refused.value.key == "warm_up"


@pytest.mark.parametrize("method", [m for m in PROGRAMS if m.startswith(tuple(SUMS))])
@pytest.mark.parametrize("clients", [1, 3])
def test_every_method_of_sums_takes_a_warm_start(train: Train, method: str, clients: int) -> None:
    """Two central images, three rounds on the server, three private rounds; with several clients,
    as one sum."""
    several = ["partition=iid", f"partition.clients={clients}", "privacy.aggregation=secure"]
    run = train(*words(method), *(several if clients > 1 else []))
    privacy = json.loads((run / "privacy.json").read_text())
    assert privacy["views"]["server"]["epsilon"] <= 10
    assert len(privacy["clients"]) == clients
    [[first, twice], [_, thrice]] = privacy["clients"]["0"]["events"]
    assert (twice, thrice) == (2, 3)
    assert first["rate"] == 0.1
    assert first["gates"]["noise_multiplier"] == pytest.approx(2.2360679775 * 2**0.5)


def test_the_publication_names_the_warm_start(train: Train) -> None:
    public = train(*words("dpgan_small")) / "public"
    record = json.loads((public / "generator.json").read_text())["warm_up"]
    assert record["noise_multiplier"] == 2.2360679775 and record["method"]["type"] == NAME
    card = (public / "README.md").read_text()
    assert (
        "- dpgan_small\n- central_images\n" in card and "dpgan_small after central_images" in card
    )


@pytest.mark.slow
def test_a_warm_start_resumes_to_the_same_bits(train: Train, tmp_path: Path) -> None:
    """Stopped in each of its phases."""
    whole = train(*words("dpgan_small"), "sample_every=4", name="whole")
    for stop in (1, 4, 6):
        run = tmp_path / f"stopped{stop}"
        died = [*words("dpgan_small"), "sample_every=4", f"run_dir={run}"]
        died += [f"runtime.faults.server_dies={stop}"]
        assert Command(["train", *died]).wait() == -signal.SIGKILL
        assert cli.run(["train", f"resume={run}"]) == 0
        assert fingerprint(run) == fingerprint(whole)


def released(more: list[str]) -> tuple[Setup, Tensors]:
    """A run after its two central images, and the state of its server."""
    ready = setup(compose("config", more))
    method, streams = ready.method, ready.streams
    rows = ready.dataset.shard(ready.shards[0])
    state = method.server.init(streams)
    for round_ in range(2):
        question = method.server.query(state, round_, streams)
        assert question is not None
        sent = method.client.respond({}, question, rows, round_, streams)
        mean = method.aggregate([sent.arrays["answer"]], round_, streams).float()
        state = method.server.update(state, mean, round_, streams)
    return ready, state


def test_networks_are_pretrained_without_queries() -> None:
    """Server rounds on central images improve a denoiser of real digits, from released values
    alone."""
    more = ["privacy=none", "warm_up.rounds=30", "rounds=33"]
    ready, state = released([*words("dpdm_small"), *more])
    method, streams = ready.method, ready.streams
    images, labels = ready.dataset.shard(ready.shards[0]).rows(torch.arange(200))

    def loss() -> float:
        return -float(method.server.membership_scores(state, images, labels, streams).mean())

    before = loss()
    for round_ in range(2, 32):
        assert method.server.query(state, round_, streams) is None
        state = method.server.server_step(state, round_, streams)
    assert loss() < 0.9 * before
    assert method.server.query(state, 32, streams) is not None


@kills("fedgen/methods/families/pretraining.py", "self.streams == streams", "True")
@kills("fedgen/methods/families/pretraining.py", "mine is theirs for mine", "True for mine")
def test_samples_are_drawn_once() -> None:
    """For all server rounds of a run; another repetition of it, and another state of which a part
    is the same, have their own."""
    ready, state = released([*words("dpdm_small"), "privacy=none"])
    warm_up = ready.method.server.server_step.__self__  # type: ignore[attr-defined]
    first, repetition = part(state, "first"), ready.streams.for_repetition(1)
    samples = warm_up._samples(first, ready.streams)
    assert len(samples) == 30
    for round_ in (2, 3):
        state = ready.method.server.server_step(state, round_, ready.streams)
    assert warm_up._samples(part(state, "first"), ready.streams) is samples
    assert warm_up._samples(first, repetition) is not samples
    longer = {**first, "more": torch.zeros(1)}
    again = warm_up._samples(longer, ready.streams)
    assert warm_up._samples({**longer, "more": torch.ones(1)}, ready.streams) is not again


def test_a_set_starts_with_samples() -> None:
    """Each image is closer to the central images of its label than to those of others."""
    more = ["privacy=none", "method.learning_rate=1.0e-6"]
    ready, state = released([*words("psg_small"), *more])
    state = ready.method.server.server_step(state, 2, ready.streams)
    images = part(state, "then")["set/images"].flatten(1)
    central = part(state, "first")["images"].mean(0).flatten(1) * 2 - 1
    labels = torch.arange(10).repeat_interleave(len(images) // 10)
    near = torch.cdist(images, central).argmin(1)
    # two images of each label: by chance half would fit with probability below 1e-5
    assert float((near == labels).float().mean()) >= 0.5


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["warm_up.rounds=0"], "warm_up.rounds: must be at least 1"),
        (["warm_up.noise_multiplier=0"], "warm_up.noise_multiplier: must be at least"),
        (
            ["warm_up.method.sampling_rate=3"],
            "warm_up.method.sampling_rate: must be at most 1, got 3",
        ),
        (["warm_up.method.images=0"], "warm_up.method.images: must be positive"),
        (["rounds=5"], "rounds: 5 are too few"),
        (["warm_up.method=3"], "warm_up.method: cannot be 3"),
        (["warm_up.noise_multiplier=0.1"], "raise it, or warm_up.noise_multiplier"),
        (
            ["warm_up.noise_multiplier=0.1", "privacy.noise_multiplier=9"],
            "raise it, privacy.noise_multiplier, or warm_up.noise_multiplier",
        ),
    ],
)
def test_invalid_settings_are_one_line(
    more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "run"
    assert cli.run(["train", *words("dpdm_small"), *more, f"run_dir={place}"]) == 2
    assert message in capsys.readouterr().err
    assert not place.exists()


def test_methods_without_sums_take_no_warm_start() -> None:
    other = ["warm_up=central_images", "method@warm_up.method=dp_merf_small"]
    with pytest.raises(FedgenError, match="continues after its releases"):
        setup(compose("config", ["method=dpdm_small", *other]))


@kills("fedgen/run/noise_domain.py", 'domain_inputs.append(settings["warm_up"])', "pass")
def test_another_warm_up_has_other_streams() -> None:
    """Under the same seed and noise: later queries depend on it."""
    known = [*words("dpdm_small"), "privacy.noise_multiplier=1", "privacy.target_epsilon=null"]
    branches = {
        setup(compose("config", [*known, *more])).domain
        for more in ([], ["warm_up.noise_multiplier=3"], ["warm_up.batch=11"])
    }
    assert len(branches) == 3
