"""Every script in ``scripts/`` runs at its smallest size."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import Train

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"

SMALLEST: dict[str, list[str]] = {
    "bench_deployment.py": ["--nodes", "1", "--rounds", "1", "--stock-rounds", "0"],
    "bench_mixture.py": ["--records", "100", "--repeats", "1"],
    "bench_scale.py": ["--clients", "4", "--rounds", "2", "data=digits", "method=gs_wgan_small"],
    "bench_runtimes.py": ["--rounds", "1", "--clients", "2"],
    "bench_sums.py": ["--clients", "4", "--numbers", "100", "--repeats", "2"],
    "check_noise.py": ["--numbers", "1e4"],
    "debug_power.py": [
        *("data=digits", "--clients", "8", "--repetitions", "1"),
        *("--faulty", "1", "--faults", "none", "rotated"),
    ],
    "gradient_norms.py": ["--help"],
    "make_shapes.py": ["shapes.npz", "--side", "16", "--rows", "20"],
    "mutants.py": ["--tests-passed", "--share=2", "tests/privacy/test_gaussian_noise.py"],
}
"""Words of each script that needs nothing else. ``gradient_norms.py`` is run whole by
``tests/commands/test_sweep.py``."""

OTHERS = {
    "bench_critics.py": "by gpu_queue.sh",
    "bench_dpdm.py": "by gpu_queue.sh",
    "bench_dpsgd.py": "by gpu_queue.sh",
    "docs_pages.py": "by mkdocs, in make docs",
    "flwr_run.py": "by tests/test_install.py",
    "mixture_control.py": "below",
    "results_page.py": "below",
}


def test_every_script_is_run() -> None:
    assert [path.name for path in SCRIPTS.glob("*.sh")] == ["gpu_queue.sh"]
    assert {path.name for path in SCRIPTS.glob("*.py")} == {*SMALLEST, *OTHERS}


def script(name: str, words: list[str], where: Path, root: Path = ROOT) -> str:
    """Return the output of a script."""
    own = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(root / "scripts" / name), *words],
        cwd=where,
        env=own,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST)
def test_a_script_at_its_smallest(name: str, tmp_path: Path) -> None:
    assert script(name, SMALLEST[name], tmp_path) or name == "make_shapes.py"


@pytest.mark.slow
def test_the_queue_for_a_gpu_on_a_cpu(tmp_path: Path) -> None:
    """Each part succeeds at tiny sizes and writes its log; training draws samples."""
    own = {**os.environ, "DEVICE": "cpu", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = ["bash", str(SCRIPTS / "gpu_queue.sh"), str(tmp_path / "out"), "3600"]
    done = subprocess.run(command, env=own, capture_output=True, text=True, check=False)
    parts = [line.partition(",")[0] for line in done.stdout.splitlines()]
    names = ["tests", "dpsgd", "dpdm", "critics", "run"]
    assert parts == [f"{name}: status 0" for name in names], done
    assert all((tmp_path / "out" / f"{name}.txt").stat().st_size for name in names)
    assert (tmp_path / "out" / "run" / "public" / "samples.png").exists()


@pytest.mark.slow
def test_the_power_of_an_experiment_with_two_groups(tmp_path: Path) -> None:
    words = ["--experiment", "debug_clients", "--repetitions", "1", "method=mixture_small"]
    words += ["privacy.unit=client", "privacy.aggregation=secure", "privacy.threshold=all"]
    words += ["partition=iid", "partition.clients=90", "debug.quantiles=true"]
    words += ["debug.reserved_clients=30", "debug.suspect=0.4", "debug.normal=0.6"]
    words += ["debug.samples=100", "evaluation=none", "runtime.threads=1"]
    assert "of 1 |" in script("debug_power.py", words, tmp_path)


@pytest.mark.slow
def test_the_control_of_the_mixture(train: Train, tmp_path: Path, data_root: Path) -> None:
    data = ["data=mnist", f"data.root={data_root}", "method.rows=60"]
    one = train(*data, "method=dp_merf_small", name="one")
    other = train(*data, "method=mixture_small", "method.private_classifier=ridge", name="other")
    os.environ["FEDGEN_DATA"], before = str(data_root), os.environ.get("FEDGEN_DATA")
    try:
        result = script("mixture_control.py", [str(one), str(other), "--samples", "40"], tmp_path)
    finally:
        os.environ.pop("FEDGEN_DATA") if before is None else os.environ.update(FEDGEN_DATA=before)
    assert "both: " in result


def test_the_figures_of_all_pages_are_those_of_the_records(tmp_path: Path) -> None:
    """Regenerated from ``docs/results``, the page of measured runs and the figures in prose are the
    present ones; a wrong figure is replaced."""
    for name in ("scripts", "docs", "fedgen"):
        shutil.copytree(ROOT / name, tmp_path / name)
    readme = (ROOT / "README.md").read_text()
    wrong = readme.replace("98.2 ± 0.1<!--", "99.9 ± 0.0<!--")
    assert wrong != readme
    (tmp_path / "README.md").write_text(wrong)
    (tmp_path / "docs" / "measured.md").unlink()
    script("results_page.py", [], tmp_path, tmp_path)
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        assert (tmp_path / page.relative_to(ROOT)).read_text() == page.read_text(), page
