"""Sums of clipped per-example gradients, for the price of a plain gradient and of norms.

For a module whose examples do not mix, the gradient of one example's loss with respect to a layer's
weight is a product of what went into the layer and of the gradient of what came out of it:

1. forward; one backward for the gradients of all that came out, without weight gradients;
2. each example's squared norm, layer by layer: from the products of positions with each other where
   a layer has few ("ghost norm", Li, Tramer, Liang, Hashimoto 2022), from the example's own weight
   gradient where that is smaller (the choice of Bu, Mao, Xu 2022);
3. what came back is scaled by each example's clipping factor, and one weight gradient for the whole
   batch is the clipped sum ("book-keeping", Bu, Wang, Zha, Karypis 2023); where examples' own
   gradients were made for their norms, the sum is of these.

So a clipped step costs a plain one and the norms. What goes in and what comes back are in single
precision, or rounded to a lower one: norms and sums are of the same rounded tensors, and the bound
holds for them.
``by_vmap`` is the general path, for any module and for losses with gradients of their own inside;
``by_opacus`` is a reference.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedgen.errors import FedgenError
from fedgen.privacy.layers import (
    USES,
    Kept,
    Product,
    Use,
    layers_of,
    norms_of,
    scaled_by,
    square_of,
)

# convolutions in TF32, cuDNN's default, round a sum to more than the norms that it was clipped by
torch.backends.cudnn.allow_tf32 = False

Weights = Mapping[str, Tensor]
Losses = Callable[[Tensor], Tensor]
"""A module's output for n examples -> each example's own loss (n,)."""
Precision = Literal["float64", "float32", "tf32", "bfloat16"]
"""float64: norms and sums in double precision, forward and backward pass in single. The others are
of the passes, with norms and sums in single; tf32 is float32 on a CPU."""

_SEAL = object()
_LONGEST = 1e30
# single precision may leave a clipped norm a little above the bound: clip a little below it
_ROUNDING = 1 - 8e-6
# and of sums more (see ``clipped_sum``)
_OF_SUMS = 1 - 2.0**-10
_KEEPS_APART: WeakSet[nn.Module] = WeakSet()  # modules that were tried


@dataclass(frozen=True)
class ClippedSum:
    """A sum over examples of their gradients, each clipped to norm ``clip`` over all weights. Made
    by this module alone: a mechanism relies on the bound.

    gradients: named as the weights. norms: (n,), before clipping: private. clip: infinity for none.
    """

    gradients: dict[str, Tensor]
    norms: Tensor
    clip: float
    _seal: object = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self._seal is not _SEAL:
            raise TypeError("a ClippedSum is made by what clips, nothing else")

    def flat(self) -> Tensor:
        """All gradients in one vector, in the order of their names."""
        return torch.cat([self.gradients[name].flatten() for name in sorted(self.gradients)])


def clipping_factors(norms: Tensor, clip: float, below: float = _ROUNDING) -> Tensor:
    """What each example's gradient is multiplied by; zero for one that is not finite, or so long
    that single precision cannot scale it. ``below``: the share of ``clip`` that it is clipped to,
    the rest is for rounding."""
    if math.isinf(clip):
        return torch.ones_like(norms)
    scale = (clip * below / norms).clamp(max=1.0)
    return torch.where(norms < _LONGEST, scale, 0.0)


def clip_rows(rows: Tensor, clip: float) -> Tensor:
    """Scales each row (all but the first dimension) to L2 norm at most ``clip``.

    A row with a NaN or an infinity, or whose norm overflows, becomes zero.
    """
    return scaled_by(rows, clipping_factors(norms_of(rows), clip).to(rows))


def clipped_sum(
    module: nn.Module,
    weights: Weights,
    inputs: tuple[Tensor, ...],
    losses: Losses,
    clip: float,
    at_once: int | None = None,
    precision: Precision = "float64",
    copies: int = 1,
) -> ClippedSum:
    """The sum over examples of their clipped gradients.

    **What rounding makes of one example more.** 2^-10 of the clip norm are kept free for it. An
    example counts as at least 2^-8.5 of its products' absolute values in all (``layers.py``), so
    that these, scaled, come to at most 2^8.5 clip norms. Products of single precision are exact in
    double; a sum of k of them, in whatever order, is off by at most k 2^-53 / (1 - k 2^-53) times
    their absolute values (Higham 2002, section 3.1). So no norm is too short by more than 2^-30 of
    itself for k up to 2^30 (what is lost is less than what ``layers.py`` adds), and a sum over n
    examples of t products each is off by at most t n^2 2^(8.5-53) clip norms: by 2^-14 for 128
    examples of 65,536 positions, or for 512 (as many as a GPU takes) of 4,096. Both of the sums
    that are compared are off by that at most, and all is within the 2^-10.

    With any other ``precision`` products are added in single, where this bound says little:
    kernels add in blocks, and what was found is 1e-5 of the clip norm at most, for examples that
    all agree, for random ones, and for one whose gradient cancels among others
    (``tests/privacy/test_per_example.py``). That is measured and not proven.

    In either case an example's own tensors are taken to be the same whatever examples are computed
    beside it. Kernels may add in another order for another number of examples: their values differ
    by 1e-7 of themselves then, which the free 2^-10 covers as long as the network is well
    conditioned. And examples after the one more move to other places, so that over very many chunks
    rounding could add up: a mechanism has batches summed in parts that do not depend on each other
    (``SumGaussian``).

    Args:
        module: called with ``weights`` in place of its own, on ``inputs``, (n, ...) each.
        clip: L2 bound of each example's gradient over all weights; infinity: no clipping.
        at_once: examples in memory at a time; None: as many as are fastest, 64 on a CPU.
        precision: see ``Precision``.
        copies: K, inputs and losses of one example, one after the other: (n K, ...). An example's
            gradient is the mean of theirs, taken before it is clipped ("noise multiplicity",
            Dockhorn, Cao, Vahdat, Kreis 2023): a product of K times as many positions.

    Raises:
        FedgenError: for a module that mixes examples, or whose layers see other than one row for
            each; that has a layer of a kind that is not known here, or changes activations in
            place.
    """
    layers = layers_of(module)
    if module not in _KEEPS_APART:
        _check_apart(module, layers, weights, inputs)
        _KEEPS_APART.add(module)
    total = _nothing(weights)
    norms = [torch.zeros(0, dtype=torch.float64, device=inputs[0].device)]
    at_once = copies * (at_once or examples_at_once(inputs[0].device.type))
    for start in range(0, len(inputs[0]), at_once):
        some = tuple(each[start : start + at_once] for each in inputs)
        uses = _forward_and_back(module, weights, some, losses, layers, precision, copies)
        squares = torch.stack([square_of(found) for found in uses.values()])
        norms.append(squares.sum(0).sqrt())
        factors = clipping_factors(norms[-1], clip, _OF_SUMS)
        for name, found in uses.items():
            for use in found:
                total[name] += use.summed(factors).view_as(total[name])
    return ClippedSum(total, torch.cat(norms), clip, _SEAL)


def examples_at_once(device: str) -> int:
    """As many as are fastest: a CPU is quicker with what fits in its caches, and with memory that
    it need not ask for anew."""
    return 64 if device == "cpu" else 512


def _nothing(weights: Weights) -> dict[str, Tensor]:
    """The sum of no gradients."""
    return {name: torch.zeros_like(value, dtype=torch.float64) for name, value in weights.items()}


def by_vmap(
    loss: Callable[..., Tensor],
    weights: Weights,
    inputs: tuple[Tensor, ...],
    clip: float,
    at_once: int = 64,
) -> ClippedSum:
    """``clipped_sum`` for any ``loss(weights, *example) -> ()``, with all gradients in memory.

    A sum of n clipped gradients in single precision is off by at most n^2 2^-24 clip norms, two of
    64 and 65 by less than the 2^-10 that are kept free.
    """
    total = _nothing(weights)
    norms = [torch.zeros(0, dtype=torch.float64, device=inputs[0].device)]
    for start in range(0, len(inputs[0]), at_once):
        some = tuple(each[start : start + at_once] for each in inputs)
        found = vmap(grad(loss), (None, *[0] * len(some)))(dict(weights), *some)
        norms.append(norms_of(torch.cat([each.flatten(1) for each in found.values()], 1)))
        _add(total, found, clipping_factors(norms[-1], clip, _OF_SUMS))
    return ClippedSum(total, torch.cat(norms), clip, _SEAL)


def by_opacus(
    module: nn.Module, inputs: tuple[Tensor, ...], losses: Losses, clip: float
) -> ClippedSum:
    """``clipped_sum`` by Opacus' hooks, for a module with weights of its own: a reference."""
    from opacus import GradSampleModule  # slow to import, never needed by a run

    wrapped = GradSampleModule(module, loss_reduction="sum")
    torch.autograd.backward(losses(wrapped(*inputs)).sum())
    found = {name: getattr(p, "grad_sample") for name, p in module.named_parameters()}  # noqa: B009
    norms = norms_of(torch.cat([each.flatten(1) for each in found.values()], 1))
    total = _nothing(dict(module.named_parameters()))
    _add(total, found, clipping_factors(norms, clip, _OF_SUMS))
    wrapped.to_standard_module()
    return ClippedSum(total, norms, clip, _SEAL)


def of_rows(rows: Tensor, clip: float, blocks: Tensor | None = None, count: int = 1) -> ClippedSum:
    """The sum of rows (n, d), each clipped: contributions that are no gradients.

    ``blocks``: which of ``count`` blocks of the sum (count, d) each row is added to.
    """
    norms = norms_of(rows)
    blocks = torch.zeros(len(rows), dtype=torch.long) if blocks is None else blocks
    # in double precision: sums of many rows lose what one more would add
    total = rows.new_zeros(count, rows.shape[1], dtype=torch.float64)
    scaled = scaled_by(rows, clipping_factors(norms, clip)).double()
    total.index_add_(0, blocks.to(rows.device), scaled)
    return ClippedSum({"rows": total}, norms, clip, _SEAL)


def of_moments(
    rows: Tensor,
    clip: float,
    blocks: Tensor | None = None,
    count: int = 1,
    beside: Tensor | None = None,
) -> ClippedSum:
    """The sum over rows v (n, d) of v v^T, the whole of it clipped to Frobenius norm ``clip``: its
    upper triangle, entries off the diagonal times sqrt(2), so that lengths are Frobenius norms
    (count, d (d + 1) / 2). In double precision.

    blocks: as ``of_rows``. beside: t (n, q), so that v t^T is summed as well, clipped together with
        v v^T and behind it (count, d q more).
    """
    private = rows.double()
    other = private.new_zeros(len(rows), 0) if beside is None else beside.double()
    lengths = norms_of(private)
    norms = lengths * (lengths.square() + norms_of(other).square()).sqrt()
    factors = clipping_factors(norms, clip)
    scaled = scaled_by(private, factors)
    used = torch.where((factors != 0)[:, None], torch.cat([private, other], 1), 0.0)
    down, right = torch.triu_indices(rows.shape[1], rows.shape[1], device=rows.device)
    weight = torch.where(down == right, 1.0, math.sqrt(2)).double()
    found = []
    for block in range(count):
        mine = slice(None) if blocks is None else (blocks == block).to(rows.device)
        product = scaled[mine].T @ used[mine]
        square, rest = product[:, : rows.shape[1]], product[:, rows.shape[1] :]
        found.append(torch.cat([square[down, right] * weight, rest.flatten()]))
    return ClippedSum({"rows": torch.stack(found)}, norms, clip, _SEAL)


def from_moments(found: Tensor, side: int) -> Tensor:
    """The matrices (..., side, side) that upper triangles as ``of_moments`` has them stand for.
    Noise of one size in all entries is twice as large, squared, on the diagonal."""
    down, right = torch.triu_indices(side, side, device=found.device)
    half = found / torch.where(down == right, 1.0, math.sqrt(2)).to(found)
    whole = found.new_zeros(*found.shape[:-1], side, side)
    whole[..., down, right] = half
    whole[..., right, down] = half
    return whole


def _add(total: dict[str, Tensor], found: Mapping[str, Tensor], factors: Tensor) -> None:
    """Adds what was found for each example, scaled; nothing of those whose factor is zero."""
    used = factors != 0  # zero times infinity is not zero
    for name, each in found.items():
        total[name] += torch.tensordot(factors[used].to(each), each[used], 1)


def _check_apart(
    module: nn.Module,
    layers: dict[nn.Module, dict[str, str]],
    weights: Weights,
    inputs: tuple[Tensor, ...],
) -> None:
    """Raises FedgenError unless three examples and two come out as each of them alone, with one row
    for each in all layers. They are random, and so are the weights, by a public seed: nothing
    private decides. What mixes examples too little to show beside rounding, or seldom, is not
    found; what draws numbers of its own, as dropout does, cannot be told from it."""
    drawn = torch.Generator().manual_seed(0)

    def like(given: Tensor, count: int) -> Tensor:
        size = (count, *given.shape[1:])
        if not given.is_floating_point():
            return torch.zeros(size, dtype=given.dtype, device=given.device)
        return torch.randn(size, generator=drawn).to(given)

    some = tuple(like(each, 3) for each in inputs)
    tried = {
        name: (torch.randn(each.shape, generator=drawn) / max(each[0].numel(), 1) ** 0.5).to(each)
        if each.dim() > 1
        else torch.ones_like(each)
        for name, each in weights.items()
    }

    def out(rows: slice) -> Tensor:
        """Of these examples, by a pass that counts rows."""
        few = tuple(each[rows] for each in some)
        found: list[Tensor] = []

        def losses(outputs: Tensor) -> Tensor:
            found.append(outputs.detach())
            return outputs.reshape(len(outputs), -1).sum(1)

        _forward_and_back(module, tried, few, losses, layers, "float32", 1)
        return found[0]

    alone = torch.cat([out(slice(row, row + 1)) for row in range(3)])
    for count in (2, 3):
        together = out(slice(0, count))
        if not torch.allclose(together, alone[:count], rtol=1e-2, atol=1e-4, equal_nan=True):
            raise FedgenError(
                "model",
                "mixes examples: what it says of one is not what it says of that one alone",
                "leave out what is computed over a batch, and dropout",
            )


def _forward_and_back(
    module: nn.Module,
    weights: Weights,
    inputs: tuple[Tensor, ...],
    losses: Losses,
    layers: dict[nn.Module, dict[str, str]],
    precision: Precision,
    copies: int,
) -> dict[str, list[Use]]:
    """Each weight's uses by these examples."""
    seen: list[tuple[nn.Module, Tensor, Tensor, int]] = []
    count = len(inputs[0])

    def look(layer: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
        if not given:
            raise FedgenError("model", "gives a layer its input by name", "give it by position")
        if not len(given[0]) == len(out) == count:
            problem = f"has a layer see {len(given[0])} rows of {count} examples"
            raise FedgenError("model", problem, "keep examples in the first dimension")
        # weights ask for no gradient, so a first layer's output has no history: it starts here
        out = out if out.requires_grad else out.requires_grad_()
        seen.append((layer, given[0].detach(), out, out._version))
        return out

    handles = [layer.register_forward_hook(look) for layer in layers]
    try:
        with _unchanged(), torch.enable_grad(), _computing_in(precision, inputs[0].device.type):
            fixed = {name: value.detach() for name, value in weights.items()}
            outputs = functional_call(module, fixed, tuple(each.detach() for each in inputs))
            whole = losses(_single(outputs)).sum() / copies
    finally:
        for handle in handles:
            handle.remove()
    if any(out._version != version for _, _, out, version in seen):
        raise _in_place()
    with _unchanged(), _computing_in(precision, inputs[0].device.type):
        backs = torch.autograd.grad(whole, [out for _, _, out, _ in seen], materialize_grads=True)
    uses: dict[str, list[Use]] = defaultdict(list)
    multiplied = _double if precision == "float64" else _single
    for (layer, given, _, _), back in zip(seen, backs, strict=True):
        found = USES[type(layer)](layer, multiplied(given), multiplied(back))
        for part, name in layers[layer].items():
            use = found[part]
            kept = copies > 1 or (isinstance(use, Product) and use.gradient_is_smaller)
            uses[name].append(Kept.of(use, copies) if kept else use)
    return uses


def _single(found: Tensor) -> Tensor:
    return found.float() if found.dtype == torch.bfloat16 else found


def _double(found: Tensor) -> Tensor:
    """But for indices."""
    return found.double() if found.is_floating_point() else found


@contextlib.contextmanager
def _computing_in(precision: Precision, device: str) -> Iterator[None]:
    """Products of matrices at this precision, until it ends."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    try:
        matmul.allow_tf32 = cudnn.allow_tf32 = precision == "tf32"
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16"):
            yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


@contextlib.contextmanager
def _unchanged() -> Iterator[None]:
    """Raises FedgenError where torch finds an activation changed."""
    try:
        yield
    except RuntimeError as error:
        if "in-place" in str(error) or "inplace" in str(error):
            raise _in_place() from error
        raise


def _in_place() -> FedgenError:
    return FedgenError("model", "changes activations in place", "set inplace=False")
