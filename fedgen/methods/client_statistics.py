"""Client statistics: one noisy sum per client, by which ``fedgen debug`` finds clients with faulty
images or labels, and names the fault.

    client    once: (sum over records of s(x, y) + N(0, sigma^2)) / (rows / clients)
    server    stores the sums of each client; with secure or trusted sums, the sum of all

s(x, y), in ``fedgen.models.client_statistics``, has norm at most 1 for any record: a low-pass image
and a count in the block of the label, amplitudes of spatial frequencies, and an intensity
histogram. A sample is the low-pass mean image of its label at a random client. At client
level, a client contributes the mean of s over its records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.methods.api import Method, PublicFacts, Query, ServerProgram, WorstCase
from fedgen.methods.families.noisy_sums import SumMechanisms, SumQuery, SumSequence, mean_std
from fedgen.models.client_statistics import StatisticsSpace, mean_images
from fedgen.models.functional import Tensors
from fedgen.privacy.clipping import ClippedSum
from fedgen.privacy.events import Unit
from fedgen.randomness import RandomStreams

_SUMS = "statistics"
_AT_ONCE = 500  # images


@dataclass(frozen=True)
class Server:
    """Store the sums of each client; post-processing.

    sums: number of sums.
    scale: factor from a response to the sum over a client's records, or to its mean at client
        level.
    std: standard deviation of the noise in each entry of a scaled response.
    """

    space: StatisticsSpace
    sums: int
    scale: float
    std: float
    sequence: SumSequence

    def init(self, streams: RandomStreams) -> Tensors:
        """Return empty sums."""
        del streams
        return {
            "sums": torch.zeros(self.sums, self.space.size),
            "std": torch.tensor(self.std),
            "known": torch.zeros(()),
        }

    def query(
        self, state: Mapping[str, Tensor], round_: int, streams: RandomStreams
    ) -> Query | None:
        """Query the sums once."""
        del round_, streams
        return None if state["known"] else self.sequence.make_query(0, {})

    def update(
        self, state: Mapping[str, Tensor], responses: Tensor, round_: int, streams: RandomStreams
    ) -> Tensors:
        """Store the sums.

        Raises:
            FedgenError: if a response is missing: the sums could not be assigned to clients.
        """
        del round_, streams
        sums = responses.cpu().view(-1, self.space.size) * self.scale
        if len(sums) != self.sums:
            problem = f"{len(sums)} of {self.sums} clients responded"
            raise FedgenError(
                "method", problem, "start a new run without the clients that did not respond"
            )
        return {**state, "sums": sums, "known": torch.ones(())}

    def sample(
        self, weights: Mapping[str, Tensor], labels: Tensor, streams: RandomStreams
    ) -> Tensor:
        """Return the mean image of each label at a random client."""
        weights = {name: value.cpu() for name, value in weights.items()}
        means = mean_images(self.space, weights["sums"], float(weights["std"]))
        rng = streams.public("samples")
        client = torch.randint(0, self.sums, (len(labels),), generator=rng)
        return self.space.to_pixels(means[client, labels.cpu()])

    def membership_scores(
        self, state: Mapping[str, Tensor], images: Tensor, labels: Tensor, streams: RandomStreams
    ) -> Tensor:
        """Score images by the product of their contribution with the sum of all clients."""
        del streams
        total = state["sums"].cpu().double().sum(0)
        scores = [
            self.space.contribution(image[None], label[None]).flat() @ total
            for image, label in zip(images.cpu(), labels.cpu(), strict=True)
        ]
        return torch.stack(scores) if scores else torch.zeros(0)


def client_statistics(
    facts: PublicFacts, noise_multiplier: float | None, *, rows: int, sums: int | None, device: str
) -> Method:
    """Build client statistics from public parameters.

    Args:
        noise_multiplier: noise standard deviation over the norm 1 of a record's contribution; None:
            no noise.
        rows: public number near the number of records of all clients. Each client divides its sum
            by an equal share, and the server multiplies by it.
        sums: number of sums; None: one per client with local noise, otherwise one.
    """
    space = StatisticsSpace(facts.shape, facts.classes)
    mechanism = SumMechanisms(facts, noise_multiplier, rows).mechanism()

    def contribution(shared: Mapping[str, Tensor], images: Tensor, labels: Tensor) -> ClippedSum:
        del shared
        return space.contribution(images, labels)

    query = SumQuery(_SUMS, space.size, mechanism, contribution, at_once=_AT_ONCE)
    sequence = SumSequence((query,), device)
    separate = mechanism.aggregation.is_local
    scale = 1.0 if facts.unit is Unit.CLIENT else facts.units_of_run(rows) / facts.clients
    number = sums or (facts.clients if separate else 1)
    if not separate:  # the mean of the responses
        scale *= facts.clients
    std = mean_std(mechanism, 1 if separate else facts.clients) * scale
    server = Server(space, number, scale, std, sequence)
    method = sequence.build(
        ServerProgram(
            init=server.init,
            query=server.query,
            update=server.update,
            generator=lambda state: {name: state[name] for name in ("sums", "std")},
            sample=server.sample,
            membership_scores=server.membership_scores,
            distinct_images=number * facts.classes,
        ),
        sequence.plan("none", None, None, sequence.rounds),
        facts.clients,
        lambda: [_worst_case(sequence, facts.shape)],
        {"sums": number},
    )
    return replace(method, aggregate=_stacked) if separate else method


def _stacked(responses: Sequence[NDArray[Any]], round_: int, streams: RandomStreams) -> Tensor:
    """Stack the responses, times their number to cancel the division in ``CohortStrategy.mean``."""
    del round_, streams
    stacked = torch.stack([torch.from_numpy(response).double() for response in responses])
    return stacked * len(responses)


def _worst_case(sequence: SumSequence, shape: tuple[int, int, int]) -> WorstCase:
    """Return a black image and no image."""
    one = Shard(torch.zeros(1, *shape, dtype=torch.uint8), torch.zeros(1, dtype=torch.long))
    none = Shard(one.images[:0], one.labels[:0])
    return sequence.worst_case(_SUMS, {}, ({}, one), ({}, none))
