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
