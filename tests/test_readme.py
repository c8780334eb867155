"""The commands of the README and of docs/ work: CI runs the set-up, this file runs the recipes at
two rounds."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import rounds_override, tiny

from fedgen import cli
from fedgen.config.compose import compose
from fedgen.run.setup import setup

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXT = "\n".join(page.read_text() for page in PAGES)
BLOCKS = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
RECIPES = sorted(
    {
        line.split("#")[0].strip()
        for block in BLOCKS[1:]
        for line in block.splitlines()
        if line.startswith("fedgen train") and "runtime=deployed" not in line  # tests/deployment
    }
)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if "```python" in page.read_text()])
def test_python_examples_of_the_pages_run(page: Path, tmp_path: Path) -> None:
    """All blocks of a page in order, in an empty folder."""
    code = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_the_readme_is_short() -> None:
    """At most 150 lines, and 30 words per sentence."""
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for part in re.split(r"\n\s*\n|\n(?=[-|#*])|\|", prose):
        words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", part)
        for sentence in re.split(r"(?<=[.!?:;])\s", words):
            assert len(sentence.split()) <= 30, sentence


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_pages_exist(page: Path) -> None:
    assert not re.search(r"@[A-Z]|TODO", page.read_text()), "a figure is missing"
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    for link in links:
        assert (page.parent / link).exists(), link


def test_ci_runs_the_setup_commands() -> None:
    commands = [line for line in BLOCKS[0].splitlines() if line]
    assert commands == ["make demo", "make test"]
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in script if line.startswith("make ")] == commands


def test_every_other_command_composes(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.split("#")[0].strip() for block in BLOCKS[1:] for line in block.splitlines()]
    others = [w for w in lines if w.startswith("fedgen ") and not w.startswith("fedgen train")]
    assert {line.split()[1] for line in others} >= {"evaluate", "benchmark", "report"}
    for line in others:
        assert cli.run([*shlex.split(line)[1:], "--cfg"]) == 0, capsys.readouterr().err


def test_there_are_recipes() -> None:
    assert len(RECIPES) >= 8


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(r, marks=pytest.mark.slow if "runtime=ray" in r else ()) for r in RECIPES],
)
def test_a_recipe_at_two_rounds(
    recipe: str, tmp_path: Path, data_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDGEN_DATA", str(data_root))
    monkeypatch.chdir(tmp_path)
    for folder, more in (("clients", []), ("persons", ["--images-per-person", "1-8"])):
        if f"data.path={folder}" in recipe:
            shapes = [ROOT / "scripts" / "make_shapes.py", folder, "--clients", "2", "--rows", "80"]
            subprocess.run([sys.executable, *map(str, shapes), *more], check=True)
    words = shlex.split(recipe)[1:]
    alone = [word for word in words if word.startswith(("method=", "experiment="))]
    config = compose("config", alone)
    method = config.names.method
    method = "dp_wgan_gp_small" if "sweep=dp_wgan_gp" in recipe else method
    given = {word.split("=")[0] for word in words} | {"rounds"}
    few = ["data.least_rows=1"] if "least_rows" in config.data else []  # writers, and their rows
    overrides = [
        word
        for word in [*tiny(method, "method.responders=2"), *few]
        if word.split("=")[0] not in given
    ]
    place, wanted = tmp_path / "run", 2
    if "warm_up=" in recipe or config.warm_up.method is not None:
        overrides += ["warm_up.rounds=1", "warm_up.batch=4"]
        known = [word for word in [*words[1:], *overrides] if not word.startswith("rounds=")]
        wanted = setup(compose("config", [*known, "rounds=1000"])).method.plan.min_rounds
    overrides += [*rounds_override(method, wanted), "evaluate_every=0", f"run_dir={place}"]
    assert cli.run([*words, *overrides]) == 0
    for results in place.rglob("results.json"):
        finished_rounds = json.loads(results.read_text())["rounds"]
        assert finished_rounds == wanted or not rounds_override(method, wanted)


def test_every_method_has_a_page() -> None:
    pages = {page.stem for page in PAGES}
    for file in (ROOT / "fedgen" / "configs" / "method").glob("*.yaml"):
        assert file.stem.removesuffix("_small") in pages, file.stem


def test_the_site_shows_a_method_without_another_edit(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "fedgen" / "configs", tmp_path / "configs")
    mine = tmp_path / "configs" / "method" / "mine.yaml"
    mine.write_text("# Of my own.\ntype: dpgan\n")
    code = (
        f"import docs_pages; print(docs_pages.settings(docs_pages.Path({str(mine.parents[1])!r})))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        cwd=ROOT / "scripts",
        capture_output=True,
        text=True,
    )
    assert "## method=mine\n\n```yaml\n# Of my own." in shown.stdout


def test_the_transcript_of_the_demo_has_the_recorded_figure() -> None:
    """``scripts/results_page.py add "The demo" RUN "fedgen train experiment=demo"`` records it."""
    [line] = (ROOT / "docs" / "results" / "the-demo.jsonl").read_text().splitlines()
    results = json.loads(line)["results"]
    gen2real, real2gen = results["gen2real"]["cnn"], results["real2gen"]["cnn"]
    low, high = (f"{100 * end:.1f}%" for end in gen2real["interval"])
    page = (ROOT / "docs" / "first-run.md").read_text()
    assert f"gen2real cnn: {100 * gen2real['mean']:.1f}% (95 %: {low} to {high}, of" in page
    assert f"real2gen: {100 * real2gen['mean']:.1f}%" in page


def test_every_experiment_is_complete() -> None:
    """Each composes, and is named in the README or the pages."""
    for file in (ROOT / "fedgen" / "configs" / "experiment").glob("*.yaml"):
        compose("config", [f"experiment={file.stem}"])
        assert re.search(rf"\b{file.stem}\b", TEXT), file.stem


def test_the_help_names_every_option_group() -> None:
    text = re.sub(r"\|\s+", "|", cli.help_text())
    for group in ("method", "warm_up", "data", "partition", "privacy", "runtime", "evaluation"):
        for file in (ROOT / "fedgen" / "configs" / group).glob("*.yaml"):
            assert re.search(rf"{group}=[\w|]*\b{file.stem}\b", text), (group, file.stem)
