"""The page of measured runs, ``docs/measured.md``, of the figures kept under ``docs/results/``.

    python scripts/results_page.py                                  # writes the page
    python scripts/results_page.py add SECTION RUN_DIR "COMMAND"    # keeps a run's figures first

A run is kept as one small JSON file: its results without what only its directory needs, the
versions that made it, its date, and the command, which has to compose to the run's own settings.
"""

from __future__ import annotations

import json
import re
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fedgen.errors import FedgenError
from fedgen.experiments.configuration import compose
from fedgen.experiments.identity import opened
from fedgen.files import digest
from fedgen.reporting.progress import bytes_in_words, epsilon_in_words

ROOT = Path(__file__).resolve().parent.parent
KEPT, PAGE = ROOT / "docs" / "results", ROOT / "docs" / "measured.md"
_LEFT_OUT = ("sha256", "generator_sha256", "per_class", "per_client", "judged_by", "failures")
_HEAD = """# Measured runs

Every line is a run, or one run by several seeds: `python scripts/results_page.py` writes this page.
`docs/results/` has the figures of each, and the versions that made it. CNN and logistic regression:
accuracy in percent of a classifier that learnt from samples alone. ε is at δ = 1e-5, against the
server / for whoever gets the generator. Minutes are of one core beside other runs.
"""


def main() -> None:
    """See the module."""
    match sys.argv[1:]:
        case []:
            pass
        case ["add", section, run, command]:
            add(section, Path(run), command)
        case _:
            sys.exit(__doc__)
    PAGE.write_text(page())


def add(section: str, run: Path, command: str) -> None:
    """Keeps the figures of a finished run."""
    run_dir, made, identity = opened(run, "run")
    asked = compose("config", shlex.split(command)[2:])
    for key, value in identity["left_open"].items():  # what the method settled for itself
        OmegaConf.update(made, key, value)
    for config in (made, asked):
        config.run_dir = config.logger = config.names.logger = None
    plain = [OmegaConf.to_container(each, resolve=True) for each in (made, asked)]
    if plain[0] != plain[1]:
        sys.exit(f"results_page: {command} has other settings than {run}")
    privacy = run_dir.privacy()
    told = {
        "section": section,
        "command": command,
        "date": time.strftime("%Y-%m-%d", time.gmtime((run / "results.json").stat().st_mtime)),
        "environment": identity["environment"],
        "unit": privacy["unit"],
        "delta": privacy["delta"],
        "aggregation": privacy["aggregation"]["kind"],
        "results": _small(run_dir.results()),
    }
    slug = re.sub(r"[^a-z0-9]+", "-", command.removeprefix("fedgen train ").lower())
    name = f"{slug[:80].strip('-')}-{digest(command.encode())[:8]}.json"
    KEPT.mkdir(exist_ok=True)
    (KEPT / name).write_text(json.dumps(told, indent=1) + "\n")


def _small(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _small(each) for key, each in value.items() if key not in _LEFT_OUT}


def page() -> str:
    """The page, of all that is kept."""
    runs = [json.loads(file.read_text()) for file in sorted(KEPT.glob("*.json"))]
    parts = [_HEAD]
    for section in sorted({run["section"] for run in runs}):
        parts += [
            f"## {section}\n",
            "| command | unit, clients | ε | CNN | logistic regression | min | up |",
        ]
        parts.append("|---|---|---|---|---|---|---|")
        commands: dict[str, list[dict[str, Any]]] = {}
        for run in runs:
            if run["section"] == section:
                commands.setdefault(re.sub(r" seed=\d+", "", run["command"]), []).append(run)
        parts += [_line(command, same) for command, same in commands.items()] + [""]
    return "\n".join(parts)


def _line(command: str, runs: list[dict[str, Any]]) -> str:
    first, seeds = runs[0], sorted(run["results"]["seed"] for run in runs)
    results = [run["results"] for run in runs]
    server, release = (epsilon_in_words(results[0]["epsilon"][n]) for n in ("server", "release"))
    cells = [
        f"`{command}`" + (f", seeds {', '.join(map(str, seeds))}" if len(runs) > 1 else ""),
        f"{first['unit']}, {results[0]['clients']}",
        f"{server} / {release}",
        *(_accuracy(results, name) for name in ("cnn", "logistic_regression")),
        f"{statistics.mean(each['seconds'] for each in results) / 60:.1f}",
        bytes_in_words(results[0]["bytes"]["up"]),
    ]
    return f"| {' | '.join(cells)} |"


def _accuracy(results: list[dict[str, Any]], name: str) -> str:
    found = [100 * each["gen2real"][name]["mean"] for each in results if name in each["gen2real"]]
    if not found:
        return ""
    spread = f" ± {statistics.stdev(found):.1f}" if len(found) > 1 else ""
    return f"{statistics.mean(found):.1f}{spread}"


if __name__ == "__main__":
    try:
        main()
    except FedgenError as error:
        sys.exit(str(error))
