"""Networks as functions of explicit parameters: initialization, spectral norm, Adam, stacking.

A module serves as a template: its parameters and buffers live outside of it, in mappings that may
carry a leading dimension, one entry per network of a stack.
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


def template(module: nn.Module) -> nn.Module:
    """The module without its numbers, to be called with ``torch.func.functional_call``."""
    return module.to("meta").requires_grad_(False)


def initial(module: nn.Module, generator: torch.Generator) -> Tensors:
    """Fresh parameters and buffers for a template: Kaiming uniform weights as torch's layers have
    them, zero biases, ones for the scales of normalization, standard normal embeddings and spectral
    vectors."""
    found: Tensors = {}
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
        found[name] = value
    for name, buffer in module.named_buffers():
        found[name] = torch.empty(buffer.shape).normal_(generator=generator)
    return found


def stack(networks: list[Tensors]) -> Tensors:
    """Several networks of one architecture as one mapping with a leading dimension."""
    return {name: torch.stack([net[name] for net in networks]) for name in networks[0]}


def applied(module: nn.Module, networks: Mapping[str, Tensor], *inputs: Tensor) -> Tensor:
    """What each network of a stack makes of its inputs: all tensors have the same leading
    dimension, and so has the result. A stack of one is spared the cost of stacking."""
    size = len(inputs[0])
    if size == 1:
        one = {name: value[0] for name, value in networks.items()}
        alone: Tensor = functional_call(module, one, tuple(each[0] for each in inputs))
        return alone[None]
    token = _stacked_on_gpu.set(inputs[0].is_cuda)
    try:
        called: Tensor = vmap(lambda network, *given: functional_call(module, network, given))(
            dict(networks), *inputs
        )
    finally:
        _stacked_on_gpu.reset(token)
    return called


# a stack's convolutions are one in groups, which cuDNN is slow at
_stacked_on_gpu = ContextVar("_stacked_on_gpu", default=False)


def _by_product(images: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """A convolution, square in all, as one product of its patches and its weights."""
    padded = F.pad(images, (padding,) * 4)
    side = weight.shape[-1]
    patches = padded.unfold(2, side, stride).unfold(3, side, stride)  # (n, c, h, w, side, side)
    count, _, high, wide = patches.shape[:4]
    rows = patches.permute(0, 2, 3, 1, 4, 5).reshape(count * high * wide, -1)
    found = (rows @ weight.flatten(1).T).view(count, high, wide, -1)
    return found.permute(0, 3, 1, 2)


def gradients_of(losses: Tensor, network: Mapping[str, Tensor]) -> Tensors:
    """Gradients of the sum of all losses by the network's parameters, which require them. Of a
    stack: no network's loss depends on another's parameters, so each finds its own."""
    names = parameter_names(network)
    found = torch.autograd.grad(losses.sum(), [network[name] for name in names])
    return dict(zip(names, found, strict=True))


def trainable(network: Mapping[str, Tensor]) -> Tensors:
    """The same numbers, as leaves whose parameters require gradients."""
    names = parameter_names(network)
    return {n: v.detach().requires_grad_(n in names) for n, v in network.items()}


class Spectral:
    """Mixin: the layer's weight is divided by its largest singular value, as estimated by power
    iteration from the buffer ``u``. The forward pass leaves ``u`` alone; ``power_iteration``,
    called by training code only, moves it. So answering a query changes nothing. A weight that is
    ``settled`` has an empty ``u`` and is taken as it is."""

    weight: Tensor
    u: Tensor

    def normalized(self) -> Tensor:
        """The weight over its spectral norm."""
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
        if _stacked_on_gpu.get():
            made = _by_product(images, self.normalized(), self.stride[0], int(self.padding[0]))
            return made if self.bias is None else made + self.bias[:, None, None]
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


def settled(networks: Mapping[str, Tensor]) -> Tensors:
    """A stack whose weights are divided by their spectral norms once, for several passes."""
    found = dict(networks)
    for name, buffer in networks.items():
        if name.endswith(".u"):
            weight = networks[name[:-1] + "weight"]
            matrix, u = weight.flatten(2), F.normalize(buffer, dim=-1).unsqueeze(-2)
            v = F.normalize(u @ matrix.detach(), dim=-1).transpose(-2, -1)
            norms = (u @ (matrix @ v)).view(-1, *[1] * (weight.dim() - 1))
            found[name[:-1] + "weight"], found[name] = weight / norms, buffer[:, :0]
    return found


def power_iteration(network: Mapping[str, Tensor], stacked: bool) -> Tensors:
    """One step of power iteration for every spectral vector: the new buffers."""
    moved = {}
    for name, u in network.items():
        if name.endswith(".u"):
            matrix = network[name[:-1] + "weight"].flatten(2 if stacked else 1)
            v = F.normalize((u.unsqueeze(-2) @ matrix).squeeze(-2), dim=-1)
            moved[name] = F.normalize((matrix @ v.unsqueeze(-1)).squeeze(-1), dim=-1)
    return moved


def adam_start(network: Mapping[str, Tensor]) -> Tensors:
    """Adam's state for all parameters (what is not a spectral vector) of a network or stack."""
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
    """One step of Adam (Kingma and Ba 2015), in place; elementwise, so a stack steps as one."""
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
    """What a server keeps of a generator, under ``generator``, ``average`` and ``adam``: its
    weights, an average of them over its steps, and Adam's state."""
    average = {name: value.clone() for name, value in weights.items()}
    return join(generator=weights, average=average, adam=adam_start(weights))


def generator_step(
    state: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    adam: tuple[float, tuple[float, float]],
    decay: float,
) -> Tensors:
    """The same after a step of Adam (learning rate, betas). ``decay``: of the average."""
    weights, moments = (
        {name: value.clone() for name, value in part(state, of).items()}
        for of in ("generator", "adam")
    )
    adam_step(weights, gradients, moments, *adam)
    weights.update(power_iteration(weights, stacked=False))
    steps = float(moments["step"])
    keep = min(decay, (1 + steps) / (10 + steps))  # forgets the initial weights sooner
    old = part(state, "average")
    average = {name: torch.lerp(value, old[name], keep) for name, value in weights.items()}
    return join(generator=weights, average=average, adam=moments)


def parameter_names(network: Mapping[str, Tensor]) -> list[str]:
    """The names of what is trained: everything but the spectral vectors."""
    return [name for name in network if not name.endswith(".u")]


def split(network: Mapping[str, Tensor]) -> tuple[Tensors, Tensors]:
    """What is trained, and the spectral vectors."""
    names = parameter_names(network)
    return (
        {name: network[name] for name in names},
        {name: value for name, value in network.items() if name not in names},
    )


def likeness(images: Tensor, labels: Tensor, made: Tensor, made_labels: Tensor) -> Tensor:
    """Minus the distance of each image (n, ...) to the nearest that was made with its label."""
    apart = torch.cdist(images.flatten(1), made.flatten(1))
    apart = apart.masked_fill(labels[:, None] != made_labels[None, :], torch.inf)
    return -apart.min(1).values


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    """All entries in one vector, in the order of names."""
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def unflat(vector: Tensor, like: Mapping[str, Tensor]) -> Tensors:
    """The inverse of ``flat``, in the shapes of ``like``; each in memory of its own, since sums
    over memory that begins elsewhere may round otherwise."""
    names = sorted(like)
    pieces = torch.split(vector, [like[name].numel() for name in names])
    return {n: p.clone().view_as(like[n]) for n, p in zip(names, pieces, strict=True)}


def join(**parts: Mapping[str, Tensor]) -> Tensors:
    """Several mappings in one, each name below its part's."""
    return {f"{part}/{name}": value for part, ts in parts.items() for name, value in ts.items()}


def part(joined: Mapping[str, Tensor], name: str) -> Tensors:
    """One of the mappings that ``join`` joined."""
    prefix = f"{name}/"
    return {n.removeprefix(prefix): v for n, v in joined.items() if n.startswith(prefix)}
