"""The ways to break fedgen on purpose still fit the code; ``make test`` runs them."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_every_mutant_has_its_line_and_its_test() -> None:
    for mutant in runpy.run_path(str(ROOT / "scripts" / "mutants.py"))["MUTANTS"]:
        assert (ROOT / mutant.file).read_text().count(mutant.old) == 1, mutant.name
        file, *names = mutant.test.partition("[")[0].split("::")
        text = (ROOT / file).read_text()
        assert all(f"{name}(" in text or f"class {name}" in text for name in names), mutant.name
