"""What a run comes to, from plan, messages and ledgers."""

from __future__ import annotations

import math
from collections import Counter

from dp_accounting import NonPrivateDpEvent
from tiny import make

from fedgen.experiments.accounts import Accounts, amplification
from fedgen.experiments.settings import Privacy
from fedgen.federation.rounds import RunState
from fedgen.privacy.accounting import epsilon, gaussian_epsilon
from fedgen.privacy.budget import Budget
from fedgen.privacy.events import canonical
from fedgen.privacy.ledger import Account
from fedgen.reporting.words import statement


def test_a_failure_of_one_client_ends_its_bound_and_no_others() -> None:
    """The plan of several clients does not know of it: the ledgers do."""
    method = make(clients=5, noise=1.0)
    privacy = Privacy(1e-5, "secure", 1.0, Budget(10, 60, 0.0))
    state = RunState({}, rounds=4, rows=Counter(dict.fromkeys(range(5), 24)))
    assert Accounts(method, privacy, 5).views(state)["release"].value is not None
    failed = {3: Account(1, 0, {NonPrivateDpEvent(): 1})}
    accounts = Accounts(method, privacy, 5, failed)
    record = accounts.record(state, None)
    assert record["without_bound"] == [3]
    assert "For 1 of the 5 clients there is no bound" in statement(record, "x")
    for client, found in record["clients"].items():
        assert (found["server"] is None) == (found["release"] is None) == (client == "3")
    assert all(view["epsilon"] > 0 for view in record["views"].values())
    assert record["views"]["release"]["epsilon"] == record["views"]["server"]["epsilon"]
    assert record["views"]["release"]["amplified_by"] is None
    everybody = dict.fromkeys(range(5), failed[3])
    views = Accounts(method, privacy, 5, everybody).views(state)
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
    found = {}
    for times in (1, 10):
        accounts = Accounts(method, privacy, 5, begun=Counter(dict.fromkeys(range(4), times)))
        found[times] = accounts.release(RunState({}, rounds=4), stopped=False)
    assert method.plan.seen is not None
    cap = epsilon(canonical(method.plan.seen(4 * rows)), 1e-5, method.plan.relation)
    assert found[1] is not None and found[1].or_infinity < cap.or_infinity
    assert found[10] == cap


def test_rounds_done_again_tell_nothing_where_nobody_is_drawn() -> None:
    method = make(clients=4, noise=1.0, routing="mean")
    rows = method.plan.rows_per_round
    privacy = Privacy(1e-5, "secure", 1.0, Budget(4, 4 * rows, 0.0))
    accounts = Accounts(method, privacy, 4)
    once = RunState({}, rounds=4)
    once.rows.update(dict.fromkeys(range(4), 4 * rows))
    again = Accounts(method, privacy, 4, begun=Counter({3: 3}))
    assert accounts.release(once, stopped=False) == again.release(once, stopped=False)
    server = accounts.views(once)["server"]
    assert accounts.views(once)["release"].or_infinity < server.or_infinity / 1.5


def test_a_client_that_does_not_answer_leaves_what_was_really_answered() -> None:
    """Draws by the plan are of everybody; a run that goes on may have met but one."""
    method = make(clients=2, noise=4.0, routing="per_step", unanswered=True)
    rows = method.plan.rows_per_round
    privacy, state = Privacy(1e-5, "secure", 4.0, Budget(10, 10 * rows, 0.0)), RunState({})
    state.rounds, state.rows[0] = 10, 10 * rows
    accounts = Accounts(method, privacy, 2, unanswered=lambda: True)
    found = accounts.release(state, stopped=False)
    assert found is not None
    assert found.value == gaussian_epsilon(math.sqrt(10 * rows) / 4.0, 1e-5)
    assert "60 Gaussian" in accounts.published_in_words(state, stopped=False)


def test_how_many_a_poisson_cohort_had_changes_nothing_that_is_said() -> None:
    method = make(clients=5, noise=1.0, routing="per_sample", cohort_sampling="poisson")
    privacy = Privacy(1e-5, "seeded", 1.0, Budget(4, 4 * method.plan.rows_per_round, 0.0))
    accounts = Accounts(method, privacy, 5)
    few, many = RunState({}, rounds=4), RunState({}, rounds=4)
    few.rows[0] = 1
    many.rows.update(dict.fromkeys(range(5), 4 * method.plan.rows_per_round))
    assert accounts.release(few, stopped=False) == accounts.release(many, stopped=False)
