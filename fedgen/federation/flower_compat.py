"""Every import of Flower that is not public, in one place, but for a deployment's (its room's files
``flower_*``); a contract test watches over them."""

from __future__ import annotations

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

CLIENT_RAISED = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
UNKNOWN = ErrorCode.UNKNOWN
MESSAGE_UNAVAILABLE = ErrorCode.MESSAGE_UNAVAILABLE
REPLY_UNAVAILABLE = ErrorCode.REPLY_MESSAGE_UNAVAILABLE
NODE_UNAVAILABLE = ErrorCode.NODE_UNAVAILABLE


def identify_process(run_id: int) -> None:
    """Tells ``Message()`` whose messages this process makes; Flower keeps it per process."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, run_id, 1


def empty_run(run_id: int) -> Run:
    """A run description for a grid of our own."""
    return Run.create_empty(run_id)


def set_message_id(message: Message, message_id: str) -> None:
    """Gives a message its id, as Flower's own grids do when they push it."""
    message.metadata.__dict__["_message_id"] = message_id


def through_the_wire(message: Message) -> Message:
    """The message as it arrives after a trip over the wire."""
    copy = message_from_proto(message_to_proto(message))
    set_message_id(copy, message.metadata.message_id)
    return copy
