"""Networks: shapes, ranges, spectral norms, and stacks without interaction between members."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedgen.config.registry import load, words
from fedgen.errors import FedgenError
from fedgen.models import dcgan, functional, resnet
from fedgen.models.functional import (
    SpectralConv2d,
    adam_start,
    adam_step,
    functional_apply,
    init_weights,
    meta_module,
    power_iterate_all,
    power_iteration,
    split,
    stack,
    trainable,
    weight_gradients,
)
from fedgen.randomness import RandomStreams

SHAPES = [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 64, 64), (1, 12, 12)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", [dcgan.Generator, resnet.Generator])
def test_generators(make: type, shape: tuple[int, int, int], streams: RandomStreams) -> None:
    net = meta_module(make(latent=5, classes=3, shape=shape, width=4))
    weights = init_weights(net, streams.public("weights"))
    images = functional_call(net, weights, (torch.randn(2, 5), torch.tensor([0, 2])))
    assert images.shape == (2, *shape)
    assert images.min() >= 0
    assert images.max() <= 1
    assert (images[0] != images[1]).any()


@pytest.mark.parametrize("word", sorted(words("method.generator").keys() - {"autoencoder"}))
def test_generators_work_in_a_stack(word: str, streams: RandomStreams) -> None:
    """By vmap over generators, as in warm starts."""
    make = load(word, "method.generator")
    net = meta_module(make(latent=5, classes=3, shape=(1, 8, 8), width=4))
    each = [init_weights(net, streams.public("weights", number)) for number in range(2)]
    latents, labels = torch.rand(2, 4, 5), torch.tensor([[0, 1, 2, 0], [1, 2, 0, 1]])
    images = functional_apply(net, stack(each), latents, labels)
    for alone, inputs, label, result in zip(each, latents, labels, images, strict=True):
        expected = functional_call(net, alone, (inputs, label))
        assert torch.allclose(result, expected, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_critic(shape: tuple[int, int, int], streams: RandomStreams) -> None:
    net = meta_module(dcgan.Critic(classes=3, shape=shape, width=4))
    weights = init_weights(net, streams.public("weights"))
    images = torch.rand(2, *shape).repeat(2, 1, 1, 1)
    scores = functional_call(net, weights, (images, torch.tensor([0, 0, 1, 1])))
    assert scores.shape == (4,)
    assert (scores[:2] != scores[2:]).all(), "the label counts"


def test_the_critic_has_the_size_of_the_paper() -> None:
    net = dcgan.Critic(classes=10, shape=(1, 28, 28), width=64)
    assert sum(p.numel() for p in net.parameters()) == 1_071_105


def test_sizes_unreachable_by_doubling_are_refused() -> None:
    for size in (7, 9, 30, 33):
        with pytest.raises(FedgenError, match="do not fit"):
            dcgan.upsamplings(size)


@pytest.mark.parametrize("make", [partial(dcgan.Critic, 10), partial(resnet.Generator, 4, 10)])
def test_precomputed_weights_equal_normalising_layers(
    make: Callable[..., nn.Module], streams: RandomStreams
) -> None:
    """With the same gradients, alone and in a stack."""
    module = meta_module(make((1, 8, 8), 3))
    sources = [streams.public("init", number) for number in range(2)]
    stacked = trainable(stack([init_weights(module, source) for source in sources]))
    labels = torch.tensor([[1, 2], [3, 4]])
    size = (2, 2, *((1, 8, 8) if isinstance(module, dcgan.Critic) else (4,)))
    inputs = torch.rand(size, generator=streams.public("inputs"))
    for take in (slice(0, 2), slice(1, 2)):
        some = trainable({name: value[take] for name, value in stacked.items()})
        plain = functional_apply(module, some, inputs[take], labels[take])
        once = functional_apply(module, power_iterate_all(some), inputs[take], labels[take])
        assert torch.allclose(plain, once, atol=1e-6)
        expected = weight_gradients(plain.square().sum(), some)
        for name, value in weight_gradients(once.square().sum(), some).items():
            assert torch.allclose(value, expected[name], atol=1e-5), name


def test_power_iteration_finds_the_spectral_norm(streams: RandomStreams) -> None:
    net = meta_module(dcgan.Critic(classes=3, shape=(1, 8, 8), width=4))
    weights = init_weights(net, streams.public("weights"))
    for _ in range(200):
        weights.update(power_iteration(weights, stacked=False))
    name = "convolutions.1.weight"
    matrix, u = weights[name].flatten(1), weights["convolutions.1.u"]
    v = torch.nn.functional.normalize(matrix.T @ u, dim=0)
    top = torch.linalg.matrix_norm(matrix, 2)
    assert float(u @ matrix @ v) == pytest.approx(float(top), rel=1e-3)


def test_a_stack_steps_like_its_members(streams: RandomStreams) -> None:
    """Power iteration and Adam on a stack equal those on each member, exactly."""
    net = meta_module(dcgan.Critic(classes=3, shape=(1, 8, 8), width=4))
    members = [init_weights(net, streams.public("weights", i)) for i in range(3)]
    gradients = [init_weights(net, streams.public("gradients", i)) for i in range(3)]
    stacked, state = stack(members), adam_start(stack(members))
    adam_step(stacked, split(stack(gradients))[0], state, 1e-2, (0.5, 0.9))
    stacked.update(power_iteration(stacked, stacked=True))
    for i, member in enumerate(members):
        adam_step(member, split(gradients[i])[0], adam_start(member), 1e-2, (0.5, 0.9))
        member.update(power_iteration(member, stacked=False))
        for name, value in member.items():
            assert torch.allclose(value, stacked[name][i], rtol=1e-6, atol=1e-7), name


def test_adam_equals_that_of_torch(streams: RandomStreams) -> None:
    ours = {"w": torch.ones(4)}
    state = adam_start(ours)
    theirs = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.Adam([theirs], 1e-2, betas=(0.5, 0.9))
    for step in range(5):
        gradient = torch.randn(4, generator=streams.public("gradient", step))
        adam_step(ours, {"w": gradient}, state, 1e-2, (0.5, 0.9))
        theirs.grad = gradient
        optimizer.step()
    assert torch.allclose(ours["w"], theirs.detach(), atol=1e-7)


def test_adam_accepts_gradients_in_any_memory_layout() -> None:
    """vmap returns gradients with permuted strides; each entry must be used with its own weight."""
    gradient = torch.arange(12.0).view(3, 4)
    steps = []
    for given in (gradient, gradient.T.contiguous().T):
        network = {"w": torch.zeros(3, 4)}
        adam_step(network, {"w": given}, adam_start(network), 1e-2, (0.5, 0.9))
        steps.append(network["w"])
    assert torch.equal(*steps)
    assert (steps[0] == 0).sum() == 1


@pytest.mark.parametrize("make", [dcgan.Generator, resnet.Generator])
def test_forward_passes_change_nothing_and_can_be_stacked(
    make: type, streams: RandomStreams
) -> None:
    net = meta_module(make(latent=5, classes=3, shape=(1, 8, 8), width=4))
    stacked = stack([init_weights(net, streams.public("weights", i)) for i in range(2)])
    before = {name: value.clone() for name, value in stacked.items()}
    inputs = torch.randn(2, 3, 5), torch.tensor([[0, 1, 2], [2, 1, 0]])
    images = vmap(partial(functional_call, net))(stacked, inputs)
    assert images.shape == (2, 3, 1, 8, 8)
    assert all(torch.equal(before[name], stacked[name]) for name in before)


def test_a_stack_convolves_equally_by_matrix_products() -> None:
    """As on a GPU, with first and second derivatives."""
    torch.manual_seed(0)
    layer = SpectralConv2d(3, 4, 5, 2, 2)
    stacked = stack([init_weights(layer, torch.Generator().manual_seed(seed)) for seed in range(3)])
    images = torch.rand(3, 6, 3, 9, 9)

    def slopes(device: str) -> list[Tensor]:
        token = functional._stack_device.set(device)
        at = images.clone().requires_grad_()
        weights = {name: value.clone().requires_grad_() for name, value in stacked.items()}
        result = vmap(lambda own, given: functional_call(layer, own, given))(weights, at)
        functional._stack_device.reset(token)
        (slope,) = torch.autograd.grad(result.square().sum(), at, create_graph=True)
        return [result, slope, *torch.autograd.grad(slope.square().sum(), [weights["weight"], at])]

    for ours, theirs in zip(slopes("cuda"), slopes("cpu"), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4)
