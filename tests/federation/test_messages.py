"""Messages: serialization is lossless, and only a Release is packed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent
from flwr.app import Message
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from mutation import kills

from fedgen.federation import messages
from fedgen.federation.flower_compat import identify_process, serialize_roundtrip, set_message_id
from fedgen.federation.messages import Response
from fedgen.methods.api import Query
from fedgen.privacy.aggregation import LOCAL, Aggregation, Secure, Trusted
from fedgen.privacy.bounds import Ball
from fedgen.privacy.events import Relation, Unit, repeat
from fedgen.privacy.mechanisms import ClientGaussian, RowGaussian
from fedgen.privacy.routing import Routing
from fedgen.randomness import RandomStreams

identify_process(1)
numbers = st.sampled_from([np.float32, np.int64, np.uint8, np.float64]).flatmap(
    lambda dtype: arrays(dtype, array_shapes(max_dims=3, max_side=4))
)


@given(st.dictionaries(st.text("abc/.", min_size=1), numbers, max_size=3))
def test_arrays_keep_every_bit(given_arrays: dict) -> None:
    result = messages.unpack_arrays(messages.pack_arrays(given_arrays))
    assert result.keys() == given_arrays.keys()
    for name, value in given_arrays.items():
        assert result[name].numpy().dtype == value.dtype
        assert result[name].numpy().tobytes() == value.tobytes()


def test_a_query_survives_the_wire() -> None:
    query = Query({"images": torch.rand(4, 1, 8, 8), "labels": torch.arange(4)})
    message = Message(messages.pack_query(3, query), dst_node_id=2, message_type=messages.ASK)
    set_message_id(message, "1")
    for arrived in (message, serialize_roundtrip(message)):
        assert messages.read_round(arrived) == 3
        result = messages.read_query(arrived)
        assert all(torch.equal(result.samples[name], query.samples[name]) for name in query.samples)


def test_a_release_survives_the_wire_with_little_overhead() -> None:
    mechanism = RowGaussian(Ball(1.0), 2.0, Routing("mean", 1), True, Unit.CLIENT)
    rows = [(torch.arange(32), torch.rand(32, 1, 28, 28))]
    release = mechanism.release((32, 1, 28, 28), rows, RandomStreams.from_seed(0, "seeded"))
    question = Message(messages.pack_hello(), dst_node_id=2, message_type=messages.ASK)
    set_message_id(question, "1")
    reply = Message(
        messages.pack_response(messages.response_from(release, LOCAL)), reply_to=question
    )
    result = messages.read_response(serialize_roundtrip(reply), LOCAL)
    assert result.event == release.event == repeat(GaussianDpEvent(2.0), 32)
    assert result.unit is Unit.CLIENT
    assert np.array_equal(result.arrays["answer"], release.arrays["answer"])
    size = release.arrays["answer"].nbytes
    assert size < messages.count_bytes(reply) < 1.01 * size


def test_nothing_but_a_release_is_packed() -> None:
    raw = Response({"answer": np.zeros(3, np.float32)}, GaussianDpEvent(1.0), Unit.RECORD)
    for aggregation in (LOCAL, Secure(3, 2, 0), Trusted(1.0)):
        with pytest.raises(TypeError, match="Response must not leave"):
            messages.response_from(raw, aggregation)  # type: ignore[arg-type]


@kills(
    "fedgen/federation/messages.py",
    "if not isinstance(message, aggregation.leaves):",
    "if isinstance(message, Response):",
)
@pytest.mark.parametrize("own", [LOCAL, Secure(3, 2, 0), Trusted(1.0)])
def test_each_aggregation_packs_its_own_type(own: Aggregation) -> None:
    """A clipped vector for a trusted aggregator, a share for a secure sum, a release otherwise.
    Under trusted aggregation the aggregator adds the noise: a client that adds some is faulty."""
    mechanism = ClientGaussian(1.0, 1.0, Relation.ADD_OR_REMOVE_ONE, aggregation=own)
    sent = mechanism.release(3, lambda: torch.ones(3), RandomStreams.from_seed(0, "seeded"))
    for other in (LOCAL, Secure(3, 2, 0), Trusted(1.0)):
        if type(other) is type(own):
            assert messages.response_from(sent, other)
            continue
        with pytest.raises(TypeError, match=f"{type(sent).__name__} must not leave"):
            messages.response_from(sent, other)


def test_foreign_bytes_are_refused() -> None:
    record = messages.pack_arrays({"x": np.zeros(3, np.float32)})
    record["x"].data = record["x"].data[:-1]
    with pytest.raises(ValueError, match="buffer size"):
        messages.unpack_arrays(record)
