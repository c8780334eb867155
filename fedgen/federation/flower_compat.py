"""All imports of Flower's private modules outside ``fedgen.deployment.flower_*``; a test names the
supported versions."""

from __future__ import annotations

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.supercore.run import Run as Run
from flwr.supercore.task_identity import TaskIdentity

CLIENT_RAISED = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
UNKNOWN = ErrorCode.UNKNOWN
MESSAGE_UNAVAILABLE = ErrorCode.MESSAGE_UNAVAILABLE
REPLY_UNAVAILABLE = ErrorCode.REPLY_MESSAGE_UNAVAILABLE
NODE_UNAVAILABLE = ErrorCode.NODE_UNAVAILABLE


def identify_process(run_id: int) -> None:
    """Set the run of messages that this process creates; Flower stores it per process."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, run_id, 1


def empty_run(run_id: int) -> Run:
    """Return the description of a run for our own grids."""
    return Run.create_empty(run_id)


def set_message_id(message: Message, message_id: str) -> None:
    """Set the id of a message, as Flower's grids do."""
    message.metadata.__dict__["_message_id"] = message_id


def serialize_roundtrip(message: Message) -> Message:
    """Return the message as it arrives after serialization."""
    copy = message_from_proto(message_to_proto(message))
    set_message_id(copy, message.metadata.message_id)
    return copy
