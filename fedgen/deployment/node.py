"""``fedgen node``: a client that stays. It speaks to a SuperLink, runs the fedgen that is installed
here and nothing that is sent, and answers what its site's policy allows."""

from __future__ import annotations

import contextlib
import fcntl
import signal
import sys
import threading
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from omegaconf import DictConfig

from fedgen.deployment import policy as policies
from fedgen.deployment import request
from fedgen.deployment.flower_coordinator import bundle_hash
from fedgen.deployment.flower_node import (
    AGAIN_SECONDS,
    Connection,
    LostError,
    RunOverError,
    connected,
    error_reply,
)
from fedgen.deployment.keys import key_at
from fedgen.deployment.log import Log
from fedgen.deployment.policy import RefusedError
from fedgen.deployment.site import Place, open_run
from fedgen.errors import FedgenError
from fedgen.experiments import settings
from fedgen.federation import messages
from fedgen.federation.client_app import REFUSED, ClientHome, Homes, client_app
from fedgen.federation.signing import Signer, fingerprint

_POLL_SECONDS = 0.05


def node(config: DictConfig) -> str:
    """Serves until it is told to end; what it did, in a line.

    Raises:
        FedgenError: for a setting that does not work, or if the SuperLink does not let it in.
    """
    home = Path(config.home).expanduser()
    key = key_at(Path(config.key).expanduser())
    print(f"key {config.key}.pub: {fingerprint(key.public_key())}", flush=True)
    if config.superlink is None:
        return f"hand {config.key}.pub to the coordinator; then give superlink=HOST:PORT"
    policy = policies.read(Path(config.policy).expanduser())
    signer = Signer(key, policy.peers)
    place = Place(config.number, settings.dataset(config), home, policy, signer)
    if config.number < 0:
        raise FedgenError("number", f"cannot be {config.number}", "count clients from 0")
    try:
        ca = Path(config.ca).expanduser().read_bytes()
    except OSError as error:
        problem = f"{config.ca} cannot be read ({error.strerror})"
        raise FedgenError("ca", problem, "take the ca.crt of the coordinator") from error
    served, over = _Serving(place), threading.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: over.set())
    with _alone(home), connected(config.superlink, ca, key, over) as connection:
        if connection is not None:
            print(f"node {config.number} is connected to {config.superlink}", flush=True)
            served.until(over, connection)
    return f"ended; {served.count} messages left, see fedgen node log home={config.home}"


@contextlib.contextmanager
def _alone(home: Path) -> Iterator[None]:
    """Raises FedgenError while another process is at home there."""
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (home / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            problem = f"another node is at home in {home}"
            raise FedgenError("home", problem, "end it, or name another folder") from error
        yield


class _Serving:
    """A node's runs."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._log = Log(place.home)
        self._bundle = bundle_hash(metadata.version("fedgen"))
        self._names: dict[int, str] = {}  # Flower's run -> ours
        self._homes: dict[str, Homes | None] = {}  # None: refused
        self._app = client_app(self._home)
        self.count = 0

    def until(self, over: threading.Event, connection: Connection) -> None:
        """Answers messages until it is told to end. What cannot be sent now is sent later: it was
        charged."""
        unsent: tuple[Message, Message] | None = None
        while not over.is_set():
            try:
                if unsent is None:
                    message = connection.receive()
                    if message is None:
                        over.wait(_POLL_SECONDS)
                        continue
                    unsent = message, self._answer(message, connection)
                connection.reply(*unsent)
                unsent = None
            except RunOverError:  # it ended before this reply
                unsent = None
            except LostError as error:
                print(f"fedgen: {error}; trying again", file=sys.stderr, flush=True)
                over.wait(AGAIN_SECONDS)

    def _answer(self, message: Message, connection: Connection) -> Message:
        """The reply to a message, which is written down before it leaves."""
        name = self._opened(message.metadata.run_id, connection)
        if self._homes[name] is None:
            reply = error_reply(message, REFUSED)
        else:
            context = Context(
                message.metadata.run_id,
                connection.node,
                {"partition-id": self._place.number},
                RecordDict(),
                {},
            )
            reply = self._app(message, context)
        self.count += 1
        kind, size = message.metadata.message_type, 0
        if reply.has_content():
            size = messages.count_bytes(reply)
        self._log.left(name, kind, size, reply.error.code if reply.has_error() else None)
        return reply

    def _home(self, context: Context) -> ClientHome:
        found = self._homes[self._names[context.run_id]]
        assert found is not None
        return found(context)

    def _opened(self, run_id: int, connection: Connection) -> str:
        """A run's name, once its request was answered."""
        if run_id in self._names:
            return self._names[run_id]
        told = connection.run(run_id)
        name = str(run_id)
        try:
            if told.bundle != self._bundle:
                raise RefusedError("the coordinator has another version of fedgen, or other code")
            try:
                asked = request.read(told.request)
            except ValueError as error:
                raise RefusedError(f"what is asked is no run of fedgen ({error})") from error
            name = asked.run
            self._homes[name], relation = open_run(self._place, asked)
            self._log.opened(name, asked.settings, relation)
        except RefusedError as error:
            self._homes[name] = None
            self._log.refused(name, str(error))
            print(f"fedgen: refused run {name}: {error}", file=sys.stderr, flush=True)
        self._names[run_id] = name
        return name
