"""Pack messages into one object: Flower would send each array as a separate object."""

from __future__ import annotations

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.message import make_message
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict

_WHOLE = "whole"


def pack_message(message: Message) -> Message:
    """Return a message with all of its content as bytes."""
    content_bytes = recorddict_to_proto(message.content).SerializeToString()
    return make_message(
        metadata=message.metadata,
        content=RecordDict({_WHOLE: ConfigRecord({_WHOLE: content_bytes})}),
    )


def unpack_message(message: Message) -> Message:
    """Invert ``pack_message``. A message without such bytes is malformed and returned unchanged."""
    if message.has_error():
        return message
    try:
        content_bytes = message.content.config_records[_WHOLE][_WHOLE]
        assert isinstance(content_bytes, bytes)
        content = recorddict_from_proto(ProtoRecordDict.FromString(content_bytes))
    except Exception:  # untrusted bytes
        return message
    return make_message(metadata=message.metadata, content=content)
