"""The ways to break fedgen on purpose still fit the code; ``make test`` runs them."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_every_mutant_has_its_line_and_its_test(request: pytest.FixtureRequest) -> None:
    """Of tests, those in files that pytest collected as a whole: all of them when all tests run."""
    config = request.config
    chosen = config.getoption("keyword") or config.getoption("markexpr")
    some = bool(chosen) or any("::" in word for word in config.args)
    collected = set[str]() if some else {item.nodeid for item in request.session.items}
    tests = collected | {name.partition("[")[0] for name in collected}
    files = {name.partition("::")[0] for name in collected}
    for mutant in runpy.run_path(str(ROOT / "scripts" / "mutants.py"))["MUTANTS"]:
        assert (ROOT / mutant.file).read_text().count(mutant.old) == 1, mutant.name
        file = mutant.test.partition("::")[0]
        assert (ROOT / file).is_file(), mutant.name
        if file in files:
            assert mutant.test in tests | files, mutant.name
