"""Score of a generator on private records, the last query of each run of ``fedgen tune``.

    server     trains a classifier on samples of the finished generator, and sends its weights
    clients    count the records with a correctly predicted label; one noisy sum

The score is the noisy number of correct predictions over the public number of records, an estimate
of accuracy. The query is one more Gaussian release, of sensitivity one, and composes with those of
the method.

Predictions are exact (``fedgen.privacy.exact_matmul``): whether a record is counted depends on no
other record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from dp_accounting import ComposedDpEvent, DpEvent
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.methods.api import (
    ClientProgram,
    Method,
    PublicFacts,
    Query,
    ServerProgram,
    State,
    Tensors,
    WorstCase,
)
from fedgen.methods.families.noisy_sums import RELATION, SumMechanisms, SumQuery, SumSequence
from fedgen.methods.plan import Plan
from fedgen.privacy.aggregation import Sent
from fedgen.privacy.clipping import ClippedSum, sum_of_rows
from fedgen.privacy.events import repeat
from fedgen.privacy.exact_matmul import product
from fedgen.randomness import RandomStreams

SCORE = "score"
"""Name of the query, and of the score in the state of the server; NaN before the query."""

_HIDDEN = 256
_EPOCHS, _BATCH, _LEARNING_RATE = 12, 128, 1e-3
_MAX_WEIGHT = 1e3
_SAMPLES_AT_ONCE = 2000


@dataclass(frozen=True)
class Scored:
    """A method with a final query that scores its generator.

    rounds: rounds of the method.
    samples: samples that the classifier is trained on.
    """

    method: Method
    sequence: SumSequence
    facts: PublicFacts
    rounds: int
    samples: int

    # --- clients --------------------------------------------------------------------------------

    def respond(
        self, state: State, query: Query, shard: Shard, round_: int, streams: RandomStreams
    ) -> Sent:
        """Respond to the query for the score; delegate other queries to the method."""
        client = self.sequence.client if SCORE in query.samples else self.method.client
        return client.respond(state, query, shard, round_, streams)

    def aggregate(
        self, responses: Sequence[NDArray[Any]], round_: int, streams: RandomStreams
    ) -> Tensor:
        """See ``Method``."""
        if round_ < self.rounds:
            return self.method.aggregate(responses, round_, streams)
        return self.sequence.aggregate(responses, round_ - self.rounds, streams)

    # --- the server -----------------------------------------------------------------------------

    def server(self) -> ServerProgram:
        """Return the server of the method, with the score in its state."""
        server = self.method.server

        def on_method_state(function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda state, *rest: function(_without_score(state), *rest)

        def init(streams: RandomStreams) -> Tensors:
            return {**server.init(streams), SCORE: torch.full((1,), math.nan)}

        def query(state: Tensors, round_: int, streams: RandomStreams) -> Query | None:
            if round_ < self.rounds:
                return server.query(_without_score(state), round_, streams)
            weights = self._classifier(server.generator(_without_score(state)), streams)
            return self.sequence.make_query(round_ - self.rounds, weights)

        def update(
            state: Tensors, responses: Tensor, round_: int, streams: RandomStreams
        ) -> Tensors:
            if round_ < self.rounds:
                updated = server.update(_without_score(state), responses, round_, streams)
                return {**updated, SCORE: state[SCORE]}
            return {**state, SCORE: responses.flatten().cpu().float()}

        def server_step(state: Tensors, round_: int, streams: RandomStreams) -> Tensors:
            stepped = server.server_step(_without_score(state), round_, streams)
            return {**stepped, SCORE: state[SCORE]}

        return replace(
            server,
            init=init,
            broadcast=on_method_state(server.broadcast),
            query=query,
            update=update,
            server_step=server_step,
            generator=on_method_state(server.generator),
            membership_scores=on_method_state(server.membership_scores),
            metrics=on_method_state(server.metrics),
        )

    def _classifier(self, generator: Tensors, streams: RandomStreams) -> dict[str, Tensor]:
        """Return the weights of a classifier trained on samples of a generator."""
        score_streams = streams.at(SCORE)
        labels = torch.arange(self.samples) % self.facts.classes
        images = torch.cat(
            [
                self.method.server.sample(
                    generator, part, score_streams.at("samples", number)
                ).cpu()
                for number, part in enumerate(torch.split(labels, _SAMPLES_AT_ONCE))
            ]
        )
        source = score_streams.public("classifier")
        return train_classifier(images, labels, self.facts.classes, source)

    # --- privacy --------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Return the plan of the method and the score."""
        plan, score = self.method.plan, self.sequence.plan("none", None, None)
        queries = plan.queries_in(self.rounds)

        def then_score(
            event: Callable[[int], DpEvent], limit: int, score_event: Callable[[int], DpEvent]
        ) -> Callable[[int], DpEvent]:
            def combined(count: int) -> DpEvent:
                if count <= limit:
                    return event(count)
                return ComposedDpEvent([event(limit), score_event(count - limit)])

            return combined

        def repeated_score(count: int) -> DpEvent:
            return repeat(self.sequence.queries[0].mechanism.event(), count)

        server_event = then_score(plan.server_event, queries, score.server_event)
        release = revealed = None
        if plan.release_event is not None:
            release = then_score(plan.release_event, self.rounds, repeated_score)
        if plan.event_if_sampling_revealed is not None:
            revealed = then_score(plan.event_if_sampling_revealed, queries, repeated_score)

        def shape(rows: int, round_: int) -> tuple[int, ...]:
            return plan.response_shape(rows, round_) if round_ < self.rounds else (1, 1)

        all_rounds = plan.query_rounds is None or plan.query_rounds >= self.rounds
        between = plan.server_rounds if all_rounds else (queries, self.rounds - queries)
        return replace(
            plan,
            response_shape=shape,
            server_event=server_event,
            release_event=release,
            event_if_sampling_revealed=revealed,
            claim=None,
            query_rounds=self.rounds + 1 if all_rounds and plan.query_rounds else None,
            server_rounds=between,
            fixed_rounds=None if plan.fixed_rounds is None else self.rounds + 1,
            value_ranges=plan.value_ranges + score.value_ranges,
        )

    def worst_cases(self) -> list[WorstCase]:
        """Return the worst cases of the method, and a record that is counted or missing."""
        image, classes = torch.zeros(1, *self.facts.shape, dtype=torch.uint8), self.facts.classes
        weights = {
            "hidden": torch.zeros(image.numel(), _HIDDEN),
            "hidden_bias": torch.zeros(_HIDDEN),
            "output": torch.zeros(_HIDDEN, classes),
            "output_bias": torch.eye(classes)[0],  # predicts label 0
        }
        counted = Shard(image, torch.zeros(1, dtype=torch.long))
        missing = Shard(image[:0], torch.zeros(0, dtype=torch.long))
        case = self.sequence.worst_case(SCORE, weights, ({}, counted), ({}, missing))
        return [
            *self.method.worst_cases(),
            replace(case, round=self.rounds, custom_noise=True),
        ]


def with_score(
    method: Method,
    facts: PublicFacts,
    noise_multiplier: float | None,
    rounds: int,
    rows: float,
    samples: int,
    device: str,
) -> Method:
    """Return a method with a final query that scores its generator.

    Args:
        noise_multiplier: of the score; None: no noise.
        rounds: of the method and its score; not used if the method has a fixed number.
        rows: approximate public number of records.
        samples: samples that the classifier is trained on.

    Raises:
        FedgenError: for methods other than noisy sums of all clients.
    """
    plan = method.plan
    queries_all = not method.cohort.is_sampled and not method.client.prepare_steps
    queries_all &= method.trained_per_round == 0 and plan.samples_per_round == 1
    if not queries_all or plan.relation is not RELATION:
        problem = "is not supported by fedgen tune, which requires noisy sums of all clients"
        raise FedgenError("method", problem, "use e.g. mixture, dp_merf, dpgan or dpdm")
    sums = SumMechanisms(facts, noise_multiplier, rows)
    query = SumQuery(SCORE, 1, sums.mechanism(), count_predicted)
    method_rounds = plan.fixed_rounds or rounds - 1
    combined = Scored(method, SumSequence((query,), device), facts, method_rounds, samples)
    return replace(
        method,
        client=ClientProgram(combined.respond, resamples=method.client.resamples),
        server=combined.server(),
        plan=combined.plan(),
        worst_cases=combined.worst_cases,
        aggregate=combined.aggregate,
    )


def count_predicted(shared: Mapping[str, Tensor], images: Tensor, labels: Tensor) -> ClippedSum:
    """Return the number of images (n, ...) in [0, 1] with a correctly predicted label."""
    correct = predict(shared, images) == labels
    return sum_of_rows(correct[:, None].double(), 1.0)


def predict(weights: Mapping[str, Tensor], images: Tensor) -> Tensor:
    """Return predicted labels (n,) of images (n, ...) in [0, 1]. For any weights, a prediction does
    not depend on the other images."""
    finite = {name: value.double().nan_to_num(0.0) for name, value in weights.items()}
    max_entry = {name: _largest_entry(value) for name, value in finite.items()}
    pixels = images.flatten(1).double()
    hidden = product(pixels, finite["hidden"], (1.0, max_entry["hidden"])) + finite["hidden_bias"]
    max_hidden = len(finite["hidden"]) * max_entry["hidden"] + max_entry["hidden_bias"]
    hidden = hidden.clamp(0, max_hidden)
    logits = product(hidden, finite["output"], (max_hidden, max_entry["output"]))
    return (logits + finite["output_bias"]).argmax(1)


def _largest_entry(values: Tensor) -> float:
    return min(max(float(values.abs().max()), 1e-6), _MAX_WEIGHT)


def train_classifier(
    images: Tensor, labels: Tensor, classes: int, source: torch.Generator
) -> dict[str, Tensor]:
    """Return the weights of a network with one hidden layer, trained on images (n, ...) in [0, 1]
    and labels (n,)."""
    inputs = images.flatten(1)
    size = inputs.shape[1]
    with torch.random.fork_rng():
        torch.manual_seed(int(torch.randint(2**62, (1,), generator=source)))
        layers = nn.Linear(size, _HIDDEN), nn.Linear(_HIDDEN, classes)
    network = nn.Sequential(layers[0], nn.ReLU(), layers[1])
    adam = torch.optim.Adam(network.parameters(), _LEARNING_RATE)
    with torch.enable_grad():
        for _ in range(_EPOCHS):
            for batch in torch.split(torch.randperm(len(labels), generator=source), _BATCH):
                adam.zero_grad()
                loss = F.cross_entropy(network(inputs[batch]), labels[batch])
                loss.backward()  # type: ignore[no-untyped-call]
                adam.step()
    first, last = layers
    return {
        "hidden": first.weight.detach().T.contiguous(),
        "hidden_bias": first.bias.detach(),
        "output": last.weight.detach().T.contiguous(),
        "output_bias": last.bias.detach(),
    }


def _without_score(state: Tensors) -> Tensors:
    return {name: value for name, value in state.items() if name != SCORE}
