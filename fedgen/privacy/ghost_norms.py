"""Uses of a layer's weights by each example: norms of their gradients and scaled sums of them.

The gradient of one example's loss with respect to a layer's weight is a product of the layer's
input and the gradient of its output. So neither a norm nor a sum over examples needs the gradients
in memory ("ghost norm", Li, Tramer, Liang, Hashimoto 2022).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from fedgen.errors import FedgenError

Pair = tuple[int, int]

_CANCELLATION = 2.0**-17  # 64 times the rounding error of a product in single precision
_UNSUPPORTED_OPTIONS = (
    "max_norm",
    "padding_idx",
    "scale_grad_by_freq",
)
_MIXING = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


def row_norms(rows: Tensor) -> Tensor:
    """Return L2 norms (n,) in double precision: in single, norms of long rows would be too
    small."""
    dimensions = tuple(range(1, rows.dim()))
    norms: Tensor = torch.linalg.vector_norm(rows, dim=dimensions, dtype=torch.float64)
    return norms


def squared_row_norms(rows: Tensor) -> Tensor:
    """Return squared L2 norms (n,) in double precision."""
    return row_norms(rows).square()


def scale_rows(rows: Tensor, factors: Tensor) -> Tensor:
    """Return rows (n, ...) times factors. Non-finite entries count as zero: the factor of their
    row is zero, or NaN if nothing is clipped (``clipping_factors``)."""
    return zero_nonfinite(rows) * factors.to(rows).view(-1, *[1] * (rows.dim() - 1))


def zero_nonfinite(rows: Tensor) -> Tensor:
    """Return rows with non-finite entries replaced by zero, because zero times infinity is NaN.
    Masking rows takes more operators; boolean indexing synchronizes with the device."""
    return torch.nan_to_num(rows, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Product:
    """A weight whose gradient for example n is, in each group g, the sum over positions t of
    y[n, g, :, t] x[n, g, :, t]^T.

    x: () -> that tensor, which is large for convolutions.
    width: third dimension of x.
    gram: () -> products of x between positions (n, g, t, t).
    weighted_sum: factors (n,) -> scaled sum over examples.
    """

    x: Callable[[], Tensor]
    y: Tensor
    width: int
    gram: Callable[[], Tensor]
    weighted_sum: Callable[[Tensor], Tensor]

    def gradients_and_lengths(self) -> tuple[Tensor, Tensor]:
        """Return the gradient of each example, with entries in any order (n, weights), and an upper
        bound on the sum of the absolute values of its products (n,)."""
        x = self.x()  # once: convolutions recompute it
        return _grouped_matmul(self.y, x.transpose(2, 3)).flatten(1), row_norms(x) * row_norms(
            self.y
        )

    @property
    def gradient_is_smaller(self) -> bool:
        """Whether the gradient of an example is smaller than its factors."""
        groups, q, positions = self.y.shape[1:]
        return positions * groups > 1 and positions * (self.width + q) >= self.width * q

    def squares(self) -> Tensor:
        """Return the squared norm of each example (n,), plus the term for cancellation (see
        ``_cancellation``)."""
        if self.y.shape[1] * self.y.shape[3] == 1:
            return (row_norms(self.x()) * row_norms(self.y)).square()
        x, y = self.gram(), _grouped_matmul(self.y.transpose(2, 3), self.y)
        trace_x, trace_y = (gram.diagonal(dim1=2, dim2=3).double().sum((1, 2)) for gram in (x, y))
        squares = (x * y).double().sum((1, 2, 3))
        return squares + _cancellation((trace_x * trace_y).sqrt())

    def summed(self, factors: Tensor) -> Tensor:
        """Return the scaled sum over examples."""
        return self.weighted_sum(factors)


@dataclass(frozen=True)
class SmallWeight:
    """A small weight whose per-example gradients (n, ...) are materialized: biases, affine
    norms."""

    gradients: Tensor

    def gradients_and_lengths(self) -> tuple[Tensor, Tensor]:
        """See ``Product.gradients_and_lengths``; the norms are those of the summed gradients."""
        gradients = self.gradients.flatten(1)
        return gradients, row_norms(gradients)

    def squares(self) -> Tensor:
        """Return the squared norm of each example (n,)."""
        return squared_row_norms(self.gradients)

    def summed(self, factors: Tensor) -> Tensor:
        """Return the scaled sum over examples."""
        return scale_rows(self.gradients, factors).sum(0)


@dataclass(frozen=True)
class EmbeddingTable:
    """An embedding: row indices (n, t) into a table (rows, d), and output gradients (n, t, d)."""

    index: Tensor
    output_gradient: Tensor
    shape: torch.Size

    def gradients_and_lengths(self) -> tuple[Tensor, Tensor]:
        """See ``Product.gradients_and_lengths``."""
        gradients = self.output_gradient.new_zeros(len(self.index), *self.shape)
        gradients.scatter_add_(
            1, self.index[..., None].expand_as(self.output_gradient), self.output_gradient
        )
        return gradients.flatten(1), self._lengths()

    def squares(self) -> Tensor:
        """Return the squared norm of each example (n,); gradients of repeated rows add up."""
        if self.index.shape[1] == 1:
            return squared_row_norms(self.output_gradient)
        same = self.index[:, :, None] == self.index[:, None, :]
        squares = (
            (self.output_gradient @ self.output_gradient.transpose(1, 2) * same)
            .double()
            .sum((1, 2))
        )
        return squares + _cancellation(self._lengths())

    def _lengths(self) -> Tensor:
        lengths: Tensor = torch.linalg.vector_norm(self.output_gradient.double(), dim=2).sum(1)
        return lengths

    def summed(self, factors: Tensor) -> Tensor:
        """Return the scaled sum over examples."""
        table = self.output_gradient.new_zeros(self.shape)
        return table.index_add_(
            0, self.index.flatten(), scale_rows(self.output_gradient, factors).flatten(0, 1)
        )


SingleUse = Product | SmallWeight | EmbeddingTable


@dataclass(frozen=True)
class Materialized:
    """Per-example gradients (n, weights) summed over copies, and the sum of their lengths (n,);
    used where they are smaller than their factors."""

    gradients: Tensor
    lengths: Tensor

    @classmethod
    def from_copies(cls, use: SingleUse, copies: int) -> Materialized:
        """Sum the gradients over consecutive copies."""
        gradients, lengths = use.gradients_and_lengths()
        summed = gradients.view(-1, copies, gradients.shape[1]).sum(1)
        return cls(summed, lengths.view(-1, copies).sum(1))

    def gradients_and_lengths(self) -> tuple[Tensor, Tensor]:
        """See ``Product.gradients_and_lengths``."""
        return self.gradients, self.lengths

    def squares(self) -> Tensor:
        """Return the squared norm of each example (n,)."""
        return squared_row_norms(self.gradients) + _cancellation(self.lengths)

    def summed(self, factors: Tensor) -> Tensor:
        """Return the scaled sum over examples."""
        return factors.to(self.gradients) @ zero_nonfinite(self.gradients)


Use = SingleUse | Materialized


def squared_norms(uses: list[Use]) -> Tensor:
    """Return the squared norms (n,) of the gradient of one weight over all of its uses."""
    if len(uses) == 1:
        return uses[0].squares()
    total, lengths = uses[0].gradients_and_lengths()
    for use in uses[1:]:
        gradients, use_lengths = use.gradients_and_lengths()
        total, lengths = total + gradients, lengths + use_lengths
    return squared_row_norms(total) + _cancellation(lengths)


def _cancellation(lengths: Tensor) -> Tensor:
    """Return the term added to squared norms (n,) of sums of products whose absolute values sum to
    ``lengths``. Cancellation leaves rounding errors, in the norm and in the sum over a batch, which
    could swallow other examples: an example whose products are much longer than their sum counts as
    longer. If they are 15 times as long, as in convolutions of images, this adds a thousandth of
    its norm."""
    return _CANCELLATION * lengths.square()


# --- supported layers -----------------------------------------------------------------------------
# (layer, input, output gradient) -> uses of its weights


def _linear(layer: nn.Linear, inputs: Tensor, output_gradient: Tensor) -> dict[str, SingleUse]:
    x, y = (
        tensor.reshape(len(tensor), -1, tensor.shape[-1]) for tensor in (inputs, output_gradient)
    )

    def weighted_sum(factors: Tensor) -> Tensor:
        return scale_rows(y, factors).flatten(0, 1).T @ zero_nonfinite(x).flatten(0, 1)

    columns, rows = x.transpose(1, 2)[:, None], y.transpose(1, 2)[:, None]
    product = Product(
        lambda: columns,
        rows,
        x.shape[2],
        lambda: _grouped_matmul(columns.transpose(2, 3), columns),
        weighted_sum,
    )
    return {"weight": product, "bias": SmallWeight(y.sum(1))}


def _convolution(
    layer: nn.Conv1d | nn.Conv2d, inputs: Tensor, output_gradient: Tensor
) -> dict[str, SingleUse]:
    inputs, output_gradient, size, geometry = _as_2d(layer, inputs, output_gradient)

    def weighted_sum(factors: Tensor) -> Tensor:
        weight_gradient: Tensor = conv2d_weight(
            zero_nonfinite(inputs),
            size,
            scale_rows(output_gradient, factors),
            **geometry,
            groups=layer.groups,
        )
        return weight_gradient

    product = _patches(
        inputs, output_gradient, (size[2], size[3]), geometry, layer.groups, weighted_sum
    )
    return {"weight": product, "bias": SmallWeight(output_gradient.flatten(2).sum(2))}


def _transposed(
    layer: nn.ConvTranspose2d, inputs: Tensor, output_gradient: Tensor
) -> dict[str, SingleUse]:
    """Return the uses by a transposed convolution: a convolution with input and output gradient
    exchanged."""
    inputs, output_gradient, size, geometry = _as_2d(layer, inputs, output_gradient)

    def weighted_sum(factors: Tensor) -> Tensor:
        weight_gradient: Tensor = conv2d_weight(
            scale_rows(output_gradient, factors),
            size,
            zero_nonfinite(inputs),
            **geometry,
            groups=layer.groups,
        )
        return weight_gradient

    product = _patches(
        output_gradient, inputs, (size[2], size[3]), geometry, layer.groups, weighted_sum
    )
    return {"weight": product, "bias": SmallWeight(output_gradient.flatten(2).sum(2))}


def _as_2d(
    layer: nn.Conv1d | nn.Conv2d | nn.ConvTranspose2d, inputs: Tensor, output_gradient: Tensor
) -> tuple[Tensor, Tensor, tuple[int, int, int, int], dict[str, Pair]]:
    """Return the tensors, weight shape and geometry of a convolution in two dimensions."""
    out_channels, in_channels, *kernel = layer.weight.shape
    if len(kernel) == 1:
        inputs, output_gradient = inputs[:, :, None], output_gradient[:, :, None]
    geometry: dict[str, Pair] = {}
    for name, neutral in {"stride": 1, "padding": 0, "dilation": 1}.items():
        *first, last = getattr(layer, name)
        geometry[name] = (first[0] if first else neutral, last)
    height = kernel[0] if len(kernel) == 2 else 1
    return inputs, output_gradient, (out_channels, in_channels, height, kernel[-1]), geometry


def _patches(
    images: Tensor,
    positions: Tensor,
    kernel: Pair,
    geometry: Mapping[str, Pair],
    groups: int,
    weighted_sum: Callable[[Tensor], Tensor],
) -> Product:
    """Return the product of patches of images (n, c, h, w) with values at their positions (n, d,
    ...)."""

    def columns() -> Tensor:
        return _grouped(extract_patches(images, kernel, **geometry), groups)

    def gram() -> Tensor:
        stride = geometry["stride"]
        whole_cells = all(k % s == 0 for k, s in zip(kernel, stride, strict=True))
        if whole_cells and geometry["dilation"] == (1, 1):
            return _patch_gram(
                images, positions.shape[2:], kernel, stride, geometry["padding"], groups
            )
        x = columns()
        return _grouped_matmul(x.transpose(2, 3), x)

    width = images.shape[1] // groups * math.prod(kernel)
    return Product(columns, _grouped(positions.flatten(2), groups), width, gram, weighted_sum)


def extract_patches(
    images: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    """Return the patches that a kernel covers, (n, c * k * k, t), like torch.nn.functional.unfold,
    which would launch a CUDA kernel per image."""
    padded = F.pad(images, (padding[1], padding[1], padding[0], padding[0]))
    count, channels, *sides = padded.shape
    high, wide = (
        (side - d * (k - 1) - 1) // s + 1
        for side, k, s, d in zip(sides, kernel, stride, dilation, strict=True)
    )
    image, channel, down, right = padded.stride()
    strides = (down * dilation[0], right * dilation[1], down * stride[0], right * stride[1])
    views = padded.as_strided((count, channels, *kernel, high, wide), (image, channel, *strides))
    return views.reshape(count, -1, high * wide)


def _patch_gram(
    images: Tensor, positions: torch.Size, kernel: Pair, stride: Pair, padding: Pair, groups: int
) -> Tensor:
    """Return products of patches with each other (n, g, t, t), without the patches in memory.

    If the kernel is a multiple of the stride, a patch consists of cells of stride by stride pixels,
    and the product of two patches is a sum of products of cells, which overlapping patches share.
    """
    count, (high, wide), (down, right) = len(images), positions, stride
    block = [(i, j) for i in range(kernel[0] // down) for j in range(kernel[1] // right)]
    rows, columns = high + block[-1][0], wide + block[-1][1]
    below, beyond = rows * down - images.shape[2], columns * right - images.shape[3]
    padded = F.pad(
        images, (padding[1], beyond - padding[1], padding[0], below - padding[0])
    )  # drop pixels outside all patches
    split = padded.view(count, groups, -1, rows, down, columns, right)
    cells = split.permute(0, 1, 2, 4, 6, 3, 5).reshape(count, groups, -1, rows * columns)
    products = _grouped_matmul(cells.transpose(2, 3), cells).view(
        count, groups, rows, columns, rows, columns
    )
    shifted = (
        products[:, :, i : i + high, j : j + wide, i : i + high, j : j + wide] for i, j in block
    )
    gram: Tensor = sum(shifted, torch.zeros((), device=images.device, dtype=images.dtype))
    return gram.reshape(count, groups, high * wide, high * wide)


def _grouped_matmul(left: Tensor, right: Tensor) -> Tensor:
    """Return the matrix products (n, g, a, c) of (n, g, a, b) and (n, g, b, c): ``left @ right``
    with about half as many dispatched operators."""
    products = torch.bmm(left.flatten(0, 1), right.flatten(0, 1))
    return products.view(*left.shape[:2], *products.shape[1:])


def _grouped(columns: Tensor, groups: int) -> Tensor:
    """Reshape (n, channels, t) to (n, groups, channels per group, t)."""
    return columns.reshape(len(columns), groups, -1, columns.shape[2])


def _embedding(
    layer: nn.Embedding, inputs: Tensor, output_gradient: Tensor
) -> dict[str, SingleUse]:
    index, rows = (
        inputs.reshape(len(inputs), -1),
        output_gradient.reshape(len(output_gradient), -1, output_gradient.shape[-1]),
    )
    return {"weight": EmbeddingTable(index, rows, layer.weight.shape)}


def _group_norm(
    layer: nn.GroupNorm, inputs: Tensor, output_gradient: Tensor
) -> dict[str, SingleUse]:
    normalized = F.group_norm(inputs, layer.num_groups, eps=layer.eps)
    products, rows = (
        tensor.reshape(*tensor.shape[:2], -1).sum(2)
        for tensor in (normalized * output_gradient, output_gradient)
    )
    return {"weight": SmallWeight(products), "bias": SmallWeight(rows)}


def _layer_norm(
    layer: nn.LayerNorm, inputs: Tensor, output_gradient: Tensor
) -> dict[str, SingleUse]:
    normalized, shape = (
        F.layer_norm(inputs, layer.normalized_shape, eps=layer.eps),
        layer.normalized_shape,
    )
    products, rows = (
        tensor.reshape(len(tensor), -1, *shape).sum(1)
        for tensor in (normalized * output_gradient, output_gradient)
    )
    return {"weight": SmallWeight(products), "bias": SmallWeight(rows)}


USES: dict[type[nn.Module], Callable[..., dict[str, SingleUse]]] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.ConvTranspose2d: _transposed,
    nn.Embedding: _embedding,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
}


def parameter_layers(module: nn.Module) -> dict[nn.Module, dict[str, str]]:
    """Return layers with their own weights -> name of each weight in the module."""
    names = {id(weight): name for name, weight in module.named_parameters()}
    layers: dict[nn.Module, dict[str, str]] = {}
    for path, layer in module.named_modules():
        if isinstance(layer, _MIXING):
            raise FedgenError(
                path or "model", f"{type(layer).__name__} mixes examples", "use GroupNorm"
            )
        parameters = dict(layer.named_parameters(recurse=False))
        if not parameters:
            continue
        supported = getattr(layer, "padding_mode", "zeros") == "zeros" and not isinstance(
            getattr(layer, "padding", 0), str
        )
        supported &= all(
            getattr(layer, option, None) in (None, False) for option in _UNSUPPORTED_OPTIONS
        )
        if type(layer) not in USES or not supported:
            raise FedgenError(
                path or "model",
                f"clipped_sum does not support this {type(layer).__name__}",
                "use by_vmap",
            )
        layers[layer] = {part: names[id(weight)] for part, weight in parameters.items()}
    return layers
