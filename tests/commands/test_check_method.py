"""``fedgen check``: methods that satisfy the contract, and methods that break it."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked import Command
from tiny import PARTITIONS, tiny

from fedgen import cli

Captured = pytest.CaptureFixture[str]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gs_wgan_small", "mixture_small", "fedavg_gan"])
def test_methods_pass_all_checks(method: str, capsys: Captured) -> None:
    words = [] if method == "fedavg_gan" else PARTITIONS["one"]
    assert cli.run(["check", f"method={method}", *tiny(method), *words, "audit.releases=200"]) == 0
    output = capsys.readouterr().out
    assert "FAIL" not in output
    for promise in (
        "a run stays within its budget: ε",
        "the printed ε covers every ledger",
        "samples are valid images and reproducible",
        "a run is reproducible: bit-identical",
        "states on disk do not change the result",
        "an interrupted run resumes",
        "several clients stay within the budget",
        *(() if method == "fedavg_gan" else ("secure sums stay within the budget",)),
        "no attack refutes the proof",
        *(
            ("adding a record changes a sum by at most its sensitivity",)
            if method == "mixture_small"
            else ()
        ),
    ):
        assert f"pass      {promise}" in output, promise
    assert "halved noise is detected" in output
    assert "not checked; the author must ensure it" in output


def test_checks_that_cannot_decide_are_untested(capsys: Captured) -> None:
    """A run too short to interrupt, or without a budget, neither passes nor fails."""
    words = [*tiny("dp_hp_small"), "rounds=1", "audit.releases=200", "privacy.target_epsilon=null"]
    words += ["privacy.noise_multiplier=2"]
    assert cli.run(["check", "method=dp_hp_small", *words]) == 0
    output = capsys.readouterr().out
    assert "untested  an interrupted run resumes: too short" in output
    assert "untested  a run stays within its budget" in output


@pytest.mark.parametrize(
    ("right", "wrong", "promise"),
    [
        (
            "return sum_of_rows(images.flatten(1), clip, labels, facts.classes)",
            "found = sum_of_rows(images.flatten(1), clip, labels, facts.classes)\n"
            "        found.gradients['rows'].mul_(2)\n        return found",
            "no attack refutes the proof (client program, means)",
        ),
        (
            "return sum_of_rows(images.flatten(1), clip, labels, facts.classes)",
            "dark = images.flatten(1).mean(1) < 0.9\n"  # twice, and not what an attack plays
            "        images = torch.cat([images, images[dark]])\n"
            "        labels = torch.cat([labels, labels[dark]])\n"
            "        return sum_of_rows(images.flatten(1), clip, labels, facts.classes)",
            "adding a record changes a sum by at most its sensitivity (means)",
        ),
        (
            '{"means": means.clamp(0, 1)}',
            '{"means": (means + 0.1 * torch.rand(means.shape)).clamp(0, 1)}',
            "a run is reproducible: the generator or ε differs",
        ),
        (
            'generator=streams.public("samples")',
            "generator=None",
            "samples are valid images and reproducible",
        ),
    ],
)
def test_a_broken_method_fails_its_check(
    right: str, wrong: str, promise: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.run(["new", "method", "name=blur", f"out={tmp_path}"]) == 0
    program = tmp_path / "blur" / "blur.py"
    assert right in program.read_text()
    program.write_text(program.read_text().replace(right, wrong))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDGEN_EXTENSIONS", "blur")
    command = Command(["check", "method=blur", "audit.releases=2000"])
    assert command.wait() == 2
    assert "fedgen: method: blur fails" in command.errors
    assert f"FAIL      {promise}" in command.output


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("audit.releases=0", "audit.releases"),
        ("run_dir=x", "run_dir"),
        ("privacy.noise=secure", "privacy.noise"),
        ("method=none", "method"),
    ],
)
def test_invalid_settings_are_refused(word: str, key: str, capsys: Captured) -> None:
    assert cli.run(["check", *tiny("gs_wgan_small"), word]) == 2
    assert key in capsys.readouterr().err


def test_the_traceback_of_a_failing_program_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the temporary folder of its run is deleted."""
    assert cli.run(["new", "method", "name=blur", f"out={tmp_path}"]) == 0
    program = tmp_path / "blur" / "blur.py"
    program.write_text(program.read_text().replace("clip, labels, facts", "labels, clip, facts"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDGEN_EXTENSIONS", "blur")
    command = Command(["check", "method=blur"])
    assert command.wait() == 2
    assert "blur.py" in command.output and "of_rows" in command.output
    assert str(tmp_path) in command.output and "errors.jsonl" not in command.errors
