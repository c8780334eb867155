"""Run ``fedgen node``: a client that stays connected. It runs the installed fedgen and no received
code, and responds as far as the policy of its site allows."""

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
from fedgen.deployment.flower_link import poll_interval
from fedgen.deployment.flower_node import (
    RETRY_SECONDS,
    Connection,
    LogOnce,
    LostError,
    RunOverError,
    TooLargeError,
    connected,
    error_reply,
)
from fedgen.deployment.log import Log, plain
from fedgen.deployment.policy import RefusedError
from fedgen.deployment.request import Request
from fedgen.deployment.site import SiteFolder, open_run
from fedgen.errors import FedgenError
from fedgen.federation import messages
from fedgen.federation.client.app import FAILED, REFUSED, client_app
from fedgen.federation.client.context import ClientContext, ClientContexts
from fedgen.federation.secagg.signing import Signer, fingerprint
from fedgen.privacy.events import Spend, with_sampling_revealed
from fedgen.privacy.ledger import Ledger
from fedgen.run import setup
from fedgen.run.setup import label_names
from fedgen.storage.io import read_bounded
from fedgen.storage.keys import LARGEST, load_or_create_key
from fedgen.version import VERSION


def node(config: DictConfig) -> str:
    """Serve until terminated; return a summary line.

    Raises:
        FedgenError: for an invalid setting, or if the SuperLink does not admit it.
    """
    home = Path(config.home).expanduser()
    key = load_or_create_key(Path(config.key).expanduser())
    key_fingerprint = fingerprint(key.public_key())
    print(f"key {config.key}.pub: {key_fingerprint}", flush=True)
    if config.superlink is None:
        return f"hand {config.key}.pub to the coordinator; then give superlink=HOST:PORT"
    if not re.fullmatch(r"[^\s/:]+:\d{1,5}|\[[^\s/]+\]:\d{1,5}", str(config.superlink)):
        raise FedgenError("superlink", f"cannot be {config.superlink}", "give HOST:PORT")
    place = _open_site(config, home, Signer(key, None), key_fingerprint)
    try:
        ca = read_bounded(Path(config.ca).expanduser(), LARGEST)
    except (OSError, ValueError) as error:
        problem = f"{config.ca} cannot be read ({getattr(error, 'strerror', None) or error})"
        raise FedgenError("ca", problem, "take the ca.crt of the coordinator") from error
    shape = ",".join(map(str, place.dataset.shape))
    print(f"node {config.number}: {place.dataset.classes} labels, data.shape=[{shape}]", flush=True)
    served, over = _NodeServer(place), threading.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, lambda *_: over.set())
    with _lock_home(home), connected(config.superlink, ca, key, over) as connection:
        if connection is not None:
            print(f"node {config.number} is connected to {config.superlink}", flush=True)
            served.serve(over, connection)
    return f"ended; {served.count} messages were sent, see fedgen node log home={config.home}"


def _open_site(config: DictConfig, home: Path, signer: Signer, key_fingerprint: str) -> SiteFolder:
    """Open the folder of a site.

    Args:
        key_fingerprint: fingerprint of its key.
    """
    policy = policies.read(Path(config.policy).expanduser())
    if policy.peers is not None and policy.peers.get(config.number) != key_fingerprint:
        problem = f"do not list the key of this node, {config.number}: {key_fingerprint}"
        raise FedgenError("policy.peers", problem, "list all nodes, including this one")
    if config.data.get("labels", ()) is None and config.data.classes is None:
        problem = "are not set, but all sites must use the same label order"
        raise FedgenError("data.labels", problem, "list all sites' labels, e.g. [ill,well]")
    rows = setup.dataset(config)
    if rows.is_remote:
        raise FedgenError("data", "has no images", "set data.path to the images of this site")
    signer_with_peers = Signer(signer.key, policy.peers)
    return SiteFolder(config.number, rows, home, policy, signer_with_peers, label_names(config))


@contextlib.contextmanager
def _lock_home(home: Path) -> Iterator[None]:
    """Raise FedgenError if another process uses the folder."""
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (home / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            problem = f"another node is using {home}"
            raise FedgenError("home", problem, "stop it, or use another folder") from error
        yield


class _NodeServer:
    """The runs of a node."""

    def __init__(self, place: SiteFolder) -> None:
        self._place = place
        self._log = Log(place.home)
        self._bundle = bundle_hash(VERSION)
        self._names: dict[int, str] = {}  # Flower run id -> name
        self._asked: dict[str, Request] = {}
        self._homes: dict[str, ClientContexts | None] = {}  # None: refused
        self._app = client_app(self._home)
        self.count = 0

    def serve(self, over: threading.Event, connection: Connection) -> None:
        """Respond to messages until terminated. Replies that cannot be sent now are sent later:
        they were charged."""
        unsent: tuple[Message, Message] | None = None
        heard, problem_log = time.monotonic(), LogOnce()
        while not over.is_set():
            try:
                if unsent is None:
                    message = connection.receive()
                    problem_log.over()
                    if message is None:
                        over.wait(poll_interval(time.monotonic() - heard))
                        continue
                    unsent = message, self._respond(message, connection)
                connection.reply(*unsent)
                unsent, heard = None, time.monotonic()
            except RunOverError:  # the run ended before this reply
                unsent = None
            except TooLargeError as error:
                problem_log.once(f"reply exceeds the link's request limit: {error}")
                unsent = None
            except LostError as error:
                problem_log.once(str(error))
                over.wait(RETRY_SECONDS)
            except Exception as error:  # a node keeps running, whatever it receives
                problem_log.once(plain(f"{type(error).__name__}: {error}")[:200])
                unsent = None
                over.wait(RETRY_SECONDS)

    def _respond(self, message: Message, connection: Connection) -> Message:
        """Return the reply to a message, logged before it is sent."""
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
            except Exception:  # an unknown or malformed message
                reply = error_reply(message, FAILED)
        self.count += 1
        if reply.has_error():
            self._log.response_sent(name, kind, 0, {}, reply.error.code)
            self._close_unless_bounded(name)
        else:
            spend = self._spend(name) if kind == messages.ASK else {}
            checked = kind in (messages.SHARES, messages.OPEN)
            rejected = messages.read_rejected(reply) if checked else set()
            self._log.response_sent(name, kind, messages.count_bytes(reply), spend, None, rejected)
        return reply

    def _ledger(self, name: str) -> Ledger:
        homes = self._homes[name]
        assert homes is not None
        return homes.get(self._place.number).ledger

    def _spend(self, name: str) -> Spend:
        """Return the spend of a run so far."""
        spend = self._ledger(name).account().spend
        return with_sampling_revealed(spend) if self._place.has_dropout(name) else spend

    def _close_unless_bounded(self, name: str) -> None:
        """Close a run after a failure in a computation over private records: the failure reveals
        information, and may do so only once."""
        if self._homes[name] is None:
            return
        if NonPrivateDpEvent() in self._ledger(name).account().spend:
            self._homes[name] = None
            self._refuse(
                name, "a computation over the images failed; the run has ended for this site"
            )

    def _refuse(self, name: str, why: str) -> None:
        self._log.run_refused(name, why)
        print(f"fedgen: refused run {name}: {plain(why)}", file=sys.stderr, flush=True)

    def _home(self, context: Context) -> ClientContext:
        contexts = self._homes[self._names[context.run_id]]
        assert contexts is not None
        return contexts(context)

    def _opened(self, run_id: int, connection: Connection) -> str:
        """Return the name of a run, once its request was answered."""
        if run_id in self._names:
            return self._names[run_id]
        flower_run = connection.run(run_id)
        name = str(run_id)
        try:
            if flower_run.bundle != self._bundle:
                raise RefusedError("the coordinator has another version of fedgen, or other code")
            try:
                run_request = request.read(flower_run.request)
            except (ValueError, RecursionError) as error:
                raise RefusedError("the request is not a fedgen run") from error
            if self._asked.setdefault(run_request.run, run_request) != run_request:
                raise RefusedError(
                    f"run {run_request.run} was requested with different settings before"
                )
            name = run_request.run
            # resumed runs too, as in a separate process: a repeated round is
            # charged again, with new noise and new samples
            if name not in self._homes or self._homes[name] is not None:
                self._homes[name], relation = open_run(self._place, run_request)
                self._log.run_opened(name, run_request.names, run_request.settings, relation)
        except RefusedError as error:
            self._homes[name] = None
            self._refuse(name, str(error))
        self._names[run_id] = name
        return name
