"""Networks as functions of explicit parameters: initialization, spectral norm, Adam, stacking.

A module is a template: its parameters and buffers are passed as mappings, whose tensors may have a
leading dimension, one entry per network of a stack.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.optim.adam import adam

Tensors = dict[str, Tensor]

Adam = tuple[float, tuple[float, float]]
"""Learning rate and betas."""


def meta_module(module: nn.Module) -> nn.Module:
    """Return the module without its values, to be called with ``torch.func.functional_call``."""
    return module.to("meta").requires_grad_(False)


def init_weights(module: nn.Module, generator: torch.Generator) -> Tensors:
    """Return initial parameters and buffers of a template: Kaiming uniform weights as in torch's
    layers, zero biases, ones for scales of normalization, standard normal embeddings and spectral
    vectors."""
    tensors: Tensors = {}
    embeddings = {
        f"{name}.weight" for name, part in module.named_modules() if isinstance(part, nn.Embedding)
    }
    scales = {
        f"{name}.weight" for name, part in module.named_modules() if isinstance(part, nn.GroupNorm)
    }
    for name, shape in [(n, p.shape) for n, p in module.named_parameters()]:
        value = torch.zeros(shape)
        if name in embeddings:
            value.normal_(generator=generator)
        elif name in scales:
            value.fill_(1.0)
        elif len(shape) > 1:
            nn.init.kaiming_uniform_(value, a=5**0.5, generator=generator)
        tensors[name] = value
    for name, buffer in module.named_buffers():
        tensors[name] = torch.empty(buffer.shape).normal_(generator=generator)
    return tensors


def stack(networks: list[Tensors]) -> Tensors:
    """Return several networks of one architecture as one mapping with a leading dimension."""
    return {name: torch.stack([net[name] for net in networks]) for name in networks[0]}


def functional_apply(module: nn.Module, networks: Mapping[str, Tensor], *inputs: Tensor) -> Tensor:
    """Apply each network of a stack to its inputs: all tensors and the result have the same leading
    dimension. A stack of one avoids the cost of stacking."""
    size = len(inputs[0])
    if size == 1:
        one = {name: value[0] for name, value in networks.items()}
        alone: Tensor = functional_call(module, one, tuple(tensor[0] for tensor in inputs))
        return alone[None]
    token = _stack_device.set(inputs[0].device.type)
    try:
        called: Tensor = vmap(
            lambda network, *arguments: functional_call(module, network, arguments)
        )(dict(networks), *inputs)
    finally:
        _stack_device.reset(token)
    return called


_stack_device: ContextVar[str | None] = ContextVar("_stack_device", default=None)
"""Device type of the stacked networks in ``functional_apply``; None otherwise."""


def channels_last(features: Tensor) -> Tensor:
    """Return features in the layout that makes transposed convolutions faster on CPUs; unchanged in
    a stack, because vmap does not support memory formats."""
    if _stack_device.get() is not None:
        return features
    return features.contiguous(memory_format=torch.channels_last)


def _conv_by_matmul(images: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """Return a convolution with square kernel, stride and padding as one product of patches and
    weights."""
    padded = F.pad(images, (padding,) * 4)
    side = weight.shape[-1]
    patches = padded.unfold(2, side, stride).unfold(3, side, stride)  # (n, c, h, w, side, side)
    count, _, high, wide = patches.shape[:4]
    rows = patches.permute(0, 2, 3, 1, 4, 5).reshape(count * high * wide, -1)
    outputs = (rows @ weight.flatten(1).T).view(count, high, wide, -1)
    return outputs.permute(0, 3, 1, 2)


def weight_gradients(losses: Tensor, network: Mapping[str, Tensor]) -> Tensors:
    """Return gradients of the sum of all losses with respect to the parameters of the network. In a
    stack, the loss of a network does not depend on the parameters of others, so each receives its
    own gradients."""
    names = parameter_names(network)
    gradients = torch.autograd.grad(losses.sum(), [network[name] for name in names])
    return dict(zip(names, gradients, strict=True))


def trainable(network: Mapping[str, Tensor]) -> Tensors:
    """Return the same values as leaves that require gradients."""
    names = parameter_names(network)
    return {n: v.detach().requires_grad_(n in names) for n, v in network.items()}


class Spectral:
    """Mixin: the weight of the layer is divided by its largest singular value, estimated by power
    iteration from the buffer ``u``. The forward pass does not change ``u``; only training code
    calls ``power_iteration``, so that responding to a query changes nothing. A weight that
    ``power_iterate_all`` has divided has an empty ``u`` and is used unchanged."""

    weight: Tensor
    u: Tensor

    def normalized(self) -> Tensor:
        """Return the weight divided by its spectral norm."""
        if not self.u.numel():
            return self.weight
        matrix = self.weight.flatten(1)
        u = F.normalize(self.u, dim=0)
        v = F.normalize(matrix.detach().T @ u, dim=0)
        return self.weight / (u @ (matrix @ v))


class SpectralConv2d(nn.Conv2d, Spectral):
    """Convolution with spectral normalization (Miyato et al. 2018)."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, padding: int) -> None:
        super().__init__(inputs, outputs, kernel, stride, padding)
        self.register_buffer("u", torch.zeros(outputs))

    def forward(self, images: Tensor) -> Tensor:
        if _stack_device.get() == "cuda":  # grouped convolutions are slow in cuDNN
            outputs = _conv_by_matmul(
                images, self.normalized(), self.stride[0], int(self.padding[0])
            )
            return outputs if self.bias is None else outputs + self.bias[:, None, None]
        return F.conv2d(images, self.normalized(), self.bias, self.stride, self.padding)


class SpectralLinear(nn.Linear, Spectral):
    """Linear layer with spectral normalization."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("u", torch.zeros(outputs))

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(features, self.normalized(), self.bias)


class SpectralEmbedding(nn.Embedding, Spectral):
    """Embedding with spectral normalization of its table."""

    def __init__(self, entries: int, size: int) -> None:
        super().__init__(entries, size)
        self.register_buffer("u", torch.zeros(entries))

    def forward(self, index: Tensor) -> Tensor:
        return F.embedding(index, self.normalized())


def power_iterate_all(networks: Mapping[str, Tensor]) -> Tensors:
    """Return a stack whose weights are divided by their spectral norms once, for several passes."""
    normalized = dict(networks)
    for name, buffer in networks.items():
        if name.endswith(".u"):
            weight = networks[name[:-1] + "weight"]
            matrix, u = weight.flatten(2), F.normalize(buffer, dim=-1).unsqueeze(-2)
            v = F.normalize(u @ matrix.detach(), dim=-1).transpose(-2, -1)
            norms = (u @ (matrix @ v)).view(-1, *[1] * (weight.dim() - 1))
            normalized[name[:-1] + "weight"], normalized[name] = weight / norms, buffer[:, :0]
    return normalized


def power_iteration(network: Mapping[str, Tensor], stacked: bool) -> Tensors:
    """Return the buffers after one step of power iteration of every spectral vector."""
    moved = {}
    for name, u in network.items():
        if name.endswith(".u"):
            matrix = network[name[:-1] + "weight"].flatten(2 if stacked else 1)
            v = F.normalize((u.unsqueeze(-2) @ matrix).squeeze(-2), dim=-1)
            moved[name] = F.normalize((matrix @ v.unsqueeze(-1)).squeeze(-1), dim=-1)
    return moved


def adam_start(network: Mapping[str, Tensor]) -> Tensors:
    """Return the state of Adam for all parameters (without spectral vectors) of a network or
    stack."""
    state = {"step": torch.zeros(())}
    for name in parameter_names(network):
        state[f"m.{name}"] = torch.zeros_like(network[name])
        state[f"v.{name}"] = torch.zeros_like(network[name])
    return state


def adam_step(
    network: Tensors,
    gradients: Mapping[str, Tensor],
    state: Tensors,
    learning_rate: float,
    betas: tuple[float, float],
) -> None:
    """Apply one step of Adam (Kingma and Ba 2015) in place; it is elementwise, so a stack steps at
    once."""
    names = parameter_names(network)
    adam(
        [network[name] for name in names],
        # contiguous: the fused step walks through memory, and would pair weights of one network
        # with gradients of another if vmap left them in another order
        [gradients[name].contiguous() for name in names],
        [state[f"m.{name}"] for name in names],
        [state[f"v.{name}"] for name in names],
        [],
        [state["step"].to(network[names[0]].device, copy=True) for _ in names],
        fused=True,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=learning_rate,
        weight_decay=0.0,
        eps=1e-8,
        maximize=False,
    )
    state["step"] = state["step"] + 1


def generator_start(weights: Tensors) -> Tensors:
    """Return the server state of a generator, under ``generator``, ``average`` and ``adam``: its
    weights, their moving average, and the state of Adam."""
    average = {name: value.clone() for name, value in weights.items()}
    return concat_parts(generator=weights, average=average, adam=adam_start(weights))


def descend_generator(
    state: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    adam: tuple[float, tuple[float, float]],
    decay: float,
) -> Tensors:
    """Return the state after a step of Adam (learning rate, betas).

    Args:
        decay: decay of the moving average.
    """
    weights, moments = (
        {name: value.clone() for name, value in part(state, of).items()}
        for of in ("generator", "adam")
    )
    adam_step(weights, gradients, moments, *adam)
    weights.update(power_iteration(weights, stacked=False))
    steps = float(moments["step"])
    keep = min(decay, (1 + steps) / (10 + steps))  # forgets the initial weights earlier
    old = part(state, "average")
    average = {name: torch.lerp(value, old[name], keep) for name, value in weights.items()}
    return concat_parts(generator=weights, average=average, adam=moments)


def parameter_names(network: Mapping[str, Tensor]) -> list[str]:
    """Return the names of trained tensors: all but the spectral vectors."""
    return [name for name in network if not name.endswith(".u")]


def split(network: Mapping[str, Tensor]) -> tuple[Tensors, Tensors]:
    """Return the trained tensors, and the spectral vectors."""
    names = parameter_names(network)
    return (
        {name: network[name] for name in names},
        {name: value for name, value in network.items() if name not in names},
    )


def nearest_similarity(
    images: Tensor, labels: Tensor, generated: Tensor, generated_labels: Tensor
) -> Tensor:
    """Return minus the distance of each image (n, ...) to the nearest generated one with its
    label."""
    distances = torch.cdist(images.flatten(1), generated.flatten(1))
    distances = distances.masked_fill(labels[:, None] != generated_labels[None, :], torch.inf)
    return -distances.min(1).values


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return all entries in one vector, in the order of names."""
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def unflat(vector: Tensor, like: Mapping[str, Tensor]) -> Tensors:
    """Invert ``flat`` with the shapes of ``like``; each tensor has its own memory, because sums
    over memory with another alignment may be rounded differently."""
    names = sorted(like)
    pieces = torch.split(vector, [like[name].numel() for name in names])
    return {n: p.clone().view_as(like[n]) for n, p in zip(names, pieces, strict=True)}


def concat_parts(**parts: Mapping[str, Tensor]) -> Tensors:
    """Return several mappings as one, with names prefixed by their part."""
    return {f"{part}/{name}": value for part, ts in parts.items() for name, value in ts.items()}


def part(joined: Mapping[str, Tensor], name: str) -> Tensors:
    """Return one of the mappings joined by ``concat_parts``."""
    prefix = f"{name}/"
    return {n.removeprefix(prefix): v for n, v in joined.items() if n.startswith(prefix)}
