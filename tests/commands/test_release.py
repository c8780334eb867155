"""From a rehearsal to a published package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import pytest
from mutation import kills
from tiny import Train, tiny

import fedgen
from fedgen import cli, verify
from fedgen.commands import audit
from fedgen.privacy import aggregation

JUDGED = ["method=dp_merf_small", "rounds=4", "evaluation=quick", "evaluation.samples=40",
          "evaluate_every=2", "held_out=100"]  # fmt: skip


def records(run: Path) -> tuple[dict, dict]:
    return tuple(json.loads((run / f"{n}.json").read_text()) for n in ("privacy", "results"))


@pytest.mark.parametrize("clients", [[], ["partition=iid", "partition.clients=4",
                                          "privacy.aggregation=secure"]])  # fmt: skip
def test_a_rehearsal_is_released(clients: list[str], train: Train, tmp_path: Path) -> None:
    rehearsal = train(*JUDGED, *clients)
    run, out = tmp_path / "released", tmp_path / "hand-out.zip"
    words = [f"run={rehearsal}", f"out={out}", f"run_dir={run}", "audit=false", "registry=false"]
    assert cli.run(["release", *words]) == 0
    (before, judged), (after, results) = records(rehearsal), records(run)
    assert (before["noise"], after["noise"]) == ("seeded", "secure")
    assert after["noise_multiplier"] == before["noise_multiplier"]
    assert after["views"] == before["views"]
    assert judged["gen2real"] and not results["gen2real"]
    assert results["generator_sha256"] != judged["generator_sha256"]
    with zipfile.ZipFile(out) as packed:
        packed.extractall(tmp_path / "elsewhere")
    public = tmp_path / "elsewhere" / "hand-out"
    packed_names = {p.name for p in public.iterdir()}
    assert packed_names - {p.name for p in (run / "public").iterdir()} == {
        "manifest.json",
        "verify.py",
    }
    assert cli.run(["verify", str(out)]) == 0
    assert "not for release" not in (public / "PRIVACY.md").read_text()
    assert fedgen.load(public).samples(5).images.shape == (5, 1, 8, 8)
    # what was released once is packed, and nothing is spent again; nor is what lies beside it
    (run / "public" / "report.html").write_text("who has what")
    again = tmp_path / "again.zip"
    assert cli.run(["release", f"run={run}", f"out={again}", "audit=false", "registry=false"]) == 0
    assert records(run) == (after, results)
    with zipfile.ZipFile(again) as packed:
        assert {Path(name).name for name in packed.namelist()} == {p.name for p in public.iterdir()}
        whole = packed.read("again/generator.safetensors")
    assert whole == (public / "generator.safetensors").read_bytes()


def test_a_large_delta_is_refused_for_a_release(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With δ = 0.9 a mechanism may publish nine records of ten in full."""
    words = ["method=dp_merf_small", "rounds=4", "privacy.target_epsilon=1"]
    rehearsal = train(*words, "privacy.delta=1e-3")
    assert "warning: privacy.delta: 0.001 is above 1 / 1,437 records" in capsys.readouterr().out
    assert cli.run(["release", f"run={rehearsal}", f"out={tmp_path / 'out.zip'}"]) == 2
    error = capsys.readouterr().err
    assert "privacy.delta: 0.001 is above 1 / 1,437 records" in error
    assert "e.g. privacy.delta=0.0001" in error
    secure = [f"run_dir={tmp_path / 'secure'}", "privacy.noise=secure", "privacy.delta=0.9"]
    assert cli.run(["train", *tiny("dp_merf_small"), *words, *secure]) == 2
    assert "privacy.delta" in capsys.readouterr().err
    assert not (tmp_path / "secure").exists()
    four = ["method=fedavg_gan", "partition=iid", "partition.clients=4", "privacy.delta=0.02"]
    assert cli.run(["account", *tiny("fedavg_gan"), *four]) == 0
    assert "0.02 is above 0.01" in capsys.readouterr().out, "of four clients 1/n says nothing"


def test_a_packed_release_has_no_times_or_modes(train: Train, tmp_path: Path) -> None:
    """File times and owners are not part of a release."""
    run = train("method=dp_merf_small", "rounds=4", "privacy.noise=secure")
    packed = []
    for name in ("a.zip", "b.zip"):
        for file in (run / "public").iterdir():
            os.utime(file, (1e9 + ord(name[0]) * 1e6,) * 2)
            file.chmod(0o600 if name == "a.zip" else 0o644)
        out = tmp_path / name
        assert (
            cli.run(["release", f"run={run}", f"out={out}", "audit=false", "registry=false"]) == 0
        )
        with zipfile.ZipFile(out) as opened:
            packed.append([(i.date_time, i.external_attr, i.CRC) for i in opened.infolist()])
    assert packed[0] == packed[1]


@pytest.mark.slow
@kills("fedgen/commands/audit.py", "for point in program.points):", "for point in ()):")
def test_a_release_is_audited_before_it_is_packed(
    train: Train,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = train("method=dp_merf_small", "rounds=4", "privacy.noise=secure")
    words = ["release", f"run={run}", "registry=false"]
    assert cli.run([*words, f"out={tmp_path / 'a.zip'}"]) == 0
    assert "attacks on the client program with reduced noise" in verify.format_rows(
        verify.verify(str(tmp_path / "a.zip"))
    )
    monkeypatch.setattr(audit, "_RELEASE_SECONDS", 0.0)
    assert cli.run([*words, f"out={tmp_path / 'b.zip'}"]) == 0
    assert "audit skipped: estimated duration 1 min; audit=true" in capsys.readouterr().out
    with zipfile.ZipFile(tmp_path / "b.zip") as packed:
        assert "b/audit.json" not in packed.namelist()
    # a third of the noise of each sum
    honest = aggregation.noised
    monkeypatch.setattr(aggregation, "noised", lambda exact, std, *to: honest(exact, std / 3, *to))
    assert cli.run([*words, f"out={tmp_path / 'c.zip'}", "audit=true"]) == 2
    assert "an attack refutes the proven ε" in capsys.readouterr().err
    assert not (tmp_path / "c.zip").exists()


def test_a_release_beyond_the_budget_is_refused(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rehearsal = train("method=dp_merf_small", "rounds=4", "privacy.target_epsilon=2")
    out = tmp_path / "out.zip"
    words = [f"run={rehearsal}", f"out={out}", f"run_dir={tmp_path / 'r'}", "registry=false"]
    assert cli.run(["release", *words, "budget_epsilon=1"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("fedgen: budget_epsilon: ")
    assert not out.exists()


@kills("fedgen/commands/release.py", ("    _check_place(out)\n    run_dir,"), "    run_dir,")
@pytest.mark.parametrize(
    ("made", "words", "message"),
    [
        (["privacy=none"], [], "run: has no noise"),
        ([], ["out=a.tar"], "out: a.tar is not a .zip"),
        ([], ["out=nowhere/a.zip"], "out: nowhere/a.zip cannot be written"),
        ([], ["run=no"], "run: no is not a run directory"),
        ([], ["budget_epsilon=-1"], "budget_epsilon: must be at least"),
    ],
)
def test_invalid_settings_are_refused(
    made: list[str], words: list[str], message: str, train: Train, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run = train("method=dp_merf_small", "rounds=2", *made)
    words = [*words, f"run_dir={tmp_path / 'released'}"]
    capsys.readouterr()
    assert cli.run(["release", f"run={run}", f"out={tmp_path / 'o.zip'}", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"fedgen: {message}") and error.count("\n") == 1
    assert not (tmp_path / "o.zip").exists() and not (tmp_path / "released").exists()


def test_an_interrupted_release_prints_how_to_pack_it(train: Train, tmp_path: Path) -> None:
    run, out = train("method=dp_merf_small", "rounds=3"), tmp_path / "o.zip"
    words = [f"run={run}", f"out={out}", f"run_dir={tmp_path / 'released'}", "registry=false"]
    code = (
        "import os, signal, sys\n"
        "from fedgen.commands import release\nfrom fedgen.run import train as training\n"
        "from fedgen.config.compose import compose\n"
        "def stop(*_): os.kill(os.getpid(), signal.SIGINT)\n"
        "def train(config): return training.train(config, watch=stop)\n"
        "release.train = train\n"
        "release.release(compose('release', sys.argv[1:]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False
    )
    assert f"then pack it: fedgen release run=... out={out}" in done.stderr
    assert cli.run(["train", f"resume={tmp_path / 'released'}"]) == 0
    words = [f"run={tmp_path / 'released'}", f"out={out}", "registry=false", "audit=false"]
    assert cli.run(["release", *words]) == 0
    assert out.exists()


def test_a_finished_run_is_packed_without_its_data(
    train: Train, tmp_path: Path, data_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The audit alone needs them; accounts are signed again by resuming."""
    words = ["data=mnist", f"data.root={data_root}", "privacy.noise=secure"]
    run = train("method=dp_merf_small", "rounds=2", *words)
    (data_root / "mnist.npz").rename(data_root / "elsewhere.npz")
    release = ["release", f"run={run}", "registry=false"]
    assert cli.run([*release, f"out={tmp_path / 'a.zip'}", "audit=true"]) == 2
    assert cli.run([*release, f"out={tmp_path / 'b.zip'}"]) == 0
    assert "audit skipped: " in capsys.readouterr().out


def test_an_interrupted_audit_prints_how_to_pack(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run, out = train("method=dp_merf_small", "rounds=2", "privacy.noise=secure"), tmp_path / "a.zip"

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(audit, "attack_program", interrupt)
    assert cli.run(["release", f"run={run}", f"out={out}", "registry=false"]) == 130
    assert f"pack it: fedgen release run={run} out={out}" in capsys.readouterr().err
    assert not out.exists() and not list(tmp_path.glob(".fedgen-*"))


def test_a_run_without_signed_accounts_is_not_packed(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As those of 0.1.0; resuming one at its end signs them."""
    run = train("method=dp_merf_small", "rounds=2", "privacy.noise=secure")
    results = json.loads((run / "results.json").read_text())
    del results["sha256"]["public/account.json"]
    (run / "results.json").write_text(json.dumps(results))
    (run / "public" / "account.json").unlink()
    words = ["release", f"run={run}", f"out={tmp_path / 'a.zip'}", "registry=false", "audit=false"]
    assert cli.run(words) == 2
    assert f"fedgen train resume={run} signs them" in capsys.readouterr().err
    assert cli.run(["train", f"resume={run}"]) == 0
    assert cli.run(words) == 0


@kills("fedgen/storage/packages.py", "if name not in _KNOWN or", "if")
def test_a_package_is_read_like_its_folder(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = train("method=dp_merf_small", "rounds=2", "privacy.noise=secure"), tmp_path / "o.zip"
    words = ["release", f"run={run}", f"out={out}", "registry=false", "audit=false"]
    assert cli.run(words) == 0
    images = [fedgen.load(place).samples(8).images for place in (out, run)]
    assert (images[0] == images[1]).all()
    assert cli.run(["sample", f"run={out}", "n=8", f"out={tmp_path / 'samples'}"]) == 0
    page = tmp_path / "page.html"
    assert cli.run(["report", f"runs={out}", "audience=public", f"out={page}"]) == 0
    assert "Who vouches for it" in page.read_text()
    for name in ("o/evil", "o/../../evil", "/evil", "o/README.md"):
        bad = tmp_path / "bad.zip"
        shutil.copy(out, bad)
        with zipfile.ZipFile(bad, "a") as archive, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a name twice
            archive.writestr(name, b"")
        assert cli.run(["sample", f"run={bad}", "n=8", f"out={tmp_path / 'x.npz'}"]) == 2
        assert "is not a package of fedgen release (it contains" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*evil*"))


def test_a_changed_generator_is_not_packed(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train("method=dp_merf_small", "rounds=2", "privacy.noise=secure")
    (run / "public" / "PRIVACY.md").write_text("ε = 0.1")
    words = ["release", f"run={run}", f"out={tmp_path / 'o.zip'}", "registry=false"]
    assert cli.run(words) == 2
    assert "PRIVACY.md was changed after the run wrote it" in capsys.readouterr().err
    assert not (tmp_path / "o.zip").exists()
