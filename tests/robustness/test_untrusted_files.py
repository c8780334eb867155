"""Untrusted files are data: no content is called, followed, or used unchecked."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import operator
import os
import shlex
import shutil
import struct
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import yaml
from hostile import content
from mutation import kills
from omegaconf import DictConfig, OmegaConf
from tiny import TINY, tiny

import fedgen
from fedgen import cli
from fedgen.config.build import build
from fedgen.errors import FedgenError
from fedgen.evaluation.utility import scikit
from fedgen.federation import checkpoint
from fedgen.run.resume import _settings_digest
from fedgen.storage.io import digest, parse_json, read_yaml

Captured = pytest.CaptureFixture[str]
CALL = {"type": "torch.utils.collect_env.run"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, which no test changes."""
    place = tmp_path_factory.mktemp("finished") / "run"
    words = [*TINY, "partition=iid", "partition.clients=3", "rounds=2", f"run_dir={place}"]
    assert cli.run(["train", *words]) == 0
    return place


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(finished, tmp_path / "handed" / "run"))


def refused(capsys: Captured, *words: str) -> str:
    """Return the line with which a command refuses."""
    capsys.readouterr()
    assert cli.run(list(words)) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1, error
    return error[0]


def change(path: Path, edit: Callable[[Any], None]) -> None:
    """Edit a JSON or YAML file in place."""
    text = path.read_text()
    record = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    edit(record)
    path.write_text(json.dumps(record) if path.suffix == ".json" else yaml.safe_dump(record))


# Nothing in a file is called


@pytest.mark.parametrize("word", ["name", "type"])
def test_a_generator_can_name_only_parts_of_fedgen(
    word: str, run: Path, tmp_path: Path, capsys: Captured
) -> None:
    owned = tmp_path / "owned"
    call = {word: CALL["type"], "command": f"touch {owned}"}
    change(
        run / "public" / "generator.json", lambda record: record["method"].update(generator=call)
    )
    before = content(run)
    for command in (["sample", "n=10", f"out={tmp_path}/s.npz"], ["evaluate"]):
        assert "run" in refused(capsys, command[0], f"run={run}", *command[1:])
    assert not owned.exists()
    assert content(run) == before


@kills(
    "fedgen/config/registry.py",
    "    if (isinstance(value, str) and value in choices) or is_extension(value):",
    "    if True:",
)
@pytest.mark.parametrize("command", [["evaluate", "run="], ["train", "resume="]])
@pytest.mark.parametrize("group", ["data", "method", "partition", "runtime"])
def test_settings_of_a_run_can_call_only_parts_of_fedgen(
    command: list[str], group: str, run: Path, tmp_path: Path, capsys: Captured
) -> None:
    owned = tmp_path / "owned"
    call = CALL | {"command": f"touch {owned}"}
    change(run / "config.yaml", lambda record: record[group].update(extra=call))
    before = content(run)
    result = refused(capsys, command[0], f"{command[1]}{run}")
    assert f"({group}.extra.type" in result and "FEDGEN_EXTENSIONS" in result
    assert not owned.exists()
    assert content(run) == before


OUT_OF_PLACE = {
    "data.extra": {"type": "tensorboard", "name": "x", "rounds": 0},
    "partition.extra": {"type": "hugging_face", "path": "a/b"},
    "runtime.extra": {
        "type": "ray",
        "address": "127.0.0.1:1",
    },
    "runtime": {"type": "folder"},
    "data": {"type": "ray", "address": "127.0.0.1:1"},
    "method.generator": {"type": "hugging_face", "path": "a/b"},
}


def signed(run: Path) -> None:
    """Update the digest of a run's settings: it is not a signature."""
    config = OmegaConf.load(run / "config.yaml")
    assert isinstance(config, DictConfig)
    change(run / "run.json", lambda record: record.update(settings=_settings_digest(config)))


@kills(
    "fedgen/config/registry.py",
    "return REGISTRY.get(group_of(place), {})",
    "return {word: name for each in REGISTRY.values() for word, name in each.items()}",
)
@kills(
    "fedgen/config/registry.py",
    "REGISTRY.get(group_of(place), {})",
    "REGISTRY[group_of(place).partition('.')[0]]",
)
@pytest.mark.parametrize(
    "command", [["sample", "run="], ["evaluate", "run="], ["train", "resume="]]
)
@pytest.mark.parametrize("key", OUT_OF_PLACE)
def test_settings_of_a_run_can_call_parts_only_in_their_group(
    command: list[str], key: str, run: Path, tmp_path: Path, capsys: Captured
) -> None:
    call = {**OUT_OF_PLACE[key], "place": str(tmp_path / "owned")}

    def edit(record: Any) -> None:
        *inside, last = key.split(".")
        reduce(operator.getitem, inside, record)[last] = call

    change(run / "config.yaml", edit)
    signed(run)
    shutil.rmtree(run / "public")  # a run that is not over is sampled by its settings
    (run / "results.json").unlink()
    before = content(run)
    words = ["n=10", f"out={tmp_path}/s.npz"] if command[0] == "sample" else []
    result = refused(capsys, command[0], f"{command[1]}{run}", *words)
    assert "cannot be" in result or "altered" in result
    assert not (tmp_path / "owned").exists()
    assert content(run) == before


ESCAPED = "\\${oc.create:{type: torch.utils.collect_env.run, command: 'touch OWNED'}}"


@pytest.mark.parametrize(
    "command", [["sample", "run="], ["evaluate", "run="], ["train", "resume="]]
)
@pytest.mark.parametrize("text", [ESCAPED, "x\\${oc.env:HOME}", "${oc.env:HOME}", ESCAPED[1:]])
def test_interpolations_in_a_file_are_refused(
    command: list[str], text: str, run: Path, tmp_path: Path, capsys: Captured
) -> None:
    """Hydra resolves strings when it calls a function, so a backslash would not protect them."""
    owned = tmp_path / "owned"
    shown = text.replace("OWNED", str(owned))
    change(run / "config.yaml", lambda record: record["data"].update(root=shown))
    if text.startswith("\\") or "x" in text[:1]:
        signed(run)
    shutil.rmtree(run / "public")
    (run / "results.json").unlink()
    before = content(run)
    words = ["n=10", f"out={tmp_path}/s.npz"] if command[0] == "sample" else []
    refused(capsys, command[0], f"{command[1]}{run}", *words)
    assert not owned.exists()
    assert content(run) == before


@kills(
    "fedgen/config/registry.py",
    '        if isinstance(value, str) and "${" in value:',
    "        if False:",
)
@pytest.mark.parametrize("text", [ESCAPED, "x\\${oc.env:HOME}", "${oc.env:HOME}"])
def test_settings_are_not_resolved_twice(text: str, tmp_path: Path) -> None:
    settings = {"type": "digits", "root": text.replace("OWNED", "owned")}
    with pytest.raises(FedgenError, match=r"data.root: contains \$\{"):
        build(settings, "data")
    with pytest.raises(FedgenError, match="_args_"):
        build({"type": "digits", "_args_": [1]}, "data")
    for call in ({"_args_": []}, {"_args_": {"_partial_": 1}}, {"_recursive_": {}}):
        with pytest.raises(FedgenError, match="is not a setting"):
            build({"type": "digits", **call}, "data")


@kills(
    "fedgen/config/compose.py",
    "            if not is_group or not isinstance",
    "            if not isinstance",
)
@pytest.mark.parametrize(
    "names",
    [{"hydra.searchpath": "[pkg://this]"}, {"data": "../../x"}, {"data": "[digits]"}, {"x": "y"}],
)
@pytest.mark.parametrize("command", [["evaluate", "run="], ["train", "resume="]])
def test_names_are_options_and_not_hydra_syntax(
    command: list[str], names: dict[str, str], run: Path, capsys: Captured
) -> None:
    sys.modules.pop("this", None)
    change(run / "config.yaml", lambda record: record["names"].update(names))
    signed(run)
    before = content(run)
    assert "another version (names." in refused(capsys, command[0], f"{command[1]}{run}")
    assert "this" not in sys.modules
    assert content(run) == before


@kills(
    "fedgen/run/resume.py",
    "        or (name in method_settings and value is None)",
    "        or True",
)
@pytest.mark.parametrize(
    "value",
    [
        {"logger": {"uri": "http://127.0.0.1:1"}},
        {"names.logger": "mlflow"},
        {"rounds": "1"},
        {"method.latent": 1},
        {"method.strategy": None},
        {"method.type": None},
        {"method.generator.width": None},
        {"method.betas.9": None},
        [],
    ],
)
def test_derived_settings_are_numbers(value: Any, run: Path, capsys: Captured) -> None:
    change(run / "run.json", lambda record: record.update(left_open=value))
    out = run.parent / "out.zip"
    assert "run.json was altered" in refused(capsys, "release", f"run={run}", f"out={out}")
    assert not out.exists()


@kills("fedgen/run/resume.py", '    if config.get("resume") is not None:', "    if False:")
def test_a_directory_cannot_name_another_run(run: Path, finished: Path, capsys: Captured) -> None:
    """Otherwise another run than the inspected one would be resumed and packed."""
    change(run / "config.yaml", lambda record: record.update(resume=str(finished), rounds=5))
    signed(run)
    before, out = content(finished), run.parent / "out.zip"
    for words in (["release", f"run={run}", f"out={out}"], ["train", f"resume={run}"]):
        assert "config.yaml was altered (resume)" in refused(capsys, *words)
    assert content(finished) == before and not out.exists()


LATE_ERROR = "epsilons=[1e-9]"  # found only after the matrix is read
OTHERS: dict[str, dict[str, Any]] = {
    "data": {"type": "folder", "path": "x"},
    "partition": {"type": "dirichlet", "clients": 2},
    "method": {"type": "dp_merf"},
    "runtime": {"type": "ray"},
    "warm_up": {"method": {"type": "dp_merf"}},
    "method.loss": {"_partial_": True},
    "method.generator": {"width": "???"},
    "names": {"method": 1},
    "audit": {"canaries": "x"},
}


@kills(
    "fedgen/config/compose.py",
    "            if type_name != type_at(default, place) and not is_extension(type_name):",
    "            if False:",
)
@pytest.mark.parametrize("place", OTHERS)
def test_settings_must_match_their_names(place: str, run: Path, capsys: Captured) -> None:
    def edit(record: Any) -> None:
        group, _, inside = place.partition(".")
        settings = record.setdefault(group, {})
        (settings.setdefault(inside, {}) if inside else settings).update(OTHERS[place])

    change(run / "config.yaml", edit)
    signed(run)
    for words in (["evaluate", f"run={run}"], ["train", f"resume={run}"]):
        result = refused(capsys, *words)
        assert place.partition(".")[0] in result
        assert "differs from" in result or "type" not in OTHERS[place]


def test_no_remedy_is_given_for_a_foreign_folder(tmp_path: Path, capsys: Captured) -> None:
    """Removing its links or sockets would break other programs."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to(tmp_path)
    place = f"{tmp_path}/folder"
    for words in (["train", f"resume={place}"], ["report", f"runs={place}"]):
        assert "folder is not a run directory; give a directory" in refused(capsys, *words)
    for words in (
        ["sample", f"run={place}", "n=1"],
        ["report", f"runs={place}", "audience=public"],
    ):
        assert "link" not in refused(capsys, *words)


def test_reformatted_text_is_accepted(run: Path, tmp_path: Path, capsys: Captured) -> None:
    change(run / "run.json", lambda record: record.update(run="\ud800"))
    words = ["report", f"runs=[{run}]", f"out={tmp_path}/page.html"]
    assert "is not a run directory" in refused(capsys, *words)
    assert parse_json('["\\ud83d\\ude00"]') == ["\N{GRINNING FACE}"]


@kills(
    "fedgen/storage/run_dir.py",
    '        if results["epsilon"] != {name:',
    "        if False and {name:",
)
@pytest.mark.parametrize("name", ["privacy", "results"])
def test_a_lower_epsilon_is_detected(
    name: str, run: Path, tmp_path: Path, capsys: Captured
) -> None:
    def edit(record: Any) -> None:
        if name == "results":
            record["epsilon"]["server"] = 0.1
        else:
            record["views"]["server"]["epsilon"] = 0.1

    result = {
        "privacy": "privacy.json was changed after the run wrote it",
        "results": "different ε",
    }
    change(run / f"{name}.json", edit)
    for words in (
        ["evaluate", f"run={run}"],
        ["report", f"runs=[{run}]", f"out={tmp_path}/p.html"],
    ):
        assert result[name] in refused(capsys, *words)
    with pytest.raises(FedgenError, match=result[name]):
        fedgen.load(run)


def test_the_public_report_uses_only_what_the_run_wrote(
    run: Path, tmp_path: Path, capsys: Captured
) -> None:
    change(run / "public" / "generator.json", lambda record: record["privacy"].update(epsilon=0.1))
    words = ["report", f"runs=[{run}]", "audience=public", f"out={tmp_path}/p.html"]
    assert "generator.json was changed after the run wrote it" in refused(capsys, *words)


@kills("fedgen/commands/matrix.py", "        if not isinstance(key, str):", "        if False:")
@kills(
    "fedgen/commands/matrix.py",
    'called = override_key(word).endswith((".type", ".strategy"))',
    "called = False",
)
@pytest.mark.parametrize(
    "methods",
    [
        {b"/../../out": {"settings": ["method=dp_merf_small"]}},
        {1: {"settings": ["method=dp_merf_small"]}},
        {"A": {"settings": ["method=dp_merf_small"], "paper": {1: {"a": 1}}}},
        {"A": {"settings": ["method=dp_merf_small", "data.type=folder"]}},
    ],
)
def test_names_in_a_matrix_are_plain_text(
    methods: dict[Any, Any], tmp_path: Path, capsys: Captured
) -> None:
    matrix, place = tmp_path / "matrix.yaml", tmp_path / "inside" / "run"
    known = {"data": ["digits"], "epsilons": [10], "seeds": [0], "settings": [], "methods": methods}
    matrix.write_text(yaml.safe_dump(known))
    words = [f"matrix={matrix}", f"run_dir={place}", LATE_ERROR]
    assert "matrix" in refused(capsys, "benchmark", *words)
    assert not place.parent.exists()


@pytest.mark.parametrize("axis", ["epsilons", "seeds"])
def test_numbers_in_a_matrix_can_be_part_of_a_name(
    axis: str, tmp_path: Path, capsys: Captured
) -> None:
    methods = {"A": {"settings": ["method=dp_merf_small"]}}
    known = {"data": ["digits"], "epsilons": [10], "seeds": [0], "settings": [], "methods": methods}
    matrix = tmp_path / "matrix.yaml"
    matrix.write_text(yaml.safe_dump({**known, axis: [10**400]}))
    result = refused(capsys, "benchmark", f"matrix={matrix}", f"run_dir={tmp_path}/run")
    assert f"matrix.{axis}" in result


@kills(
    "fedgen/commands/matrix.py",
    ('        if not _KEY.match(word) or "$" in word or called or (group and not named):'),
    "        if False:",
)
@pytest.mark.parametrize(
    "word",
    [
        "hydra.searchpath=[pkg://this]",
        "+hydra.searchpath=[pkg://this]",
        "data.path=${oc.env:HOME}",
        "data.path=$\\{oc.env:HOME\\}",
        "method=../../x",
        "method/generator={type: x}",
        "method@data=x",
        "~logger=1",
    ],
)
def test_hydra_syntax_in_a_matrix_is_refused(word: str, tmp_path: Path, capsys: Captured) -> None:
    sys.modules.pop("this", None)
    matrix, place = tmp_path / "matrix.yaml", tmp_path / "run"
    known = {"data": ["digits"], "epsilons": [10], "seeds": [0], "settings": []}
    for where in ("settings", "on_digits"):
        methods = {"A": {"settings": ["method=dp_merf_small"], where: [word]}}
        matrix.write_text(yaml.safe_dump({**known, "methods": methods}))
        result = refused(capsys, "benchmark", f"matrix={matrix}", f"run_dir={place}", LATE_ERROR)
        assert "is not allowed in a matrix" in result or "it has ${" in result
    assert "this" not in sys.modules and not place.exists()


@pytest.mark.parametrize(
    "call",
    [
        {"type": "ray", "address": "127.0.0.1:1", "server": 1},
        {"type": "celeba", "root": "/"},
        {"type": "hugging_face", "path": "a/b"},
    ],
)
@pytest.mark.parametrize("inside", [True, False])
def test_a_generator_can_name_only_parts_of_methods(
    call: dict[str, Any], inside: bool, run: Path, tmp_path: Path, capsys: Captured
) -> None:
    def edit(record: Any) -> None:
        record["method"] = {**record["method"], "generator": call} if inside else call

    change(run / "public" / "generator.json", edit)
    result = refused(capsys, "sample", f"run={run}", "n=10", f"out={tmp_path}/s.npz")
    assert f"type: cannot be '{call['type']}'" in result


@kills(
    "fedgen/run/resume.py",
    'if (address := config.runtime.get("address")) is not None:',
    "if address := None:",
)
def test_a_directory_cannot_choose_a_cluster(run: Path, capsys: Captured) -> None:
    """Machines of a cluster run arbitrary code in this process: Ray's messages are pickles."""

    def edit(record: Any) -> None:
        record["names"]["runtime"] = "ray"
        record["runtime"] |= {"type": "ray", "num_cpus": 1.0}
        record["runtime"] |= {"address": "127.0.0.1:1", "num_gpus": 0.0, "actors": None}
        record["runtime"] |= {"cache_gb": 2.0}
        record["runtime"].pop("serialize"), record["runtime"].pop("store")

    change(run / "config.yaml", edit)
    before = content(run)
    result = refused(capsys, "train", f"resume={run}", "rounds=4")
    assert "runtime=ray runtime.address=127.0.0.1:1; or runtime=ray" in result
    out = run.parent / "out.zip"
    assert "runtime.address=127.0.0.1:1; pack" in refused(
        capsys, "release", f"run={run}", f"out={out}", f"run_dir={run.parent}/released"
    )
    assert content(run) == before


@kills(
    "fedgen/run/resume.py",
    ('if link is not None and not _is_this_host(str(link).rpartition(":")[0].strip("[]")):'),
    "if False:",
)
def test_a_directory_cannot_choose_a_link(run: Path, capsys: Captured) -> None:
    for link in ("a.example:1", "[2001:db8::1]:1", "10.0.0.1:1"):
        change(run / "config.yaml", lambda record, at=link: record["runtime"].update(superlink=at))
        result = refused(capsys, "train", f"resume={run}", "rounds=4")
        assert shlex.join(["runtime=deployed", f"runtime.superlink={link}"]) in result


def test_quoted_text_controls_neither_terminal_nor_shell(run: Path, capsys: Captured) -> None:
    link = "x:1; touch owned \x1b]0;title\x07"
    change(run / "config.yaml", lambda record: record["runtime"].update(superlink=link))
    result = refused(capsys, "train", f"resume={run}", "rounds=4")
    assert result.isprintable()
    assert r"'runtime.superlink=x:1; touch owned \x1b]0;title\x07' runtime.ca=FILE" in result


def test_overrides_and_matrices_can_call_only_parts_of_fedgen(
    tmp_path: Path, capsys: Captured
) -> None:
    owned, place = tmp_path / "owned", tmp_path / "run"
    call = f"+method.extra={{type: torch.utils.collect_env.run, command: 'touch {owned}'}}"
    assert "type" in refused(capsys, "train", *TINY, call, f"run_dir={place}")
    matrix = tmp_path / "matrix.yaml"
    methods = {"DP-MERF": {"settings": [*tiny("dp_merf_small"), "method=dp_merf_small", call]}}
    known = {"data": ["digits"], "epsilons": [10], "seeds": [0], "settings": [], "methods": methods}
    matrix.write_text(yaml.safe_dump(known))
    refused(capsys, "benchmark", f"matrix={matrix}", f"run_dir={place}")
    assert not owned.exists() and not place.exists()


@kills(
    "fedgen/commands/matrix.py",
    "        if OmegaConf.select(point.config, key):",
    "        if False:",
)
@kills(
    "fedgen/commands/matrix.py", '    if point.config.privacy.noise == "secure":', "    if False:"
)
@pytest.mark.parametrize(
    "words",
    [
        ["partition=iid", "runtime=ray", "runtime.address=127.0.0.1:1"],
        ["logger=mlflow", "logger.uri=http://127.0.0.1:1"],
        ["logger=wandb", "logger.online=true"],
        ["privacy.noise=secure"],
    ],
)
def test_a_matrix_cannot_choose_where_data_goes(
    words: list[str], tmp_path: Path, capsys: Captured
) -> None:
    matrix, place = tmp_path / "matrix.yaml", tmp_path / "run"
    groups = {word.partition("=")[0] for word in words}
    own = [word for word in tiny("dp_merf_small") if word.partition("=")[0] not in groups]
    methods = {"DP-MERF": {"settings": ["method=dp_merf_small", *own, *words]}}
    known = {"data": ["digits"], "epsilons": [10], "seeds": [0], "settings": [], "methods": methods}
    matrix.write_text(yaml.safe_dump(known))
    result = refused(capsys, "benchmark", f"matrix={matrix}", f"run_dir={place}", LATE_ERROR)
    named = f"{words[-1].partition('=')[0]}, which is not allowed in a matrix"
    assert named in result or "sets privacy.noise=secure" in result
    assert not place.exists()


@kills(
    "fedgen/config/registry.py",
    "    if not (isinstance(name, str) and name in MODELS) and not is_extension(name):",
    "    if False:",
)
def test_a_classifier_must_be_a_registered_one(tmp_path: Path, capsys: Captured) -> None:
    owned, place = tmp_path / "owned", tmp_path / "run"
    call = f"model: subprocess.Popen, args: [touch, {owned}]"
    call = f"{{type: scikit, {call}}}"
    words = [*TINY, "evaluation=quick", f"+evaluation.classifiers.own={call}"]
    result = refused(capsys, "train", *words, "rounds=1", f"run_dir={place}")
    assert "'subprocess.Popen' is not a registered model" in result
    rows = np.zeros((2, 1, 8, 8), np.uint8), np.arange(2)
    with pytest.raises(FedgenError, match=r"'subprocess\.Popen' is not a registered model"):
        scikit(*rows, 2, 0, model="subprocess.Popen", args=["touch", str(owned)])
    assert not owned.exists()


def test_only_the_environment_declares_extensions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from fedgen.data.partition import iid\n\n\ndef mine(**given):\n    return iid(**given)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    words = [*TINY, "partition=iid", "partition.clients=3", "partition.type=own_package.mine"]
    words += ["rounds=1", f"run_dir={tmp_path}/run"]
    assert "own_package.mine" in refused(capsys, "train", *words)
    monkeypatch.setenv("FEDGEN_EXTENSIONS", "own_package")
    assert cli.run(["train", *words]) == 0


# Nothing is followed out of a run directory


@kills(
    "fedgen/storage/io.py", "                if stat.S_ISLNK(kind):", "                if False:"
)
@pytest.mark.parametrize(
    "name", ["clients/0", "public", "checkpoints", "samples", "metrics.jsonl", "results.json"]
)
def test_symbolic_links_are_not_followed(
    name: str, run: Path, tmp_path: Path, capsys: Captured
) -> None:
    elsewhere = tmp_path / "elsewhere"
    (run / name).rename(elsewhere)
    (run / name).symlink_to(elsewhere)
    before = content(run), content(elsewhere.parent)
    for command in (["train", "resume="], ["evaluate", "run="], ["report", "runs="]):
        result = refused(capsys, command[0], f"{command[1]}{run}")
        assert f"{run / name} is a link" in result
    assert (content(run), content(elsewhere.parent)) == before


COMPARING = {  # each with a mistake that is found later, lest anything runs
    "benchmark": ["matrix=digits", "data=[celeba]"],
    "train": ["-m", *TINY, "seed=0,1", "evaluate_every=1"],
    "debug": ["experiment=femnist_debug_small", "debug.reserved_clients=99999"],
}


@kills("fedgen/commands/benchmark.py", '    check_no_links(place, "run_dir")', "    pass")
@pytest.mark.parametrize("command", COMPARING)
@pytest.mark.parametrize("name", ["logs/lane-0.log", "0", "sweep.csv"])
def test_symbolic_links_in_a_folder_of_runs_are_not_followed(
    command: str, name: str, tmp_path: Path, capsys: Captured
) -> None:
    place, elsewhere = tmp_path / "handed", tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    (place / name).parent.mkdir(parents=True)
    (place / name).symlink_to(elsewhere)
    result = refused(capsys, command, *COMPARING[command], f"run_dir={place}")
    assert f"run_dir: {place / name} is a link" in result
    assert elsewhere.read_text() == "mine" and [p.name for p in place.rglob("*")] != []


@kills("fedgen/commands/evaluate.py", "    if out.is_symlink():", "    if False:")
@pytest.mark.parametrize("inside", [False, True])
def test_symbolic_links_next_to_samples_are_not_followed(
    inside: bool, tmp_path: Path, capsys: Captured
) -> None:
    place, elsewhere = tmp_path / "handed", tmp_path / "elsewhere"
    place.mkdir(), elsewhere.mkdir()
    images = np.zeros((200, 8, 8), np.uint8)
    np.savez(place / "s.npz", images=images, labels=np.arange(200) % 10)
    link = place / "s_evaluation"
    if inside:
        link.mkdir()
        link /= "evaluation.json"
    link.symlink_to(elsewhere)
    words = ["evaluate", f"samples={place}/s.npz", "data=digits"]
    assert f"{link} is a link" in refused(capsys, *words)
    assert not any(elsewhere.iterdir())


@kills("fedgen/storage/io.py", "os.walk(folder, onerror=closed)", "os.walk(folder)")
def test_a_folder_that_cannot_be_listed_is_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Its files can be opened by name all the same, links too. (Root can list all folders.)"""
    scandir = os.scandir

    def listed(path: str) -> Any:
        if Path(path).name == "samples":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", listed)
    for words in (["train", f"resume={run}"], ["report", f"runs=[{run}]"]):
        assert "samples cannot be looked through" in refused(capsys, *words)


def test_symbolic_links_in_a_new_run_directory_are_not_followed(
    tmp_path: Path, capsys: Captured
) -> None:
    start = tmp_path / "start"
    (start / "checkpoints").mkdir(parents=True)
    os.mkfifo(start / "checkpoints" / "checkpoint.json")
    words = [*TINY, "privacy=none", f"start={start}", f"run_dir={tmp_path}/run"]
    assert "start: " in refused(capsys, "train", *words)
    os.mkfifo(tmp_path / "matrix.yaml")
    assert "not a regular file" in refused(capsys, "benchmark", f"matrix={tmp_path}/matrix.yaml")
    (tmp_path / "free").mkdir()
    os.mkfifo(tmp_path / "free" / "SERVER_SIDE.md")
    assert "exists" in refused(capsys, "train", *TINY, f"run_dir={tmp_path}/free")


def test_pipes_are_not_opened(run: Path, capsys: Captured) -> None:
    os.mkfifo(run / "samples" / "round_000001.png.txt")
    for words in (["train", f"resume={run}"], ["report", f"runs=[{run}]"]):
        assert "round_000001.png.txt is not a file" in refused(capsys, *words)


def test_no_linked_file_appears_in_a_report(run: Path, tmp_path: Path, capsys: Captured) -> None:
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"secret")
    (run / "public" / "samples.png").unlink()
    (run / "public" / "samples.png").symlink_to(secret)
    for place in (run, run / "public"):
        words = ["report", f"runs=[{place}]", "audience=public", f"out={tmp_path}/page.html"]
        assert "is a link" in refused(capsys, *words)


# What is opened is what the run wrote


def rewrite(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = safetensors.torch.load(path.read_bytes())
    edit(weights)
    path.write_bytes(safetensors.torch.save(weights))


def reseal(run: Path) -> None:
    """Update digests of changed weights, as anyone who changes them could."""
    import hashlib

    weights = (run / "public" / "generator.safetensors").read_bytes()
    result = {"generator_sha256": hashlib.sha256(weights).hexdigest()}
    for path in (run / "public" / "generator.json", run / "results.json"):
        change(path, lambda record: record.update(result))


CHANGES: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "random": lambda w: w.update({n: torch.randn_like(v) for n, v in w.items()}),
    "NaN": lambda w: w.update({n: torch.full_like(v, torch.nan) for n, v in w.items()}),
    "one missing": lambda w: w.pop(min(w)),
    "one more": lambda w: w.update(another=torch.zeros(3)),
    "other shapes": lambda w: w.update({n: v[..., None] for n, v in w.items()}),
    "other numbers": lambda w: w.update({n: v.double() for n, v in w.items()}),
}


@kills(
    "fedgen/run/generator.py",
    'if sha256 != description.get("generator_sha256") or (of_run and sha256 != of_run):',
    "if False:",
)
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("sealed", [False, True])
def test_weights_of_another_generator_are_refused(
    name: str, sealed: bool, run: Path, tmp_path: Path, capsys: Captured
) -> None:
    rewrite(run / "public" / "generator.safetensors", CHANGES[name])
    if sealed:
        if name == "random":  # cannot be decided any more
            return
        reseal(run)
    for place in (run, run / "public"):
        words = ["sample", f"run={place}", "n=10", f"out={tmp_path}/s.npz"]
        assert "generator.safetensors" in refused(capsys, *words)


@pytest.mark.parametrize(
    "edit",
    [
        lambda content: content["method"].update(latent=10**12),
        lambda content: content["method"]["generator"].update(width=10**9),
        lambda content: content.update(classes=10**9),
        lambda content: content.update(shape=[1, 60000, 60000]),
        lambda content: content.update(shape="abc"),
        lambda content: content.update(method=[]),
        lambda content: content["method"].update(generator={"name": "dcgan.Critic", "width": 2}),
        lambda content: content["method"].update(name="fedgen.cli.main"),
        lambda content: content["method"].update(latent="${oc.env:HOME}"),
        lambda content: content.update(schema=1),
        lambda content: content.pop("generator_sha256"),
    ],
)
def test_an_invalid_description_is_refused(
    edit: Callable[[Any], None], run: Path, tmp_path: Path, capsys: Captured
) -> None:
    change(run / "public" / "generator.json", edit)
    refused(capsys, "sample", f"run={run / 'public'}", "n=10", f"out={tmp_path}/s.npz")


@pytest.fixture(scope="module")
def diffusion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("diffusion") / "run"
    assert cli.run(["train", "method=dpdm_small", *tiny("dpdm_small"), f"run_dir={place}"]) == 0
    return place / "public"


@pytest.mark.parametrize(
    ("group", "change_to"),
    [
        ("sampler", {"steps": 10**9}),
        ("sampler", {"guidance": math.nan}),
        ("sampler", {"highest": math.inf}),
        ("network", {"blocks": 100_000}),
        ("network", {"blocks": 60}),
        ("network", {"multipliers": [1] * 2001}),
    ],
)
def test_descriptions_with_excessive_work_are_refused(
    group: str, change_to: dict[str, Any], diffusion: Path, tmp_path: Path, capsys: Captured
) -> None:
    public = shutil.copytree(diffusion, tmp_path / "public")
    change(public / "generator.json", lambda record: record["method"][group].update(change_to))
    begin = time.process_time()
    refused(capsys, "sample", f"run={public}", "n=4", f"out={tmp_path}/s.npz")
    assert time.process_time() - begin < 20


@pytest.mark.parametrize("file", ["privacy.json", "public/PRIVACY.md", "public/samples.png"])
def test_altered_statements_and_pictures_are_detected(
    file: str, run: Path, capsys: Captured
) -> None:
    (run / file).write_bytes((run / file).read_bytes() + b"\n")
    for command in (["evaluate", "run="], ["report", "runs="]):
        assert f"{run / file} was changed after the run wrote it" in refused(
            capsys, command[0], f"{command[1]}{run}"
        )


# What claims to be large


def npz(path: Path, **arrays: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                file.write(data)
    return path


def header(shape: tuple[int, ...], dtype: str = "|u1") -> bytes:
    words = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    words += b" " * (63 - (len(words) + 10) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(words)) + words


@kills("fedgen/storage/io.py", "        if size > _LARGE and", "        if False and")
def test_an_inflating_npz_is_refused_before_it_is_read(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, rows in (("train", 700_000), ("test", 1000)):
            with archive.open(f"{name}_images.npy", "w", force_zip64=True) as file:
                file.write(header((rows, 28, 28)))
                for _ in range(rows // 1000):
                    file.write(bytes(784_000))
            with archive.open(f"{name}_labels.npy", "w") as file:
                file.write(header((rows,), "|u1") + bytes(rows))
    assert path.stat().st_size < 3e6
    words = ["data=folder", f"data.path={path}", "data.classes=2", f"run_dir={tmp_path}/run"]
    assert "inflate" in refused(capsys, "train", *TINY, *words)


@pytest.mark.parametrize("claimed", [(10**9, 60_000), (2**62, 2**62), (5,), (-3, 8, 8)])
def test_a_header_with_a_false_size_is_refused(
    claimed: tuple[int, ...], tmp_path: Path, capsys: Captured
) -> None:
    images, labels = header(claimed) + bytes(1000), header((10,)) + bytes(10)
    given = {"train_images": images, "test_images": images, "images": images}
    given |= {"train_labels": labels, "test_labels": labels, "labels": labels}
    path = npz(tmp_path / "liar.npz", **given)
    words = ["data=folder", f"data.path={path}", "data.classes=2", f"run_dir={tmp_path}/run"]
    assert "not a readable npz" in refused(capsys, "train", *TINY, *words)
    refused(capsys, "evaluate", f"samples={path}", "data=digits")


def test_a_bare_npy_and_an_encrypted_zip_are_refused(tmp_path: Path, capsys: Captured) -> None:
    bare = tmp_path / "bare.npz"
    np.save(tmp_path / "bare.npy", np.zeros(3))
    (tmp_path / "bare.npy").rename(bare)
    locked = npz(tmp_path / "locked.npz", images=header((1,)) + bytes(1))
    data = bytearray(locked.read_bytes())
    for mark, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(mark) + at] |= 1
    locked.write_bytes(data)
    for path in (bare, locked):
        words = ["data=folder", f"data.path={path}", "data.classes=2", f"run_dir={tmp_path}/run"]
        assert "not a readable npz" in refused(capsys, "train", *TINY, *words)
        refused(capsys, "evaluate", f"samples={path}", "data=digits")


def test_a_picture_of_60000_by_60000_is_refused(tmp_path: Path, capsys: Captured) -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    folder = tmp_path / "images" / "a"
    folder.mkdir(parents=True)
    for side in (10_000, 60_000):
        (folder / "bomb.png").write_bytes(
            b"\x89PNG\r\n\x1a\n"
            + chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0))
            + chunk(b"IDAT", zlib.compress(bytes(1000)))
            + chunk(b"IEND", b"")
        )
        words = ["data=folder", f"data.path={tmp_path}/images", "data.size=8"]
        assert "bomb.png" in refused(capsys, "train", *TINY, *words, f"run_dir={tmp_path}/run")


BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{','.join(['*' + chr(97 + n)] * 10)}]\n" for n in range(9)
)


@kills(
    "fedgen/storage/io.py",
    '            if "${" in event.value:',
    "            if False:",
)
@pytest.mark.parametrize(
    "text", ["a: ${b}", 'a: "\\x24{b}"', "a:\n- c: x${oc.env:HOME}", "${a}: 1", "a: '\\${b}'"]
)
def test_yaml_interpolations_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"it has \$\{"):
        read_yaml(tmp_path / "a.yaml")


@kills(
    "fedgen/storage/io.py",
    "class _StrictLoader(yaml.SafeLoader):",
    "class _StrictLoader(yaml.CSafeLoader):",
)
def test_yaml_is_read_as_it_was_checked(tmp_path: Path) -> None:
    """A byte order mark starts a comment for libyaml, and text for others."""
    (tmp_path / "a.yaml").write_text('{a:\n\ufeff#, b: "${oc.env:HOME}"\n, c: 1}')
    with pytest.raises(ValueError, match=r"it has \$\{"):
        read_yaml(tmp_path / "a.yaml")


@kills(
    "fedgen/storage/io.py",
    "yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag:",
    "yaml.ScalarEvent | yaml.CollectionStartEvent) and False:",
)
@kills("fedgen/storage/io.py", "            if key.value in keys:", "            if False:")
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: !!binary YQ==", "a tag"),
        ('a: !!int ""', "a tag"),
        ("!!set {a, b}", "a tag"),
        ("a: ! b", "a tag"),
        ("epsilon: 1\nepsilon: 1000", "'epsilon' twice"),
        ("a: [{b: 1, c: 2, 'b': 3}]", "'b' twice"),
        ("a: 1\n<<: {a: 2}", "not a valid name"),
        ("? [a]\n: 1", "not a valid name"),
    ],
)
def test_yaml_with_invisible_characters_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ValueError, match=problem):
        read_yaml(tmp_path / "a.yaml")


@kills(
    "fedgen/storage/io.py",
    '            raise ValueError("it has aliases")',
    "            pass",
)
def test_yaml_aliases_are_refused(tmp_path: Path) -> None:
    (tmp_path / "few.yaml").write_text("a: &a [x]\nb: *a\n")
    with pytest.raises(ValueError, match="aliases"):
        read_yaml(tmp_path / "few.yaml")


@pytest.mark.parametrize("text", [BOMB, "a: " + "[" * 10_000, "a: b: c", "x" * 2**21])
def test_inflating_settings_are_refused(
    text: str, run: Path, tmp_path: Path, capsys: Captured
) -> None:
    beside = run.parent / "beside"
    beside.mkdir()
    (beside / "config.yaml").write_text(text)
    assert cli.run(["report", f"runs=[{run}]", f"out={tmp_path}/page.html"]) == 0
    (run / "config.yaml").write_text(text)
    refused(capsys, "train", f"resume={run}")
    (tmp_path / "matrix.yaml").write_text(text)
    refused(capsys, "benchmark", f"matrix={tmp_path}/matrix.yaml")


@pytest.mark.parametrize("name", ["run.json", "results.json", "checkpoints/checkpoint.json"])
def test_deeply_nested_json_is_refused(name: str, run: Path, capsys: Captured) -> None:
    (run / name).write_text("[" * 100_000)
    command = ["evaluate", f"run={run}"] if name == "results.json" else ["train", f"resume={run}"]
    refused(capsys, *command)


JUNK = [True, None, "x", [], {}, [["x", 1]], {"0": []}, {"0": [[5, 5]]}, float("nan"), float("inf")]


def places_in(result: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the positions of all values, at any depth."""
    if isinstance(result, dict):
        keys: list[Any] = list(result)
    else:
        keys = list(range(len(result))) if isinstance(result, list) else []
    inner = [place for key in keys for place in places_in(result[key], (*above, key))]
    return [(*above, key) for key in keys] + inner


def test_a_checkpoint_is_read_completely_or_refused(run: Path) -> None:
    """With valid digests: each of its values in turn is missing or replaced."""
    file = run / "checkpoints" / checkpoint.NAME
    whole = json.loads(file.read_text())["record"]
    for place in places_in(whole):
        for junk in ("left out", *JUNK):
            record = copy.deepcopy(whole)
            *above, last = place
            parent = reduce(operator.getitem, above, record)
            if junk == "left out":
                del parent[last]
            else:
                parent[last] = junk
            body = json.dumps(record, sort_keys=True)
            file.write_text(json.dumps({"digest": digest(body.encode()), "record": record}))
            with contextlib.suppress(FedgenError):
                checkpoint.load(file.parent)


@pytest.mark.parametrize(
    "name, edit",
    [
        ("metrics.jsonl", lambda line: line.pop("claimed_epsilon")),
        ("metrics.jsonl", lambda line: line.update(round={})),
        ("results.json", lambda content: content.pop("stopped")),
    ],
)
def test_reports_ignore_incomplete_lines(
    name: str, edit: Callable[[Any], None], run: Path, tmp_path: Path, capsys: Captured
) -> None:
    path = run / name
    first, *rest = path.read_text().splitlines() if name.endswith("l") else [path.read_text()]
    record = json.loads(first)
    edit(record)
    path.write_text("\n".join([json.dumps(record), *rest, ""]))
    assert "was altered" in refused(capsys, "report", f"runs={run}", f"out={tmp_path}/page.html")


def test_the_state_of_another_method_is_refused(run: Path, capsys: Captured) -> None:
    """With valid digests."""
    folder = run / "checkpoints"
    sealed = json.loads((folder / checkpoint.NAME).read_text())
    record = sealed["record"]
    data = safetensors.torch.save({"other": torch.zeros(2)})
    (folder / record["server"][0]).write_bytes(data)
    record["server"][1] = digest(data)
    body = json.dumps(record, sort_keys=True)
    sealed["digest"] = digest(body.encode())
    (folder / checkpoint.NAME).write_text(json.dumps(sealed))
    (run / "results.json").unlink()
    assert "the state of another method" in refused(capsys, "train", f"resume={run}")
