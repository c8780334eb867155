"""``fedgen node``: a client that stays. It speaks to a SuperLink, runs the fedgen that is installed
here and nothing that is sent, and answers what its site's policy allows."""

from __future__ import annotations

import contextlib
import fcntl
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from dp_accounting import NonPrivateDpEvent
from flwr.app import Context, Message, RecordDict
from omegaconf import DictConfig

from fedgen.deployment import policy as policies
from fedgen.deployment import request
from fedgen.deployment.flower_coordinator import bundle_hash
from fedgen.deployment.flower_link import pause
from fedgen.deployment.flower_node import (
    AGAIN_SECONDS,
    Connection,
    LostError,
    RunOverError,
    Told,
    TooLargeError,
    connected,
    error_reply,
)
from fedgen.deployment.keys import LARGEST, key_at
from fedgen.deployment.log import Log, plain
from fedgen.deployment.policy import RefusedError
from fedgen.deployment.request import Request
from fedgen.deployment.site import Place, open_run
from fedgen.errors import FedgenError
from fedgen.experiments import settings
from fedgen.experiments.settings import label_names
from fedgen.federation import messages
from fedgen.federation.client_app import FAILED, REFUSED, ClientHome, Homes, client_app
from fedgen.federation.signing import Signer, fingerprint
from fedgen.files import read_bounded
from fedgen.privacy.events import Spend, with_draws_seen
from fedgen.privacy.ledger import Ledger
from fedgen.version import VERSION


def node(config: DictConfig) -> str:
    """Serves until it is told to end; what it did, in a line.

    Raises:
        FedgenError: for a setting that does not work, or if the SuperLink does not let it in.
    """
    for name in ("ca", "key", "home", "policy"):
        if not isinstance(config[name], str):
            raise FedgenError(name, f"cannot be {config[name]!r}", "name a file or folder")
    home = Path(config.home).expanduser()
    key = key_at(Path(config.key).expanduser())
    own = fingerprint(key.public_key())
    print(f"key {config.key}.pub: {own}", flush=True)
    if config.superlink is None:
        return f"hand {config.key}.pub to the coordinator; then give superlink=HOST:PORT"
    if not re.fullmatch(r"[^\s/:]+:\d{1,5}|\[[^\s/]+\]:\d{1,5}", str(config.superlink)):
        raise FedgenError("superlink", f"cannot be {config.superlink}", "give HOST:PORT")
    place = _place(config, home, Signer(key, None), own)
    try:
        ca = read_bounded(Path(config.ca).expanduser(), LARGEST)
    except (OSError, ValueError) as error:
        problem = f"{config.ca} cannot be read ({getattr(error, 'strerror', None) or error})"
        raise FedgenError("ca", problem, "take the ca.crt of the coordinator") from error
    shape = ",".join(map(str, place.rows.shape))
    print(f"node {config.number}: {place.rows.classes} labels, data.shape=[{shape}]", flush=True)
    served, over = _Serving(place), threading.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: over.set())
    with _alone(home), connected(config.superlink, ca, key, over) as connection:
        if connection is not None:
            print(f"node {config.number} is connected to {config.superlink}", flush=True)
            served.until(over, connection)
    return f"ended; {served.count} messages were sent, see fedgen node log home={config.home}"


def _place(config: DictConfig, home: Path, signer: Signer, own: str) -> Place:
    """What a node is home to. ``own``: the fingerprint of its key."""
    if config.number < 0:
        raise FedgenError("number", f"cannot be {config.number}", "count clients from 0")
    policy = policies.read(Path(config.policy).expanduser())
    if policy.peers is not None and policy.peers.get(config.number) != own:
        problem = f"do not say that {config.number} is this node ({own})"
        raise FedgenError("policy.peers", problem, "name all nodes, this one too")
    if config.data.get("labels", ()) is None and config.data.classes is None:
        problem = "are not given, and other sites number theirs as theirs are named"
        raise FedgenError("data.labels", problem, "list all sites' labels, e.g. [ill,well]")
    rows = settings.dataset(config)
    if rows.elsewhere:
        raise FedgenError("data", "has no rows", "a node is where they are")
    known = Signer(signer.key, policy.peers)
    return Place(config.number, rows, home, policy, known, label_names(config))


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
        self._bundle = bundle_hash(VERSION)
        self._names: dict[int, str] = {}  # Flower's run -> ours
        self._asked: dict[str, Request] = {}
        self._homes: dict[str, Homes | None] = {}  # None: refused
        self._app = client_app(self._home)
        self.count = 0

    def until(self, over: threading.Event, connection: Connection) -> None:
        """Answers messages until it is told to end. What cannot be sent now is sent later: it was
        charged."""
        unsent: tuple[Message, Message] | None = None
        heard, told = time.monotonic(), Told()
        while not over.is_set():
            try:
                if unsent is None:
                    message = connection.receive()
                    told.over()
                    if message is None:
                        over.wait(pause(time.monotonic() - heard))
                        continue
                    unsent = message, self._answer(message, connection)
                connection.reply(*unsent)
                unsent, heard = None, time.monotonic()
            except RunOverError:  # it ended before this reply
                unsent = None
            except TooLargeError as error:
                told.once(f"reply exceeds the link's request limit: {error}")
                unsent = None
            except LostError as error:
                told.once(str(error))
                over.wait(AGAIN_SECONDS)
            except Exception as error:  # of the SuperLink's: a node stays, whatever it is sent
                told.once(plain(f"{type(error).__name__}: {error}")[:200])
                unsent = None
                over.wait(AGAIN_SECONDS)

    def _answer(self, message: Message, connection: Connection) -> Message:
        """The reply to a message, which is written down before it leaves."""
        name = self._opened(message.metadata.run_id, connection)
        kind = message.metadata.message_type
        if self._homes[name] is None:
            reply = error_reply(message, REFUSED)
        else:
            try:
                context = Context(
                    message.metadata.run_id,
                    connection.node,
                    {"partition-id": self._place.number},
                    RecordDict(),
                    {},
                )
                reply = self._app(message, context)
            except Exception:  # a kind of message that there is not, or one that is none
                reply = error_reply(message, FAILED)
        self.count += 1
        if reply.has_error():
            self._log.left(name, kind, 0, {}, reply.error.code)
            self._close_if_unbounded(name)
        else:
            spend = self._spend(name) if kind == messages.ASK else {}
            checked = kind in (messages.SHARES, messages.OPEN)
            rejected = messages.read_rejected(reply) if checked else set()
            self._log.left(name, kind, messages.count_bytes(reply), spend, None, rejected)
        return reply

    def _ledger(self, name: str) -> Ledger:
        homes = self._homes[name]
        assert homes is not None
        return homes.of(self._place.number).ledger

    def _spend(self, name: str) -> Spend:
        """What a run has cost so far."""
        found = self._ledger(name).account().spend
        return with_draws_seen(found) if self._place.showed_draws(name) else found

    def _close_if_unbounded(self, name: str) -> None:
        """Ends a run that a computation over private rows failed in: that it did tells of them, and
        may do so once."""
        if self._homes[name] is None:
            return
        if NonPrivateDpEvent() in self._ledger(name).account().spend:
            self._homes[name] = None
            self._refuse(name, "a computation over the rows failed; the run is over for this site")

    def _refuse(self, name: str, why: str) -> None:
        self._log.refused(name, why)
        print(f"fedgen: refused run {name}: {plain(why)}", file=sys.stderr, flush=True)

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
            except (ValueError, RecursionError) as error:
                raise RefusedError("what is asked is no run of fedgen") from error
            if self._asked.setdefault(asked.run, asked) != asked:
                raise RefusedError(f"run {asked.run} was asked for with other settings before")
            name = asked.run
            # one that goes on too, as in a process of its own: a round that is done again is
            # charged again, and meets none of the noise and draws of the first time
            if name not in self._homes or self._homes[name] is not None:
                self._homes[name], relation = open_run(self._place, asked)
                self._log.opened(name, asked.names, asked.settings, relation)
        except RefusedError as error:
            self._homes[name] = None
            self._refuse(name, str(error))
        self._names[run_id] = name
        return name
