"""The command line: every mistake is one line that names the key, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutation import kills
from omegaconf import OmegaConf
from PIL import Image
from pyarrow import parquet
from tiny import TINY, Train, tiny

import fedgen
from fedgen import cli
from fedgen.config.compose import compose
from fedgen.config.overrides import shell_quote
from fedgen.errors import FedgenError
from fedgen.reporting.figures import DIGITAL_SOURCE_TYPE
from fedgen.run.evaluation import JUDGED
from fedgen.run.generator import _number
from fedgen.run.setup import dataset, setup

RDF = "http://www.w3.org/1999/02/22-rdf-syntax-ns#"
IPTC = "http://iptc.org/std/Iptc4xmpExt/2008-02-29/"

MISTAKES = [
    ("method", ["method=gs_wgn"], "did you mean gs_wgan"),
    ("data", ["data=mnits"], "did you mean mnist"),
    ("partition", ["partition=idd"], "did you mean iid"),
    ("privcy.delta", ["privcy.delta=1e-5"], "did you mean privacy.delta"),
    ("method.clp", ["method.clp=1"], "did you mean method.clip"),
    ("method.lr", ["method.lr=1"], "mean method.generator_learning_rate or method.critic_learning"),
    ("method.batch_size", ["method.batch_size=8"], "did you mean method.batch"),
    ("method.xyz", ["method.xyz=1"], "is not a setting; see fedgen --help"),
    ("method", ["method=blur"], "FEDGEN_EXTENSIONS"),
    ("noise", ["noise"], "key=value"),
    ("rounds", ["rounds=many"], "whole number"),
    ("rounds", ["rounds=0"], "at least 1"),
    ("method.clip", ["method.clip=wide"], "must be a number"),
    ("method.clip", ["method.clip=0"], "must be at least"),
    ("method.clip", ["method.clip=1e-20"], "at least"),
    ("method.generator_betas", ["method.generator_betas=0.5"], "must be a list"),
    ("method.generator", ["method.generator=null"], "it is a group of settings"),
    ("held_out", ["held_out=300", "privacy.noise=secure"], "nothing is evaluated"),
    (
        "evaluation.samples",
        ["evaluation=quick", "evaluation.samples=5", "evaluation.judge=true"],
        "at least 256",
    ),
    ("method.batch", ["method.batch=-3"], "must be positive"),
    ("method.clip", ["method.clip=inf"], "must be finite"),
    ("method.clip", ["method.clip=nan"], "must be finite"),
    ("method.ema", ["method.ema=5"], "below 1"),
    ("method.critic.width", ["method.critic.width=0"], "must be positive"),
    ("method.generator_betas", ["method.generator_betas=[0.5]"], "at least 2 entries"),
    ("method.generator_betas", ["method.generator_betas=[2,3]"], "below 1"),
    ("method.routing", ["method.routing=7"], "per_sample"),
    ("seed", ["seed=99999999999999999999"], "must be below"),
    ("runtime.threads", ["runtime.threads=100000"], "at most 1024"),
    ("evaluation.samples", ["evaluation=quick", "evaluation.samples=0"], "take evaluation=none"),
    ("evaluation.seeds", ["evaluation=quick", "evaluation.seeds=0"], "must be positive"),
    ("data.size", ["data=folder", "data.path=x", "data.size=-3"], "must be at least 8"),
    ("data.size", ["data=folder", "data.path=x", "data.size=100000"], "at most 1024"),
    ("data.size", ["data=folder", "data.path=x", "data.size=32px"], "must be a whole number"),
    ("data.size", ["data=hugging_face", "data.path=x", "data.size=4"], "at least 8"),
    ("data.channels", ["data=folder", "data.path=x", "data.channels=2"], "choose 1 or 3"),
    ("data.name", ["data=torchvision", "data.name=MNST"], "choose MNIST"),
    ("data.no_such", ["+data.no_such=1"], "is not a setting"),
    ("partition.alpha", ["partition=dirichlet", "partition.alpha=0"], "must be positive"),
    (
        "method.generator.type",
        ["method.generator.type=autoencoder"],
        "does not accept the argument 'shape'",
    ),
    ("data.path", ["data=folder", "data.path=2024"], "quote it: data.path=\"'2024'\""),
    ("data.path", ["data=folder", "data.path=[a,5]"], "must be text, got 5; quote it: '5'"),
    ("data.path", ["data=folder", "data.path=[a"], "quote it"),
    ("data.path", ["data=folder", "data.path=a,b"], "has several values"),
    ("data.root", ["data=mnist", "data.root=[1,2]"], "must be text"),
    ("method.routing", ["method.routing=per_row"], "per_sample"),
    ("privacy.delta", ["privacy.delta=1"], "must be below 1"),
    ("privacy.delta", ["privacy.delta=1.5"], "must be below 1"),
    ("privacy.delta", ["privacy.delta=0"], "must be positive"),
    ("privacy.delta", ["privacy.delta=-1e-5"], "must be positive"),
    ("privacy.target_epsilon", ["privacy.target_epsilon=-1"], "at least 1e-09"),
    ("privacy.noise_multiplier", ["privacy.noise_multiplier=1e-320"], "at least 1e-09"),
    ("privacy.aggregation", ["privacy.aggregation=???"], "is not given"),
    ("privacy.aggregation", ["privacy.aggregation=${nothing}"], "not found"),
    ("runtime.threads", ["runtime.threads=${nothing}"], "not found"),
    ("method.type", ["method.type=[1,2]"], "cannot be [1, 2]"),
    (
        "method.strategy",
        ["method.strategy=strategies.one_shot.OneShot"],
        "declare its package",
    ),
    ("evaluation.inception_weights", ["evaluation.inception_weights=[1]"], "must be text"),
    ("privacy.target_epsilon", ["privacy.target_epsilon=small"], "must be a number"),
    (
        "privacy.target_epsilon",
        ["privacy.target_epsilon=1e-9", "privacy.delta=1e-12"],
        "no noise reaches",
    ),
    (
        "privacy.target_epsilon",
        ["privacy.target_epsilon=0.1", "privacy.noise_multiplier=0.5"],
        "spent by the first round",
    ),
    ("privacy", ["privacy.target_epsilon=null"], "neither"),
    ("privacy", ["privacy=none", "privacy.target_epsilon=1"], "no target"),
    ("privacy.noise", ["privacy.noise=loud"], "seeded or secure"),
    ("privacy.adversary", ["privacy.adversary=god"], "server or release"),
    ("partition.clients", ["partition=iid", "partition.clients=2000"], "more than 1437 rows"),
    ("partition.clients", ["partition=iid", "partition.clients=0"], "must be positive"),
    (
        "partition",
        ["partition=dirichlet", "partition.clients=300", "partition.alpha=0.001"],
        "have none of",
    ),
    ("partition", ["partition=by_writer"], "writers"),
    ("partition.clients", ["partition.clients=5"], "take partition=iid"),
    (
        "evaluation.classifiers.logistic_regression.model",
        ["evaluation=quick", "evaluation.classifiers.logistic_regression.model=sklearn.svm.Nope"],
        "FEDGEN_EXTENSIONS",
    ),
    (
        "evaluation.classifiers.cnn.epochs",
        ["evaluation=quick", "evaluation.classifiers.cnn.epochs=0"],
        "must be positive",
    ),
    ("method.critics", ["method.critics=2000"], "exceed 1437 records"),
    ("method.responders", ["method.responders=9", "method.routing=per_sample"], "cannot sample 9"),
    ("runtime.store", ["runtime.store=tape"], "memory or disk"),
    ("runtime.timeout", ["runtime.timeout=0"], "must be positive"),
    ("runtime.timeout", ["runtime.timeout=soon"], "must be a number"),
    ("runtime.faults.hangs", ["runtime.faults.hangs=0.1"], "set runtime.timeout"),
    ("runtime.min_success", ["runtime.min_success=0"], "must be positive"),
    ("runtime.min_success", ["runtime.min_success=1.1"], "at most 1"),
    ("runtime.faults.nan", ["runtime.faults.nan=2"], "at most 1"),
    ("runtime.faults", ["runtime.faults.nan=0.7", "runtime.faults.late=0.7"], "more than 1"),
    ("runtime.faults.dies", ["runtime.faults.dies=0.1"], "runtime=ray"),
    ("runtime.actors", ["runtime=ray", "runtime.actors=0"], "must be positive"),
    ("runtime.num_gpus", ["runtime=ray", "runtime.num_gpus=-1"], "must be 0 or more"),
    ("runtime.num_cpus", ["runtime=ray", "runtime.num_cpus=0.00001"], "three decimals"),
    ("runtime.num_gpus", ["runtime=flower", "runtime.num_gpus=64"], "a client needs 64"),
    ("runtime.faults", ["runtime.faults=null"], "cannot be null"),
    ("runtime.num_cpus", ["runtime=ray", "runtime.num_cpus=100000"], "a client needs 100000"),
    ("runtime.num_cpus", ["runtime=flower", "runtime.num_cpus=100000"], "a client needs 100000"),
    ("runtime.address", ["runtime=ray", "runtime.address=127.0.0.1:1"], "no Ray cluster responds"),
    ("runtime.store", ["runtime=ray", "runtime.store=disk"], "a setting of runtime=in_process"),
    ("warm_up.rounds", ["warm_up.rounds=3"], "a setting of warm_up=central_images|mixture"),
    ("warm_up.no_such", ["warm_up.no_such=3"], "is not a setting"),
    ("no_such", ["+no_such=3"], "is not a setting"),
    ("privacy.epsilon", ["+privacy.epsilon=1"], "is not a setting"),
    ("partition.no_such", ["+partition.no_such=1"], "is not a setting"),
    ("names", ["+names.method=gone"], "is not a setting"),
    ("method.no_such", ["+method.no_such=1"], "is not a setting"),
    ("epsilon", ["epsilon=1"], "did you mean privacy.target_epsilon or privacy.budget_epsilon?"),
    ("noise", ["noise=secure"], "did you mean privacy.noise?"),
    ("clients", ["clients=5"], "did you mean partition.clients?"),
    ("=3", ["=3"], "write key=value"),
    ("privacy.colluders", ["privacy.colluders=1"], "does not use; set privacy.aggregation"),
    ("method", ["method="], "there is no ''; choose"),
    ("data.path", ["data=folder"], "is not set"),
    ("data.path", ["data=folder", "data.path=/nowhere/at.all"], "does not exist"),
    ("resume", ["resume=/nowhere"], "keeps its settings"),
    ("experiment", ["experiment=dmo"], "did you mean demo"),
]


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert "Traceback" not in captured.err
    return lines[0]


@pytest.mark.parametrize(
    ("key", "overrides", "words"), MISTAKES, ids=[" ".join(m[1]) for m in MISTAKES]
)
def test_a_mistake_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, overrides: list[str], words: str
) -> None:
    place = tmp_path / "run"
    arguments = ["train", *TINY, f"run_dir={place}", *overrides]
    assert cli.run(arguments) == 2
    line = one_line(capsys)
    assert line.startswith(f"fedgen: {key}: "), line
    assert words in line, line
    assert not place.exists(), "nothing is written"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["account", "spend"], "account spend: is not a command; did you mean spent?"),
        (["node", "lo"], "node lo: is not a command; did you mean log?"),
        (["node", "log=2"], "log"),
        (["release", "run=a", "privacy.budget_epsilon=5"], "did you mean budget_epsilon?"),
        (["sample", "run=no-such-place", "out=a.npz"], "run: there is no no-such-place; give a"),
        (["sample", f"run={__file__}", "out=a.npz"], "is not a folder; give a finished run"),
        (["sample", "run=no-such-place", f"out={Path(__file__).parent}"], "tests exists; give a"),
    ],
    ids=" ".join,
)
def test_similar_names_are_suggested(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert cli.run(words) == 2
    assert message in one_line(capsys)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["train", "run_dir=5"], "run_dir"),
        (["train", "resume=5"], "resume"),
        (["sample", "run=5", "out=a.npz"], "run"),
        (["sample", "run=null", "out=a.npz"], "run"),
        (["sample", "run=a", "out=5"], "out"),
        (["report", "runs=a", "out=null"], "out"),
        (["evaluate", "samples=5"], "samples"),
        (["release", "run=a", "out=5"], "out"),
        (["release", "run=a", "out=a.zip", "budget_epsilon=much"], "budget_epsilon"),
        (["benchmark", "run_dir=5"], "run_dir"),
        (["benchmark"], "matrix"),
        (["new", "method", "name=abc", "out=5"], "out"),
        (["new", "method", "name=torch"], "name"),
        (["sample", "run='a\0b'", "out=a.npz"], "run"),
        (["train", "method=${"], "method"),
    ],
    ids=" ".join,
)
def test_values_of_the_wrong_type_are_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], key: str
) -> None:
    assert cli.run(words) == 2
    assert one_line(capsys).startswith(f"fedgen: {key}: ")


@pytest.mark.slow
@given(st.text(st.characters(exclude_characters="\0[]{},'\"$\\", exclude_categories=["C", "Z"])))
def test_names_are_read_as_typed(name: str) -> None:
    """Except for Hydra's grammar, numbers and booleans."""
    name = f"a/{name}"
    assert compose("config", ["data=folder", f"data.path={name}"]).data.path == name
    both = compose("config", ["data=folder", f"data.path=[{name.replace(':', '')},b]"]).data.path
    assert list(both) == [name.replace(":", ""), "b"]


@given(st.lists(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\0"))))
def test_printed_commands_are_quoted_for_a_shell(words: list[str]) -> None:
    assert shlex.split(shell_quote(words)) == words
    assert shell_quote(["a='b c,ö'"]) == """ "a='b c,ö'" """.strip()


def test_quoted_items_of_a_list_are_unchanged() -> None:
    words = ["data=folder", """data.labels=[Übung,日本,"a b",'k=v',"p,q","br[1]","Größe"]"""]
    result = compose("config", words).data.labels
    assert list(result) == ["Übung", "日本", "a b", "k=v", "p,q", "br[1]", "Größe"]


@pytest.mark.parametrize("change", ["is left out", "???"])
@pytest.mark.parametrize("key", ["runtime.timeout", "runtime.type", "privacy.delta", "rounds"])
def test_the_settings_of_a_run_are_complete(
    train: Train, capsys: pytest.CaptureFixture[str], key: str, change: str
) -> None:
    run = train()
    config = OmegaConf.load(run / "config.yaml")
    group, _, name = key.rpartition(".")
    part = OmegaConf.select(config, group) if group else config
    if change == "???":
        part[name] = change
    else:
        del part[name]
    OmegaConf.save(config, run / "config.yaml")
    assert cli.run(["train", f"resume={run}", "rounds=9"]) == 2
    assert one_line(capsys).startswith("fedgen: resume: ")


def test_resuming_a_missing_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["train", f"resume={tmp_path}"]) == 2
    assert "not a run directory" in one_line(capsys)


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("runtime.timeout=5", "requires a runtime"),
        ("seed=5", "keeps its settings"),
        ("runtime.min_success=0.5", "keeps its settings"),
        ("runtime.threads=2", "keeps its settings"),
        ("runtime={min_success:0.5}", "keeps its settings"),
    ],
)
def test_a_resumed_run_keeps_its_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str, words: str
) -> None:
    assert cli.run(["train", f"resume={tmp_path}", word]) == 2
    assert words in one_line(capsys)


def test_corrupt_data(tmp_path: Path, capsys: pytest.CaptureFixture[str], data_root: Path) -> None:
    file = data_root / "mnist.npz"
    file.write_bytes(file.read_bytes()[:5000])
    place = tmp_path / "run"
    command = ["train", *TINY, "data=mnist", f"data.root={data_root}", f"run_dir={place}"]
    assert cli.run(command) == 2
    assert "mnist.npz is not a readable npz file" in one_line(capsys)
    assert not place.exists()


def test_wrong_image_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images, labels = np.zeros((20, 30, 30), np.uint8), np.arange(20) % 2
    np.savez(
        tmp_path / "a.npz",
        train_images=images,
        train_labels=labels,
        test_images=images,
        test_labels=labels,
    )
    command = ["train", *TINY, "data=folder", f"data.path={tmp_path / 'a.npz'}", "data.classes=2"]
    assert cli.run([*command, f"run_dir={tmp_path / 'run'}"]) == 2
    assert one_line(capsys).startswith("fedgen: data: images of 30x30 do not fit")


def test_missing_data_without_a_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision.datasets import mnist

    def unreachable(*_: object, **__: object) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(mnist, "download_and_extract_archive", unreachable)
    command = ["train", *TINY, "data=fashion_mnist", f"data.root={tmp_path}"]
    assert cli.run([*command, f"run_dir={tmp_path / 'run'}"]) == 2
    assert one_line(capsys).startswith("fedgen: data.root: FashionMNIST is not in")
    for name in ("femnist", "celeba"):
        command = ["train", *TINY, f"data={name}", f"data.root={tmp_path}"]
        assert cli.run([*command, f"run_dir={tmp_path / 'run'}"]) == 2
        assert one_line(capsys).startswith("fedgen: data.root: ")


def test_an_existing_run_directory_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    assert cli.run(["train", *TINY, f"run_dir={tmp_path}"]) == 2
    line = one_line(capsys)
    assert line.startswith("fedgen: run_dir: ")
    assert "resume=" in line
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("harm", ["cut", "alter", "cut server", "alter server", "lose server"])
def test_a_damaged_checkpoint_is_refused(
    train: Train, capsys: pytest.CaptureFixture[str], harm: str
) -> None:
    run = train()
    folder = run / "checkpoints"
    file = next(folder.glob("server_*")) if "server" in harm else folder / "checkpoint.json"
    data = file.read_bytes()
    if harm.startswith("cut"):
        file.write_bytes(data[: len(data) // 2])
    elif harm.startswith("alter"):
        file.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    else:
        file.unlink()
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    capsys.readouterr()
    assert cli.run(["train", f"resume={run}"]) == 2
    line = one_line(capsys)
    assert file.name in line
    assert "altered" in line or "missing" in line
    after = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    assert after == before, "nothing is lost"


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("run.json", lambda text: "{}", "not a run directory"),
        ("run.json", lambda text: text.replace('"cpu"', '"cuda"'), "began on cuda"),
        ("config.yaml", lambda text: text + "\n{[", "not a run directory"),
        ("config.yaml", lambda text: text.replace("clip: 1.0", "clip: 9.0"), "was altered"),
        ("clients/0/ledger.jsonl", lambda text: None, "ledger of client 0 is missing"),
        ("clients/0/ledger.jsonl", lambda text: text.split("\n")[0] + "\n", "lacks releases"),
        ("clients/0/ledger.jsonl", lambda text: "\xff\xfe", "a different run"),
        ("metrics.jsonl", lambda text: text[:-5] + "\n", "truncated or altered"),
        ("checkpoints/checkpoint.json", lambda text: None, "is missing"),
    ],
)
def test_a_damaged_run_is_refused(
    train: Train, capsys: pytest.CaptureFixture[str], file: str, change: object, words: str
) -> None:
    assert callable(change)
    run = train()
    text = change((run / file).read_text())
    if text is None:
        (run / file).unlink()
    else:
        (run / file).write_text(text, encoding="latin-1")
    public = {p: p.read_bytes() for p in (run / "public").iterdir()}
    capsys.readouterr()
    assert cli.run(["train", f"resume={run}"]) == 2
    assert words in one_line(capsys)
    assert {p: p.read_bytes() for p in (run / "public").iterdir()} == public


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("failures.jsonl", "[1]\n"),
        ("failures.jsonl", "{}\n"),
        ("failures.jsonl", '{"kind": "late", "client": 1e999}\n'),
        ("rounds_begun.txt", '"x"\n'),
        ("rounds_begun.txt", "1e999\n"),
    ],
)
def test_a_log_with_other_content_is_refused(
    train: Train, capsys: pytest.CaptureFixture[str], file: str, text: str
) -> None:
    run = train()
    (run / file).write_text(text)
    capsys.readouterr()
    assert cli.run(["train", f"resume={run}"]) == 2
    assert f"{file}: was altered" in one_line(capsys)


@pytest.mark.parametrize("name", ["metrics.jsonl", "clients/0/manifest.json"])
def test_a_folder_in_place_of_a_file_is_refused(
    train: Train, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    run = train()
    (run / name).unlink(missing_ok=True)
    (run / name).mkdir()
    capsys.readouterr()
    assert cli.run(["train", f"resume={run}"]) == 2
    assert name.split("/")[-1] in one_line(capsys)


def test_an_infinite_second_bound_is_null_in_json(train: Train) -> None:
    """At a delta near its rounding the second bound is infinite, which JSON cannot represent."""
    run = train("method=dpgan_small", "privacy.delta=1e-12", "rounds=2")
    view = json.loads((run / "privacy.json").read_text())["views"]["server"]
    assert 0 < view["epsilon"] <= 10


def invert(file: Path) -> None:
    """Write other data of the same shape."""
    with np.load(file) as archive:
        arrays = dict(archive)
    arrays["train_images"] = 255 - arrays["train_images"]
    np.savez(file, **arrays)


def test_a_mistyped_command_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["trian"]) == 2
    assert one_line(capsys).startswith("fedgen: trian: is not a command; did you mean train?")


def test_other_data_does_not_resume(
    train: Train, data_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train("data=mnist", f"data.root={data_root}")
    invert(data_root / "mnist.npz")
    capsys.readouterr()
    assert cli.run(["train", f"resume={run}"]) == 2
    assert "different data" in one_line(capsys)


def test_two_processes_cannot_resume_one_run(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both would spend the remaining budget."""
    run = train()
    code = (
        "import fcntl, sys, time; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_EX);"
        "print('in', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(run / "config.yaml")], stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        capsys.readouterr()
        assert cli.run(["train", f"resume={run}"]) == 2
        assert "in use by another process" in one_line(capsys)
        other.kill()


def test_an_altered_ledger(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    run = train()
    ledger = run / "clients" / "0" / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace('"run": "', '"run": "x'))
    capsys.readouterr()
    assert cli.run(["train", f"resume={run}"]) == 2
    assert "belongs to a different run" in one_line(capsys)


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    output = capsys.readouterr().out
    assert re.fullmatch(r"fedgen \d+\.\d+\.\d+\n", output)
    as_module = [sys.executable, "-m", "fedgen", "--version"]
    assert subprocess.run(as_module, capture_output=True, text=True, check=True).stdout == output


def test_samples_as_a_grid_and_as_a_folder(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``data=folder`` reads the folder; the same seed draws the same images."""
    run, file, folder = train(), tmp_path / "s.npz", tmp_path / "drawn"
    words = ["sample", f"run={run}", "n=30", "labels=[3,5]"]
    for out in (file, folder, tmp_path / "grid.png"):
        assert cli.run([*words, f"out={out}"]) == 0
    with np.load(file) as result:
        images, labels = result["images"], result["labels"]
    assert (
        set(labels) == {3, 5} == {int(place.name) for place in folder.iterdir() if place.is_dir()}
    )
    for path in folder.rglob("*.png"):
        assert (np.asarray(Image.open(path)) == images[int(path.stem)][0]).all()
        assert int(path.parent.name) == labels[int(path.stem)]
    assert Image.open(tmp_path / "grid.png").size == (10 * 34, 3 * 34)
    read = compose("config", ["data=folder", f"data.path={folder}"])
    assert 24 <= len(dataset(read).images) < 30  # others are the test split
    for more, key in [
        ([f"out={folder}"], "out"),
        (["out=a.npz", "labels=[10]"], "labels"),
        (["out=a.npz", "labels=[]"], "labels"),
        (["out=a.npz", "labels=3"], "labels"),
    ]:
        capsys.readouterr()
        assert cli.run([*words, *more]) == 2
        assert one_line(capsys).startswith(f"fedgen: {key}: ")


@kills("fedgen/reporting/figures.py", "    if synthetic:\n", "    if not synthetic:\n")
def test_samples_are_marked_as_synthetic_and_real_images_are_not(
    train: Train, tmp_path: Path
) -> None:
    """By the term of IPTC for generated media, as the EU's AI Act (Article 50) requires a mark
    that machines can read. A picture of samples next to real images has none."""
    run = train("evaluation=quick", "evaluation.samples=40", "evaluation.leakage=true")

    def digital_source_type(path: Path) -> str | None:
        xmp = Image.open(path).info.get("XML:com.adobe.xmp")
        if xmp is None:
            return None
        [description] = ElementTree.fromstring(xmp.encode()).iter(f"{{{RDF}}}Description")
        return description.get(f"{{{IPTC}}}DigitalSourceType")

    for out in ("samples.npz", "grid.png", "folder", "samples.parquet"):
        assert cli.run(["sample", f"run={run}", "n=20", f"out={tmp_path / out}"]) == 0
    pictures = [run / "public" / "samples.png", tmp_path / "grid.png"]
    pictures += sorted((tmp_path / "folder").rglob("*.png"))
    assert len(pictures) == 22
    assert {digital_source_type(path) for path in pictures} == {DIGITAL_SOURCE_TYPE}
    with np.load(tmp_path / "samples.npz") as file:
        assert str(file["digital_source_type"]) == DIGITAL_SOURCE_TYPE
    table = parquet.read_table(tmp_path / "samples.parquet")
    assert table.schema.metadata[b"digital_source_type"].decode() == DIGITAL_SOURCE_TYPE
    [image, *_] = table["image"].to_pylist()
    (tmp_path / "row.png").write_bytes(image["bytes"])
    assert digital_source_type(tmp_path / "row.png") == DIGITAL_SOURCE_TYPE
    assert digital_source_type(run / "evaluation" / "nearest.png") is None


def test_label_names_are_published_unless_hidden(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for label in ("well", "Ill"):
        (tmp_path / "in" / label).mkdir(parents=True)
        for i in range(20):
            Image.new("L", (8, 8), i).save(tmp_path / "in" / label / f"{label}{i}.png")
    words = ["method=dpgan_small", "data=folder", f"data.path={tmp_path / 'in'}"]
    words += ["data.public_rows=40"]
    result = train(*words, "data.labels=[well,Ill]", name="named")
    untold = train(*words, "data.names=false", name="untold")
    assert fedgen.load(result).labels == ["well", "Ill"]
    assert fedgen.load(train(*words, name="own")).labels == ["Ill", "well"]
    assert fedgen.load(untold / "public").labels is None
    assert "2 labels (well, Ill)" in (result / "public" / "README.md").read_text()
    for place in (untold / "public").iterdir():
        assert b"Ill" not in place.read_bytes()
    assert set(fedgen.load(result).samples(9, ["Ill"]).labels) == {1}
    draw = ["sample", f"run={result}", "n=30"]
    assert cli.run([*draw, "labels=[Ill,0]", f"out={tmp_path / 'out'}"]) == 0
    written = {place.name for place in (tmp_path / "out").iterdir()}
    assert written == {"well", "Ill", "README.md", "croissant.json"}
    capsys.readouterr()
    assert cli.run([*draw, "labels=[ill]", f"out={tmp_path / 'other'}"]) == 2
    assert "0 to 1, or well, Ill; got ill" in one_line(capsys)
    path = result / "public" / "generator.json"
    whole = path.read_text()
    for bad in (
        '["well"]',
        '["well", "../Ill"]',
        '["well", "WELL"]',
        '["well", ""]',
        '"ab"',
        "[0, 1]",
    ):
        path.write_text(re.sub(r'"labels": \[[^]]*\]', f'"labels": {bad}', whole))
        capsys.readouterr()
        assert cli.run([*draw, f"out={tmp_path / 'other'}"]) == 2
        assert one_line(capsys).startswith("fedgen: run: ")
        assert not (tmp_path / "other").exists()


def test_label_names_take_precedence_over_numbers() -> None:
    assert [_number(each, 3, ["1", "2", "3"]) for each in (1, "2", 3, 0)] == [0, 1, 2, 0]


def test_a_method_without_a_function(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["train", *TINY, "method={foo: 1}"]) == 2
    assert one_line(capsys).startswith("fedgen: method")


@pytest.mark.parametrize(
    "labels", ["[a/b,c]", "[a,A]", "['',b]", "[.,b]", "3", "true", "ab", "[1,null]"]
)
def test_unknown_names_are_refused(
    labels: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(
        tmp_path / "x.npz",
        train_images=np.zeros((9, 8, 8), np.uint8),
        train_labels=np.arange(9) % 2,
        test_images=np.zeros((9, 8, 8), np.uint8),
        test_labels=np.arange(9) % 2,
    )
    words = ["train", "data=folder", f"data.path={tmp_path / 'x.npz'}", "rounds=1"]
    assert cli.run([*words, f"data.labels={labels}"]) == 2
    assert one_line(capsys).startswith("fedgen: data.labels: ")
    assert cli.run([*words, "data.labels=[a,b]", "data.classes=3"]) == 2
    assert one_line(capsys).startswith("fedgen: data.classes: is 3, of 2 labels")


@pytest.mark.slow
def test_sample_and_evaluate(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train()
    out = tmp_path / "samples.npz"
    assert cli.run(["sample", f"run={run}", "n=25", f"out={out}"]) == 0
    with np.load(out) as file:
        assert file["images"].shape == (25, 1, 8, 8)
        assert file["images"].dtype == np.uint8
        assert file["labels"].shape == (25,)
    command = ["evaluate", f"run={run}", "evaluation.samples=200", "evaluation.seeds=2"]
    assert cli.run(command) == 0
    results = json.loads((run / "results.json").read_text())
    assert set(results["gen2real"]) == set(results["real2real"]) == {"cnn", "logistic_regression"}
    assert results["gen2real"]["cnn"]["n"] == 200
    assert results["real2real"]["logistic_regression"]["mean"] > 0.7
    capsys.readouterr()
    for command, key in [
        (["sample", f"run={run}", f"out={out}", "n=0"], "n"),
        (["sample", f"run={run}", "out=a.txt"], "out"),
        (["sample", f"run={run}", f"out={run}/config.yaml/s.npz"], "out"),
        (["sample", f"run={run}", f"out={tmp_path}/{300 * 'x'}.npz"], "out"),
        (["sample", f"run={tmp_path / 'no'}", f"out={out}"], "run"),
        (["sample", f"out={out}"], "run"),
        (["evaluate", "-m", f"run={run}"], "-m"),
        (["mample"], "mample"),
    ]:
        assert cli.run(command) == 2
        assert one_line(capsys).startswith(f"fedgen: {key}: ")


LEAKS = ["evaluation.leakage=true", "evaluation.judge=false"]
QUICK = ["evaluation=quick", "evaluation.samples=200", "evaluation.classifiers.cnn.epochs=1"]


def everything(run: Path) -> tuple[str, set[str]]:
    """Return all files of a run's evaluation."""
    return (run / "results.json").read_text(), {p.name for p in (run / "evaluation").iterdir()}


@pytest.mark.slow
def test_an_evaluation_survives_later_commands(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resume of the finished run, and an evaluation that fails."""
    run = train("partition=iid", "partition.clients=10", "group=[0,3]")
    assert cli.run(["evaluate", f"run={run}", *QUICK, *LEAKS]) == 0
    result, pictures = everything(run)
    config = OmegaConf.load(run / "config.yaml")
    rows = sum(len(shard) for shard in setup(config).shards)
    judged = json.loads(result)
    assert judged["memorization"]["train"] == rows  # of the two clients that took part
    assert judged["membership"]["members"] <= rows
    assert pictures == {"nearest.png", "distances.png"}
    assert cli.run(["train", f"resume={run}"]) == 0
    after = json.loads((run / "results.json").read_text())
    assert {n: after[n] for n in JUDGED if n in after} == {
        n: judged[n] for n in JUDGED if n in judged
    }
    result = everything(run)[0]
    capsys.readouterr()
    few = ["evaluation=full", "evaluation.samples=4", "evaluation.judge=false"]
    assert cli.run(["evaluate", f"run={run}", *few, "evaluation.fid=false"]) == 2
    assert "cannot learn from 4" in capsys.readouterr().err
    assert everything(run) == (result, pictures)


def test_a_run_is_not_evaluated_on_other_data(
    train: Train, data_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train("data=mnist", f"data.root={data_root}")
    invert(data_root / "mnist.npz")
    before = (run / "results.json").read_text()
    capsys.readouterr()
    assert cli.run(["evaluate", f"run={run}"]) == 2
    assert one_line(capsys).startswith("fedgen: run: ")
    assert (run / "results.json").read_text() == before


ONE_POINT = ["matrix=digits", "methods=[dp_merf]", "epsilons=[10]", "seeds=[0]"]


@pytest.mark.parametrize(
    ("command", "key"),
    [
        (["sample", "run={run}", "n=1", "out={tmp}/s.npz", f"seed={10**40}"], "seed"),
        (["evaluate", "run={run}", f"seed={10**40}"], "seed"),
        (["debug", "experiment=femnist_debug_small", f"seed={10**40}"], "seed"),
        (["debug", "experiment=femnist_debug_small", "corruption.fraction=nan"], "corruption"),
        (["debug", "experiment=femnist_debug_small", "rounds=0"], "rounds"),
        (["debug", "experiment=femnist_debug_small", "held_out=-1"], "held_out"),
        (["audit", "audit.releases=0", "audit.canaries=0"], "audit.releases"),
        (["benchmark", "matrix=digits", "epsilons=[abc]"], "epsilons.0"),
        (["benchmark", *ONE_POINT, "run_dir={run}/config.yaml"], "run_dir"),
        (["benchmark", *ONE_POINT, "run_dir=/proc/no"], "run_dir"),
    ],
)
def test_mistakes_of_other_commands_are_one_line(
    command: list[str],
    key: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("rounds: 1\n")
    assert cli.run([word.format(run=run, tmp=tmp_path) for word in command]) == 2
    assert one_line(capsys).startswith(f"fedgen: {key}")


def test_the_public_folder_alone_draws_the_same_samples(
    train: Train, tmp_path: Path, data_root: Path
) -> None:
    """``public/`` needs neither data nor other files of the run."""
    run = train("data=mnist", f"data.root={data_root}", "partition=by_writer")
    handed = tmp_path / "handed"
    shutil.copytree(run / "public", handed)
    (data_root / "mnist.npz").unlink()
    for place, out in ((run, "a.npz"), (handed, "b.npz")):
        assert cli.run(["sample", f"run={place}", "n=12", f"out={tmp_path / out}"]) == 0
    with np.load(tmp_path / "a.npz") as first, np.load(tmp_path / "b.npz") as second:
        assert np.array_equal(first["images"], second["images"])
        assert first["images"].shape == (12, 1, 28, 28)


@pytest.mark.parametrize(
    ("key", "word", "words"),
    [
        ("method.fakes", "method.fakes=5", "even"),
        ("method.accuracy_floor", "method.accuracy_floor=60", "must be at most 1"),
        ("method.discriminator_steps", "method.discriminator_steps=true", "a number or adaptive"),
        ("method.discriminator_steps", "method.discriminator_steps=often", "a number or adaptive"),
    ],
)
def test_a_mistake_about_dpgan_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, word: str, words: str
) -> None:
    small = ["method=dpgan_small", *tiny("dpgan_small"), "method.mode_seeking=1"]
    assert cli.run(["train", *small, word, f"run_dir={tmp_path / 'run'}"]) == 2
    line = one_line(capsys)
    assert line.startswith(f"fedgen: {key}: "), line
    assert words in line, line
    assert not (tmp_path / "run").exists()


def test_a_sweep_with_a_mistake_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "-m", *TINY, "privacy.delta=1e-5,5", f"run_dir={tmp_path / 'sweep'}"]
    assert cli.run(command) == 2
    assert one_line(capsys).startswith("fedgen: privacy.delta: ")
    assert not (tmp_path / "sweep").exists()


def test_an_unfinished_run_has_no_samples(
    train: Train, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = train()
    (run / "public" / "generator.safetensors").unlink()
    capsys.readouterr()
    assert cli.run(["sample", f"run={run}", f"out={tmp_path / 'a.npz'}"]) == 2
    assert "resume=" in one_line(capsys)


@pytest.mark.slow
def test_sweeps_run_every_combination(tmp_path: Path) -> None:
    place = tmp_path / "sweep"
    command = ["train", "-m", *TINY, "seed=0,1", "method.clip=1.0,2.0", f"run_dir={place}"]
    assert cli.run(command) == 0
    seeds = [json.loads((place / str(i) / "results.json").read_text())["seed"] for i in range(4)]
    assert sorted(seeds) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("words", "runtime"),
    [
        ([], "in_process"),
        (["partition=iid"], "in_process"),
        (["partition=iid", "partition.clients=21"], "ray"),
        (["partition=iid", "runtime.actors=2"], "ray"),
        (["partition=by_folder"], "in_process"),
        (["runtime=auto", "partition=by_writer"], "ray"),
        (["partition=iid", "runtime=flower"], "flower"),
        (["experiment=mnist_writers"], "ray"),
        (["experiment=femnist_debug_small"], "in_process"),  # as the experiment has it
        (["experiment=femnist_debug_small", "runtime=ray"], "ray"),
    ],
)
def test_the_runtimes_of_clients(words: list[str], runtime: str) -> None:
    assert compose("config", [*words, "run_dir=x"]).names.runtime == runtime


def test_cfg_prints_and_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "run"
    assert cli.run(["train", "--cfg", "rounds=7", f"run_dir={place}"]) == 0
    assert "rounds: 7" in capsys.readouterr().out
    assert not place.exists()


@pytest.mark.parametrize("words", [[], ["partition=iid", "partition.clients=5"]])
def test_account_predicts_the_cost_of_a_run(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """If every client responds to every query sample, a run spends its whole budget."""
    before = list(tmp_path.iterdir())
    assert cli.run(["account", *TINY, *words, "output=json"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert list(tmp_path.iterdir()) == before
    privacy = json.loads((train(*words) / "privacy.json").read_text())
    assert row["server_epsilon"] == privacy["views"]["server"]["epsilon"]
    assert row["release_epsilon"] == privacy["views"]["release"]["epsilon"]
    assert row["noise_multiplier"] == privacy["noise_multiplier"]
    assert row["steps"] == privacy["rounds"]


def test_account_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["partition=iid", "partition.clients=40", "method.routing=per_sample"]
    assert cli.run(["account", *TINY, *words]) == 0
    text = capsys.readouterr().out
    assert "not amplified: the server knows the cohort" in text
    assert "amplified by the secret sample of 1 of 40 clients" in text
    assert "its formula would claim" in text
    assert cli.run(["account", "method=dp_merf_small", "privacy.noise=secure"]) == 0
    assert "(1 queries clients)" in capsys.readouterr().out
    assert cli.run(["account", "output=xml"]) == 2
    assert "words or json" in one_line(capsys)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["train", "evaluation=quick"], "evaluation"),
        (["audit", "evaluation=none", "audit.canaries=10"], "audit.canaries"),
    ],
)
def test_a_run_for_release_evaluates_nothing_on_private_data(
    words: list[str], key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *rest = words
    place = tmp_path / "run"
    secure = ["privacy.noise=secure", f"run_dir={place}"]
    assert cli.run([command, *TINY, *rest, *secure]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"fedgen: {key}: ")
    assert not place.exists()


def test_a_run_for_release_is_not_evaluated_later_either(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train("privacy.noise=secure", "rounds=1")
    assert cli.run(["evaluate", f"run={run}"]) == 2
    error = capsys.readouterr().err
    assert "has secret noise" in error and "fedgen evaluate samples=FILE.npz" in error
    text = (run / "public" / "PRIVACY.md").read_text()
    assert "not for release" not in text
    for head in ("What is protected", "Against whom", "How strongly", "What is not covered"):
        assert f"## {head}" in text


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_each_command_has_its_own_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([command, "--help"]) == 0
    output = capsys.readouterr().out
    lines = [line for line in output.splitlines() if line.startswith("  fedgen ")]
    assert len(lines) >= 2 and all(line.startswith(f"  fedgen {command} ") for line in lines)
    assert "--cfg" in lines[-1]
    trains = command in ("train", "account", "audit", "check", "data", "debug", "tune")
    assert ("privacy.target_epsilon" in output) == trains


def test_paths_may_start_with_a_tilde(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Shells do not expand it within a word, or within quotes."""
    monkeypatch.setenv("HOME", str(tmp_path))
    result = compose("config", ["run_dir=~/runs/1", "data=folder", "data.path=[~/a,b]"])
    assert result.run_dir == f"{tmp_path}/runs/1"
    assert list(result.data.path) == [f"{tmp_path}/a", "b"]
    assert compose("config", ["run_dir='~/runs'"]).run_dir == "~/runs"


@pytest.mark.parametrize("arguments", [["--help"], ["train", "method.clp=1"], ["train", "data=x"]])
def test_help_and_mistakes_load_nothing_slow(arguments: list[str]) -> None:
    """Fast because torch is not loaded; the loaded modules are tested, the time is printed."""
    code = (
        "import sys; from fedgen import cli; cli.run(sys.argv[1:]);"
        "sys.exit(3 if {'torch', 'flwr', 'ray', 'scipy', 'matplotlib'} & set(sys.modules) else 0)"
    )
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    print(f"{' '.join(arguments)}: {time.perf_counter() - begin:.2f} s")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_training_in_process_loads_only_what_it_uses(tmp_path: Path) -> None:
    code = (
        "import sys; from fedgen import cli; assert cli.run(sys.argv[1:]) == 0;"
        "bad = {'ray', 'opacus', 'torchvision', 'sklearn', 'pandas', 'pytorch_fid',"
        " 'flwr.simulation', 'datasets'} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "train", *TINY, f"run_dir={tmp_path / 'run'}"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    shutil.rmtree(tmp_path / "run")


@pytest.mark.parametrize(
    "words",
    ["sample run=x method=dpgan", "release run=x evaluation=none", "benchmark method=dpgan"],
)
def test_groups_of_other_commands_are_refused(
    capsys: pytest.CaptureFixture[str], words: str
) -> None:
    assert cli.run(words.split()) == 2
    assert "is not a setting" in one_line(capsys)


def test_hints_refer_to_the_chosen_method(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["account", "method=mixture_small", "method.private_clasifier=none"]) == 2
    assert (
        "method.private_clasifier: is not a setting; did you mean method.private_classifier?"
        in capsys.readouterr().err
    )


def test_nothing_runs_without_locks_for_ledgers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("os.name", "nt")
        assert cli.run(["train"]) == 2
        with pytest.raises(FedgenError, match="WSL 2"):
            fedgen.__getattr__("train")
    assert capsys.readouterr().err.startswith("fedgen: Windows: does not support the file locks")
