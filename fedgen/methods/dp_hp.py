"""DP-HP: one noised mean embedding by Hermite polynomials, and a generator whose samples are to
have the same (Vinaroz, Charusaie, Harder, Adamczewski, Park, "Hermite Polynomial Features for
Private Data Generation", ICML 2022).

    phi_c(x)  of a pixel x, c = 0, 1, ...: sum over c of phi_c(x) phi_c(y) = exp(-(x - y)^2 / (2 l))
              (Mehler's formula; ``kernel_length`` is l, the square of the kernel's length)
    Phi       sum kernel: phi_c(x_d) of each pixel d, up to ``order``, over sqrt(pixels)
    Psi       product kernel: phi_c(x_i) phi_c'(x_j), up to ``pair_order``, of some pairs of pixels
              i, j that are drawn in public
    client    once:  (sum over rows of (Phi, Psi) in the block of its label + N(0, sigma^2)) / rows
    server    as DP-MERF's: each round is a step of the generator towards the same mean, by
              ``sum_weight`` |d Phi|^2 + the mean over pairs of |d Psi|^2

The paper releases Phi once and Psi for one pair in each of ten epochs, and adds up two budgets.
Here all of it is one release: Phi and Psi are scaled so that together they are 1 long at most, and
``sum_share`` of the squared length is Phi's. The norms are those that features of pixels in [0, 1]
really have, below the paper's 1. Neighbours add or remove a row, which moves the sum by 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import torch
from torch import Tensor, nn

from fedgen.data.datasets import Shard
from fedgen.errors import FedgenError
from fedgen.method import Method, PublicFacts, WorstCase
from fedgen.methods.dp_merf import Server, embedding
from fedgen.models.functional import template
from fedgen.parameters import Betas, Decay, Range
from fedgen.sequence import Sums, SumSequence

_LEVELS = 255  # that a byte has above 0
_AT_ONCE = 128  # rows: each has as many numbers as pixels times orders
_LEAST_SHARE = 1e-6

Order = Annotated[int, Range(1, below=1001)]


def hermite(order: int, length: float) -> Tensor:
    """phi_0 to phi_order of the levels 0, 1 / 255, ... 1 of a byte, in double precision (256,
    order + 1)."""
    a = 1 / (2 * length)
    rho = -1 / (2 * a) + 0.5 * math.sqrt(1 / a**2 + 4)
    x = torch.arange(_LEVELS + 1, dtype=torch.float64) / _LEVELS
    columns = [(1 - rho**2) ** 0.25 * torch.exp(-rho * x.square() / (1 + rho))]
    columns.append(math.sqrt(2 * rho) * x * columns[0])
    for k in range(1, order):
        last, before = columns[k], columns[k - 1]
        next_ = (
            math.sqrt(rho / (2 * (k + 1))) * 2 * x * last - rho * math.sqrt(k / (k + 1)) * before
        )
        columns.append(next_)
    return torch.stack(columns[: order + 1], 1)


@dataclass(frozen=True)
class Hermite:
    """Phi and Psi of images of ``pixels`` numbers in [0, 1], behind each other, 1 long at most.

    Between the levels of a byte they are interpolated, which stretches no norm: a norm is convex.
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
        """phi for Phi, and for one pixel of Psi: each at most 1 long."""
        both = (hermite(order, self.kernel_length) for order in (self.order, self.pair_order))
        scaled = [table / self._norm(table) for table in both]
        return scaled[0].float().to(self.device), scaled[1].float().to(self.device)

    @staticmethod
    def _norm(table: Tensor) -> float:
        return float(table.norm(dim=1).max())

    @property
    def count(self) -> int:
        """Of both."""
        return self.pixels * (self.order + 1) + self.pairs * (self.pair_order + 1) ** 2

    @property
    def _scales(self) -> tuple[float, float]:
        """Of Phi and of each pair's Psi, made of the tables."""
        one_pair = math.sqrt((1 - self.sum_share) / self.pairs)
        return math.sqrt(self.sum_share / self.pixels), one_pair

    @property
    def peak(self) -> float:
        """An entry of a table is 1 at most."""
        return max(self._scales)

    @cached_property
    def weights(self) -> Tensor:
        """What undoes the scales, and then weighs the two kernels."""
        norms = [
            self._norm(hermite(order, self.kernel_length))
            for order in (self.order, self.pair_order)
        ]
        of_sum = math.sqrt(self.sum_weight) * norms[0] / math.sqrt(self.sum_share)
        found = torch.full((self.count,), of_sum)
        found[self.pixels * (self.order + 1) :] = norms[1] ** 2 / math.sqrt(1 - self.sum_share)
        return found.to(self.device)

    def drawn(self, seed: Tensor) -> Tensor:
        """The pairs of pixels (pairs, 2)."""
        source = torch.Generator().manual_seed(int(seed))
        return torch.randint(0, self.pixels, (self.pairs, 2), generator=source).to(self.device)

    def __call__(self, drawn: Tensor, images: Tensor) -> Tensor:
        """Phi and Psi of images (n, ...): (n, count)."""
        pixels = images.flatten(1).clamp(0, 1)
        scale, one_pair = self._scales
        each = scale * _at(self._tables[0], pixels).flatten(1)
        left, right = self._sides(drawn, pixels)
        products = left[:, :, :, None] * right[:, :, None, :]
        return torch.cat([each, one_pair * products.flatten(1)], 1)

    def summed(self, drawn: Tensor, images: Tensor, groups: int) -> Tensor:
        """Phi and Psi, summed for each of the groups of images that lie behind each other: (groups,
        count). Phi of a group is its pixels' histograms times a table."""
        pixels = images.flatten(1).clamp(0, 1)
        scale, one_pair = self._scales
        below, share = _levels(pixels)
        size = self.pixels * (_LEVELS + 1)
        group = torch.arange(groups, device=pixels.device).repeat_interleave(len(pixels) // groups)
        pixel = torch.arange(self.pixels, device=pixels.device) * (_LEVELS + 1)
        place = (group[:, None] * size + pixel + below).flatten()
        counts = pixels.new_zeros(groups * size)
        counts = counts.index_add(0, place, (1 - share).flatten())
        counts = counts.index_add(0, place + 1, share.flatten())
        each = scale * (counts.view(groups, self.pixels, -1) @ self._tables[0]).flatten(1)
        left, right = (
            side.view(groups, -1, *side.shape[1:]) for side in self._sides(drawn, pixels)
        )
        products = torch.einsum("gnpi,gnpj->gpij", left, right)
        return torch.cat([each, one_pair * products.flatten(1)], 1)

    def _sides(self, drawn: Tensor, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """phi of both pixels of each pair: (n, pairs, pair_order + 1)."""
        left, right = (_at(self._tables[1], pixels[:, side]) for side in drawn.T)
        return left, right


def _levels(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """The level of a byte below each pixel in [0, 1], and its share of the way to the next."""
    place = pixels * _LEVELS
    below = place.detach().floor().clamp(max=_LEVELS - 1).long()
    return below, place - below


def _at(table: Tensor, pixels: Tensor) -> Tensor:
    """The table's rows at pixels (n, d) in [0, 1], linearly between levels: (n, d, columns)."""
    below, share = _levels(pixels)
    share = share[..., None]
    return table[below] * (1 - share) + table[below + 1] * share


def dp_hp(
    facts: PublicFacts,
    noise_multiplier: float | None,
    *,
    generator: Callable[..., nn.Module],
    latent: int,
    order: Order,
    pair_order: Order,
    pairs: int,
    kernel_length: Annotated[float, Range(1e-6, below=1e6)],
    sum_share: float,
    sum_weight: Annotated[float, Range(below=1e12)],
    rows: int,
    fakes_per_label: int,
    learning_rate: float,
    betas: Betas,
    ema: Decay,
    device: str,
) -> Method:
    """DP-HP for these public parameters.

    Args:
        noise_multiplier: noise std over the norm 1 of a row's features; None: no noise.
        order: of the sum kernel's polynomials. pair_order: of the product kernel's; pairs: of
            pixels, that it is of.
        kernel_length: the kernel's length, squared, for pixels in [0, 1]; a public number.
        sum_share: of a row's squared length, the sum kernel's. sum_weight: gamma.
        rows: a public number near that of all clients' rows; each divides by its equal share.
        fakes_per_label: of each label in a step.
        learning_rate, betas: of Adam.
        ema: decay of the average of the generator that is published; 0 publishes the last one.

    Raises:
        FedgenError: for a share that leaves one of the kernels nothing, in single precision.
    """
    if not _LEAST_SHARE <= sum_share <= 1 - _LEAST_SHARE:
        problem = f"{sum_share:g} leaves one of the kernels nothing"
        raise FedgenError("method.sum_share", problem, "take one between 0 and 1")
    net = template(generator(latent=latent, classes=facts.classes, shape=facts.shape))
    pixels = math.prod(facts.shape)
    features = Hermite(
        order, pair_order, pairs, kernel_length, sum_share, sum_weight, pixels, device
    )
    sums = Sums(facts, noise_multiplier, rows)
    asked = embedding(sums, features, facts.classes, lambda _, images: images, _AT_ONCE)
    sequence = SumSequence((asked,), device)
    adam = learning_rate, betas
    server = Server(net, features, latent, facts.classes, fakes_per_label, adam, ema)
    return sequence.method(
        server.program,
        sequence.plan("none", None, ("RDP of one Gaussian", "DP-HP (2022), as one release")),
        facts.clients,
        lambda: [_worst_case(sequence, facts.shape, hermite(order, kernel_length))],
    )


def _worst_case(sequence: SumSequence, shape: tuple[int, int, int], table: Tensor) -> WorstCase:
    """A row against none, all of its pixels at the level whose features are longest."""
    level = int(table.norm(dim=1).argmax())
    row = Shard(torch.full((1, *shape), level, dtype=torch.uint8), torch.zeros(1, dtype=torch.long))
    none = Shard(row.images[:0], row.labels[:0])
    return sequence.worst_case("embedding", {"seed": torch.tensor(0)}, ({}, row), ({}, none))
