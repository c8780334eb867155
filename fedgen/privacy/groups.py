"""ε of several records of one person together, in a run that protects single records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dp_accounting import DpEvent, GaussianDpEvent

from fedgen.privacy.accounting import epsilon
from fedgen.privacy.events import Relation, Spend, canonical, group_event
from fedgen.privacy.guarantee import largest_spends
from fedgen.storage.schemas import or_null

SIZES = (2, 5, 10)
"""Numbers of records of one person."""


def group_epsilons(
    spends: Sequence[Spend], delta: float, relation: Relation
) -> dict[str, float | None] | None:
    """Return ε at δ for each of ``SIZES`` records of any one client, by number as text; None if no
    bound is known.

    k records move the output of a Gaussian release by at most k times as much as one: data sets
    that differ in k records are connected by k neighbours, under either relation. For Poisson
    sampling, see ``events.group_event``.
    """
    together: dict[str, float | None] = {}
    largest = largest_spends(spends)
    try:
        for size in SIZES:
            values = [
                epsilon(_of_group(spend, size, relation), delta, relation) for spend in largest
            ]
            together[f"{size}"] = or_null(max(value.or_infinity for value in values))
    except ValueError:
        return None
    return together


def _of_group(spend: Spend, size: int, relation: Relation) -> Spend:
    """Return the spend for ``size`` records. Raises ValueError if no bound is known."""
    events: Counter[DpEvent] = Counter()
    for event, count in spend.items():
        if relation is Relation.REPLACE_ONE and not isinstance(event, GaussianDpEvent):
            raise ValueError(f"no bound for several replaced records: {event}")
        events.update(canonical(group_event(event, size), count))
    return dict(events)
