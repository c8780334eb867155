"""A private mixture of Gaussians, and a private teacher that labels what it draws.

Everything that is learnt is a sum over rows of clipped contributions, asked for once or a few
times, with noise of its own; each question is made of the answers before it:

    levels     histogram of grey levels; mean square of pixels, which gives all clip norms
    means      each label's count and mean, in the m x m lowest cosines of a channel
    second     second moment within labels; its leading d eigenvectors are the coordinates
    clusters   k-means within each label, ``steps`` times: each cluster's count and sum; of one
               cluster, once: its mean anew, with less noise in fewer coordinates
    spread     each label's covariance around its clusters' centres
    teacher    a classifier on wavelet features (``teacher.py``), if one is asked for

A sample is a centre, Gaussian noise by its label's covariance, and the grey level of the same rank
among those that were published; it may be warped (a prior written by hand, no data). All that is
published is shrunk by what noise is known to be in it, never by private counts. With a teacher, an
image is served under the label that the teacher gives it.

A release's contribution has norm 1 at most, so that a row more or less moves it by 1: a label's or
cluster's count and sum together, a moment by its Frobenius norm. With shares s_i of the budget and
noise multiplier sigma of it all, release i has sigma / sqrt(s_i), and k repeats sqrt(k) times that:
the squared ratios of sensitivity to noise add up to 1 / sigma^2 (``fedgen.sequence.Sums``).

Whatever the server asks by, a row's contribution is at most that long, and another row moves it
nowhere: cosines, coordinates, what decides the nearest cluster and a teacher's places are exact
(``privacy/exact.py``).
That the other rows' wavelet features, in single precision, stay the same to the last bit whatever
row is beside them, is taken for granted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor

from fedgen.coins import Coins
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.method import Method, PublicFacts, Query, ServerProgram, State, WorstCase
from fedgen.methods.teacher import Space, Teacher, descent, ridge
from fedgen.models.cosines import PLACES, CosineMixture, lowest_cosines
from fedgen.models.functional import Tensors, join, part
from fedgen.models.scattering import Scattering
from fedgen.models.warps import Warps
from fedgen.privacy.exact import product
from fedgen.privacy.per_example import ClippedSum, clip_rows, from_moments, of_moments, of_rows
from fedgen.sequence import Asked, OfClients, OfRows, Sums, SumSequence, std_of_mean

Learn = Callable[[Mapping[str, Tensor], Tensor], Tensors]
"""(what is known, an answer) -> what it tells."""

_SUMS = ("levels", "means", "second", "clusters", "spread")
LEVELS = 64  # of grey, in the histogram
_COUNT = 0.5  # what a row adds to a count, beside a vector of length 1
_JOINT = math.hypot(1, _COUNT)
_AT_ONCE = 2000  # images
_NONE = 1e-9  # a share of rows


# --- what a row contributes -----------------------------------------------------------------------


@dataclass(frozen=True)
class Contributions:
    """What rows contribute to each sum: functions of what the question holds, of images (n, c, h,
    w) in [0, 1] and of labels (n,)."""

    shape: tuple[int, int, int]
    classes: int
    cosines: Tensor
    clusters: int

    def levels(self, shared: Mapping[str, Tensor], images: Tensor, labels: Tensor) -> ClippedSum:
        """Shares of its pixels at each level, channel by channel, and its mean square: both at most
        1 long."""
        del shared, labels
        channels = self.shape[0]
        level = (images * (LEVELS - 1e-3)).long().flatten(2)
        level += torch.arange(channels, device=images.device)[:, None] * LEVELS
        shares = images.new_zeros(len(images), channels * LEVELS)
        ones = torch.ones_like(level, dtype=images.dtype).flatten(1)
        shares.scatter_add_(1, level.flatten(1), ones)
        square = images.double().square().flatten(1).mean(1, keepdim=True)
        both = torch.cat([shares / images[0].numel(), square], 1) if len(images) else shares
        return of_rows(_padded(both, channels * LEVELS + 1) / math.sqrt(2), 1.0)

    def means(self, shared: Mapping[str, Tensor], images: Tensor, labels: Tensor) -> ClippedSum:
        """Its cosines, and one more, in the block of its label."""
        return _counted(self.waves(images), float(shared["bound"]), labels, self.classes)

    def second(self, shared: Mapping[str, Tensor], images: Tensor, labels: Tensor) -> ClippedSum:
        """The square of what sets it apart from its label's mean."""
        apart, bound = self.waves(images) - shared["means"][labels], float(shared["bound"])
        return of_moments(clip_rows(apart, bound) / bound, 1.0)

    def clustered(self, shared: Mapping[str, Tensor], images: Tensor, labels: Tensor) -> ClippedSum:
        """Its coordinates, and one more, in the block of its label's nearest cluster."""
        place = self.coordinates(shared, images, labels)
        # of more centres than there are, one would be a block that there is not
        centres = shared["centres"][:, : self.clusters]
        blocks = labels * self.clusters + self.nearest(place, centres, labels)
        return _counted(place, float(shared["bound"]), blocks, self.classes * self.clusters)

    def spread(self, shared: Mapping[str, Tensor], images: Tensor, labels: Tensor) -> ClippedSum:
        """The square of what sets it apart from its cluster's centre, in the block of its label."""
        place, bound = self.coordinates(shared, images, labels), float(shared["bound"])
        nearest = self.nearest(place, shared["centres"], labels)
        apart = place - shared["centres"][labels, nearest]
        return of_moments(clip_rows(apart, bound) / bound, 1.0, labels, self.classes)

    def waves(self, images: Tensor) -> Tensor:
        """Images -> the lowest cosines of each channel (n, c * m * m)."""
        channels = images.flatten(2).flatten(0, 1)
        found = product(channels, self.cosines.to(images.device), (1.0, 1.0))
        return found.view(len(images), images.shape[1] * found.shape[1])

    def coordinates(self, shared: Mapping[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
        """Images -> their places around their label's mean (n, d)."""
        apart = self.waves(images) - shared["means"][labels]
        return product(apart, shared["basis"], (self.longest, 1.0))

    def nearest(self, places: Tensor, centres: Tensor, labels: Tensor) -> Tensor:
        """Of each place (n, d) the nearest of its label's centres (labels, k, d)."""
        found = torch.zeros(len(places), dtype=torch.long, device=places.device)
        for label, own in enumerate(centres.double()):
            mine = labels == label
            along = product(places[mine], own.T, (self.longest, self.longest))
            found[mine] = (own.square().sum(1) - 2 * along).argmin(1)
        return found

    @property
    def longest(self) -> float:
        """Of what sets images apart: twice a white one's length."""
        return 2 * math.sqrt(math.prod(self.shape))


def _counted(rows: Tensor, bound: float, blocks: Tensor, count: int) -> ClippedSum:
    """Rows (n, d), each at most 1 long, behind a number that counts them; 1 long in all."""
    number = torch.full_like(rows[:, :1], _COUNT)
    return of_rows(
        torch.cat([number, clip_rows(rows, bound) / bound], 1) / _JOINT, 1.0, blocks, count
    )


def _padded(rows: Tensor, width: int) -> Tensor:
    """Rows as they are; of no rows, none of this width."""
    return rows if len(rows) else rows.new_zeros(0, width)


# --- sizes ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """How much is asked for: what noise leaves of it decides, before anything is asked.

    cosines: m, along each side. coordinates: d. clusters: k, of each label.
    """

    cosines: int
    coordinates: int
    clusters: int


# --- the server -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    """What was published so far, and what is drawn from it.

    stds: of the noise in each number of the mean answers, by name; known to everybody.
    """

    shape: tuple[int, int, int]
    classes: int
    sizes: Sizes
    stds: Mapping[str, float]
    sequence: SumSequence
    contributions: Contributions
    images: CosineMixture
    teacher: Teacher | None

    def init(self, coins: Coins) -> Tensors:
        """Nothing is known; the seeds of what is drawn in public."""
        channels, labels = self.shape[0], self.classes
        waves, count = channels * self.sizes.cosines**2, self.sizes.coordinates
        clusters, tables = self.sizes.clusters, (channels, PLACES)
        shapes: dict[str, tuple[int, ...]] = {
            "levels": (channels, LEVELS),
            "power": (),
            "bound": (),
            "step": (),
            "counts": (labels,),
            "means": (labels, waves),
            "basis": (waves, count),
            "variances": (count,),
            "centres": (labels, clusters, count),
            "shares": (labels, clusters),
            "roots": (labels, count, count),
            "drawn": tables,
            "meant": tables,
        }
        if self.teacher is not None:
            shapes |= self.teacher.space.shapes()
        seeds = {
            name: torch.randint(0, 2**62, (), generator=coins.public(name))
            for name in ("centres.seed", "samples.seed")
        }
        return {name: torch.zeros(shape) for name, shape in shapes.items()} | seeds

    def query(self, state: Mapping[str, Tensor], round_: int, coins: Coins) -> Query | None:
        """The next sum, with what of the answers before it is made of."""
        del coins
        if round_ >= self.sequence.rounds:
            return None
        needs, _ = self._sums[self.sequence.at(round_).name]
        return self.sequence.question(round_, {name: state[name] for name in needs})

    def update(
        self, state: Mapping[str, Tensor], answers: Tensor, round_: int, coins: Coins
    ) -> Tensors:
        """What a sum tells."""
        del coins
        _, learn = self._sums[self.sequence.at(round_).name]
        told = learn(state, answers.flatten().double())
        return {**state, **{name: value.float() for name, value in told.items()}}

    @property
    def _sums(self) -> dict[str, tuple[tuple[str, ...], Learn]]:
        """Of each sum: what its question holds, and what its answer tells."""
        places = ("bound", "means", "basis", "centres")
        teacher = self.teacher
        return {
            "levels": ((), self._levels),
            "means": (("bound",), self._means),
            "second": (("bound", "means"), self._second),
            "clusters": (places, self._clusters),
            "spread": (places, self._spread),
            **({teacher.asked.name: (teacher.needs, teacher.learn)} if teacher else {}),
        }

    def _levels(self, state: Mapping[str, Tensor], found: Tensor) -> Tensors:
        del state
        found = found * math.sqrt(2)
        shares = found[:-1].view(self.shape[0], LEVELS).clamp(min=0)
        shares = shares / shares.sum(1, keepdim=True).clamp(min=1e-12)
        power = found[-1].clamp(1e-3, 1.0) * math.prod(self.shape)
        return {"levels": shares, "power": power, "bound": 1.1 * power.sqrt()}

    def _means(self, state: Mapping[str, Tensor], found: Tensor) -> Tensors:
        bound, noise = state["bound"].double(), self.stds["means"] * _JOINT
        counts, sums = _counts_and_sums(found.view(self.classes, -1), bound)
        known = counts.clamp(min=max(2 * noise / _COUNT, _NONE))
        together = sums.sum(0) / counts.sum().clamp(min=max(noise, _NONE))
        apart = sums / known[:, None] - together
        of_noise = ((noise * bound / known).square()).mean()
        varies = apart.square().mean(0)
        apart = apart * (1 - of_noise / varies.clamp(min=1e-12)).clamp(min=0)
        means = together + apart
        shares = known / known.sum()
        between = (shares[:, None] * means.square()).sum()
        within = (state["power"].double() / counts.sum().clamp(min=0.1) - between).clamp(
            min=0.05 * state["power"].double()
        )
        return {"means": means, "counts": known, "bound": 1.25 * within.sqrt()}

    def _second(self, state: Mapping[str, Tensor], found: Tensor) -> Tensors:
        side, bound = state["means"].shape[1], state["bound"].double()
        rows = state["counts"].double().sum()
        values, vectors = torch.linalg.eigh(from_moments(found, side) * bound.square() / rows)
        count = self.sizes.coordinates
        values, vectors = values.flip(0)[:count], vectors.flip(1)[:, :count]
        # the largest eigenvalue of noise alone (Wigner)
        edge = self.stds["second"] * bound.square() / rows * math.sqrt(2 * side)
        least = 0.1 * torch.maximum(values, 0.1 * edge).clamp(min=_NONE)
        variances = torch.maximum(values - 0.7 * edge, least)
        source = torch.Generator().manual_seed(int(state["centres.seed"]))
        drawn = torch.randn(
            self.classes, self.sizes.clusters, count, generator=source, dtype=torch.float64
        )
        return {
            "basis": vectors,
            "variances": variances,
            "centres": 0.7 * drawn * variances.sqrt(),
            "shares": torch.full((self.classes, self.sizes.clusters), 1 / self.sizes.clusters),
            "bound": 1.3 * variances.sum().sqrt(),
            "step": torch.zeros(()),
        }

    def _clusters(self, state: Mapping[str, Tensor], found: Tensor) -> Tensors:
        bound, variances = state["bound"].double(), state["variances"].double()
        sizes, noise = (self.classes, self.sizes.clusters), self.stds["clusters"] * _JOINT
        counts, sums = _counts_and_sums(found.view(sizes[0] * sizes[1], -1), bound)
        counts, sums = counts.view(sizes), sums.view(*sizes, -1)
        known = counts.clamp(min=max(noise / _COUNT, _NONE))
        of_noise = (noise * bound / known).square()[..., None]
        centres = sums / known[..., None] * (variances / (variances + 2 * of_noise))
        big = counts > 3 * noise / _COUNT
        big |= counts == counts.max(1, keepdim=True).values
        shares = counts.clamp(min=1e-9) * big
        shares = shares / shares.sum(1, keepdim=True)
        step = int(state["step"]) + 1
        told = {"centres": centres, "shares": shares, "step": torch.tensor(float(step))}
        if step < self.sequence.repeats("clusters"):
            # what is noise begins anew beside a big one
            source = torch.Generator().manual_seed(int(state["centres.seed"]) + step)
            for label, cluster in (~big).nonzero().tolist():
                beside = int(torch.multinomial(shares[label].float(), 1, generator=source))
                moved = torch.randn(len(variances), generator=source).double() * variances.sqrt()
                centres[label, cluster] = centres[label, beside] + 0.3 * moved
            return told
        weights = state["counts"].double() / state["counts"].double().sum()
        between = (weights[:, None] * shares * centres.square().sum(2)).sum()
        within = (variances.sum() - between).clamp(min=0.2 * variances.sum())
        centres[~big] = 1e3 * bound  # nobody is near
        return {**told, "bound": 1.3 * within.sqrt()}

    def _spread(self, state: Mapping[str, Tensor], found: Tensor) -> Tensors:
        side, bound = len(state["variances"]), state["bound"].double()
        counts = state["counts"].double()
        sums = from_moments(found.view(self.classes, -1), side) * bound.square()
        noise = self.stds["spread"] * bound.square() / math.sqrt(2)  # off the diagonal
        pooled = sums.sum(0) / counts.sum()
        variances = pooled.diagonal().clamp(
            min=1e-3 * float(pooled.diagonal().max().clamp(min=1e-6))
        )
        # entries of a covariance as they are expected to be: correlations near 0.3
        expected = 0.09 * torch.outer(variances, variances)
        own = expected / (expected + self.classes * (noise / counts.sum()).square())
        pooled = own * pooled
        pooled.diagonal().copy_(variances)
        roots = []
        for label in range(self.classes):
            mine = sums[label] / counts[label]
            ratio = (mine.trace() / variances.sum()).clamp(0.3, 3)
            both = 1 + torch.eye(side, dtype=torch.float64)
            weight = expected / (expected + (noise / counts[label]).square() * both)
            prior = pooled * ratio
            values, vectors = torch.linalg.eigh(prior + weight * (mine - prior))
            roots.append(vectors * values.clamp(min=0).sqrt() @ vectors.T)
        told = {"roots": torch.stack(roots).float(), "step": torch.zeros(())}
        labels = torch.arange(_AT_ONCE) % self.classes
        source = torch.Generator().manual_seed(int(state["samples.seed"]))
        told |= self.images.tables({**state, **told}, labels, source)
        if self.teacher is not None:
            source = torch.Generator().manual_seed(int(state["samples.seed"]) + 1)
            labels = torch.arange(self.teacher.space.samples) % self.classes
            drawn = self.images.draw({**state, **told}, labels, source, warped=False)
            told |= self.teacher.space.made(drawn, labels, source)
        return told

    # --- samples ----------------------------------------------------------------------------------

    def generator(self, state: Mapping[str, Tensor]) -> Tensors:
        """All that samples are drawn from."""
        names = ("means", "basis", "centres", "shares", "roots", "drawn", "meant")
        taught = ("mean", "directions", "weights") if self.teacher else ()
        found = {name: state[name] for name in names}
        return found | join(teacher={name: state[name] for name in taught})

    def sample(self, weights: Mapping[str, Tensor], labels: Tensor, coins: Coins) -> Tensor:
        """Images, one per label."""
        if not weights["drawn"].any():  # not all is known yet
            return torch.full((len(labels), *self.shape), 0.5)
        weights = {name: value.cpu() for name, value in weights.items()}
        source = coins.public("samples")
        if self.teacher is None:
            parts = torch.split(labels, _AT_ONCE)
            return torch.cat([self.images.draw(weights, some, source) for some in parts])
        return self._taught(self.teacher, weights, labels, source)

    def _taught(
        self,
        teacher: Teacher,
        weights: Mapping[str, Tensor],
        labels: Tensor,
        source: torch.Generator,
    ) -> Tensor:
        """As many images of each label as are wanted, by the teacher's labels; of what is missing
        when four times as many are drawn, images that were drawn for it."""
        images = torch.zeros(len(labels), *self.shape)
        places = [(labels == label).nonzero().flatten() for label in range(self.classes)]
        known, done, all_drawn = part(weights, "teacher"), [0] * self.classes, 0
        while all_drawn < 4 * len(labels):
            left = [len(place) - have for place, have in zip(places, done, strict=True)]
            if not any(left):
                break
            ahead = min(1.0, _AT_ONCE / sum(left))
            tried = torch.cat([torch.full((math.ceil(n * ahead),), c) for c, n in enumerate(left)])
            drawn = self.images.draw(weights, tried, source)
            given, all_drawn = teacher.labels(known, drawn), all_drawn + len(tried)
            for label in range(self.classes):
                mine = drawn[given == label][: len(places[label]) - done[label]]
                images[places[label][done[label] : done[label] + len(mine)]] = mine
                done[label] += len(mine)
        for label, (place, have) in enumerate(zip(places, done, strict=True)):
            rest = place[have:]
            if len(rest):
                images[rest] = self.images.draw(weights, torch.full((len(rest),), label), source)
        return images

    def classify(self, weights: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """The teacher's labels (n,)."""
        assert self.teacher is not None
        return self.teacher.labels(part(weights, "teacher"), images)

    def recognize(
        self, state: Mapping[str, Tensor], images: Tensor, labels: Tensor, coins: Coins
    ) -> Tensor:
        """By how near an image is to what its label's mixture draws."""
        del coins
        place = self.contributions.coordinates(state, images, labels)
        nearest = self.contributions.nearest(place, state["centres"], labels)
        centres = state["centres"][labels, nearest]
        return -(place - centres).square().sum(1)


def _counts_and_sums(found: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """What ``_counted`` rows were, summed: (blocks, 1 + d) -> counts (blocks,), sums."""
    found = found * _JOINT
    return found[:, 0] / _COUNT, found[:, 1:] * bound


# --- the method -----------------------------------------------------------------------------------

WARPS: Mapping[str, Warps | None] = {
    "none": None,
    "digits": Warps(1.0, rotation=12, scale=0.12, shear=0.15, shift=0.054, elastic=0.043),
    "things": Warps(0.5, rotation=3, scale=0.06, shear=0.05, shift=0.025, elastic=0.0143),
}
"""Written characters may lean and waver; what is photographed upright hardly does."""


def mixture(
    facts: PublicFacts,
    noise_multiplier: float | None,
    *,
    rows: int,
    shares: Mapping[str, float],
    steps: int,
    cosines: int | None,
    coordinates: int | None,
    clusters: int | None,
    teacher: Literal["none", "ridge", "descent"],
    teacher_share: float,
    teacher_steps: int,
    space: int,
    space_samples: int,
    warps: Literal["none", "digits", "things"],
    device: str,
) -> Method:
    """The mixture for these public parameters.

    Args:
        noise_multiplier: of all releases together, as of one Gaussian; None: no noise.
        rows: a public number near that of all clients' rows; each divides by its equal share.
        shares: of levels, means, second, clusters and spread, of what the mixture may spend.
        steps: of k-means; one, where a label has but one cluster.
        cosines, coordinates, clusters: m, d and k; None: by a rule (``_sizes``), from the noise.
        teacher: who labels samples: nobody, ridge regression, or softmax regression by descent; of
            one label always nobody.
        teacher_share: of the whole budget, where there is a teacher. teacher_steps: of descent.
        space: dimensions of the teacher's space; space_samples: that it is computed from.
        warps: how samples are warped, a prior that no row is asked for.

    Raises:
        FedgenError: for shares that do not sum to one.
    """
    if set(shares) != set(_SUMS) or abs(sum(shares.values()) - 1) > 1e-6:
        problem = f"{', '.join(shares)} sum to {sum(shares.values()):g}"
        raise FedgenError("method.shares", problem, f"give {', '.join(_SUMS)}, one in all")
    if space_samples < 2 * facts.classes:
        problem = f"{space_samples} are too few for {facts.classes} labels"
        raise FedgenError("method.space_samples", problem, f"take {2 * facts.classes} or more")
    if not 0 < teacher_share < 1:
        problem = f"is a share, got {teacher_share:g}"
        raise FedgenError("method.teacher_share", problem, "take one between 0 and 1")
    if facts.classes == 1:  # there is nothing to tell apart
        teacher = "none"
    left = 1.0 if teacher == "none" else 1 - teacher_share
    sums = Sums(facts, noise_multiplier, rows)
    # a client's rows lie in many blocks and point to many sides, so that their mean is shorter
    blocks = min(1.0, 1.5 / math.sqrt(facts.classes))
    of_client = {"levels": 1.0, "means": blocks, "second": 0.5, "clusters": blocks}
    of_client |= {"spread": 0.5 * blocks}
    repeats = dict.fromkeys(shares, 1) | {"clusters": steps}

    def mechanism(name: str) -> OfRows | OfClients:
        return sums.mechanism(left * shares[name], repeats[name], of_client=of_client[name])

    mechanisms = {name: mechanism(name) for name in shares}
    features = Scattering(facts.shape, device)
    size = min(space, features.count, space_samples)
    made_of = Space(features, facts.classes, size, space_samples)
    teachers: dict[str, Callable[[], Teacher]] = {
        "ridge": lambda: ridge(sums, made_of, teacher_share, device),
        "descent": lambda: descent(sums, made_of, teacher_share, teacher_steps, device),
    }
    who = teachers[teacher]() if teacher in teachers else None
    stds = {name: std_of_mean(each, facts.clients) for name, each in mechanisms.items()}
    by_rule = _sizes(facts, stds)
    sizes = Sizes(
        cosines or by_rule.cosines,
        coordinates or by_rule.coordinates,
        clusters or by_rule.clusters,
    )
    _check(sizes, facts)
    if sizes.clusters == 1:  # all of a label: its mean once more, in few coordinates, does not move
        repeats["clusters"] = 1
        mechanisms["clusters"] = mechanism("clusters")
        stds["clusters"] = std_of_mean(mechanisms["clusters"], facts.clients)
    waves, count = facts.shape[0] * sizes.cosines**2, sizes.coordinates
    made = Contributions(
        facts.shape,
        facts.classes,
        lowest_cosines((facts.shape[1], facts.shape[2]), sizes.cosines),
        sizes.clusters,
    )
    asked = [
        Asked("levels", facts.shape[0] * LEVELS + 1, mechanisms["levels"], made.levels),
        Asked("means", facts.classes * (1 + waves), mechanisms["means"], made.means),
        Asked("second", waves * (waves + 1) // 2, mechanisms["second"], made.second),
        Asked(
            "clusters",
            facts.classes * sizes.clusters * (1 + count),
            mechanisms["clusters"],
            made.clustered,
            repeats["clusters"],
        ),
        Asked(
            "spread", facts.classes * count * (count + 1) // 2, mechanisms["spread"], made.spread
        ),
    ]
    sequence = SumSequence((*asked, *([who.asked] if who else [])), device)
    server = Server(
        facts.shape,
        facts.classes,
        sizes,
        stds,
        sequence,
        made,
        CosineMixture(facts.shape, made.cosines, WARPS[warps]),
        who,
    )
    return sequence.method(
        ServerProgram(
            init=server.init,
            query=server.query,
            update=server.update,
            generator=server.generator,
            sample=server.sample,
            recognize=server.recognize,
            classify=server.classify if who else None,
        ),
        sequence.plan("none", None, None, sequence.rounds),
        facts.clients,
        lambda: _worst_cases(sequence, sizes, facts, made_of),
        asdict(sizes),
    )


def _check(sizes: Sizes, facts: PublicFacts) -> None:
    """Raises FedgenError for sizes that the images do not have."""
    if sizes.cosines > min(facts.shape[1:]):
        problem = f"{sizes.cosines} are more than {min(facts.shape[1:])} pixels have"
        raise FedgenError("method.cosines", problem, "lower it, or set it to null")
    waves = facts.shape[0] * sizes.cosines**2
    if sizes.coordinates > waves:
        problem = f"{sizes.coordinates} are more than there are cosines ({waves})"
        raise FedgenError("method.coordinates", problem, "lower it, or set it to null")


def _sizes(facts: PublicFacts, stds: Mapping[str, float]) -> Sizes:
    """From what noise there is, in shares of all rows: cosines whose moments' noise has a largest
    eigenvalue below 0.75 % of the bound; coordinates by its cube root, 160 of MNIST's 60,000 rows
    at epsilon 10; clusters so small that an average one is twelve times its count's noise."""
    channels, *sides = facts.shape
    least = 1e-12
    most = (0.0075 / max(stds["second"], least)) ** 2 / 2
    waves = min(*sides, 24, max(8, int(math.sqrt(most / channels))))
    of_all = channels * waves**2
    count = min(of_all, 160, max(8, round(160 * (2.95e-5 / max(stds["spread"], least)) ** (1 / 3))))
    noise = max(stds["clusters"], least) * _JOINT / _COUNT
    return Sizes(waves, count, min(64, max(1, int(1 / (12 * facts.classes * noise)))))


def _worst_cases(
    sequence: SumSequence, sizes: Sizes, facts: PublicFacts, space: Space
) -> list[WorstCase]:
    """A white row against none, by questions that let it have its whole length."""
    row = Shard(
        torch.full((1, *facts.shape), 255, dtype=torch.uint8), torch.zeros(1, dtype=torch.long)
    )
    first: tuple[State, Shard] = {}, row
    second: tuple[State, Shard] = {}, Shard(row.images[:0], row.labels[:0])
    waves = facts.shape[0] * sizes.cosines**2
    shared = {
        "bound": torch.ones(()),
        "means": torch.zeros(facts.classes, waves),
        "basis": torch.eye(waves)[:, : sizes.coordinates],
        "centres": torch.zeros(facts.classes, sizes.clusters, sizes.coordinates),
        "mean": torch.zeros(space.scattering.count),
        "directions": torch.ones(space.scattering.count, space.size),
        "weights": torch.zeros(space.size + 1, facts.classes),
    }
    return [sequence.worst_case(each.name, shared, first, second) for each in sequence.asked]
