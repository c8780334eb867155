"""Write ``docs/measured.md``, the page of measured runs, from the records in ``docs/results/``.

    python scripts/results_page.py                                # the page, and figures in text
    python scripts/results_page.py add SECTION RUN_DIR "COMMAND"  # first store the figures of a run
    python scripts/results_page.py benchmark MATRIX DIR           # those of all runs of a benchmark

DIR is the output of ``fedgen benchmark matrix=MATRIX``, mnist or hour: a table compares its runs,
and for mnist a figure, ``docs/comparison.png``, next to figures of papers. Each run is one line of
its section's JSON Lines file: trimmed results, versions, date and command. The command must compose
to the settings of the run.

In the README and the pages, a comment after a figure names its runs, and the figure is rounded to
the decimals that it has: ``98.2 ± 0.1<!-- FILE: WORDS: COLUMN -->``. WORDS are those of a command
that distinguish it in the file; of several commands with them, the shortest is meant.
"""

from __future__ import annotations

import json
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from omegaconf import OmegaConf

from fedgen.commands.attack import LIKELIHOOD_RATIOS
from fedgen.commands.matrix import expand, read_matrix
from fedgen.config.compose import compose
from fedgen.errors import FedgenError
from fedgen.privacy.guarantee import round_up
from fedgen.reporting.figures import roc_curves
from fedgen.reporting.progress import format_bytes, format_epsilon
from fedgen.run.resume import open_run
from fedgen.run.setup import default_rounds
from fedgen.storage.run_dir import RunDir

ROOT = Path(__file__).resolve().parent.parent
KEPT, PAGE = ROOT / "docs" / "results", ROOT / "docs" / "measured.md"
FIGURE, ROCS = ROOT / "docs" / "comparison.png", ROOT / "docs" / "attacks.png"
COMPARED = {  # the section of a benchmark's runs
    "mnist": "Methods on MNIST and Fashion-MNIST",
    "hour": "Recipes of up to an hour",
}
_DATA = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST"}
_EPSILONS = ("10", "1")
_LEFT_OUT = ("sha256", "generator_sha256", "per_class", "per_client", "judged_by", "failures")
_SET_BY_TUNE = ("method", "warm_up", "rounds", "score", "privacy", "evaluation", "names")
"""Settings in which a run of fedgen tune differs from its command."""
_HEAD = """# Measured runs

Each line is a run, or one setting with several seeds (mean ± standard deviation). `python
scripts/results_page.py` writes this page from the results in `docs/results/`. Seeded random streams
depend on the names of settings and on the code, so that a repeated command may have other noise.
CNN and logistic regression: accuracy in percent on real images of a classifier trained only on
samples. Private classifier: the one that the run publishes. real2gen: accuracy on samples of a
classifier trained on real images. Attack TPR: share of included canaries that the stronger
likelihood-ratio attack of `fedgen attack` detects at 1 % false positives, with its 95 % confidence
interval, not adjusted for this choice. ε is at δ = 1e-5, against the server / a reader of the
release. Minutes are of one core, with other runs on the machine. Settings common to a table are
above it.
"""


_TABLES = {
    "mnist": """## Compared

Methods on MNIST and Fashion-MNIST at the same proven ε, in minutes each (`fedgen benchmark
matrix=mnist`): accuracy of the CNN in percent, mean ± standard deviation over seeds; minutes of
training. In brackets: published figures at their claimed ε, after hours on GPUs. GANs do not
converge in minutes.

![Accuracy of all methods](comparison.png)

*Filled: at a proven ε. Hollow: published, at the claimed ε.*
""",
    "hour": """## In up to an hour

The longer recipes of `configs/experiment` (`fedgen benchmark matrix=hour`), evaluated by a CNN
trained for ten epochs instead of four; otherwise as above. On MNIST, the runs of DPGAN and G-PATE
were paused for 27 of their minutes.
""",
}


def main() -> None:
    """Run the command of the module's docstring."""
    match sys.argv[1:]:
        case []:
            pass
        case ["add", section, run, command]:
            add(section, Path(run), command)
        case ["benchmark", ("mnist" | "hour") as matrix, place]:
            for point in expand(read_matrix(matrix), Path(place)):
                run_dir = RunDir(point.run_dir)
                if run_dir.finished and run_dir.results()["judged"]:
                    words = [*point.overrides, *([f"seed={point.seed}"] if point.seed else [])]
                    command = shlex.join(["fedgen", "train", *words])
                    add(COMPARED[matrix], point.run_dir, command, point.method)
        case _:
            sys.exit(__doc__)
    PAGE.write_text(page())
    for file in pages_with_figures():
        file.write_text(with_figures(file))
    draw(compared(load_runs(), "mnist"))
    attacked = [run for run in load_runs() if "attack" in run["results"]]
    roc_curves({_attack_title(run): run["results"]["attack"]["curves"] for run in attacked}, ROCS)


def add(section: str, run: Path, command: str, method: str | None = None) -> None:
    """Store the figures of a finished run. ``method``: its name in the matrix of its benchmark."""
    run_dir, run_config, identity = open_run(run, "run")
    _, subcommand, *words = shlex.split(command)
    requested = compose("tune" if subcommand == "tune" else "config", words)
    for key in identity["left_open"]:  # derived settings
        OmegaConf.update(run_config, key, None)
    if requested.rounds is None and run_config.rounds == default_rounds(run_config):
        requested.rounds = run_config.rounds
    for config in (run_config, requested):
        config.run_dir = config.logger = config.names.logger = None
    compared_keys = [
        str(key) for key in run_config if subcommand != "tune" or key not in _SET_BY_TUNE
    ]
    plain = [
        OmegaConf.to_container(OmegaConf.masked_copy(config, compared_keys), resolve=True)
        for config in (run_config, requested)
    ]
    if plain[0] != plain[1]:
        sys.exit(f"results_page: {command} has other settings than {run}")
    privacy = run_dir.privacy()
    record = {
        "section": section,
        "method": method,
        "command": command,
        "date": time.strftime("%Y-%m-%d", time.gmtime((run / "results.json").stat().st_mtime)),
        "environment": identity["environment"],
        "unit": privacy["unit"],
        "delta": privacy["delta"],
        "aggregation": privacy["aggregation"]["kind"],
        "results": _small(run_dir.results()) | _attack(run_dir),
    }
    file = KEPT / f"{re.sub(r'[^a-z0-9]+', '-', section.lower()).strip('-')}.jsonl"
    others = _lines(file) if file.exists() else []
    runs = [*(other for other in others if other["command"] != command), record]
    runs.sort(key=lambda kept_run: kept_run["command"])
    KEPT.mkdir(exist_ok=True)
    file.write_text("".join(f"{json.dumps(value, ensure_ascii=False)}\n" for value in runs))


def _attack(run_dir: RunDir) -> dict[str, Any]:
    """Return the higher true positive rate of the two likelihood-ratio attacks at 1 % false
    positives, and the proven bound; empty if there are no results of these attacks."""
    record = run_dir.attack_results("run") or {"attacks": {}}
    ratios = [point for name in LIKELIHOOD_RATIOS for point in record["attacks"].get(name, ())]
    if not (at_one_percent := [point for point in ratios if point["fpr"] == 0.01]):
        return {}
    point = max(at_one_percent, key=lambda point: point["tpr"])
    bounds = {bound["fpr"]: bound["tpr"] for bound in record["proven"] or ()}
    proven = float(round_up(bounds.get(0.01, 1.0)))
    kept = {**point, "proven": proven, "repetitions": record["repetitions"]}
    return {"attack": _small({**kept, "curves": record["curves"]})}


def _attack_title(run: dict[str, Any]) -> str:
    data, epsilon = run["results"]["data"], run["results"]["epsilon"]["release"]
    noise = "without noise" if epsilon is None else f"ε = {epsilon:.3g}"
    return f"{_DATA.get(data, data)}, {noise}"


def _small(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _small(item) for key, item in value.items() if key not in _LEFT_OUT}


def load_runs() -> list[dict[str, Any]]:
    """Return all stored runs."""
    return [run for file in sorted(KEPT.glob("*.jsonl")) for run in _lines(file)]


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


Cells = dict[tuple[str, str], list[dict[str, Any]]]  # (data, ε) -> runs that differ by seeds


def compared(runs: list[dict[str, Any]], matrix: str) -> dict[str, Cells]:
    """Return method -> its runs of a matrix, the best on MNIST at ε = 10 first."""
    cells: dict[str, Cells] = {}
    for run in runs:
        if run["section"] == COMPARED[matrix]:
            results = run["results"]
            at = results["data"], f"{results['epsilon']['server']:.0f}"
            cells.setdefault(run["method"], {}).setdefault(at, []).append(results)

    def first(method: str) -> float:
        runs = cells[method].get(("mnist", "10"), [])
        return -statistics.mean(_cnn(runs)) if runs else 0.0

    return {method: cells[method] for method in sorted(cells, key=first)}


def _figures(*keys: str, scale: float = 1) -> Callable[[list[dict[str, Any]]], list[float]]:
    """Create a function that returns one figure of each run that has it."""

    def read(results: list[dict[str, Any]]) -> list[float]:
        values = []
        for result in results:
            value: Any = result
            for key in keys:
                value = value.get(key) if value else None
            if value is not None:
                values.append(scale * value)
        return values

    return read


_cnn = _figures("gen2real", "cnn", "mean", scale=100)
_minutes = _figures("seconds", scale=1 / 60)
_COLUMNS = {
    "CNN": _cnn,
    "logistic regression": _figures("gen2real", "logistic_regression", "mean", scale=100),
    "private classifier": _figures("classifier", "mean", scale=100),
    "real2gen CNN": _figures("real2gen", "cnn", "mean", scale=100),
    "inception score": _figures("inception_score", "generated", "mean"),
    "FCD": _figures("fcd", "generated"),
    "precision": _figures("precision", scale=100),
    "recall": _figures("recall", scale=100),
    "attack TPR": _figures("attack", "tpr", scale=100),
    "attack TPR low": _figures("attack", "low", scale=100),
    "attack TPR high": _figures("attack", "high", scale=100),
    "proven TPR": _figures("attack", "proven", scale=100),
}


_FIGURE = re.compile(r"\b\d+(?:\.(\d+))?(?: ± \d+\.(\d+))?<!-- ([\w-]+): ([^>:]*): ([\w ]+) -->")


def _papers(matrix: str, method: str) -> dict[tuple[str, str], float]:
    """Return (data, ε) -> the figure of a paper, in percent."""
    published = OmegaConf.to_container(read_matrix(matrix).methods[method]).get("paper", {})
    return {(data, e): 100 * value for data, by in published.items() for e, value in by.items()}


def _comparison(matrix: str, methods: dict[str, Cells]) -> list[str]:
    measured = {at for cells in methods.values() for at in cells}
    columns = [(data, e) for data in _DATA for e in _EPSILONS if (data, e) in measured]
    heads = [f"{_DATA[data]}, ε = {e}" for data, e in columns]
    lines = [
        f"| method | {' | '.join(heads)} | seeds | minutes |",
        "|---" * (len(columns) + 3) + "|",
    ]
    for method, cells in methods.items():
        papers, shown = _papers(matrix, method), []
        for at in columns:
            paper = f" ({papers[at]:.0f})" if at in papers else ""
            shown.append(f"{_mean(_cnn(cells.get(at, [])))}{paper}".strip())
        runs = [run for cell in cells.values() for run in cell]
        seeds = sorted({len(cell) for cell in cells.values()})
        minutes = statistics.mean(run["seconds"] for run in runs) / 60
        words = " to ".join(map(str, [seeds[0], seeds[-1]][: len(seeds)]))
        lines.append(f"| {method} | {' | '.join(shown)} | {words} | {minutes:.1f} |")
    return [*lines, ""]


def draw(methods: dict[str, Cells]) -> None:
    """Plot a panel for each data set, with a line for each method."""
    figure = Figure(figsize=(9, 0.3 * len(methods) + 1), layout="constrained")
    FigureCanvasAgg(figure)
    first = None
    for place, (data, title) in enumerate(_DATA.items()):
        axes = figure.add_subplot(1, 2, place + 1, sharey=first)
        first = first or axes
        for colour, size, e in (("C0", 7, "10"), ("C1", 5, "1")):
            for line, (method, cells) in enumerate(methods.items()):
                values, papers = _cnn(cells.get((data, e), [])), _papers("mnist", method)
                style = {"color": colour, "markersize": size, "clip_on": False}
                if values:
                    spread = statistics.stdev(values) if len(values) > 1 else None
                    axes.errorbar(statistics.mean(values), line, xerr=spread, fmt="o", **style)
                if (data, e) in papers:
                    axes.plot(papers[data, e], line, "o", fillstyle="none", **style)
        axes.set_title(title, fontsize=10)
        axes.set_xlim(0, 100)
        axes.set_xlabel("accuracy of a CNN trained on samples, %")
        axes.grid(alpha=0.3)
        axes.set_yticks(range(len(methods)), list(methods))
        axes.tick_params(labelleft=place == 0)
    assert first is not None
    first.set_ylim(len(methods) - 0.5, -0.5)
    for x, words, colour in ((2, "ε = 10", "C0"), (18, "ε = 1", "C1")):
        first.text(x, 0, words, color=colour, va="center", weight="bold")
    figure.savefig(FIGURE, dpi=150)


def page() -> str:
    """Return the page of all stored runs."""
    runs = load_runs()
    parts = [_HEAD]
    for matrix, head in _TABLES.items():
        if methods := compared(runs, matrix):
            parts += [head, *_comparison(matrix, methods)]
    for section in sorted({run["section"] for run in runs}):
        commands: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for run in runs:
            if run["section"] == section:
                words = [w for w in shlex.split(run["command"]) if not w.startswith("seed=")]
                commands.setdefault(tuple(words), []).append(run)
        shared = [word for word in min(commands) if all(word in words for words in commands)]
        parts += [
            f"## {section}\n",
            f"`{shlex.join(shared)}`" + (", and:\n" if len(commands) > 1 else "\n"),
        ]
        columns = [name for name in _COLUMNS if _has_column(name, commands)]
        heads = ["settings", "unit, clients", "ε", *columns, "min", "up"]
        parts += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        for words in sorted(commands):
            distinct = shlex.join(word for word in words if word not in shared)
            parts.append(
                _line(f"`{distinct}`" if distinct else "as above", commands[words], columns)
            )
        parts += ["", *_provenance(run for runs in commands.values() for run in runs), ""]
    return "\n".join(parts)


def pages_with_figures() -> list[Path]:
    """Return the pages with figures of runs."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [file for file in files if _FIGURE.search(file.read_text())]


def with_figures(file: Path) -> str:
    """Return the text of a page, with its marked figures filled in."""

    def figure(match: re.Match[str]) -> str:
        decimals, spread, name, words, column = match.groups()
        settings: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for run in _lines(KEPT / f"{name}.jsonl"):
            command = shlex.split(run["command"])
            if set(shlex.split(words)) <= set(command):
                key = tuple(word for word in command if not word.startswith("seed="))
                settings.setdefault(key, []).append(run["results"])
        shortest, *others = sorted(settings, key=len) or sys.exit(f"{file}: no run for {match[0]}")
        if others and len(others[0]) == len(shortest):
            sys.exit(f"{file}: several runs for {match[0]}")
        values = (_COLUMNS | {"minutes": _minutes})[column](settings[shortest])
        text = f"{statistics.mean(values):.{len(decimals or '')}f}"
        if spread is not None:
            text += f" ± {statistics.stdev(values):.{len(spread)}f}"
        return f"{text}{match[0][match[0].index('<!--') :]}"

    return _FIGURE.sub(figure, file.read_text())


def _provenance(runs: Iterable[dict[str, Any]]) -> list[str]:
    """Return dates, versions and systems of runs."""
    days: dict[str, list[str]] = {}
    for run in runs:
        environment = dict(run["environment"])
        system = environment.pop("system")
        by = ", ".join(f"{name} {version}" for name, version in environment.items())
        days.setdefault(f"{by}; {system}", []).append(run["date"])
    return [
        f"*{' to '.join(sorted({min(dates), max(dates)}))}: {by}.*"
        for by, dates in sorted(days.items())
    ]


def _has_column(name: str, commands: dict[tuple[str, ...], list[dict[str, Any]]]) -> bool:
    """Return whether at least half of the commands have a figure for the column."""
    has = [bool(_COLUMNS[name]([run["results"] for run in runs])) for runs in commands.values()]
    return 2 * sum(has) >= len(has)


def _line(settings: str, runs: list[dict[str, Any]], columns: list[str]) -> str:
    first, seeds = runs[0], sorted(run["results"]["seed"] for run in runs)
    results = [run["results"] for run in runs]
    server, release = (format_epsilon(results[0]["epsilon"][n]) for n in ("server", "release"))
    cells = [
        settings + (f", seeds {', '.join(map(str, seeds))}" if len(runs) > 1 else ""),
        f"{first['unit']}, {results[0]['clients']}",
        f"{server} / {release}",
        *(_mean(_COLUMNS[name](results)) for name in columns),
        f"{statistics.mean(result['seconds'] for result in results) / 60:.1f}",
        format_bytes(results[0]["bytes"]["up"]),
    ]
    return f"| {' | '.join(cells)} |"


def _mean(values: list[float]) -> str:
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


if __name__ == "__main__":
    try:
        main()
    except FedgenError as error:
        sys.exit(str(error))
