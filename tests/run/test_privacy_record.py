"""The account of a run from plan, messages and ledgers."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from dp_accounting import NonPrivateDpEvent
from mutation import kills
from tiny import SETTINGS, make

from fedgen.federation.rounds import RunState
from fedgen.methods.api import Method, PublicFacts
from fedgen.methods.gs_wgan import gs_wgan
from fedgen.privacy.accounting import epsilon
from fedgen.privacy.budget import Budget
from fedgen.privacy.events import canonical
from fedgen.privacy.gaussian_dp import gaussian_epsilon
from fedgen.privacy.ledger import Account
from fedgen.reporting.privacy_statement import statement
from fedgen.run.calibrate import Privacy
from fedgen.run.privacy_record import Accounts, amplification


@kills(
    "fedgen/run/privacy_record.py",
    "return of_clients and bool(self.without_bound(spends))",
    "return False",
)
@kills("fedgen/run/privacy_record.py", '"without_bound": sorted(lost),', '"without_bound": [],')
def test_the_failure_of_a_client_voids_only_its_own_bound() -> None:
    """The plan of several clients does not contain it, the ledgers do."""
    method = make(clients=5, noise=1.0)
    privacy = Privacy(1e-5, "secure", 1.0, Budget(10, 60, 0.0))
    state = RunState({}, rounds=4, samples=Counter(dict.fromkeys(range(5), 24)))
    assert Accounts(method, privacy, 5).epsilon_by_adversary(state)["release"].value is not None
    failed = {3: Account(1, 0, {NonPrivateDpEvent(): 1})}
    accounts = Accounts(method, privacy, 5, failed)
    record = accounts.record(state, None)
    assert record["without_bound"] == [3]
    assert "For 1 of the 5 clients there is no bound" in statement(record, "x")
    for client, result in record["clients"].items():
        assert (result["server"] is None) == (result["release"] is None) == (client == "3")
    assert all(view["epsilon"] > 0 for view in record["views"].values())
    assert record["views"]["release"]["epsilon"] == record["views"]["server"]["epsilon"]
    assert record["views"]["release"]["amplified_by"] is None
    all_clients = dict.fromkeys(range(5), failed[3])
    views = Accounts(method, privacy, 5, all_clients).epsilon_by_adversary(state)
    for name in ("server", "release"):
        assert views[name].value is None
        by, reason = amplification(method.plan, name, views[name])
        assert by is None
        assert "failed" in str(reason)


def summing(noise: float = 0.5, threshold: int = 7, colluders: int = 0) -> Method:
    known = {"aggregation_kind": "secure", "threshold": threshold, "colluders": colluders}
    facts = PublicFacts(10, None, 10, (1, 8, 8), **known)  # type: ignore[arg-type]
    return gs_wgan(facts, noise, **{**SETTINGS, "routing": "mean", "batch": 1})


@kills(
    "fedgen/run/privacy_record.py",
    "math.sqrt((sums.honest - fewer) / sums.honest)",
    "math.sqrt(sums.honest / sums.honest)",
)
def test_epsilon_with_more_colluders_is_printed() -> None:
    """Golden values of one Gaussian at δ = 1e-5: 10.0 becomes 11.0 with one colluder more of seven
    shares, and 35.8 if all others collude."""
    sigma = 0.49989
    method = summing(sigma)
    privacy = Privacy(1e-5, "secure", sigma, Budget(1, 1, 0.0))
    state = RunState({}, rounds=1, samples=Counter(dict.fromkeys(range(10), 1)))
    record = Accounts(method, privacy, 10).record(state, None)
    assert record["views"]["server"]["epsilon"] == pytest.approx(10.0, abs=0.001)
    assert record["views"]["release"]["epsilon"] == record["views"]["server"]["epsilon"]
    one, all_others = record["aggregation"]["if_more_collude"]
    assert (one["colluders"], all_others["colluders"]) == (1, 9)
    assert one["epsilon"] == pytest.approx(11.01, abs=0.01)
    assert all_others["epsilon"] == pytest.approx(35.85, abs=0.01)
    result = statement(record, "x")
    assert "at least 7 shares" in result and "11.01" in result and "35.85" in result


@kills("fedgen/run/privacy_record.py", "min(one_more + len(lost), own_alone)", "one_more")
@kills(
    "fedgen/run/privacy_record.py",
    "(self.signed or sums.colluders >= sums.threshold // 2)",
    "(self.signed or sums.colluders >= sums.threshold)",
)
def test_colluders_and_clients_without_a_bound_add_up() -> None:
    """Shares are subtracted, noise is not divided twice; with masks, one colluder more than half of
    the counted shares has the secrets of all."""
    state = RunState({}, rounds=1, samples=Counter(dict.fromkeys(range(10), 1)))
    privacy = Privacy(1e-5, "secure", 3.0, Budget(1, 1, 0.0))
    failed = {c: Account(1, 0, {NonPrivateDpEvent(): 1}) for c in range(4)}
    record = Accounts(summing(3.0, 8), privacy, 10, failed).record(state, None)
    [one, _] = record["aggregation"]["if_more_collude"]
    assert one["epsilon"] == pytest.approx(gaussian_epsilon(math.sqrt(8 / 3) / 3, 1e-5))
    for masks, shares in ((False, 3), (True, 1)):
        accounts = Accounts(summing(4.0, 9, 5), privacy, 10, masks=masks)
        one, others = accounts.record(state, None)["aggregation"]["if_more_collude"]
        assert one["colluders"] == 6
        expected = gaussian_epsilon(math.sqrt(4 / shares) / 4, 1e-5)
        assert one["epsilon"] == pytest.approx(expected)
        assert others["epsilon"] == pytest.approx(gaussian_epsilon(math.sqrt(4) / 4, 1e-5))


@kills(
    "fedgen/run/privacy_record.py",
    "(self.signed or sums.colluders >= sums.threshold // 2)",
    "(sums.colluders >= sums.threshold // 2)",
)
def test_one_more_colluder_counts_as_all_if_clients_sign() -> None:
    """A malicious coordinator with more colluders than assumed can unmask sums over few clients."""
    state = RunState({}, rounds=1, samples=Counter(dict.fromkeys(range(10), 1)))
    privacy = Privacy(1e-5, "secure", 3.0, Budget(1, 1, 0.0))
    for signed, shares in ((False, 6), (True, 1)):
        accounts = Accounts(summing(3.0, 8, 1), privacy, 10, masks=True, signed=signed)
        one, _ = accounts.record(state, None)["aggregation"]["if_more_collude"]
        assert one["colluders"] == 2
        expected = gaussian_epsilon(math.sqrt(7 / shares) / 3, 1e-5)
        assert one["epsilon"] == pytest.approx(expected)


@kills(
    "fedgen/run/privacy_record.py",
    "if not lost or not isinstance(sums, Secure):",
    "if not lost or isinstance(sums, Secure):",
)
def test_noise_of_clients_without_a_bound_is_not_relied_on() -> None:
    """Two clients that failed or lied count as colluders beyond the counted ones: the others have
    the noise of five shares of seven; without any left, there is no bound."""
    state = RunState({}, rounds=1, samples=Counter(dict.fromkeys(range(10), 1)))
    privacy = Privacy(1e-5, "secure", 0.5, Budget(1, 1, 0.0))
    for threshold, lost, left in ((7, 2, 5), (7, 7, 0)):
        failed = {c: Account(1, 0, {NonPrivateDpEvent(): 1}) for c in range(lost)}
        record = Accounts(summing(0.5, threshold), privacy, 10, failed).record(state, None)
        expected = gaussian_epsilon(1 / (0.5 * math.sqrt(left / threshold)), 1e-5) if left else None
        result = record["views"]["server"]["epsilon"]
        assert result == (expected and pytest.approx(expected))
        assert record["clients"]["9"]["server"] == result


def test_repeated_rounds_may_end_a_run_and_reveal_its_samples() -> None:
    """A given noise multiplier plans no stop; repeated rounds make one likely all the same."""
    method = make(clients=5, noise=1.0, routing="per_sample")
    rows = method.plan.samples_per_round
    privacy = Privacy(1e-5, "secure", 1.0, Budget(4, 4 * rows, 0.0))
    result = {}
    for times in (1, 10):
        accounts = Accounts(method, privacy, 5, started=Counter(dict.fromkeys(range(4), times)))
        result[times] = accounts.release(RunState({}, rounds=4), stopped=False)
    assert method.plan.event_if_sampling_revealed is not None
    cap = epsilon(
        canonical(method.plan.event_if_sampling_revealed(4 * rows)), 1e-5, method.plan.relation
    )
    assert result[1] is not None and result[1].or_infinity < cap.or_infinity
    assert result[10] == cap


def test_repeated_rounds_reveal_nothing_without_sampling() -> None:
    method = make(clients=4, noise=1.0, routing="mean")
    rows = method.plan.samples_per_round
    privacy = Privacy(1e-5, "secure", 1.0, Budget(4, 4 * rows, 0.0))
    accounts = Accounts(method, privacy, 4)
    once = RunState({}, rounds=4)
    once.samples.update(dict.fromkeys(range(4), 4 * rows))
    again = Accounts(method, privacy, 4, started=Counter({3: 3}))
    assert accounts.release(once, stopped=False) == again.release(once, stopped=False)
    server = accounts.epsilon_by_adversary(once)["server"]
    assert accounts.epsilon_by_adversary(once)["release"].or_infinity < server.or_infinity / 1.5


@kills(
    "fedgen/run/privacy_record.py",
    "if planned is None or not self.dropouts() or not self.method.cohort.is_sampled:",
    "if True:",
)
def test_a_dropout_leaves_the_actual_responses() -> None:
    """The plan counts samples of all clients; a run that continues may have only one."""
    method = make(clients=2, noise=4.0, routing="per_step", unanswered=True)
    rows = method.plan.samples_per_round
    privacy, state = Privacy(1e-5, "secure", 4.0, Budget(10, 10 * rows, 0.0)), RunState({})
    state.rounds, state.samples[0] = 10, 10 * rows
    accounts = Accounts(method, privacy, 2, dropouts=lambda: True)
    result = accounts.release(state, stopped=False)
    assert result is not None
    assert result.value == gaussian_epsilon(math.sqrt(10 * rows) / 4.0, 1e-5)
    assert "60 Gaussian" in accounts.describe_release(state, stopped=False)


def test_the_size_of_a_poisson_cohort_does_not_change_the_statement() -> None:
    method = make(clients=5, noise=1.0, routing="per_sample", cohort_sampling="poisson")
    privacy = Privacy(1e-5, "seeded", 1.0, Budget(4, 4 * method.plan.samples_per_round, 0.0))
    accounts = Accounts(method, privacy, 5)
    few, many = RunState({}, rounds=4), RunState({}, rounds=4)
    few.samples[0] = 1
    many.samples.update(dict.fromkeys(range(5), 4 * method.plan.samples_per_round))
    assert accounts.release(few, stopped=False) == accounts.release(many, stopped=False)
