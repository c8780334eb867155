"""Completion in a real bash, also of own methods."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedgen import cli, completion
from fedgen.config.schema import TARGETS

BASH = """
eval "$(fedgen completion)"
COMP_LINE="$1"; COMP_POINT=${#COMP_LINE}
_fedgen
printf '%s\\n' "${COMPREPLY[@]}"
"""


def after(line: str) -> list[str]:
    names = {word: command.settings for word, command in cli.COMMANDS.items()}
    return completion.complete(line, names)


@pytest.mark.parametrize(
    "line, result",
    [
        ("fedgen tr", ["train"]),
        ("fedgen train meth", ["method.", "method="]),
        ("fedgen train method=dpgan", ["method=dpgan", "method=dpgan_small"]),
        ("fedgen train method=dpgan_small method.discriminator_s", ["method.discriminator_steps="]),
        ("fedgen train method=mixture_small method.discriminator_s", []),
        ("fedgen train logger=mlflow logger.u", ["logger.uri="]),
        ("fedgen train privacy.target", [f"privacy.{name}=" for name in sorted(TARGETS)]),
        ("fedgen train seed=x method.clus", []),
        ("fedgen sample run", ["run="]),
        ("fedgen nothing x", []),
    ],
)
def test_completions(line: str, result: list[str]) -> None:
    assert after(line) == result


def test_all_commands_and_all_keys_compose() -> None:
    assert after("fedgen ") == sorted(cli.COMMANDS)
    keys = after("fedgen train method=dpgan_small ")
    assert {"rounds=", "data=", "runtime."} <= set(keys)
    keys += after("fedgen train method=dpgan_small method.")
    assert "method.clip=" in keys and "method.generator." in keys
    assert not [
        key for key in keys if key.endswith((".type", ".strategy")) or key.startswith("names")
    ]


def test_in_bash(tmp_path: Path) -> None:
    """Bash splits words at an equals sign."""
    place = str(Path(sys.executable).parent)
    for line, result in (
        ("fedgen train method=gs_w", ["gs_wgan", "gs_wgan_small"]),
        ("fedgen rel", ["release"]),
    ):
        environment = {"PATH": f"{place}:/usr/bin:/bin", "HOME": str(tmp_path)}
        command = ["bash", "-c", BASH, "bash", line]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.split() == result, done.stderr


def test_own_methods_are_completed(tmp_path: Path) -> None:
    assert cli.run(["new", "method", "name=blur", f"out={tmp_path}"]) == 0
    command = [sys.executable, "-m", "fedgen.cli", "--complete", "fedgen train method=bl"]
    environment = {"FEDGEN_EXTENSIONS": "blur", "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["method=blur"], done.stderr
