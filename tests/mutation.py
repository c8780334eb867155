"""Mutants: faults that the decorated test must detect, and how to find them in the tests.

``@kills(path, old, new)`` states that replacing ``old``, which occurs once in the file, by ``new``
makes the test fail. ``scripts/mutants.py`` applies each to a copy of the package and runs the
test."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

TESTS = Path(__file__).resolve().parent
_Test = TypeVar("_Test")


def kills(path: str, old: str, new: str, *, case: str | None = None) -> Callable[[_Test], _Test]:
    """Declare a mutant next to the test that notices it.

    Args:
        path: file to change, relative to the repository.
        case: parameters of the test that notices it, as in its id; None: any.
    """
    del path, old, new, case
    return lambda test: test


@dataclass(frozen=True)
class Mutant:
    """A change of ``old`` to ``new`` in a file, and the id of a test that must notice it."""

    path: str
    old: str
    new: str
    test: str

    @property
    def title(self) -> str:
        """Return the file, and the first line of the change."""
        lines = zip(self.old.splitlines(), [*self.new.splitlines(), ""], strict=False)
        before, after = next((pair for pair in lines if pair[0] != pair[1]), (self.old, self.new))
        return f"{self.path}: {before.strip()} -> {after.strip() or '(nothing)'}"


def mutants() -> list[Mutant]:
    """Return all mutants, by file of tests and line."""
    return [each for file in sorted(TESTS.rglob("test_*.py")) for each in _in_file(file)]


def _in_file(file: Path) -> Iterator[Mutant]:
    source = file.read_text()
    if "@kills(" in source:
        yield from _in_body(ast.parse(source).body, str(file.relative_to(TESTS.parent)))


def _in_body(body: list[ast.stmt], place: str) -> Iterator[Mutant]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _in_body(node.body, f"{place}::{node.name}")
        elif isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                match decorator:
                    case ast.Call(func=ast.Name(id="kills")):
                        path, old, new = map(ast.literal_eval, decorator.args)
                        cases = [ast.literal_eval(word.value) for word in decorator.keywords]
                        case = "".join(f"[{each}]" for each in cases)
                        yield Mutant(path, old, new, f"{place}::{node.name}{case}")
