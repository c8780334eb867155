"""Messages in one piece: Flower takes each array for an object, and asks for each by itself."""

from __future__ import annotations

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.message import make_message
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict

_WHOLE = "whole"


def packed(message: Message) -> Message:
    """A message with all of its content as bytes."""
    whole = recorddict_to_proto(message.content).SerializeToString()
    return make_message(
        metadata=message.metadata, content=RecordDict({_WHOLE: ConfigRecord({_WHOLE: whole})})
    )


def unpacked(message: Message) -> Message:
    """The inverse of ``packed``. What does not hold such bytes stays as it is: it is malformed."""
    if message.has_error():
        return message
    try:
        whole = message.content.config_records[_WHOLE][_WHOLE]
        assert isinstance(whole, bytes)
        content = recorddict_from_proto(ProtoRecordDict.FromString(whole))
    except Exception:  # somebody else's bytes
        return message
    return make_message(metadata=message.metadata, content=content)
