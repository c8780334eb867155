"""Mutants fit the code; ``scripts/mutants.py`` runs them."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutation import mutants

ROOT = Path(__file__).resolve().parent.parent


def test_every_mutant_has_its_line_and_its_test(request: pytest.FixtureRequest) -> None:
    """Tests are checked in files that pytest collected as a whole, i.e. all if all tests run."""
    config = request.config
    chosen = config.getoption("keyword") or config.getoption("markexpr")
    some = bool(chosen) or any("::" in word for word in config.args)
    collected = set[str]() if some else {item.nodeid for item in request.session.items}
    tests = collected | {name.partition("[")[0] for name in collected}
    files = {name.partition("::")[0] for name in collected}
    result = mutants()
    assert len(result) > 280
    for mutant in result:
        assert (ROOT / mutant.path).read_text().count(mutant.old) == 1, mutant
        if mutant.test.partition("::")[0] in files:
            assert mutant.test in tests, mutant
