"""No banned word occurs in docstrings, messages, identifiers, documentation or comments."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

BANNED = {
    r"coins?": "random stream, sample",
    r"whoever|whomever": "name the party",
    r"(goes|go|going) on with": "resume, continue",
    r"(is|are|was|were) told": "receives, is passed",
    r"ballots?": "critic output",
    r"diary": "metrics log",
    r"waves": "DCT coefficients",
    r"homes?(?= to)": "client context, holds",
    r"teach(es)?": "train",
    r"comes? to (ε|the same)": "equals",
    r"hangs on": "depends on",
    r"made of": "contains, consists of",
    r"mend(s|ed)?": "correct, fix",
    r"cut off": "interrupted, truncated",
    r"may tell": "may reveal",
    r"learnt": "learned, trained on",
    r"drawn (by|from|in|at)|in secret": "sampled, secretly sampled",
    r"handed out": "published",
    r"who answers|who answered": "responders",
    r"somebody|nobody|everybody": "name the party, no party, all parties",
}
"""Pattern -> remedy."""
_PATTERNS = {
    re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE): use for pattern, use in BANNED.items()
}
_ANY = re.compile("|".join(pattern.pattern for pattern in _PATTERNS), re.IGNORECASE)


def prose() -> Iterator[tuple[str, str]]:
    """Yield (place, text) of docstrings, messages, comments, identifiers and pages."""
    for folder in ("fedgen", "tests", "scripts"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            if file != Path(__file__):
                yield from code(file)
    for file in [ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")]:
        yield str(file.relative_to(ROOT)), re.sub(r"`[^`]*`", "", file.read_text())
    for file in sorted((ROOT / "fedgen" / "configs").rglob("*.yaml")):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            yield f"{file.relative_to(ROOT)}:{number}", line.partition("#")[2]


def code(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the same of a Python file; of tests, whose texts are data, no messages."""
    place, text, names = file.relative_to(ROOT), file.read_text(), set[str]()
    for node in ast.walk(ast.parse(text)):
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if docstring or (place.parts[0] != "tests" and isinstance(node, ast.Constant)):
            value = node.value if isinstance(node, ast.Constant) else node.value.value
            if isinstance(value, str) and " " in value:
                yield f"{place}:{node.lineno}", value
        name = getattr(node, "name", None) or getattr(node, "arg", None) or getattr(node, "id", "")
        if name and isinstance(name, str) and name not in names and hasattr(node, "lineno"):
            names.add(name)
            yield f"{place}:{node.lineno}", name.replace("_", " ")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield f"{place}:{token.start[0]}", token.string


def test_prose_uses_the_terms_of_the_field() -> None:
    hits = [
        f"{place}: {match[0]!r}; use {use}"
        for place, text in prose()
        if _ANY.search(text)
        for pattern, use in _PATTERNS.items()
        for match in pattern.finditer(text)
    ]
    assert not hits, "\n".join(hits)
