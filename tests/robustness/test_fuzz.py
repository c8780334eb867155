"""Random overrides, files, run directories and messages: each is accepted, or refused in one line
without changes. Cases are the same in every run; ``--fuzz N`` takes N of each kind."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from hostile import content, copied, lying, no_longer_than
from omegaconf import DictConfig, OmegaConf
from PIL import Image
from tiny import METHODS, TINY, tiny

from fedgen import cli
from fedgen.config.compose import compose
from fedgen.errors import Interrupted
from fedgen.federation import messages
from fedgen.federation.rounds import RunState
from fedgen.run import train
from fedgen.run.setup import Setup

SECONDS = 60.0  # more is a hang

Captured = pytest.CaptureFixture[str]


def dice(kind: str, number: int) -> random.Random:
    """Return the random numbers of one case."""
    return random.Random(f"{kind} {number}")


def answered(capsys: Captured, case: object, *words: str) -> int:
    """Run a command that must not crash; return its exit status. A refusal is one line."""
    capsys.readouterr()
    with no_longer_than(SECONDS):
        status = cli.run(list(words))
    error = capsys.readouterr().err
    assert status in (0, 2, 3), (case, words, status)
    if status:
        lines = [line for line in error.strip().splitlines() if line.startswith("fedgen: ")]
        assert len(lines) == 1, (case, words, error)
    return status


# --- overrides ------------------------------------------------------------------------------------

VALUES = [
    *("", "null", "nan", "inf", "-inf", "-1", "0", "1", "0.5", "1e-300", "1e308", "1e309", "true"),
    *("[]", "{}", "[[1]]", "[1,2]", "{a: 1}", "${nope}", "${seed}", "???", "a", "é", "'", '"', "("),
    *("99999999999999999999", "-99999999999999999999", "0x10", "1_0", "../..", "a=b", "a,b", "~"),
    *("[null]", "{type: os.system}", "\\", "$", "#", "1 2", "10" * 200, "\u0000", "[", "{"),
]


def keys_of(config: DictConfig, above: str = "") -> list[str]:
    result = []
    for name in config:
        key = f"{above}{name}"
        result.append(key)
        value = OmegaConf.select(config, str(name))
        if isinstance(value, DictConfig):
            result += keys_of(value, f"{key}.")
    return result


def override(rng: random.Random, keys: list[str]) -> str:
    key, value = rng.choice(keys), rng.choice(VALUES)
    if rng.random() < 0.2:
        place = rng.randrange(len(key) + 1)
        key = key[:place] + rng.choice(string.printable) + key[place + rng.randrange(2) :]
    return rng.choice(["", "", "", "", "+", "++", "~"]) + f"{key}={value}"


def test_overrides(fuzz: int, capsys: Captured) -> None:
    for number in range(fuzz):
        rng = dice("override", number)
        method = rng.choice(METHODS)
        keys = keys_of(compose("account", [f"method={method}"]))
        words = [f"method={method}", *tiny(method)]
        words += [override(rng, keys) for _ in range(rng.randint(1, 2))]
        answered(capsys, number, "account", *words)


# --- data -----------------------------------------------------------------------------------------


def harm(data: bytes, rng: random.Random) -> bytes:
    """Flip, delete, insert or replace bytes."""
    match rng.randrange(5):
        case 0 if data:
            harmed = bytearray(data)
            for _ in range(rng.choice([1, 1, 3, 30])):
                harmed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            return bytes(harmed)
        case 1:
            return data[: rng.randrange(len(data) + 1)]
        case 2:
            place = rng.randrange(len(data) + 1)
            return data[:place] + rng.randbytes(rng.randint(1, 9)) + data[place:]
        case 3:
            start = rng.randrange(len(data) + 1)
            return data[:start] + data[start + rng.randint(1, 100) :]
        case _:
            crafted = [b"", b"{}", b"null", b"[]", b"[" * 100_000, b'{"a": NaN}', b"\x00" * 99]
            return rng.choice([*crafted, rng.randbytes(100), b"- &a [*a]", b"1" * 5000])


def test_data(fuzz: int, tmp_path: Path, data_root: Path, capsys: Captured) -> None:
    """An npz of a data set, of samples, and images in a folder."""
    good = (data_root / "mnist.npz").read_bytes()
    images = tmp_path / "images"
    for name in ("a/1.png", "a/2.png", "b/1.png", "b/2.png"):
        (images / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(len(name)).integers(0, 255, (8, 8), dtype=np.uint8)
        Image.fromarray(pixels).save(images / name)
    picture = (images / "a" / "1.png").read_bytes()
    samples = tmp_path / "samples.npz"
    rng = np.random.default_rng(0)
    np.savez(samples, images=rng.random((30, 1, 8, 8)).astype("f"), labels=np.arange(30) % 10)
    sampled = samples.read_bytes()
    for number in range(fuzz):
        streams = dice("data", number)
        kind = number % 3
        if kind == 0:
            (data_root / "mnist.npz").write_bytes(harm(good, streams))
            answered(capsys, number, "account", "data=mnist", f"data.root={data_root}", *TINY)
        elif kind == 1:
            (images / "a" / "1.png").write_bytes(harm(picture, streams))
            answered(capsys, number, "account", "data=folder", f"data.path={images}", *TINY)
        else:
            samples.write_bytes(harm(sampled, streams))
            judged = ["evaluation.leakage=true", "evaluation.classifiers={}"]
            answered(capsys, number, "evaluate", f"samples={samples}", *judged)


# --- run directories ------------------------------------------------------------------------------

RUN = [*TINY, "partition=iid", "partition.clients=3", "method.routing=per_sample"]
RUN += ["method.warm_start=0", "sample_every=1", "log_every=1"]
CUT = [*RUN, "rounds=5", "runtime.checkpoint_every=2"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, as a stranger may pass it on."""
    place = tmp_path_factory.mktemp("finished") / "run"
    return train.train(compose("config", [*CUT, f"run_dir={place}"]))


@pytest.fixture(scope="module", params=["seeded", "secure"])
def interrupted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that died in its third round, a round after its checkpoint, and the home
    in which it was charged."""
    place = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDGEN_HOME", str(place / "home"))

        def stop(ready: Setup, state: RunState, record: object) -> None:
            if state.rounds == 3:
                raise KeyboardInterrupt

        words = [*CUT, f"privacy.noise={request.param}", f"run_dir={place / 'run'}"]
        with pytest.raises(Interrupted):
            train.train(compose("config", words), watch=stop)
    (place / "home").mkdir(exist_ok=True)
    return place


def harm_one(run: Path, rng: random.Random) -> str:
    """Damage a file of a folder; return its name."""
    path = rng.choice(sorted(path for path in run.rglob("*") if path.is_file()))
    if rng.random() < 0.1:
        path.unlink()
    elif path.suffix == ".json" and rng.random() < 0.4:
        edited = json.loads(path.read_text())
        craft(edited, rng)
        path.write_text(json.dumps(edited))
    else:
        path.write_bytes(harm(path.read_bytes(), rng))
    return str(path.relative_to(run))


def craft(value: Any, rng: random.Random) -> None:
    """Replace a value somewhere in a record."""
    while isinstance(value, (dict, list)) and value:
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        if not isinstance(value[key], (dict, list)) or rng.random() < 0.3:
            value[key] = rng.choice([None, -1, 10**30, "", "../..", [], {}, [[]], 0.5, True])
            return
        value = value[key]


def test_resume(
    fuzz: int,
    interrupted: Path,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    """A damaged run is refused unchanged; a run that resumes ends as if it were undamaged."""
    whole = json.loads((finished / "results.json").read_text())
    seeded = interrupted.name.startswith("seeded")
    home = tmp_path / "home"
    monkeypatch.setenv("FEDGEN_HOME", str(home))
    for number in range(fuzz // 2):
        copied(interrupted / "home", home)
        run = copied(interrupted / "run", tmp_path / "run")
        harmed = harm_one(run, dice("resume", number))
        before, charged = content(run), content(home)
        if answered(capsys, (number, harmed), "train", f"resume={run}"):
            assert content(run) == before, (number, harmed)
            assert content(home) == charged, (number, harmed)
        elif seeded:
            record = json.loads((run / "results.json").read_text())
            assert record["generator_sha256"] == whole["generator_sha256"], (number, harmed)
            assert record["epsilon"] == whole["epsilon"], (number, harmed)
        else:
            privacy = json.loads((run / "privacy.json").read_text())
            released = sum(client["releases"] for client in privacy["clients"].values())
            assert released > 5, "round 3 was done twice"


COMMANDS: list[Callable[[Path, Path], list[str]]] = [
    lambda run, out: ["report", f"runs={run}", f"out={out}/report.html", "audience=public"],
    lambda run, out: ["report", f"runs={run}", f"out={out}/report.html"],
    lambda run, out: ["sample", f"run={run}", "n=3", f"out={out}/s.npz"],
    lambda run, out: ["evaluate", f"run={run}"],
    lambda run, out: ["train", f"resume={run}"],
]


def test_finished_runs(fuzz: int, finished: Path, tmp_path: Path, capsys: Captured) -> None:
    for number in range(fuzz):
        rng = dice("finished", number)
        run, out = copied(finished, tmp_path / "run"), tmp_path / "out"
        out.mkdir(exist_ok=True)
        harmed = harm_one(run, rng)
        before = content(run)
        words = COMMANDS[number % len(COMMANDS)](run, out)
        if answered(capsys, (number, harmed), *words):
            assert content(run) == before, (number, harmed, words)


# --- messages -------------------------------------------------------------------------------------


def lie(rng: random.Random, reply: RecordDict) -> None:
    """Change a reply somewhere."""
    name = rng.choice(sorted(reply))
    record = reply[name]
    choice = rng.randrange(4)
    if choice == 0:
        del reply[name]
    elif choice == 1:
        reply[rng.choice([name, "x"])] = ConfigRecord({"a": rng.choice([1, "b", 0.5, b"c", True])})
    elif isinstance(record, ArrayRecord) and record:
        key = rng.choice(sorted(record))
        kept = record[key]
        shape = rng.choice([kept.shape, (), (-1,), (2**62, 2), kept.shape[::-1], (0,)])
        dtype = rng.choice([kept.dtype, "float64", "complex64", "object", "<U9", "int8", "é"])
        data = rng.choice([kept.data, harm(kept.data, rng), b""])
        stype = rng.choice([kept.stype, kept.stype, "numpy.ndarray", ""])
        reply[name] = ArrayRecord({key: Array(dtype=dtype, shape=shape, stype=stype, data=data)})
    elif isinstance(record, ConfigRecord) and record:
        key = rng.choice(sorted(record))
        value: Any = record[key]
        if isinstance(value, str) and rng.random() < 0.7:
            try:
                edited = json.loads(value)
                craft(edited, rng)
                value = json.dumps(edited)
            except ValueError:
                value = harm(value.encode(), rng).decode(errors="replace")
        else:
            value = rng.choice([-1, 2**62, 0.5, "", "x", b"\xff", [1, 2], float("nan"), True])
        reply[name] = ConfigRecord({**dict(record), key: value})


def test_messages(fuzz: int, tmp_path: Path, capsys: Captured) -> None:
    """Of one client: the ε of others stays the same, and its own never falls."""
    kinds = [messages.ASK, messages.ASK, messages.TRAIN, messages.ACCOUNT, messages.KEEP]
    for number in range(fuzz):
        rng, run = dice("message", number), tmp_path / str(number)
        words = [*RUN, "rounds=2", "runtime.min_success=0.3", "runtime.checkpoint_every=1"]
        with pytest.MonkeyPatch.context() as patch:
            lying(patch, rng.choice(kinds), lambda record, rng=rng: lie(rng, record))
            if answered(capsys, number, "train", *words, f"run_dir={run}"):
                continue
        clients = json.loads((run / "privacy.json").read_text())["clients"]
        for client in ("1", "2"):
            assert 0 <= clients[client]["server"] <= 10, number
