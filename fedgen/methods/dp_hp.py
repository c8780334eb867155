"""DP-HP: one noisy mean embedding by Hermite polynomials, and a generator whose samples match it
(Vinaroz, Charusaie, Harder, Adamczewski, Park, "Hermite Polynomial Features for Private Data
Generation", ICML 2022).

    phi_c(x)  for a pixel x, c = 0, 1, ...:
              sum over c of phi_c(x) phi_c(y) = exp(-(x - y)^2 / (2 l))
              (Mehler's formula; ``kernel_length`` is l, the squared length of the kernel)
    Phi       sum kernel: phi_c(x_d) for each pixel d, up to ``order``, over sqrt(pixels)
    Psi       product kernel: phi_c(x_i) phi_c'(x_j), up to ``pair_order``, for public random
              pairs of pixels i, j
    client    once:
              (sum over records of (Phi, Psi) in the block of its label + N(0, sigma^2)) / rows
    server    as in DP-MERF: each round is a generator step towards the same mean, by
              ``sum_weight`` |d Phi|^2 + the mean over pairs of |d Psi|^2

The paper releases Phi once and Psi for one pair in each of ten epochs, and adds up two budgets.
Here all of it is one release: Phi and Psi are scaled to a joint norm of at most 1, and
``sum_share`` of the squared norm belongs to Phi. The norms are those of features of pixels in [0,
1], below the paper's 1. Neighbours add or remove a record, which moves the sum by at most 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from fedgen.config.constraints import Betas, Decay
from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.methods.api import Method, PublicFacts, WorstCase
from fedgen.methods.dp_merf import Server, embedding
from fedgen.methods.families.noisy_sums import SumMechanisms, SumSequence
from fedgen.models.factories import GeneratorFactory
from fedgen.models.functional import meta_module

_LEVELS = 255  # nonzero values of a byte
_CHUNK = 128  # records, each with pixels times orders features
_MIN_SHARE = 1e-6

Order = Annotated[int, Ge(1), Lt(1001)]


def hermite(order: int, length: float) -> Tensor:
    """Return phi_0 to phi_order at the byte values 0, 1 / 255, ... 1, in double precision (256,
    order + 1)."""
    a = 1 / (2 * length)
    rho = -1 / (2 * a) + 0.5 * math.sqrt(1 / a**2 + 4)
    x = torch.arange(_LEVELS + 1, dtype=torch.float64) / _LEVELS
    columns = [(1 - rho**2) ** 0.25 * torch.exp(-rho * x.square() / (1 + rho))]
    columns.append(math.sqrt(2 * rho) * x * columns[0])
    for k in range(1, order):
        last, previous = columns[k], columns[k - 1]
        next_ = (
            math.sqrt(rho / (2 * (k + 1))) * 2 * x * last - rho * math.sqrt(k / (k + 1)) * previous
        )
        columns.append(next_)
    return torch.stack(columns[: order + 1], 1)


@dataclass(frozen=True)
class Hermite:
    """Phi and Psi of images with ``pixels`` values in [0, 1], concatenated, of norm at most 1.

    They are interpolated between byte values, which does not increase norms, because norms are
    convex.
    """

    order: int
    pair_order: int
    pairs: int
    kernel_length: float
    sum_share: float
    sum_weight: float
    pixels: int
    device: str

    @cached_property
    def _tables(self) -> tuple[Tensor, Tensor]:
        """Return phi for Phi and for one pixel of Psi, each scaled to norm at most 1."""
        both = (hermite(order, self.kernel_length) for order in (self.order, self.pair_order))
        scaled = [table / self._norm(table) for table in both]
        return scaled[0].float().to(self.device), scaled[1].float().to(self.device)

    @staticmethod
    def _norm(table: Tensor) -> float:
        return float(table.norm(dim=1).max())

    @property
    def count(self) -> int:
        """Number of features."""
        return self.pixels * (self.order + 1) + self.pairs * (self.pair_order + 1) ** 2

    @property
    def _scales(self) -> tuple[float, float]:
        """Scales of Phi and of Psi of each pair, relative to the tables."""
        one_pair = math.sqrt((1 - self.sum_share) / self.pairs)
        return math.sqrt(self.sum_share / self.pixels), one_pair

    @property
    def max_entry(self) -> float:
        """Maximum feature; entries of a table are at most 1."""
        return max(self._scales)

    @cached_property
    def weights(self) -> Tensor:
        """Weights that undo the scales and weigh the two kernels."""
        norms = [
            self._norm(hermite(order, self.kernel_length))
            for order in (self.order, self.pair_order)
        ]
        sum_weight_ = math.sqrt(self.sum_weight) * norms[0] / math.sqrt(self.sum_share)
        weights = torch.full((self.count,), sum_weight_)
        weights[self.pixels * (self.order + 1) :] = norms[1] ** 2 / math.sqrt(1 - self.sum_share)
        return weights.to(self.device)

    def sample_parameters(self, seed: Tensor) -> Tensor:
        """Return the pairs of pixels (pairs, 2)."""
        source = torch.Generator().manual_seed(int(seed))
        return torch.randint(0, self.pixels, (self.pairs, 2), generator=source).to(self.device)

    def __call__(self, pairs: Tensor, images: Tensor) -> Tensor:
        """Return Phi and Psi of images (n, ...): (n, count)."""
        pixels = images.flatten(1).clamp(0, 1)
        scale, one_pair = self._scales
        sums = scale * _at(self._tables[0], pixels).flatten(1)
        left, right = self._sides(pairs, pixels)
        products = left[:, :, :, None] * right[:, :, None, :]
        return torch.cat([sums, one_pair * products.flatten(1)], 1)

    def sum_by_label(self, pairs: Tensor, images: Tensor, groups: int) -> Tensor:
        """Return Phi and Psi summed for each consecutive group of images: (groups, count). Phi of a
        group is the histogram of its pixels times a table."""
        pixels = images.flatten(1).clamp(0, 1)
        scale, one_pair = self._scales
        below, share = _levels(pixels)
        size = self.pixels * (_LEVELS + 1)
        group = torch.arange(groups, device=pixels.device).repeat_interleave(len(pixels) // groups)
        pixel = torch.arange(self.pixels, device=pixels.device) * (_LEVELS + 1)
        bins = (group[:, None] * size + pixel + below).flatten()
        counts = pixels.new_zeros(groups * size)
        counts = counts.index_add(0, bins, (1 - share).flatten())
        counts = counts.index_add(0, bins + 1, share.flatten())
        sums = scale * (counts.view(groups, self.pixels, -1) @ self._tables[0]).flatten(1)
        left, right = (
            side.view(groups, -1, *side.shape[1:]) for side in self._sides(pairs, pixels)
        )
        products = torch.einsum("gnpi,gnpj->gpij", left, right)
        return torch.cat([sums, one_pair * products.flatten(1)], 1)

    def _sides(self, pairs: Tensor, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return phi of both pixels of each pair: (n, pairs, pair_order + 1)."""
        left, right = (_at(self._tables[1], pixels[:, side]) for side in pairs.T)
        return left, right


def _levels(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the byte value below each pixel in [0, 1], and the fraction towards the next."""
    scaled = pixels * _LEVELS
    below = scaled.detach().floor().clamp(max=_LEVELS - 1).long()
    return below, scaled - below


def _at(table: Tensor, pixels: Tensor) -> Tensor:
    """Interpolate the rows of a table linearly at pixels (n, d) in [0, 1]: (n, d, columns)."""
    below, share = _levels(pixels)
    share = share[..., None]
    return table[below] * (1 - share) + table[below + 1] * share


def dp_hp(
    facts: PublicFacts,
    noise_multiplier: float | None,
    *,
    generator: GeneratorFactory,
    latent: int,
    order: Order,
    pair_order: Order,
    pairs: int,
    kernel_length: Annotated[float, Ge(1e-6), Lt(1e6)],
    sum_share: float,
    sum_weight: Annotated[float, Gt(0), Lt(1e12)],
    rows: int,
    fakes_per_label: int,
    learning_rate: float,
    betas: Betas,
    ema: Decay,
    device: str,
) -> Method:
    """Build DP-HP from public parameters.

    Args:
        noise_multiplier: noise standard deviation over the norm 1 of a record's features; None: no
            noise.
        order: polynomial order of the sum kernel.
        pair_order: polynomial order of the product kernel.
        pairs: number of pixel pairs of the product kernel.
        kernel_length: squared length of the kernel for pixels in [0, 1], a public number.
        sum_share: share of the sum kernel in the squared norm of a record.
        sum_weight: gamma.
        rows: public number near the number of records of all clients; each divides by its equal
            share.
        fakes_per_label: samples of each label in a step.
        learning_rate, betas: parameters of Adam.
        ema: decay of the moving average of the published generator; 0: the last one.

    Raises:
        FedgenError: for a share that leaves no weight for one of the kernels in single precision.
    """
    if not _MIN_SHARE <= sum_share <= 1 - _MIN_SHARE:
        problem = f"{sum_share:g} leaves no weight for one of the kernels"
        raise FedgenError("method.sum_share", problem, "use a value between 0 and 1")
    net = meta_module(generator(latent=latent, classes=facts.classes, shape=facts.shape))
    pixels = math.prod(facts.shape)
    features = Hermite(
        order, pair_order, pairs, kernel_length, sum_share, sum_weight, pixels, device
    )
    sums = SumMechanisms(facts, noise_multiplier, rows)
    query = embedding(sums, features, facts.classes, lambda _, images: images, _CHUNK)
    sequence = SumSequence((query,), device)
    adam = learning_rate, betas
    server = Server(net, features, latent, facts.classes, fakes_per_label, adam, ema)
    return sequence.build(
        server.program,
        sequence.plan("none", None, ("RDP of one Gaussian", "DP-HP (2022), as one release")),
        facts.clients,
        lambda: [_worst_case(sequence, facts.shape, hermite(order, kernel_length))],
    )


def _worst_case(sequence: SumSequence, shape: tuple[int, int, int], table: Tensor) -> WorstCase:
    """Return an image whose pixels all have the value with the longest features, and no image."""
    level = int(table.norm(dim=1).argmax())
    one = Shard(torch.full((1, *shape), level, dtype=torch.uint8), torch.zeros(1, dtype=torch.long))
    none = Shard(one.images[:0], one.labels[:0])
    return sequence.worst_case("embedding", {"seed": torch.tensor(0)}, ({}, one), ({}, none))
