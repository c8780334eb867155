"""What a run comes to, from plan, messages and ledgers."""

from __future__ import annotations

from dp_accounting import NonPrivateDpEvent
from tiny import make

from fedgen.experiments.accounts import Accounts, amplification
from fedgen.experiments.settings import Privacy
from fedgen.federation.rounds import RunState
from fedgen.privacy.budget import Budget
from fedgen.privacy.ledger import Account


def test_a_failure_of_one_client_ends_the_bound_of_what_is_published() -> None:
    """The plan of several clients does not know of it: the ledgers do."""
    method = make(clients=5, noise=1.0)
    privacy = Privacy(1e-5, "secure", 1.0, Budget(10, 60, 0.0))
    state = RunState({}, rounds=4)
    assert Accounts(method, privacy, 5).views(state)["release"].value is not None
    failed = {3: Account(1, 0, {NonPrivateDpEvent(): 1})}
    views = Accounts(method, privacy, 5, failed).views(state)
    for name in ("server", "release"):
        assert views[name].value is None
        by, reason = amplification(method.plan, name, views[name])
        assert by is None
        assert "failed" in str(reason)


def test_rounds_done_again_may_end_a_run_and_so_show_its_draws() -> None:
    """Given noise plans no stop; rounds that are done again make one likely all the same."""
    method = make(clients=5, noise=1.0, routing="per_sample")
    rows = method.plan.rows_per_round
    privacy = Privacy(1e-5, "secure", 1.0, Budget(4, 4 * rows, 0.0))
    accounts = Accounts(method, privacy, 5)
    found = {}
    for again in (0, 40):
        state = RunState({}, rounds=4)
        for client in range(5):
            state.rows[client] = (4 + again) * rows // 5 + 1 * (client < (4 + again) * rows % 5)
        assert accounts.repeated_rounds(state) == again
        found[again] = accounts.release(state, stopped=False)
    cap = accounts.release_after(4, 10**6)
    assert found[0] is not None and found[40] is not None and cap is not None
    assert found[0].or_infinity < found[40].or_infinity == cap.or_infinity


def test_rounds_done_again_tell_nothing_where_nobody_is_drawn() -> None:
    method = make(clients=4, noise=1.0, routing="mean")
    rows = method.plan.rows_per_round
    accounts = Accounts(method, Privacy(1e-5, "secure", 1.0, Budget(4, 4 * rows, 0.0)), 4)
    once, again = RunState({}, rounds=4), RunState({}, rounds=4)
    once.rows.update(dict.fromkeys(range(4), 4 * rows))
    again.rows.update(dict.fromkeys(range(4), 6 * rows))
    assert accounts.repeated_rounds(again) == 2
    assert accounts.release(once, stopped=False) == accounts.release(again, stopped=False)
    server = accounts.views(once)["server"]
    assert accounts.views(once)["release"].or_infinity < server.or_infinity / 1.5


def test_how_many_a_poisson_cohort_had_changes_nothing_that_is_said() -> None:
    method = make(clients=5, noise=1.0, routing="per_sample", cohort_sampling="poisson")
    privacy = Privacy(1e-5, "seeded", 1.0, Budget(4, 4 * method.plan.rows_per_round, 0.0))
    accounts = Accounts(method, privacy, 5)
    few, many = RunState({}, rounds=4), RunState({}, rounds=4)
    few.rows[0] = 1
    many.rows.update(dict.fromkeys(range(5), 4 * method.plan.rows_per_round))
    assert accounts.release(few, stopped=False) == accounts.release(many, stopped=False)
