"""Write one self-contained HTML file about one or several runs, without network access, for screens
(light or dark) and paper.

For the ``server`` it contains everything in a run directory; for the ``public`` only what is in
``public/``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from fedgen.errors import FedgenError
from fedgen.reporting.figures import histogram_of_clients, trade_off
from fedgen.reporting.headline import (
    adversary_rows,
    audit_rows,
    context_rows,
    describe_attacks,
    headline,
    vouching,
)
from fedgen.reporting.pages import (
    curve_of,
    embed_image,
    epsilon_lanes,
    figure_along,
    float_metric_names,
    svg,
    template,
)
from fedgen.reporting.privacy_statement import (
    NOT_IN_THE_FOLDER,
    exceptions,
    guarantee_of,
    protected,
    strength,
    unbounded_note,
)
from fedgen.reporting.summary import PARTS, averages, figures
from fedgen.storage.io import check_no_links, read_json, read_yaml
from fedgen.storage.packages import unpacked
from fedgen.storage.run_dir import RunDir

_MOST_GRIDS = 24
_MOST_LISTED = 2000  # limit on clients in a table; beyond it, the extremes
_EXTREMES = 25
ACCURACY = "gen2real accuracy"


def report(runs: Sequence[Path], audience: str, about: Mapping[str, Any]) -> str:
    """Return the page.

    Args:
        about: statements about the data (``headline.ABOUT``).

    Raises:
        FedgenError: if one of the runs is not finished.
    """
    facts, context = (_public if audience == "public" else _server), context_rows(about)
    contents = [facts(path) for path in runs]
    if not runs:
        raise FedgenError("runs", "is empty", "name at least one run directory")
    names = _distinct([str(path) for path in runs])
    if audience == "public":  # names of folders are not published
        names = [f"generator {number}" for number in range(1, len(runs) + 1)]
    for run, name in zip(contents, names, strict=True):
        run["name"] = name
    compared = None
    if len(contents) > 1 and audience == "server":
        compared = {
            "rows": [_compared(run) for run in contents],
            "curve": figure_along({run["name"]: run["accuracies"] for run in contents}, ACCURACY),
        }
    page = template("report.html")
    return page.render(runs=contents, audience=audience, compared=compared, context=context)


def _public(path: Path) -> dict[str, Any]:
    """Return the content of the published folder, or of a package of ``fedgen release``."""
    with unpacked(path, "runs") as folder:
        return {**_published(folder), "place": str(path)}


def _published(path: Path) -> dict[str, Any]:
    folder = path / "public" if (path / "public").is_dir() else path
    if not os.path.lexists(folder / "generator.json"):  # another folder may contain links
        raise FedgenError("runs", f"{path} has no readable public folder", "give a finished run")
    check_no_links(folder, "runs")
    if (path / "results.json").exists():
        RunDir(path).check_digests("runs")
    try:
        described = read_json(folder / "generator.json")
        method = described["method"]
        # 0.1.0 wrote ``name: MODULE.FUNCTION``
        title = str(method.get("type", method.get("name"))).rpartition(".")[2]
        statement = (folder / "PRIVACY.md").read_text()
        picture = embed_image(folder / "samples.png")
        privacy, (channels, high, wide) = described["privacy"], described["shape"]
        metadata = {
            "run": str(described["generator_sha256"])[:12],
            "fedgen": str(described["fedgen"]),
            "date": str(described["date"]),
            "classes": int(described["classes"]),
            "shape": [int(channels), int(high), int(wide)],
        }
        views = {"release": privacy}
        lost = privacy.get("without_bound", {"clients": 0, "of": 0})
        but = unbounded_note(int(lost["clients"]), int(lost["of"]))
        card = headline(views, privacy, but)
        curves = _trade_off(views, privacy["delta"])
    except (OSError, ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
        raise FedgenError(
            "runs", f"{path} has no readable public folder", "give a finished run"
        ) from error
    return {
        "title": title,
        "card": {**card, **metadata, "releases": None},
        "trade_off": curves,
        "vouching": vouching(folder),
        "uncovered": _section(statement, "What is not covered"),
        "statement": _paragraphs(statement),
        "grids": [("", picture)],
        "configuration": OmegaConf.to_yaml(OmegaConf.create(method)),
    }


def _metadata(run_dir: RunDir, identity: Mapping[str, Any]) -> dict[str, Any]:
    try:
        published = read_json(run_dir.public / "generator.json")
        return {
            "run": identity["run"][:16],
            "fedgen": published["fedgen"],
            "date": published["date"],
            "classes": published["classes"],
            "shape": published["shape"],
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{run_dir.path}/public/generator.json is of another version"
        raise FedgenError("runs", problem, "train it anew") from error


def _clients(record: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table and the histogram of clients, of very many only the extremes."""
    clients = [
        {
            "client": int(name),
            "server": client["server"],
            "release": client["release"],
            "releases": client["releases"],
            **{way: results["bytes"]["per_client"][name][way] for way in ("up", "down")},
        }
        for name, client in record["clients"].items()
    ]
    listed = sorted(clients, key=lambda c: (c["server"] is None, c["server"] or 0), reverse=True)
    if len(clients) > _MOST_LISTED:
        listed = [*listed[:_EXTREMES], *listed[-_EXTREMES:]]
    bounded = [client["server"] for client in clients if client["server"] is not None]
    title = f"ε (server) at δ = {record['delta']:g}"
    return {
        "clients": listed,
        "left_out": len(clients) - len(listed),
        "histogram": svg(lambda out: histogram_of_clients(bounded, title, out))
        if len(bounded) > 1
        else None,
    }


def _server(path: Path) -> dict[str, Any]:
    """Return the content of a run directory."""
    run_dir, config, identity = RunDir.open(path, "runs")
    results = run_dir.results("runs")
    for name in ("privacy.json", "public/samples.png"):
        if not (path / name).exists():
            raise FedgenError("runs", f"{path} has no {name}", "restore it")
    run_dir.check_digests("runs")
    record = run_dir.privacy("runs")
    lines = run_dir.metrics()
    spent = [line for line in lines if "epsilon" in line]
    # the log of a selected run has the ε of that run alone
    epsilon_lines = [] if "selection" in record else spent
    accuracies = run_dir.accuracies("runs")
    pictures, partition = sorted((path / "evaluation").glob("*.png")), path / "partition.png"
    return {
        "place": str(path),
        "title": f"{results['method']} on {results['data']}",
        "results": results,
        "record": record,
        "card": {
            **headline(record["views"], record, exceptions(record)),
            **_metadata(run_dir, identity),
            "releases": max(client["releases"] for client in record["clients"].values()),
        },
        "trade_off": _trade_off(record["views"], record["delta"]),
        "vouching": vouching(run_dir.public),
        "uncovered": [
            line
            for line in _section((run_dir.public / "PRIVACY.md").read_text(), "What is not covered")
            if line != NOT_IN_THE_FOLDER
        ],
        "by_adversary": adversary_rows(record),
        "of_persons": list((record["views"]["server"].get("group_epsilon") or {}).items()),
        "audited": audit_rows(path),
        "attacked": describe_attacks(attacks)
        if (attacks := run_dir.attack_results("runs"))
        else [],
        "protected": protected(record) + exceptions(record),
        "strength": {
            name: strength(view, record["delta"])
            for name, view in record["views"].items()
            if view["epsilon"] is not None
        },
        "grids": _grids(run_dir),
        "accuracies": accuracies,
        "epsilon_curve": figure_along(
            epsilon_lanes(epsilon_lines), f"ε at δ = {record['delta']:g}"
        ),
        "accuracy_curve": figure_along({"": accuracies}, ACCURACY),
        "shown_curves": [
            (name, figure_along({"": curve_of(spent, name)}, name))
            for name in float_metric_names(spent)
        ],
        "quality": figures(results),
        "pictures": [(file.stem, embed_image(file)) for file in pictures],
        "partition": embed_image(partition) if partition.exists() else None,
        **_clients(record, results),
        "failures": run_dir.failure_lines(),
        "siblings": _sibling_runs(path, config),
        "held_out": config.get("held_out", 0),
        "configuration": OmegaConf.to_yaml(config),
        "environment": identity.get("environment", {}),
        "parts": [
            (PARTS.get(name, name), seconds)
            for name, seconds in results["seconds_per_round"].items()
        ],
    }


def _trade_off(views: Mapping[str, Mapping[str, Any]], delta: float) -> str | None:
    """Return the figure of the trade-off curves of views with a bound; None if there are none."""
    curves = {
        name: guarantee_of(view, delta)
        for name, view in views.items()
        if view["epsilon"] is not None
    }
    return svg(lambda out: trade_off(curves, out)) if curves else None


def _compared(run: dict[str, Any]) -> dict[str, Any]:
    results, kind = run["results"], run["record"]["aggregation"]["kind"]
    accuracies = {name: scores["mean"] for name, scores in results["gen2real"].items()}
    return {
        "name": run["name"],
        "title": run["title"],
        "epsilon": results["epsilon"],
        "unit": run["record"]["unit"],
        "gen2real": accuracies,
        "average": averages(results)[0],
        "clients": f"{results['clients']:,} ({kind})" if results["clients"] > 1 else "1",
        "seconds": results["seconds"],
        "memory": results["peak_rss_bytes"],
        "up": results["bytes"]["up"],
        "down": results["bytes"]["down"],
        "picture": run["grids"][-1][1],
    }


def _grids(run_dir: RunDir) -> list[tuple[str, str]]:
    """Return (caption, picture) over rounds, the last one at the end."""
    files = sorted(run_dir.samples.glob("round_*.png"))
    if len(files) > _MOST_GRIDS:
        files = [files[i * (len(files) - 1) // (_MOST_GRIDS - 1)] for i in range(_MOST_GRIDS)]
    along = [(f"round {int(file.stem.rpartition('_')[2]):,}", embed_image(file)) for file in files]
    return [*along, ("published", embed_image(run_dir.public / "samples.png"))]


def _sibling_runs(path: Path, config: DictConfig) -> int:
    """Return the number of other runs on the same data set in the same folder."""
    count = 0
    for other in path.absolute().parent.glob("*/config.yaml"):
        if other.parent != path.absolute():
            try:
                theirs = OmegaConf.create(read_yaml(other))
                count += theirs.names.data == config.names.data and all(
                    theirs.data.get(key) == config.data.get(key)
                    for key in ("name", "path", "train", "test")
                )
            except (OSError, ValueError, AttributeError, YAMLError, OmegaConfBaseException):
                continue
    return count


def _distinct(places: Sequence[str]) -> list[str]:
    """Return the shortest suffix of each path that distinguishes it from the others."""
    parts = [Path(place).parts for place in places]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path_parts[-length:]) for path_parts in parts]
        if len(set(names)) == len(names):
            return names
    return list(places)


def _paragraphs(markdown: str) -> list[tuple[str, str]]:
    """Return (kind, text) of a privacy statement: h1, h2, li or p."""
    paragraphs = []
    for line in filter(None, markdown.splitlines()):
        kind, text = "p", line
        for mark, name in (("## ", "h2"), ("# ", "h1"), ("- ", "li")):
            if line.startswith(mark):
                kind, text = name, line.removeprefix(mark)
                break
        paragraphs.append((kind, _strip_markdown(text)))
    return paragraphs


def _section(markdown: str, title: str) -> list[str]:
    """Return the points of a list in a privacy statement."""
    inside = markdown.partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line.removeprefix("- ") for line in inside.splitlines() if line.startswith("- ")]
    return [_strip_markdown(line) for line in lines]


def _strip_markdown(text: str) -> str:
    """Return the text without marks of bold type and code."""
    return text.replace("**", "").replace("`", "")
