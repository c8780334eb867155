"""Clipped sums against per-example gradients by torch.func and by Opacus."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mutation import kills
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedgen.errors import FedgenError
from fedgen.models.cdcgan import Discriminator
from fedgen.privacy.clipping import (
    ClippedSum,
    Precision,
    by_opacus,
    by_vmap,
    clip_rows,
    clipped_sum,
    joint_sum,
    sum_of_outer_products,
    sum_of_rows,
)
from fedgen.privacy.ghost_norms import Pair, extract_patches


class Reshape(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), *self.shape)


class Twice(nn.Module):
    """One layer called twice, the second time on its own output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)),
        lambda n: torch.randn(n, 5),
    ),
    "linear over positions": (
        lambda: nn.Sequential(nn.Linear(5, 7, bias=False), nn.Tanh(), nn.Linear(7, 3)),
        lambda n: torch.randn(n, 4, 5),
    ),
    "conv2d": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 6, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(6, 8, 3, 2, 1), nn.Flatten()
        ),
        lambda n: torch.randn(n, 2, 12, 10),
    ),
    "conv2d dilated, in groups": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 6, 3, (2, 1), (1, 2), (1, 2), groups=2), nn.Tanh(), nn.Flatten()
        ),
        lambda n: torch.randn(n, 4, 9, 8),
    ),
    "conv1d": (
        lambda: nn.Sequential(
            nn.Conv1d(3, 4, 5, 2, 2), nn.Tanh(), nn.Conv1d(4, 4, 3), nn.Flatten()
        ),
        lambda n: torch.randn(n, 3, 21),
    ),
    "conv transposed": (
        lambda: nn.Sequential(
            nn.ConvTranspose2d(3, 4, 4, 2, 1),
            nn.Tanh(),
            nn.ConvTranspose2d(4, 6, 3, 2, 1, output_padding=1, groups=2),
            nn.Flatten(),
        ),
        lambda n: torch.randn(n, 3, 4, 5),
    ),
    "norms": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 8, 3), nn.GroupNorm(2, 8), nn.Tanh(), nn.LayerNorm([8, 4, 4]), nn.Flatten()
        ),
        lambda n: torch.randn(n, 2, 6, 6),
    ),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(6, 5), nn.Linear(5, 4), nn.Tanh(), nn.Flatten()),
        lambda n: torch.randint(0, 6, (n, 3)),
    ),
    "linear twice": (
        lambda: nn.Sequential(Twice(nn.Linear(5, 5)), nn.Linear(5, 2)),
        lambda n: torch.randn(n, 5),
    ),
    "conv twice": (
        lambda: nn.Sequential(Twice(nn.Conv2d(3, 3, 3, 1, 1)), nn.Flatten()),
        lambda n: torch.randn(n, 3, 6, 6),
    ),
    "embedding twice": (
        lambda: nn.Sequential(nn.Embedding(4, 3), Reshape(6), nn.Linear(6, 2)),
        lambda n: torch.randint(0, 4, (n, 2)),
    ),
}


def losses(output: Tensor) -> Tensor:
    """Return the loss of each example, for any output."""
    return F.softplus(output.flatten(1)).square().sum(1)


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in module.named_parameters()}


def reference(module: nn.Module, inputs: tuple[Tensor, ...], clip: float) -> ClippedSum:
    def loss(weights: dict[str, Tensor], *example: Tensor) -> Tensor:
        return losses(functional_call(module, weights, tuple(e[None] for e in example)))[0]

    return by_vmap(loss, weights_of(module), inputs, clip)


def same(first: ClippedSum, second: ClippedSum, tolerance: float = 5e-4) -> None:
    scale = max(float(value.abs().max()) for value in second.gradients.values())
    assert torch.allclose(first.norms, second.norms, rtol=tolerance)
    assert first.gradients.keys() == second.gradients.keys()
    for name, value in second.gradients.items():
        assert torch.allclose(first.gradients[name], value, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("name", NETWORKS)
@given(st.integers(0, 10**6), st.integers(1, 9), st.sampled_from([0.1, 1.0, 30.0, math.inf]))
@settings(max_examples=6)
def test_equal_to_torch_func(name: str, seed: int, count: int, clip: float) -> None:
    torch.manual_seed(seed)
    make, data = NETWORKS[name]
    module, inputs = make(), (data(count),)
    ours = clipped_sum(module, weights_of(module), inputs, losses, clip)
    same(ours, reference(module, inputs, clip))


@kills(
    "fedgen/privacy/clipping.py",
    "Materialized.from_copies(use, copies) if materialize else use",
    "use",
)
@kills(
    "fedgen/privacy/clipping.py",
    "losses(_to_single(outputs)).sum() / copies",
    "losses(_to_single(outputs)).sum()",
)
@pytest.mark.parametrize("name", NETWORKS)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 4), st.sampled_from([0.1, 1.0]))
@settings(max_examples=6)
def test_copies_are_averaged_before_clipping(
    name: str, seed: int, count: int, k: int, clip: float
) -> None:
    """Against the mean of each example's gradients; k equal copies count as one."""
    torch.manual_seed(seed)
    make, data = NETWORKS[name]
    module = make()
    inputs = data(count * k)
    ours = clipped_sum(module, weights_of(module), (inputs,), losses, clip, copies=k)

    def loss(weights: dict[str, Tensor], example: Tensor) -> Tensor:
        return losses(functional_call(module, weights, (example,))).mean()

    apart = inputs.view(count, k, *inputs.shape[1:])
    same(ours, by_vmap(loss, weights_of(module), (apart,), clip))
    assert len(ours.norms) == count
    once = inputs[::k]
    equal = clipped_sum(
        module, weights_of(module), (once.repeat_interleave(k, 0),), losses, clip, copies=k
    )
    same(equal, clipped_sum(module, weights_of(module), (once,), losses, clip))


@given(st.data())
@settings(max_examples=40)
def test_convolutions_of_any_geometry(data: st.DataObject) -> None:
    """Norms by products of patches and by gradients, whichever needs less work."""
    draw = lambda *choices: data.draw(st.sampled_from(choices))  # noqa: E731
    groups, kernel = draw(1, 1, 2), (draw(1, 2, 3, 4), draw(2, 4))
    stride, dilation, padding = (
        (draw(2, 2, 1), draw(2, 2, 1)),
        draw(1, 1, 2),
        (draw(0, 1), draw(0, 2)),
    )
    inputs, outputs = draw(2, 16, 32), draw(2, 16, 32)
    torch.manual_seed(0)
    transposed = draw(False, True)
    layer: nn.Module = nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, groups)
    if transposed:
        extra = tuple(draw(0, s - 1) for s in stride)
        layer = nn.ConvTranspose2d(
            inputs, outputs, kernel, stride, padding, extra, groups, dilation=dilation
        )
    module = nn.Sequential(layer, nn.Tanh(), nn.Flatten())
    images = (torch.randn(3, inputs, draw(7, 8), draw(7, 8)),)
    same(
        clipped_sum(module, weights_of(module), images, losses, 1.0),
        reference(module, images, 1.0),
    )


@kills(
    "fedgen/privacy/ghost_norms.py",
    ("block = [(i, j) for i in range(kernel[0] // down) for j in range(kernel[1] // right)]"),
    "block = [(kernel[0] // down - 1, kernel[1] // right - 1)]",
)
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(16, 32, 4, 2, 1),
        nn.Conv2d(32, 48, (4, 3), (2, 3), (0, 2), groups=2),
        nn.Conv2d(48, 64, 3, 1, 0),
        nn.ConvTranspose2d(32, 24, 4, 2, 1),
    ],
    ids=str,
)
def test_patches_are_not_materialised(layer: nn.Module) -> None:
    """Few positions and many channels: norms by products of positions."""
    torch.manual_seed(0)
    channels = int(getattr(layer, "in_channels"))  # noqa: B009
    side = 4 if isinstance(layer, nn.ConvTranspose2d) else 7
    module, images = nn.Sequential(layer, nn.Flatten()), (torch.randn(5, channels, side, side),)
    ours = clipped_sum(module, weights_of(module), images, losses, 1.0)
    same(ours, reference(module, images, 1.0))


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_equal_to_opacus(name: str) -> None:
    torch.manual_seed(1)
    make, data = NETWORKS[name]
    module, inputs = make(), (data(7),)
    ours = clipped_sum(module, weights_of(module), inputs, losses, 0.7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = by_opacus(module, inputs, losses, 0.7)
    same(ours, theirs)


@pytest.mark.parametrize("at_once", [1, 5, 64])
def test_the_discriminator_in_small_batches(at_once: int) -> None:
    torch.manual_seed(0)
    module = Discriminator(10, (1, 28, 28), 8)
    inputs = torch.rand(17, 1, 28, 28), torch.randint(0, 10, (17,))

    def logistic(logits: Tensor) -> Tensor:
        return F.softplus(-logits)

    def loss(weights: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return logistic(functional_call(module, weights, (image[None], label[None])))[0]

    ours = clipped_sum(module, weights_of(module), inputs, logistic, 0.5, at_once)
    same(ours, by_vmap(loss, weights_of(module), inputs, 0.5))
    assert ours.flat().shape == (sum(p.numel() for p in module.parameters()),)


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
    st.tuples(st.integers(1, 2), st.integers(1, 2)),
    st.sampled_from([torch.contiguous_format, torch.channels_last]),
)
def test_patches_equal_those_of_torch_unfold(
    kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, order: torch.memory_format
) -> None:
    torch.manual_seed(0)
    images = torch.randn(2, 3, 7, 6).contiguous(memory_format=order)
    theirs = F.unfold(images, kernel, dilation, padding, stride)
    assert torch.equal(extract_patches(images, kernel, stride, padding, dilation), theirs)


def test_an_empty_batch_gives_a_zero_sum() -> None:
    module = nn.Linear(3, 2)
    result = clipped_sum(module, weights_of(module), (torch.zeros(0, 3),), losses, 1.0)
    assert all(not value.any() for value in result.gradients.values())
    assert result.norms.shape == (0,)


@kills(
    "fedgen/privacy/clipping.py",
    "total | _zeros_like(uncalled)",
    "total or _zeros_like(uncalled)",
)
def test_a_layer_that_is_not_called_has_a_zero_gradient() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.called, self.other = nn.Linear(3, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.called(x)

    module = Partly()
    result = clipped_sum(module, weights_of(module), (torch.randn(4, 3),), losses, 1.0)
    assert result.gradients.keys() == weights_of(module).keys()
    assert result.gradients["called.weight"].any() and not result.gradients["other.weight"].any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
@pytest.mark.parametrize("name", ["linear", "conv2d", "conv transposed", "norms", "conv twice"])
def test_a_non_finite_example_contributes_zero_and_others_are_unchanged(
    name: str, bad: float
) -> None:
    torch.manual_seed(2)
    make, data = NETWORKS[name]
    module, rows = make(), data(6)
    spoiled = rows.clone()
    spoiled[3] = bad
    good = torch.arange(6) != 3
    ours = clipped_sum(module, weights_of(module), (spoiled,), losses, 1.0)
    alone = clipped_sum(module, weights_of(module), (rows[good],), losses, 1.0)
    if math.isfinite(bad):  # its gradient may be finite: then it is clipped like any other
        assert float((ours.flat() - alone.flat()).norm()) <= 1 + 1e-4
        return
    for key, value in alone.gradients.items():
        assert torch.allclose(ours.gradients[key], value, atol=1e-5)


@kills(
    "fedgen/privacy/clipping.py",
    "return torch.where(norms.isfinite(), 1.0, math.nan)",
    "return torch.ones_like(norms)",
)
@pytest.mark.parametrize("name", ["linear", "conv2d", "conv transposed", "norms", "conv twice"])
def test_without_clipping_a_non_finite_example_is_not_hidden(name: str) -> None:
    torch.manual_seed(2)
    make, data = NETWORKS[name]
    module, rows = make(), data(6)
    rows[3, 0] = math.nan
    summed = clipped_sum(module, weights_of(module), (rows,), losses, math.inf)
    assert all(value.isnan().all() for value in summed.gradients.values())
    assert clip_rows(rows.flatten(1), math.inf).isnan().all(1).tolist() == [
        row == 3 for row in range(6)
    ]


@kills(
    "fedgen/privacy/clipping.py",
    "norms.append(squares.sum(0).sqrt())",
    "norms.append(squares.amax(0).sqrt())",
)
@given(st.integers(0, 10**6), st.floats(0.05, 5))
@settings(max_examples=20)
def test_one_example_moves_the_sum_by_at_most_the_clip_norm(seed: int, clip: float) -> None:
    torch.manual_seed(seed)
    make, data = NETWORKS["conv2d"]
    module, rows = make(), data(5) * 10
    more, less = (
        clipped_sum(module, weights_of(module), (some,), losses, clip).flat()
        for some in (rows, rows[:-1])
    )
    assert float((more - less).norm()) <= clip * (1 + 1e-4)


@settings(max_examples=20)
@given(
    st.integers(0, 10**6), st.sampled_from(["tf32", "bfloat16"]), st.sampled_from(list(NETWORKS))
)
def test_the_bound_holds_at_lower_precision(seed: int, precision: Precision, name: str) -> None:
    """And the sum is close to that in single precision."""
    torch.manual_seed(seed)
    make, inputs = NETWORKS[name]
    module, rows = make(), inputs(3)

    def clipped_sum_of(some: Tensor, clip: float, precision: Precision) -> Tensor:
        outcome = clipped_sum(
            module, weights_of(module), (some,), losses, clip, precision=precision
        )
        assert all(each.dtype == torch.float64 for each in outcome.gradients.values())
        return outcome.flat().double()

    for row in rows.split(1):
        assert float(clipped_sum_of(row, 1e-3, precision).norm()) <= 1e-3
    exact = clipped_sum_of(rows, math.inf, "float32")
    assert float((clipped_sum_of(rows, math.inf, precision) - exact).norm() / exact.norm()) < 0.05
    assert not torch.backends.cudnn.allow_tf32


def test_cancellation_does_not_shrink_norms() -> None:
    """Positions that nearly cancel: the norm from products of positions includes their rounding."""
    torch.manual_seed(0)
    module = nn.Linear(400, 400, bias=False)
    row = torch.randn(1, 1, 400) * 1e4
    rows = torch.cat([row, -row * (1 + 1e-4)], 1).expand(1, 2, 400)
    back = torch.ones(400)
    result = clipped_sum(
        module, weights_of(module), (rows,), lambda out: (out * back).sum((1, 2)), math.inf
    )
    exact = float(result.flat().double().norm())
    assert float(result.norms[0]) >= exact * (1 - 1e-3)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), "mixes examples"),
        (nn.Sequential(nn.InstanceNorm1d(2)), "mixes examples"),
        (nn.LSTM(3, 4), "does not support this LSTM"),
        (nn.Conv2d(1, 1, 3, padding_mode="circular"), "clipped_sum does not support"),
        (nn.Embedding(3, 2, max_norm=1.0), "clipped_sum does not support"),
        (nn.Embedding(3, 2, padding_idx=2), "clipped_sum does not support"),
        (nn.Embedding(3, 2, scale_grad_by_freq=True), "clipped_sum does not support"),
    ],
)
def test_unknown_layers_are_refused_by_name(module: nn.Module, words: str) -> None:
    with pytest.raises(FedgenError, match=words):
        clipped_sum(module, weights_of(module), (torch.zeros(1, 1, 4, 4),), losses, 1.0)


class Function(nn.Module):
    """Any function of a layer and of examples (n, 4, 5)."""

    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor], layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.function = layer, forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer, x)


@kills("fedgen/privacy/clipping.py", "if not len(inputs[0]) == len(output) == count:", "if False:")
@kills(
    "fedgen/privacy/clipping.py",
    ("if not torch.allclose(together, separate[:count], rtol=1e-2, atol=1e-4, equal_nan=True):"),
    "if False:",
)
@pytest.mark.parametrize("rows", [3, 4])
@pytest.mark.parametrize(
    ("forward", "layer", "words"),
    [
        (lambda f, x: f(x.flatten(0, 1)).view(len(x), -1), nn.Linear(5, 2), "rows for"),
        (lambda f, x: x[..., :2] * f(torch.arange(4)), nn.Embedding(4, 2), "rows for"),
        (lambda f, x: f(x) * (1 + f(x).std(0).mean()), nn.Linear(5, 2), "mixes examples"),
        (lambda f, x: f(x - x.mean(0)), nn.Linear(5, 2), "mixes examples"),
        (lambda f, x: f(x.flip(0)), nn.Linear(5, 2), "mixes examples"),
        (lambda f, x: f(input=x), nn.Linear(5, 2), "by keyword"),
        (lambda f, x: torch.relu(h := f(x)).add_(h), nn.Linear(5, 2), "in place"),
    ],
)
def test_functions_that_mix_examples_are_refused(
    forward: Callable[[nn.Module, Tensor], Tensor], layer: nn.Module, words: str, rows: int
) -> None:
    """For any number of examples, also that of positions. One more record would move a sum of such
    parts by several clip norms."""
    module = Function(forward, layer)
    with pytest.raises(FedgenError, match=words):
        clipped_sum(module, weights_of(module), (torch.randn(rows, 4, 5),), losses, 1.0)


@pytest.mark.parametrize("before", [0, 1])
def test_changes_in_place_are_refused(before: int) -> None:
    first = [nn.Linear(3, 3)] * before
    module = nn.Sequential(*first, nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    with pytest.raises(FedgenError, match="in place"):
        clipped_sum(module, weights_of(module), (torch.randn(2, 3),), losses, 1.0)


@kills(
    "fedgen/privacy/clipping.py",
    "scaled = scale_rows(rows, clipping_factors(norms, clip)).double()",
    "scaled = rows.double()",
)
@kills(
    "fedgen/privacy/clipping.py",
    "math.hypot(*(part.clip for part in parts))",
    "max(part.clip for part in parts)",
)
def test_a_joint_sum_is_bounded_by_the_root_of_squared_clip_norms() -> None:
    rows = torch.tensor([[30.0, 40.0]])
    joint = joint_sum(sum_of_rows(rows, 0.6), sum_of_rows(-rows, 0.8, torch.tensor([1]), 2))
    assert joint.clip == pytest.approx(1.0)
    flat = joint.flat()
    assert flat.tolist() == pytest.approx([0.36, 0.48, 0, 0, -0.48, -0.64], rel=1e-4)
    assert float(flat.norm()) <= joint.clip + 1e-12 and float(joint.norms) == pytest.approx(
        50 * math.sqrt(2)
    )


def test_rows_that_are_not_gradients() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [math.nan, 0.0]])
    result = sum_of_rows(rows, 1.0)
    assert torch.allclose(result.flat().float(), torch.tensor([0.9, 1.2]), atol=1e-5)
    assert sum_of_rows(rows[:0], 1.0).flat().tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Linear(20_000, 3), (20_000,)),
        (nn.Linear(100_000, 3), (100_000,)),
        (nn.Conv2d(3, 64, 5, 2, 2, bias=False), (3, 32, 32)),
        (nn.Conv2d(256, 64, 3, 1, 1, bias=False), (256, 8, 8)),
        (nn.Conv2d(64, 64, 4, 2, 1, bias=False), (64, 16, 16)),
    ],
    ids=str,
)
def test_the_release_of_one_example_is_within_the_clip_norm(
    module: nn.Module, shape: tuple[int, ...]
) -> None:
    """Constant rows, whose sums have the largest rounding errors: norms hold beyond single
    precision."""
    torch.manual_seed(0)
    for value in (0.3, 0.7, 1.3):
        given = (torch.full((1, *shape), value),)
        result = clipped_sum(module, weights_of(module), given, lambda o: o.flatten(1).sum(1), 1.0)
        assert float(result.flat().double().norm()) <= 1


@kills(
    "fedgen/privacy/clipping.py",
    "torch.zeros_like(value, dtype=torch.float64) for name",
    "torch.zeros_like(value) for name",
)
def test_one_record_among_sixty_thousand_moves_a_sum_by_at_most_the_clip_norm() -> None:
    """Constructed rows: in single precision all 937 sums of 64 are rounded up without the first row
    and down with it, while the total is above 2^15, by 2^-8 each."""
    count = 937
    rows = torch.full((count, 64), 0.90625, dtype=torch.float64)
    rows[:, 62] = 0.9 // 2**-8 * 2**-8 + 2**-9 + 2**-16 - torch.arange(count) * 2.0**-15
    rows[:, 63] = 0.9 // 2**-8 * 2**-8 + torch.arange(count) * 2.0**-15
    given_rows = rows.flatten()[:, None].float()
    more = torch.cat([torch.full((1, 1), -0.9), given_rows])
    module = nn.Linear(1, 1, bias=False)
    for one in (
        lambda some: clipped_sum(module, weights_of(module), (some,), lambda y: y[:, 0], 1.0),
        lambda some: by_vmap(
            lambda w, x: (w["weight"] * x).sum(), weights_of(module), (some,), 1.0, at_once=64
        ),
    ):
        first, second = one(given_rows).flat(), one(more).flat()
        assert float((second - first).abs()) <= 1.0


@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.parametrize("kind", ["agree", "random"])
def test_rounding_is_within_its_allowance(kind: str, precision: Precision) -> None:
    """One record in a part of 100, for the network of "Private GANs, revisited" at full width:
    beyond its own contribution, the sum moves by less than half of the 2^-10 of the clip norm that
    is reserved for rounding."""
    torch.manual_seed(0)
    module = Discriminator(10, (1, 28, 28), 128)
    images, labels = torch.rand(101, 1, 28, 28), torch.randint(0, 10, (101,))
    if kind == "agree":
        images, labels = images[:1].repeat(101, 1, 1, 1), labels[:1].repeat(101)

    def summed(first: int, last: int) -> Tensor:
        inputs, weights = (images[first:last], labels[first:last]), weights_of(module)
        return clipped_sum(module, weights, inputs, minus_log_d, 1.0, 128, precision).flat()

    moved = summed(0, 101) - summed(0, 100)
    assert float((moved - summed(100, 101)).norm()) < 2.0**-11
    assert float(moved.norm()) <= 1.0


def minus_log_d(logits: Tensor) -> Tensor:
    return F.softplus(-logits)


@pytest.mark.parametrize(("width", "precision"), [(8, "float32"), (64, "float32"), (8, "float64")])
def test_a_record_with_cancelling_gradients_moves_a_sum_by_at_most_the_clip_norm(
    width: int, precision: Precision
) -> None:
    """A hostile discriminator: gradients at the first layer are large at all positions, and nearly
    cancel for the white image, but not for others."""
    module = Discriminator(10, (1, 28, 28), width)
    weights = {name: torch.zeros_like(each) for name, each in weights_of(module).items()}
    weights["convolutions.0.bias"].fill_(2.0**-40)
    weights["convolutions.1.weight"][0, :, 1:3, 1:3] = 2.0**30
    weights["convolutions.2.weight"][0, 0, 1:3, 1:3] = 1
    logits = weights["logit.weight"].view(-1, 4, 4)
    logits[0, 1, 1:3], logits[0, 2, 1:3] = 1, -1
    rows = torch.rand(64, 1, 28, 28, generator=torch.Generator().manual_seed(1)) * 20 / 255
    rows[:, :, :14] += 200 / 255
    labels = torch.zeros(64, dtype=torch.long)
    for place in (0, 31, 63):
        more = rows.clone()
        more[place] = 1
        others = torch.arange(64) != place
        first, second = (
            clipped_sum(
                module, weights, (some, labels[: len(some)]), minus_log_d, 1.0, None, precision
            ).flat()
            for some in (more, more[others])
        )
        assert float((first - second).norm()) <= 1


class Weighted(nn.Module):
    """A linear layer over positions, with weights on its output at each."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.layer = nn.Linear(side, side, bias=False)

    def forward(self, x: Tensor, by: Tensor) -> Tensor:
        return (self.layer(x) * by).sum((1, 2))


# of a small layer each example's gradient is kept, of a large one positions are multiplied
@kills(
    "fedgen/privacy/clipping.py",
    'multiplied = _to_double if precision == "float64" else _to_single',
    "multiplied = _to_single",
)
@pytest.mark.parametrize("side", [8, 256])
def test_cancelling_positions_move_a_sum_by_at_most_the_clip_norm(side: int) -> None:
    """A linear layer over 64 positions, where the products of one record are a million times those
    of others. Beyond its contribution, the sum moves by what double precision guarantees: single
    precision leaves a hundred times as much."""
    torch.manual_seed(0)
    module, x, by = Weighted(side), torch.rand(64, 64, side), torch.ones(64, 64, side)
    for size in (2.0**10, 2.0**20, 2.0**40):
        x[40], by[40, :32], by[40, 32:] = 1, size, -size
        others = torch.arange(64) != 40
        for precision, proven in (("float64", 2.0**-26), ("float32", math.inf)):
            first, second, alone = (
                clipped_sum(
                    module, weights_of(module), given, lambda out: out, 1.0, None, precision
                ).flat()
                for given in ((x, by), (x[others], by[others]), (x[40:41], by[40:41]))
            )
            assert float((first - second).norm()) <= 1
            assert float((first - second - alone).norm()) < proven


@kills(
    "fedgen/privacy/ghost_norms.py",
    "return squared_row_norms(self.gradients) + _cancellation(self.lengths)",
    "return squared_row_norms(self.gradients)",
)
@kills(
    "fedgen/privacy/ghost_norms.py",
    "return squares + _cancellation((trace_x * trace_y).sqrt())",
    "return squares",
)
@pytest.mark.parametrize("side", [8, 256])
@pytest.mark.parametrize("copies", [1, 2])
def test_norms_are_at_least_a_fraction_of_the_products(side: int, copies: int) -> None:
    """At least 2^-8.5 of their absolute values: rounding in other records is relative to these, and
    is scaled with them."""
    module, x, by = Weighted(side), torch.ones(2, 64, side), torch.ones(2, 64, side)
    by[:, 32:] = -1
    result = clipped_sum(
        module,
        weights_of(module),
        (x, by),
        lambda out: out,
        1.0,
        precision="float64",
        copies=copies,
    )
    assert (result.norms >= 2**-8.5 * 64 * side * (1 - 1e-6)).all()


@kills(
    "fedgen/privacy/clipping.py",
    "norms = row_norms(left) * row_norms(right)",
    "norms = row_norms(left)",
)
@kills(
    "fedgen/privacy/clipping.py",
    'return ClippedSum({"rows": scale_rows(left, factors).T @ used}',
    'return ClippedSum({"rows": left.T @ used}',
)
@settings(max_examples=30)
@given(st.integers(0, 20), st.integers(0, 10**6), st.floats(1e-3, 1e3))
def test_outer_products_are_clipped(count: int, seed: int, scale: float) -> None:
    """Compare with a loop over examples. Invalid rows contribute nothing."""
    source = torch.Generator().manual_seed(seed)
    left = torch.randn((count + 2, 3), generator=source) * scale
    right = torch.randn((count + 2, 4), generator=source)
    left[count], right[count + 1] = math.nan, math.inf
    result = sum_of_outer_products(left, right, 0.5).flat().view(3, 4)
    expected = torch.zeros(3, 4, dtype=torch.float64)
    for v, w in zip(left[:count].double(), right[:count].double(), strict=True):
        product = torch.outer(v, w)
        expected += product * min(1.0, 0.5 / max(float(product.norm()), 1e-30))
    assert torch.allclose(result, expected, rtol=1e-3, atol=1e-3 * (count + 1))
    if count:
        more = sum_of_outer_products(left[1:], right[1:], 0.5).flat().view(3, 4)
        assert float((result - more).norm()) <= 0.5
