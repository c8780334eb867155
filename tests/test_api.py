"""The Python API: the same runs and messages as on the command line, without side effects for the
caller."""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from tiny import tiny

import fedgen
from fedgen import cli
from fedgen.config.overrides import to_override_value

TINY = {
    key: yaml.safe_load(value)
    for key, _, value in (word.partition("=") for word in tiny("dp_merf_small"))
    if key != "rounds"
}


@pytest.mark.slow
def test_the_readme_example_in_a_fresh_interpreter(tmp_path: Path) -> None:
    """``import fedgen`` alone loads neither torch nor Flower."""
    code = f"""
import sys, fedgen
assert not {{"torch", "flwr", "hydra"}} & set(sys.modules)
run = fedgen.train(method="dp_merf_small", data="digits", epsilon=1.0, rounds=3,
                   evaluation="none", run_dir={str(tmp_path / "run")!r})
assert 0.9 < run.epsilon <= 1.0
assert set(run.samples(20, labels=[3, 5]).labels) == {{3, 5}}
assert fedgen.load(run.path / "public").samples(4).images.shape == (4, 1, 8, 8)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    """In a real kernel: a run shows ε and a picture, and a typo is one line."""
    notebook = nbformat.read(Path(__file__).parents[1] / "examples" / "first_run.ipynb", 4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in code)
    typo = nbformat.v4.new_code_cell('fedgen.train(method="mixtur")')
    typo.metadata.tags = ["raises-exception"]
    notebook.cells.append(typo)
    NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = code[0].outputs[-1].data
    assert "ε per record" in shown["text/html"] and "data:image/png;base64" in shown["text/html"]
    [error] = [output for output in typo.outputs if output.output_type == "error"]
    assert len(error.traceback) == 1 and "did you mean mixture?" in error.traceback[0]
    assert "image/png" in code[1].outputs[0].data
    page, _ = HTMLExporter().from_notebook_node(notebook)
    (tmp_path / "notebook.html").write_text(page)
    assert "did you mean mixture?" in page and "Traceback" not in page


def test_a_run_equals_that_of_the_command_line(tmp_path: Path) -> None:
    rounds, place = np.int64(3), tmp_path / "it's, here"
    there = fedgen.train(TINY, method="dp_merf_small", rounds=rounds, run_dir=place)
    words = [*tiny("dp_merf_small"), "method=dp_merf_small", "rounds=3"]
    assert cli.run(["train", *words, f"run_dir={tmp_path / 'run'}"]) == 0
    record = json.loads((tmp_path / "run" / "results.json").read_text())
    assert there.results["generator_sha256"] == record["generator_sha256"]
    assert there.epsilon == there.epsilons["server"] == there.privacy["views"]["server"]["epsilon"]
    stated = there.privacy["views"]["server"]["guarantee"]
    assert there.guarantee.tpr(0.01) == pytest.approx(stated["tpr"]["0.01"])
    assert there.guarantees["release"].advantage == pytest.approx(stated["advantage"])
    out = tmp_path / "samples.npz"
    assert cli.run(["sample", f"run={tmp_path / 'run'}", "n=9", "labels=[1,2]", f"out={out}"]) == 0
    with np.load(out) as file:
        own = there.samples(np.int64(9), np.array([1, 2]), np.int64(0))
        assert (file["images"] == own.images).all()
        assert set(file["labels"]) == {1, 2}
    with pytest.raises(fedgen.FedgenError, match="n: must be a whole number from 1"):
        there.samples(10**15)
    with pytest.raises(fedgen.FedgenError, match="labels: must be a list of numbers"):
        there.samples(1, labels=[True])
    with pytest.raises(fedgen.FedgenError, match="seed: must be a whole number"):
        there.samples(1, seed="a")  # type: ignore[arg-type]


def test_runs_are_shown_tabulated_and_released(tmp_path: Path) -> None:
    """In a notebook; markup in the name of a folder is text. Only a resume needs the checkpoints
    and the states of clients."""
    for seed, name in enumerate(("a", "<b>", "c")):
        settings = {**TINY, "seed": seed, "evaluation": "none", "run_dir": tmp_path / name}
        run = fedgen.train(settings, method="dp_merf_small")
        if name == "c":
            (run.path / "results.json").unlink()
    for folder in ("checkpoints", "clients"):
        shutil.rmtree(tmp_path / "a" / folder)
    page = fedgen.load(tmp_path / "<b>")._repr_html_()  # type: ignore[attr-defined]
    for part in ("dp_merf_small on digits", "per record at δ = 1e-05", "<td>server</td>"):
        assert part in page
    assert "data:image/png;base64,iVBOR" in page and "&lt;b&gt;" in page and "/<b>" not in page
    table = fedgen.results(str(tmp_path / "*"))
    assert table["seed"].tolist() == [1, 0] and table["run"].str.contains("<b>").sum() == 1
    assert table["epsilon.server"].max() <= 10 and set(table["method"]) == {"dp_merf_small"}
    with pytest.raises(fedgen.FedgenError, match="matches no trained run"):
        fedgen.results(str(tmp_path / "x*"))
    out = fedgen.report([tmp_path / "a", tmp_path / "<b>"], tmp_path / "page.html")
    assert "<h1>2 runs</h1>" in out.read_text()
    about = {"registry": False, "audit": False, "run_dir": tmp_path / "secret"}
    packed = fedgen.release(tmp_path / "a", tmp_path / "a.zip", about)
    assert fedgen.load(packed).samples(3).images.shape == (3, 1, 8, 8)


def test_a_mistake_is_one_line_in_a_notebook() -> None:
    with pytest.raises(fedgen.FedgenError) as error:
        fedgen.train(method="dp_murf")
    [line] = error.value._render_traceback_()
    assert line.startswith("fedgen: method: there is no 'dp_murf'; did you mean")


def test_a_published_classifier_accepts_common_layouts(tmp_path: Path) -> None:
    """With or without a channel, and no images at all; other input is one line."""
    known = {
        "evaluation": "none",
        "run_dir": tmp_path / "run",
        "method.private_classifier": "ridge",
    }
    run = fedgen.train(known, method="mixture_small", data="digits", epsilon=10)
    images, labels = run.samples(60)
    outcome = run.classify(images)
    assert (outcome == labels).mean() > 0.8
    assert (run.classify(images[:, 0]) == outcome).all()
    assert run.classify(images[:0]).shape == (0,)
    for wrong, result in [
        (images[:, :, 1:], r"images: are of shape \[1, 7, 8\], and it knows \[1, 8, 8\]"),
        (images / 255, "type float64"),
        ("a.png", "of type"),
    ]:
        with pytest.raises(fedgen.FedgenError, match=result):
            run.classify(wrong)  # type: ignore[arg-type]
    with pytest.raises(fedgen.FedgenError, match="published no classifier"):
        fedgen.train(TINY, method="dp_merf_small", run_dir=tmp_path / "none").classify(images)


def test_without_a_bound_epsilon_is_infinite(tmp_path: Path) -> None:
    known = {**TINY, "method": "dp_merf_small", "privacy": "none", "rounds": 2}
    run = fedgen.train(known, run_dir=tmp_path / "run")
    assert run.epsilon == math.inf
    assert run.guarantee.tpr(0.01) == 1.0


def test_the_state_of_the_caller_is_unchanged(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    state, before = torch.get_rng_state(), signal.getsignal(signal.SIGINT)
    known = {"evaluation": "none", "runtime.threads": 1, "method": "central_images_small"}
    result = []
    for call in (
        lambda: None,
        lambda: fedgen.train(known, run_dir=tmp_path / "run").samples(3),
        lambda: fedgen.load(tmp_path / "run").samples(3),
        lambda: fedgen.account(known),
    ):
        torch.manual_seed(5)
        state = torch.get_rng_state()
        call()
        result.append(torch.rand(3).tolist())
        torch.set_rng_state(state)
    assert result == result[:1] * 4
    try:
        assert torch.get_num_threads() == 2
        assert (torch.get_rng_state() == state).all()
        assert signal.getsignal(signal.SIGINT) is before
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_num_threads(1)


def test_errors_have_the_messages_of_the_command_line(tmp_path: Path) -> None:
    for settings, result in [
        ({"method": "dp_murf"}, "did you mean dp_merf"),
        ({"privacy.delta": 2}, "privacy.delta: must be below 1"),
        ({"epsilon": "much"}, "privacy.target_epsilon: must be a number"),
        ({"no.such": 1}, "no.such: is not a setting"),
    ]:
        with pytest.raises(fedgen.FedgenError, match=result):
            fedgen.train(settings, run_dir=tmp_path / "run")
    for place in (tmp_path / "nothing", None, 3, "a\0b"):
        with pytest.raises(fedgen.FedgenError):
            fedgen.load(place)  # type: ignore[arg-type]
    with pytest.raises(fedgen.FedgenError, match="settings: must be a dictionary"):
        fedgen.account("method=psg_small")  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_accounting_before_a_run() -> None:
    row = fedgen.account(method="dpgan_small", epsilon=2, rounds=50)
    assert 1.9 < row["server_epsilon"] <= 2
    assert row["noise_multiplier"] > 0


def test_samples_from_elsewhere_are_evaluated() -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (100, 8, 8), dtype=np.uint8)
    known = {"evaluation.classifiers.cnn.epochs": 1}
    result = fedgen.evaluate(images, np.arange(100) % 10, known, data="digits")
    assert result["judged"] == 100
    assert 0 <= result["gen2real"]["logistic_regression"]["mean"] <= 1
    with pytest.raises(fedgen.FedgenError, match=r"^samples: what was given has images float32"):
        fedgen.evaluate(images.astype(np.float32), np.arange(100) % 10, known, data="digits")
    with pytest.raises(fedgen.FedgenError, match=r"^labels: is no array of numbers"):
        fedgen.evaluate(images, np.array([None] * 100), known, data="digits")


def test_a_method_is_audited(tmp_path: Path) -> None:
    known = {**TINY, "method": "dp_merf_small", "audit.releases": 200, "audit.canaries": 0}
    result = fedgen.audit(known, rounds=2, run_dir=tmp_path / "run")
    assert result.program and not result.run
    assert not any(point.broken for point in result.program)


@given(st.text(st.characters(codec="utf-8", exclude_characters="\x00\n\r"), max_size=20))
def test_any_text_is_passed_unchanged(text: str) -> None:
    [result] = OverridesParser.create().parse_overrides([f"run_dir={to_override_value(text)}"])
    value = result.value()
    assert (value if isinstance(value, str) else value.text) == text


def test_values_are_passed_unchanged() -> None:
    for value in (None, True, 3, 2.5, 1e-5, [1, 2], {"a": 1, "b": [2.5]}, float("inf")):
        [result] = OverridesParser.create().parse_overrides([f"x={to_override_value(value)}"])
        assert result.value() == value
