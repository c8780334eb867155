"""Files and functions that a reader can keep in mind, or a reason for the length of each other."""

from __future__ import annotations

import ast
from pathlib import Path

import fedgen

PACKAGE = Path(fedgen.__file__).parent
MAX_FILE, MAX_FUNCTION = 450, 70

LONG_FILES = {
    "methods/mixture.py": "one paper's method: five sums, their noise and the sampler",
    "verify.py": "copied and read alone, without the rest of fedgen",
    "federation/rounds.py": "one loop: a round, its failures and its checkpoints",
    "run/train.py": "one loop: a run from its settings to its output",
    "privacy/mechanisms.py": "all code that can create a release",
    "privacy/clipping.py": "all code that clips, with one proof about rounding",
    "privacy/ghost_norms.py": "one rule per layer for norms, which the proof in clipping.py uses",
    "cli.py": "the table of commands with their help",
    "storage/run_dir.py": "all files of a run directory, with what each promises",
    "run/setup.py": "what settings mean: data, partition, method, noise, in order",
    "run/generator.py": "a published generator: its file, its checks and its samples",
    "evaluation/client_comparison.py": "one test of clients, from distances to p-values",
    "federation/secagg/masking.py": "one protocol, which must be read as a whole",
    "federation/messages.py": "all that is sent, so that a reader sees each message",
}
LONG_FUNCTIONS = {  # parameters are settings, and their documentation is that of the settings
    "mixture",
    "fedavg_gan",
    "dp_merf_ae",
    "dp_sinkhorn",
    "gs_wgan",
    "psg",
    "dpdm",
    "folder",
}


def test_long_files_have_a_reason() -> None:
    lengths = {
        str(path.relative_to(PACKAGE)): len(path.read_text().splitlines())
        for path in PACKAGE.rglob("*.py")
    }
    long = {name for name, length in lengths.items() if length > MAX_FILE}
    assert long == LONG_FILES.keys()


def test_only_functions_that_document_settings_are_long() -> None:
    functions = [
        node
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]
    long = {
        node.name
        for node in functions
        if (node.end_lineno or node.lineno) - node.lineno >= MAX_FUNCTION
    }
    assert long == LONG_FUNCTIONS
