"""The private parts of Flower that fedgen uses: this file fails first if one changes."""

from __future__ import annotations

import ast
from pathlib import Path

import flwr
import pytest
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

import fedgen
from fedgen.federation import flower_compat
from fedgen.federation.runtimes.in_process import InProcessGrid

PUBLIC = ("flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.simulation")
PACKAGE = Path(fedgen.__file__).parent


def test_version() -> None:
    assert flwr.__version__.startswith("1.41.")


def test_only_files_named_flower_import_private_packages() -> None:
    """One file per role: messages in process, link, coordinator, node, limits and packing."""
    importing, public = set(), tuple(f"{name}." for name in PUBLIC)
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            if module.startswith("flwr.") and not module.startswith(public):
                importing.add(file.name)
            if isinstance(node, ast.Import):
                assert not [name for name in node.names if name.name.startswith("flwr.")]
    roles = ("compat", "link", "coordinator", "node", "limits", "packing")
    assert importing == {f"flower_{role}.py" for role in roles}


def grid(app: ClientApp, serialize: bool = False) -> InProcessGrid:
    return InProcessGrid(app, 3, 60.0, serialize)


def ask(node: int) -> Message:
    content = RecordDict({"facts": ConfigRecord({"x": 1})})
    return Message(content, dst_node_id=node, message_type="query.hello")


def test_code_of_a_raising_client() -> None:
    assert flower_compat.CLIENT_RAISED == 2


@pytest.mark.parametrize("serialize", [False, True])
def test_a_message_reaches_its_client_and_its_reply_returns(serialize: bool) -> None:
    app = ClientApp()

    @app.query("hello")
    def hello(message: Message, context: Context) -> Message:
        partition = context.node_config["partition-id"]
        return Message(RecordDict({"facts": ConfigRecord({"p": partition})}), reply_to=message)

    here = grid(app, serialize)
    nodes = list(here.get_node_ids())
    ids = list(here.push_messages([ask(node) for node in nodes]))
    replies = {}
    while len(replies) < 3:
        for reply in here.pull_messages(ids):
            replies[reply.metadata.reply_to_message_id] = reply
    result = [replies[i].content.config_records["facts"]["p"] for i in ids]
    assert result == [0, 1, 2]
    assert list(here.pull_messages(ids)) == []
    assert here.run.run_id == 1
    [again] = here.send_and_receive([here.create_message(ask(2).content, "query.hello", 2, "g")])
    assert again.content.config_records["facts"]["p"] == 0


@pytest.mark.parametrize("serialize", [False, True])
def test_the_text_of_an_exception_is_not_sent(serialize: bool) -> None:
    app = ClientApp()

    @app.query("hello")
    def hello(message: Message, context: Context) -> Message:
        raise ValueError("label of row 17 is 3")

    [reply] = grid(app, serialize).send_and_receive([ask(2)])
    assert reply.error == Error(flower_compat.CLIENT_RAISED)
    assert "label of row" not in repr(reply)


def test_unknown_nodes_answer_with_an_error() -> None:
    [reply] = grid(ClientApp()).send_and_receive([ask(99)])
    assert reply.has_error()
