"""``flwr run . local`` on its own SuperLink, which ends with the run: no process is left.

    python scripts/flwr_run.py [options of flwr run]

Exit with 0 if the run completed, with 1 if it failed, with 130 after Ctrl-C.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",  # the environment is there already
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@contextlib.contextmanager
def superlink(home: Path, environment: dict[str, str]) -> Iterator[None]:
    """Start a SuperLink that Flower knows as ``local``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (home / "config.toml").write_text(
        '[superlink]\ndefault = "local"\n\n'
        f'[superlink.local]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    command = [str(BIN / "flower-superlink"), "--insecure", "--simulation"]
    command += ["--isolation", "subprocess", "--host", "127.0.0.1", "--port", str(port)]
    with (home / "superlink.log").open("w") as log:
        link = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        until = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
                break
            except OSError:
                if link.poll() is not None or time.monotonic() > until:
                    log_text = (home / "superlink.log").read_text()
                    sys.exit(f"the SuperLink did not start:\n{log_text}")
                time.sleep(0.1)
        yield
    finally:
        family = psutil.Process(link.pid).children(recursive=True)
        link.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            link.wait(5)
        _, alive = psutil.wait_procs(family, timeout=2)
        for process in alive:  # of an interrupted run
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        link.kill()


def main() -> int:
    """Run the app; return the exit status."""
    with tempfile.TemporaryDirectory() as home:
        path = f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"
        environment = {**os.environ, **QUIET, "FLWR_HOME": home, "PATH": path}
        flwr = str(BIN / "flwr")
        with superlink(Path(home), environment):
            subprocess.run(
                [flwr, "run", str(ROOT), "local", *sys.argv[1:], "--stream"],
                env=environment,
                check=False,
            )
            listed = subprocess.run(
                [flwr, "ls", "local", "--limit", "1", "--format", "json"],
                env=environment,
                check=False,
                capture_output=True,
                text=True,
            )
    try:
        return int(json.loads(listed.stdout)["runs"][0]["status"] != "finished:completed")
    except (ValueError, LookupError):  # flwr run was refused
        return 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
