"""What a layer's weights got from each example: norms of their gradients, and scaled sums of these.

The gradient of one example's loss with respect to a layer's weight is a product of what went into
the layer and of the gradient of what came out of it. So a norm need not have the gradient in memory
("ghost norm", Li, Tramer, Liang, Hashimoto 2022), nor has a sum over examples.
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

_CANCELS = 2.0**-17  # 64 times the rounding of a product in single precision
_OF_EMBEDDINGS = ("max_norm", "padding_idx", "scale_grad_by_freq")  # options that are not known
_MIXING = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


def norms_of(rows: Tensor) -> Tensor:
    """L2 norms (n,) in double precision: in single, those of long rows come out too small."""
    norms: Tensor = torch.linalg.vector_norm(rows.flatten(1), dim=1, dtype=torch.float64)
    return norms


def squares_of(rows: Tensor) -> Tensor:
    """Squared L2 norms (n,), in double precision."""
    return norms_of(rows).square()


def scaled_by(rows: Tensor, factors: Tensor) -> Tensor:
    """Rows (n, ...) times their factors; zero where that is zero, whatever the row is."""
    factor = factors.to(rows).view(-1, *[1] * (rows.dim() - 1))
    return torch.where(factor != 0, rows * factor, 0.0)


@dataclass(frozen=True)
class Product:
    """A weight whose gradient for example n is, in each group g, the sum over positions t of
    y[n, g, :, t] x[n, g, :, t]^T. ``x``: () -> that tensor, which for convolutions is large.
    ``width``: its third dimension. ``gram``: () -> its products of positions with each other
    (n, g, t, t). ``whole``: factors (n,) -> the scaled sum over examples."""

    x: Callable[[], Tensor]
    y: Tensor
    width: int
    gram: Callable[[], Tensor]
    whole: Callable[[Tensor], Tensor]

    def measured(self) -> tuple[Tensor, Tensor]:
        """Each example's gradient, in any order of its entries (n, weights); and no less than its
        products' absolute values in all (n,)."""
        x = self.x()  # once: for convolutions it is made anew
        return (self.y @ x.transpose(2, 3)).flatten(1), norms_of(x) * norms_of(self.y)

    @property
    def gradient_is_smaller(self) -> bool:
        """Whether an example's own gradient is smaller than what it is made of."""
        groups, q, positions = self.y.shape[1:]
        return positions * groups > 1 and positions * (self.width + q) >= self.width * q

    def squares(self) -> Tensor:
        """Each example's squared norm (n,), with what may cancel (see ``_cancelling``)."""
        if self.y.shape[1] * self.y.shape[3] == 1:
            return (norms_of(self.x()) * norms_of(self.y)).square()
        x, y = self.gram(), self.y.transpose(2, 3) @ self.y
        from_x, from_y = (each.diagonal(dim1=2, dim2=3).double().sum((1, 2)) for each in (x, y))
        found = (x * y).double().sum((1, 2, 3))
        return found + _cancelling((from_x * from_y).sqrt())

    def summed(self, factors: Tensor) -> Tensor:
        """The sum over examples, each scaled."""
        return self.whole(factors)


@dataclass(frozen=True)
class Small:
    """A weight so small that each example's gradient (n, ...) is kept: biases, affine norms."""

    gradients: Tensor

    def measured(self) -> tuple[Tensor, Tensor]:
        """See ``Product.measured``: what is summed is what the norm is of."""
        gradients = self.gradients.flatten(1)
        return gradients, norms_of(gradients)

    def squares(self) -> Tensor:
        """Each example's squared norm (n,)."""
        return squares_of(self.gradients)

    def summed(self, factors: Tensor) -> Tensor:
        """The sum over examples, each scaled."""
        return scaled_by(self.gradients, factors).sum(0)


@dataclass(frozen=True)
class Table:
    """An embedding: index (n, t) of rows of a table (rows, d), and what came back (n, t, d)."""

    index: Tensor
    back: Tensor
    shape: torch.Size

    def measured(self) -> tuple[Tensor, Tensor]:
        """See ``Product.measured``."""
        found = self.back.new_zeros(len(self.index), *self.shape)
        found.scatter_add_(1, self.index[..., None].expand_as(self.back), self.back)
        return found.flatten(1), self._lengths()

    def squares(self) -> Tensor:
        """Each example's squared norm (n,): rows that are looked up twice add up."""
        if self.index.shape[1] == 1:
            return squares_of(self.back)
        same = self.index[:, :, None] == self.index[:, None, :]
        found = (self.back @ self.back.transpose(1, 2) * same).double().sum((1, 2))
        return found + _cancelling(self._lengths())

    def _lengths(self) -> Tensor:
        found: Tensor = torch.linalg.vector_norm(self.back.double(), dim=2).sum(1)
        return found

    def summed(self, factors: Tensor) -> Tensor:
        """The sum over examples, each scaled."""
        found = self.back.new_zeros(self.shape)
        return found.index_add_(
            0, self.index.flatten(), scaled_by(self.back, factors).flatten(0, 1)
        )


Plain = Product | Small | Table


@dataclass(frozen=True)
class Kept:
    """A weight's use by each example, or by its copies: the sum of their gradients (n, weights),
    and of their lengths (n,). It is kept where it is smaller than what it is made of."""

    gradients: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, use: Plain, copies: int) -> Kept:
        """From that by all copies, one after the other."""
        gradients, lengths = use.measured()
        whole = gradients.view(-1, copies, gradients.shape[1]).sum(1)
        return cls(whole, lengths.view(-1, copies).sum(1))

    def measured(self) -> tuple[Tensor, Tensor]:
        """See ``Product.measured``."""
        return self.gradients, self.lengths

    def squares(self) -> Tensor:
        """Each example's squared norm (n,)."""
        return squares_of(self.gradients) + _cancelling(self.lengths)

    def summed(self, factors: Tensor) -> Tensor:
        """The sum over examples, each scaled."""
        used = factors != 0  # zero times infinity is not zero
        return factors[used].to(self.gradients) @ self.gradients[used]


Use = Plain | Kept


def square_of(uses: list[Use]) -> Tensor:
    """Squared norms (n,) of one weight's gradient over all of its uses."""
    if len(uses) == 1:
        return uses[0].squares()
    whole, lengths = uses[0].measured()
    for use in uses[1:]:
        gradients, more = use.measured()
        whole, lengths = whole + gradients, lengths + more
    return squares_of(whole) + _cancelling(lengths)


def _cancelling(lengths: Tensor) -> Tensor:
    """What is added to squared norms (n,) of sums of products whose absolute values come to
    ``lengths`` in all. What cancels leaves its rounding, in the norm and in the sum over a batch
    alike, where it would swallow other examples: one whose products are much longer than what is
    left of them counts as longer than that. Where they are 15 times as long, as in convolutions of
    images, that is a thousandth of its norm."""
    return _CANCELS * lengths.square()


# --- the layers that are known --------------------------------------------------------------------
# each: (layer, what went in, what came back) -> its weights' uses


def _linear(layer: nn.Linear, given: Tensor, back: Tensor) -> dict[str, Plain]:
    x, y = (each.reshape(len(each), -1, each.shape[-1]) for each in (given, back))

    def whole(factors: Tensor) -> Tensor:
        scaled, used = scaled_by(y, factors), scaled_by(x, (factors != 0).to(x))
        return scaled.flatten(0, 1).T @ used.flatten(0, 1)

    columns, rows = x.transpose(1, 2)[:, None], y.transpose(1, 2)[:, None]
    product = Product(
        lambda: columns,
        rows,
        x.shape[2],
        lambda: columns.transpose(2, 3) @ columns,
        whole,
    )
    return {"weight": product, "bias": Small(y.sum(1))}


def _convolution(layer: nn.Conv1d | nn.Conv2d, given: Tensor, back: Tensor) -> dict[str, Plain]:
    given, back, size, geometry = _in_the_plane(layer, given, back)

    def whole(factors: Tensor) -> Tensor:
        found: Tensor = conv2d_weight(
            scaled_by(given, (factors != 0).to(given)),
            size,
            scaled_by(back, factors),
            **geometry,
            groups=layer.groups,
        )
        return found

    product = _patches(given, back, (size[2], size[3]), geometry, layer.groups, whole)
    return {"weight": product, "bias": Small(back.flatten(2).sum(2))}


def _transposed(layer: nn.ConvTranspose2d, given: Tensor, back: Tensor) -> dict[str, Plain]:
    """A convolution's backward pass: what came back plays the part of what went in."""
    given, back, size, geometry = _in_the_plane(layer, given, back)

    def whole(factors: Tensor) -> Tensor:
        found: Tensor = conv2d_weight(
            scaled_by(back, factors),
            size,
            scaled_by(given, (factors != 0).to(given)),
            **geometry,
            groups=layer.groups,
        )
        return found

    product = _patches(back, given, (size[2], size[3]), geometry, layer.groups, whole)
    return {"weight": product, "bias": Small(back.flatten(2).sum(2))}


def _in_the_plane(
    layer: nn.Conv1d | nn.Conv2d | nn.ConvTranspose2d, given: Tensor, back: Tensor
) -> tuple[Tensor, Tensor, tuple[int, int, int, int], dict[str, Pair]]:
    """A convolution's tensors, its weight's shape and its geometry, in two dimensions."""
    outputs, inputs, *kernel = layer.weight.shape
    if len(kernel) == 1:
        given, back = given[:, :, None], back[:, :, None]
    geometry: dict[str, Pair] = {}
    for name, neutral in {"stride": 1, "padding": 0, "dilation": 1}.items():
        *above, last = getattr(layer, name)
        geometry[name] = (above[0] if above else neutral, last)
    height = kernel[0] if len(kernel) == 2 else 1
    return given, back, (outputs, inputs, height, kernel[-1]), geometry


def _patches(
    images: Tensor,
    positions: Tensor,
    kernel: Pair,
    geometry: Mapping[str, Pair],
    groups: int,
    whole: Callable[[Tensor], Tensor],
) -> Product:
    """The product of patches of images (n, c, h, w) with what is at their positions (n, d, ...)."""

    def columns() -> Tensor:
        return _grouped(patches_of(images, kernel, **geometry), groups)

    def gram() -> Tensor:
        stride = geometry["stride"]
        whole_cells = all(k % s == 0 for k, s in zip(kernel, stride, strict=True))
        if whole_cells and geometry["dilation"] == (1, 1):
            return _gram_of_patches(
                images, positions.shape[2:], kernel, stride, geometry["padding"], groups
            )
        x = columns()
        return x.transpose(2, 3) @ x

    width = images.shape[1] // groups * math.prod(kernel)
    return Product(columns, _grouped(positions.flatten(2), groups), width, gram, whole)


def patches_of(images: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """The patches that a kernel sees, (n, c * k * k, t): as torch.nn.functional.unfold, which calls
    CUDA once for each image."""
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


def _gram_of_patches(
    images: Tensor, positions: torch.Size, kernel: Pair, stride: Pair, padding: Pair, groups: int
) -> Tensor:
    """Products of patches with each other (n, g, t, t), without the patches in memory.

    Where the kernel is a multiple of the stride a patch is a block of whole cells of stride by
    stride pixels, so that two patches' product is a sum of products of cells; overlapping patches
    share these.
    """
    count, (high, wide), (down, right) = len(images), positions, stride
    block = [(i, j) for i in range(kernel[0] // down) for j in range(kernel[1] // right)]
    rows, columns = high + block[-1][0], wide + block[-1][1]
    below, beyond = rows * down - images.shape[2], columns * right - images.shape[3]
    padded = F.pad(
        images, (padding[1], beyond - padding[1], padding[0], below - padding[0])
    )  # what no patch reaches is cut off
    split = padded.view(count, groups, -1, rows, down, columns, right)
    cells = split.permute(0, 1, 2, 4, 6, 3, 5).reshape(count, groups, -1, rows * columns)
    products = (cells.transpose(2, 3) @ cells).view(count, groups, rows, columns, rows, columns)
    shifted = (
        products[:, :, i : i + high, j : j + wide, i : i + high, j : j + wide] for i, j in block
    )
    found: Tensor = sum(shifted, torch.zeros((), device=images.device, dtype=images.dtype))
    return found.reshape(count, groups, high * wide, high * wide)


def _grouped(columns: Tensor, groups: int) -> Tensor:
    """(n, channels, t) -> (n, groups, channels of a group, t)."""
    return columns.reshape(len(columns), groups, -1, columns.shape[2])


def _embedding(layer: nn.Embedding, given: Tensor, back: Tensor) -> dict[str, Plain]:
    index, rows = given.reshape(len(given), -1), back.reshape(len(back), -1, back.shape[-1])
    return {"weight": Table(index, rows, layer.weight.shape)}


def _group_norm(layer: nn.GroupNorm, given: Tensor, back: Tensor) -> dict[str, Plain]:
    normal = F.group_norm(given, layer.num_groups, eps=layer.eps)
    products, rows = (each.reshape(*each.shape[:2], -1).sum(2) for each in (normal * back, back))
    return {"weight": Small(products), "bias": Small(rows)}


def _layer_norm(layer: nn.LayerNorm, given: Tensor, back: Tensor) -> dict[str, Plain]:
    normal, shape = (
        F.layer_norm(given, layer.normalized_shape, eps=layer.eps),
        layer.normalized_shape,
    )
    products, rows = (each.reshape(len(each), -1, *shape).sum(1) for each in (normal * back, back))
    return {"weight": Small(products), "bias": Small(rows)}


USES: dict[type[nn.Module], Callable[..., dict[str, Plain]]] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.ConvTranspose2d: _transposed,
    nn.Embedding: _embedding,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
}


def layers_of(module: nn.Module) -> dict[nn.Module, dict[str, str]]:
    """Layers with weights of their own, and under which names the module has these."""
    names = {id(weight): name for name, weight in module.named_parameters()}
    found: dict[nn.Module, dict[str, str]] = {}
    for place, layer in module.named_modules():
        if isinstance(layer, _MIXING):
            raise FedgenError(
                place or "model", f"{type(layer).__name__} mixes examples", "take GroupNorm"
            )
        own = dict(layer.named_parameters(recurse=False))
        if not own:
            continue
        plain = getattr(layer, "padding_mode", "zeros") == "zeros" and not isinstance(
            getattr(layer, "padding", 0), str
        )
        plain &= all(getattr(layer, option, None) in (None, False) for option in _OF_EMBEDDINGS)
        if type(layer) not in USES or not plain:
            raise FedgenError(
                place or "model",
                f"there is no clipped sum for this {type(layer).__name__}",
                "take by_vmap",
            )
        found[layer] = {part: names[id(weight)] for part, weight in own.items()}
    return found
