"""Sums of clipped per-example gradients at the cost of one plain gradient plus norms.

For a module that processes examples independently, the gradient of one example's loss with respect
to a layer's weight is a product of the layer's input and the gradient of its output:

1. forward pass, and one backward pass for the gradients of all outputs, without weight gradients;
2. the squared norm of each example, layer by layer: from products between positions where a layer
   has few positions ("ghost norm", Li, Tramer, Liang, Hashimoto 2022), or from the example's weight
   gradient where that is smaller (the choice of Bu, Mao, Xu 2022);
3. output gradients are scaled by the clipping factors, and one weight gradient for the whole batch
   is the clipped sum ("book-keeping", Bu, Wang, Zha, Karypis 2023); where per-example gradients
   were materialized for their norms, they are summed.

Inputs and output gradients are in single precision, or rounded to a lower one: norms and sums use
the same rounded tensors, and the bound holds for them. ``by_vmap`` is the general path, for any
module and for losses that contain gradients; ``by_opacus`` is a reference.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedgen.errors import FedgenError
from fedgen.privacy.ghost_norms import (
    USES,
    Materialized,
    Product,
    Use,
    parameter_layers,
    row_norms,
    scale_rows,
    squared_norms,
    zero_nonfinite,
)

# TF32 convolutions, the default of cuDNN, would round sums more than their clipped norms allow
torch.backends.cudnn.allow_tf32 = False

Weights = Mapping[str, Tensor]
Losses = Callable[[Tensor], Tensor]
"""Output of a module for n examples -> loss of each example (n,)."""
Precision = Literal["float64", "float32", "tf32", "bfloat16"]
"""float64: norms and sums in double, forward and backward pass in single precision. Others:
precision of the passes, with norms and sums in single; tf32 is float32 on a CPU."""

_SEAL = object()
_MAX_NORM = 1e30
# single precision may leave a clipped norm slightly above the bound: clip slightly below it
_ROUNDING_MARGIN = 1 - 8e-6
# sums need a larger margin (see ``clipped_sum``)
_SUM_MARGIN = 1 - 2.0**-10
_CHECKED: WeakSet[nn.Module] = WeakSet()  # modules that process examples independently


@dataclass(frozen=True)
class ClippedSum:
    """Sum over examples of their gradients, each clipped to norm ``clip`` over all weights. Only
    this module creates it, because mechanisms rely on the bound.

    gradients: by name of the weight.
    norms: norms before clipping (n,); private.
    clip: clip norm; infinity: no clipping.
    """

    gradients: dict[str, Tensor]
    norms: Tensor
    clip: float
    _seal: object = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self._seal is not _SEAL:
            raise TypeError("only the functions of this module create a ClippedSum")

    def flat(self) -> Tensor:
        """Return all gradients as one vector, ordered by name."""
        return torch.cat([self.gradients[name].flatten() for name in sorted(self.gradients)])

    def divided_by(self, count: int) -> ClippedSum:
        """Return the sum divided by ``count``, at least by 1: its bound still holds."""
        gradients = {name: value / max(count, 1) for name, value in self.gradients.items()}
        return replace(self, gradients=gradients)


def clipped_mean(sums: Sequence[ClippedSum], count: int, clip: float) -> ClippedSum:
    """Return the mean contribution of a person, clipped to norm ``clip``, from clipped sums over
    parts of their ``count`` records; in double precision."""
    names = sums[0].gradients
    total = {
        name: sum(
            (part.gradients[name].double() for part in sums[1:]),
            start=sums[0].gradients[name].double(),
        )
        for name in names
    }
    mean = {name: value / count for name, value in total.items()}
    norm = torch.stack([value.square().sum() for value in mean.values()]).sum().sqrt()
    factor = clipping_factors(norm, clip)
    gradients = {name: value * factor for name, value in mean.items()}
    return ClippedSum(gradients, norm[None], clip, _SEAL)


def clipping_factors(norms: Tensor, clip: float, margin: float = _ROUNDING_MARGIN) -> Tensor:
    """Return the factor of each example's gradient; zero for a gradient that is not finite, or too
    long to scale in single precision. ``margin``: fraction of ``clip`` to clip to; the rest covers
    rounding. With infinite ``clip``, the factor of a non-finite gradient is NaN, so that training
    without privacy does not hide it.
    """
    if math.isinf(clip):
        return torch.where(norms.isfinite(), 1.0, math.nan)
    scale = (clip * margin / norms).clamp(max=1.0)
    return torch.where(norms < _MAX_NORM, scale, 0.0)


def clip_rows(rows: Tensor, clip: float) -> Tensor:
    """Scale each row (all but the first dimension) to L2 norm at most ``clip``.

    With a finite ``clip``, a row that contains NaN or infinity, or whose norm overflows, becomes
    zero; without clipping, a row that is not finite becomes NaN.
    """
    return scale_rows(rows, clipping_factors(row_norms(rows), clip).to(rows))


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
    """Return the sum over examples of their clipped gradients.

    **Rounding errors of one additional example.** A margin of 2^-10 of the clip norm covers them.
    An example counts with a norm of at least 2^-8.5 of the sum of the absolute values of its
    products (``ghost_norms.py``), so that after scaling this sum is at most 2^8.5 clip norms.
    Products of single precision numbers are exact in double precision; a sum of k of them, in any
    order, has an error of at most k 2^-53 / (1 - k 2^-53) times the sum of their absolute values
    (Higham 2002, section 3.1). So no norm is too small by more than 2^-30 of itself for k up to
    2^30 (the loss is less than the term that ``ghost_norms.py`` adds), and the error of a sum over
    n examples of t products each is at most t n^2 2^(8.5-53) clip norms: 2^-14 for 128 examples of
    65,536 positions, or for 512 (the default on a GPU) of 4,096. Both compared sums have at most
    this error, and the total is within 2^-10.

    With any other ``precision``, products are added in single precision, where this bound says
    little: kernels add in blocks, and the observed error is at most 1e-5 of the clip norm, for
        identical examples, random ones, and one whose gradient cancels among others
        (``tests/privacy/test_clipping.py``). This is measured and not proven.

    In both cases, the tensors of an example are assumed not to depend on the other examples of the
    batch. Kernels may add in another order for another number of examples: their values then differ
    by a relative 1e-7, which the margin covers for a well-conditioned network. Examples after an
    additional one also move to other positions, so that rounding errors could add up over very many
    chunks: a mechanism sums batches in parts that do not depend on each other (``SumGaussian``).

    Args:
        module: called with ``weights`` in place of its own, on ``inputs``, (n, ...) each.
        clip: L2 bound of each example's gradient over all weights; infinity: no clipping.
        at_once: examples in memory at a time; None: the fastest number, 64 on a CPU.
        precision: see ``Precision``.
        copies: K, inputs and losses per example, consecutive: (n K, ...). The gradient of an
            example is the mean over its copies before clipping ("noise multiplicity", Dockhorn,
            Cao, Vahdat, Kreis 2023): a product of K times as many positions.

    Raises:
        FedgenError: for a module that mixes examples, whose layers see a different number of rows
            than examples, that has an unsupported layer, or that changes activations in place.
    """
    layers = parameter_layers(module)
    if module not in _CHECKED:
        _check_independent(module, layers, weights, inputs)
        _CHECKED.add(module)
    total: dict[str, Tensor] = {}
    norms = [torch.zeros(0, dtype=torch.float64, device=inputs[0].device)]
    at_once = copies * (at_once or examples_at_once(inputs[0].device.type))
    for start in range(0, len(inputs[0]), at_once):
        chunk = tuple(tensor[start : start + at_once] for tensor in inputs)
        uses = _backward(module, weights, chunk, losses, layers, precision, copies)
        squares = torch.stack([squared_norms(weight_uses) for weight_uses in uses.values()])
        norms.append(squares.sum(0).sqrt())
        factors = clipping_factors(norms[-1], clip, _SUM_MARGIN)
        for name, weight_uses in uses.items():
            for use in weight_uses:
                chunk_sum = use.summed(factors).view_as(weights[name]).double()
                total[name] = total[name].add_(chunk_sum) if name in total else chunk_sum
    uncalled = {name: value for name, value in weights.items() if name not in total}
    return ClippedSum(total | _zeros_like(uncalled), torch.cat(norms), clip, _SEAL)


def examples_at_once(device: str) -> int:
    """Return the fastest number of examples at a time: on a CPU, what fits its caches."""
    return 64 if device == "cpu" else 512


def _zeros_like(weights: Weights) -> dict[str, Tensor]:
    """Return zero gradients in double precision."""
    return {name: torch.zeros_like(value, dtype=torch.float64) for name, value in weights.items()}


def by_vmap(
    loss: Callable[..., Tensor],
    weights: Weights,
    inputs: tuple[Tensor, ...],
    clip: float,
    at_once: int = 64,
) -> ClippedSum:
    """Compute ``clipped_sum`` for any ``loss(weights, *example) -> ()``, with all gradients in
    memory.

    The error of a sum of n clipped gradients in single precision is at most n^2 2^-24 clip norms,
    for two sums of 64 and 65 less than the margin of 2^-10.
    """
    total = _zeros_like(weights)
    norms = [torch.zeros(0, dtype=torch.float64, device=inputs[0].device)]
    for start in range(0, len(inputs[0]), at_once):
        chunk = tuple(tensor[start : start + at_once] for tensor in inputs)
        gradients = vmap(grad(loss), (None, *[0] * len(chunk)))(dict(weights), *chunk)
        norms.append(row_norms(torch.cat([tensor.flatten(1) for tensor in gradients.values()], 1)))
        _add(total, gradients, clipping_factors(norms[-1], clip, _SUM_MARGIN))
    return ClippedSum(total, torch.cat(norms), clip, _SEAL)


def by_opacus(
    module: nn.Module, inputs: tuple[Tensor, ...], losses: Losses, clip: float
) -> ClippedSum:
    """Compute ``clipped_sum`` by the hooks of Opacus, for a module with its own weights: a
    reference."""
    from opacus import GradSampleModule  # slow to import, not needed by runs

    wrapped = GradSampleModule(module, loss_reduction="sum")
    torch.autograd.backward(losses(wrapped(*inputs)).sum())
    gradients = {name: getattr(p, "grad_sample") for name, p in module.named_parameters()}  # noqa: B009
    norms = row_norms(torch.cat([gradient.flatten(1) for gradient in gradients.values()], 1))
    total = _zeros_like(dict(module.named_parameters()))
    _add(total, gradients, clipping_factors(norms, clip, _SUM_MARGIN))
    wrapped.to_standard_module()
    return ClippedSum(total, norms, clip, _SEAL)


def sum_of_rows(
    rows: Tensor, clip: float, blocks: Tensor | None = None, count: int = 1
) -> ClippedSum:
    """Return the sum of clipped rows (n, d), for contributions that are not gradients.

    ``blocks``: index of the block of the sum (count, d) that each row is added to.
    """
    norms = row_norms(rows)
    blocks = torch.zeros(len(rows), dtype=torch.long) if blocks is None else blocks
    # double precision: in single, sums of many rows would lose small contributions
    total = rows.new_zeros(count, rows.shape[1], dtype=torch.float64)
    scaled = scale_rows(rows, clipping_factors(norms, clip)).double()
    total.index_add_(0, blocks.to(rows.device), scaled)
    return ClippedSum({"rows": total}, norms, clip, _SEAL)


def joint_sum(*parts: ClippedSum) -> ClippedSum:
    """Combine sums over the same examples: the joint contribution of an example has at most the
    root of the sum of the squared clip norms."""
    norms = torch.stack([part.norms for part in parts]).square().sum(0).sqrt()
    gradients = {
        f"{number:04d} {name}": gradient
        for number, part in enumerate(parts)
        for name, gradient in part.gradients.items()
    }
    return ClippedSum(gradients, norms, math.hypot(*(part.clip for part in parts)), _SEAL)


def sum_of_second_moments(
    rows: Tensor,
    clip: float,
    blocks: Tensor | None = None,
    count: int = 1,
    targets: Tensor | None = None,
) -> ClippedSum:
    """Return the sum over rows v (n, d) of v v^T, each clipped to Frobenius norm ``clip``: the
    upper triangles, with entries off the diagonal times sqrt(2) so that norms are Frobenius norms
    (count, d (d + 1) / 2). In double precision.

    Args:
        blocks: as in ``sum_of_rows``.
        targets: t (n, q): v t^T is summed as well, clipped jointly with v v^T and appended (count,
            d q).
    """
    private = rows.double()
    other = private.new_zeros(len(rows), 0) if targets is None else targets.double()
    lengths = row_norms(private)
    norms = lengths * (lengths.square() + row_norms(other).square()).sqrt()
    factors = clipping_factors(norms, clip)
    scaled = scale_rows(private, factors)
    used = torch.where((factors != 0)[:, None], torch.cat([private, other], 1), 0.0)
    down, right = torch.triu_indices(rows.shape[1], rows.shape[1], device=rows.device)
    weight = torch.where(down == right, 1.0, math.sqrt(2)).double()
    total = private.new_zeros(count, len(down) + rows.shape[1] * other.shape[1])
    for block in range(count) if blocks is None else set(blocks.tolist()):
        selected = slice(None) if blocks is None else (blocks == block).to(rows.device)
        product = scaled[selected].T @ used[selected]
        square, cross = product[:, : rows.shape[1]], product[:, rows.shape[1] :]
        total[block] = torch.cat([square[down, right] * weight, cross.flatten()])
    return ClippedSum({"rows": total}, norms, clip, _SEAL)


def sum_of_outer_products(left: Tensor, right: Tensor, clip: float) -> ClippedSum:
    """Return the sum over examples of the outer product v w^T (a, b), each product clipped to
    Frobenius norm ``clip``, for rows v (n, a) and w (n, b). In double precision, with the margin of
    ``clipped_sum``. This is the clipped gradient of a linear layer."""
    left, right = left.double(), right.double()
    norms = row_norms(left) * row_norms(right)
    factors = clipping_factors(norms, clip, _SUM_MARGIN)
    used = torch.where((factors != 0)[:, None], right, 0.0)
    return ClippedSum({"rows": scale_rows(left, factors).T @ used}, norms, clip, _SEAL)


def symmetric_from_triangle(triangles: Tensor, side: int) -> Tensor:
    """Return the matrices (..., side, side) of upper triangles as ``sum_of_second_moments`` has
    them. Equal noise in all entries has twice the variance on the diagonal."""
    down, right = torch.triu_indices(side, side, device=triangles.device)
    triangle = triangles / torch.where(down == right, 1.0, math.sqrt(2)).to(triangles)
    matrix = triangles.new_zeros(*triangles.shape[:-1], side, side)
    matrix[..., down, right] = triangle
    matrix[..., right, down] = triangle
    return matrix


def _add(total: dict[str, Tensor], gradients: Mapping[str, Tensor], factors: Tensor) -> None:
    """Add the sum of the gradients of examples times ``factors``."""
    for name, gradient in gradients.items():
        total[name] += torch.tensordot(factors.to(gradient), zero_nonfinite(gradient), 1)


def _check_independent(
    module: nn.Module,
    layers: dict[nn.Module, dict[str, str]],
    weights: Weights,
    inputs: tuple[Tensor, ...],
) -> None:
    """Raise FedgenError unless two and three examples give the same outputs as each alone, with one
    row per example in all layers. Inputs and weights are random with a public seed, independent of
    private data. Mixing that is rare or below rounding errors is not detected; layers with random
    numbers, such as dropout, look like mixing."""
    rng = torch.Generator().manual_seed(0)

    def like(tensor: Tensor, count: int) -> Tensor:
        size = (count, *tensor.shape[1:])
        if not tensor.is_floating_point():
            return torch.zeros(size, dtype=tensor.dtype, device=tensor.device)
        return torch.randn(size, generator=rng).to(tensor)

    examples = tuple(like(tensor, 3) for tensor in inputs)
    random_weights = {
        name: (torch.randn(tensor.shape, generator=rng) / max(tensor[0].numel(), 1) ** 0.5).to(
            tensor
        )
        if tensor.dim() > 1
        else torch.ones_like(tensor)
        for name, tensor in weights.items()
    }

    def out(rows: slice) -> Tensor:
        """Return the outputs for these examples, from a pass that checks the number of rows."""
        subset = tuple(tensor[rows] for tensor in examples)
        recorded: list[Tensor] = []

        def losses(outputs: Tensor) -> Tensor:
            recorded.append(outputs.detach())
            return outputs.reshape(len(outputs), -1).sum(1)

        _backward(module, random_weights, subset, losses, layers, "float32", 1)
        return recorded[0]

    separate = torch.cat([out(slice(row, row + 1)) for row in range(3)])
    for count in (2, 3):
        together = out(slice(0, count))
        if not torch.allclose(together, separate[:count], rtol=1e-2, atol=1e-4, equal_nan=True):
            raise FedgenError(
                "model",
                "mixes examples: its output for one example depends on the others",
                "remove batch statistics and dropout",
            )


def _backward(
    module: nn.Module,
    weights: Weights,
    inputs: tuple[Tensor, ...],
    losses: Losses,
    layers: dict[nn.Module, dict[str, str]],
    precision: Precision,
    copies: int,
) -> dict[str, list[Use]]:
    """Return the uses of each weight by these examples."""
    recorded: list[tuple[nn.Module, Tensor, Tensor, int]] = []
    count = len(inputs[0])

    def look(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if not inputs:
            raise FedgenError(
                "model", "passes the input of a layer by keyword", "pass it by position"
            )
        if not len(inputs[0]) == len(output) == count:
            problem = f"has a layer that receives {len(inputs[0])} rows for {count} examples"
            raise FedgenError("model", problem, "keep examples in the first dimension")
        # weights require no gradient, so the output of a first layer has no history: start it
        output = output if output.requires_grad else output.requires_grad_()
        recorded.append((layer, inputs[0].detach(), output, output._version))
        return output

    handles = [layer.register_forward_hook(look) for layer in layers]
    try:
        with (
            _in_place_errors(),
            torch.enable_grad(),
            _matmul_precision(precision, inputs[0].device.type),
        ):
            # weights are constants here; detach() only where needed, each call is an operator
            fixed = {
                name: value.detach() if value.requires_grad else value
                for name, value in weights.items()
            }
            outputs = functional_call(module, fixed, tuple(tensor.detach() for tensor in inputs))
            loss = losses(_to_single(outputs)).sum() / copies
    finally:
        for handle in handles:
            handle.remove()
    if any(out._version != version for _, _, out, version in recorded):
        raise _in_place_error()
    with _in_place_errors(), _matmul_precision(precision, inputs[0].device.type):
        output_gradients = torch.autograd.grad(
            loss, [out for _, _, out, _ in recorded], materialize_grads=True
        )
    uses: dict[str, list[Use]] = defaultdict(list)
    multiplied = _to_double if precision == "float64" else _to_single
    for (layer, layer_input, _, _), output_gradient in zip(recorded, output_gradients, strict=True):
        layer_uses = USES[type(layer)](layer, multiplied(layer_input), multiplied(output_gradient))
        for part, name in layers[layer].items():
            use = layer_uses[part]
            materialize = copies > 1 or (isinstance(use, Product) and use.gradient_is_smaller)
            uses[name].append(Materialized.from_copies(use, copies) if materialize else use)
    return uses


def _to_single(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def _to_double(tensor: Tensor) -> Tensor:
    """Convert floating-point tensors to double precision; keep indices."""
    return tensor.double() if tensor.is_floating_point() else tensor


@contextlib.contextmanager
def _matmul_precision(precision: Precision, device: str) -> Iterator[None]:
    """Compute matrix products at this precision within the context."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    try:
        matmul.allow_tf32 = cudnn.allow_tf32 = precision == "tf32"
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16"):
            yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


@contextlib.contextmanager
def _in_place_errors() -> Iterator[None]:
    """Convert torch's errors about activations changed in place to FedgenError."""
    try:
        yield
    except RuntimeError as error:
        if "in-place" in str(error) or "inplace" in str(error):
            raise _in_place_error() from error
        raise


def _in_place_error() -> FedgenError:
    return FedgenError("model", "changes activations in place", "set inplace=False")
