"""The page ``docs/deployment.md``, followed line by line by three parties in three folders."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from forked import Command
from PIL import Image
from tiny import tiny

from fedgen import cli
from fedgen.federation.secagg.signing import fingerprint
from fedgen.storage.keys import MACHINE_KEY, load_or_create_key

PAGE = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text()
RELEASING = (Path(__file__).parents[2] / "docs" / "releasing.md").read_text()
LINES = [
    line
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
]
[POLICY] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


def images(place: Path, seed: int) -> None:
    """Write small colour images under two labels, four of each patient."""
    rng = np.random.default_rng(seed)
    for label, level in (("ill", 60), ("well", 160)):
        for number in range(40):
            pixels = (level + rng.integers(0, 60, (8, 8, 3))).astype(np.uint8)
            patient = place / label / f"Erika{number // 4}"
            patient.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(patient / f"{number}.png")


@pytest.mark.slow
def test_three_parties_follow_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    link, key, accept, other, serve, train, log, release, verify = LINES
    places = {name: tmp_path / name for name in ("coordinator", "north", "south")}
    for seed, (name, place) in enumerate(places.items()):
        place.mkdir()
        if name != "coordinator":
            images(place / "images", seed)

    def words(line: str, name: str = "north") -> list[str]:
        # sites reach it by one address of hosts=, and the coordinator by its machine's own
        line = line.replace("link.example.org", "127.0.0.2").replace("9092", port)
        line = line.replace("number=0", f"number={int(name == 'south')}").replace("north", name)
        return shlex.split(line)[1:]

    def here(name: str, line: str) -> str:
        monkeypatch.chdir(places[name])
        capsys.readouterr()
        assert cli.run(words(line, name)) == 0
        return capsys.readouterr().out

    running = []
    try:
        monkeypatch.chdir(places["coordinator"])
        running.append(Command([*words(link), f"port={port}"]))
        prints = {}
        for number, name in enumerate(("north", "south")):
            match = re.search(r"SHA256:\S+", here(name, key))
            assert match
            prints[number] = match[0]
            shutil.copy(places[name] / f"{name}.key.pub", places["coordinator"])
        policy = re.sub(r"\d: SHA256:\S+", lambda m: f"{m[0][0]}: {prints[int(m[0][0])]}", POLICY)
        certificate = places["coordinator"] / "fedgen-link" / "ca.crt"
        until = time.monotonic() + 180
        monkeypatch.chdir(places["coordinator"])
        while cli.run([*words(accept), f"port={port}"]) != 0:
            assert time.monotonic() < until, running[0].errors
            time.sleep(0.2)
        assert cli.run([*words(other), f"port={port}"]) == 0
        for name in ("north", "south"):
            (places[name] / "policy.yaml").write_text(policy)
            shutil.copy(certificate, places[name])
            monkeypatch.chdir(places[name])
            running.append(Command(words(serve, name)))
        small = [word for word in tiny("mixture") if word.startswith("method.")]
        monkeypatch.chdir(places["coordinator"])
        asked = [*words(train), "data.shape=[3,8,8]", *small, "run_dir=run"]
        assert cli.run(asked) == 0, capsys.readouterr().err
        assert "node 1: 2 labels, data.shape=[3,8,8]" in running[2].output
        record = json.loads((places["coordinator"] / "run" / "privacy.json").read_text())
        assert record["views"]["server"]["epsilon"] <= 5 and record["noise"] == "secure"
        assert record["unit"] == "person"
        [about] = re.findall(r"```yaml\n(.*?)```", RELEASING, re.DOTALL)
        (places["coordinator"] / "about.yaml").write_text(about)
        packed = here("coordinator", release.replace("runs/...", "run"))
        assert "publish two-sites.zip only" in packed
        own = load_or_create_key(Path(os.environ["FEDGEN_HOME"]) / MACHINE_KEY)
        keys = json.dumps([*prints.values(), fingerprint(own.public_key())])
        check = f"signed_by={keys}"
        rows = here("coordinator", f"{verify.partition(' signed_by')[0]} {shlex.quote(check)}")
        assert "2 of 2 participants" in rows and rows.count("assumed") == 3
        assert all(key in rows for key in prints.values())
        with zipfile.ZipFile(places["coordinator"] / "two-sites.zip") as package:
            [account] = [name for name in package.namelist() if name.endswith("/account.json")]
            statements = [
                json.loads(s["text"]) for s in json.loads(package.read(account))["accounts"]
            ]
        assert [statement["unit"] for statement in statements] == ["person", "person"]
        for name in ("north", "south"):
            assert "ε so far 5.00" in here(name, f"{log} lines=100")
            (places[name] / "images").rename(tmp_path / f"images of {name}")
        for path in (path for place in places.values() for path in place.rglob("*")):
            assert "Erika" not in path.name
            assert not path.is_file() or b"Erika" not in path.read_bytes(), path
        assert all("Erika" not in process.output + process.errors for process in running)
    finally:
        for process in running:
            process.send_signal(9)
            process.wait(30)
