"""One DP-SGD step of DPGAN's discriminator: fedgen's clipped sum beside a plain step and others.

    python scripts/bench_dpsgd.py [--width 128] [--rows 256] [--repeats 7] [--device cpu]

Prints a table and, last, a line of JSON with the ratios. A step is forward, loss, and the gradient
of all weights: summed (plain), or clipped example by example and summed. Memory is the peak of the
process above its start (CUDA: of the device's allocator), each method in a process of its own.
``share_of_ceiling``: the arithmetic of a plain step over the time of ours, as a share of the rate
that one large product of matrices reaches here.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from fedgen.models.cdcgan import Discriminator
from fedgen.privacy.per_example import by_vmap, clipped_sum

Step = Callable[[], object]


def losses(logits: Tensor) -> Tensor:
    """-log D of each example."""
    return F.softplus(-logits)


def plain(module: nn.Module, images: Tensor, labels: Tensor) -> Step:
    """Not private: one backward pass."""

    def step() -> None:
        module.zero_grad()
        torch.autograd.backward(losses(module(images, labels)).sum())

    return step


def fedgen(module: nn.Module, images: Tensor, labels: Tensor) -> Step:
    """The engine."""
    weights = {name: value.detach() for name, value in module.named_parameters()}
    return lambda: clipped_sum(module, weights, (images, labels), losses, 1.0)


def torch_func(module: nn.Module, images: Tensor, labels: Tensor) -> Step:
    """vmap of grad, 64 examples at a time."""
    weights = {name: value.detach() for name, value in module.named_parameters()}

    def loss(given: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return losses(functional_call(module, given, (image[None], label[None])))[0]

    return lambda: by_vmap(loss, weights, (images, labels), 1.0)


def opacus_hooks(module: nn.Module, images: Tensor, labels: Tensor) -> Step:
    """GradSampleModule, then clip and sum."""
    from opacus import GradSampleModule

    wrapped = GradSampleModule(module, loss_reduction="sum")

    def step() -> None:
        wrapped.zero_grad()
        torch.autograd.backward(losses(wrapped(images, labels)).sum())
        samples = [p.grad_sample for p in wrapped.parameters()]
        norms = torch.stack([s.flatten(1).norm(dim=1) for s in samples]).norm(dim=0)
        factors = (1.0 / norms).clamp(max=1.0)
        for sample in samples:
            torch.tensordot(factors, sample, 1)

    return step


def opacus_ghost(module: nn.Module, images: Tensor, labels: Tensor) -> Step:
    """GradSampleModuleFastGradientClipping: norms in a first backward pass, the sum in a second."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(
        module, max_grad_norm=1.0, use_ghost_clipping=True, loss_reduction="sum"
    )

    def step() -> None:
        wrapped.zero_grad()
        wrapped.enable_hooks()
        each = losses(wrapped(images, labels))
        torch.autograd.backward(each.sum(), retain_graph=True)
        factors = wrapped.get_clipping_coef()
        wrapped.zero_grad()
        wrapped.disable_hooks()
        torch.autograd.backward((factors * each).sum())

    return step


METHODS = (plain, fedgen, opacus_hooks, opacus_ghost, torch_func)


def measure(
    name: str, width: int, rows: int, repeats: int, device: str, threads: int
) -> tuple[float, float]:
    """Median seconds of a step, and peak bytes above the start."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    module = Discriminator(10, (1, 28, 28), width).to(device)
    images = torch.rand(rows, 1, 28, 28, device=device)
    labels = torch.randint(0, 10, (rows,), device=device)
    cuda = device == "cuda"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    step = {each.__name__: each for each in METHODS}[name](module, images, labels)
    times = []
    for _ in range(repeats + 1):
        if cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return statistics.median(times[1:]), float(peak if cuda else after - before)


def ceiling(width: int, rows: int, device: str, threads: int) -> tuple[float, float]:
    """Floating point operations of a plain step, and those of a large product in a second."""
    torch.set_num_threads(threads)
    module = Discriminator(10, (1, 28, 28), width).to(device)
    images = torch.rand(rows, 1, 28, 28, device=device)
    with FlopCounterMode(display=False) as counted:
        plain(module, images, torch.zeros(rows, dtype=torch.long, device=device))()
    side = 8192 if device == "cuda" else 2048
    matrix, times = torch.rand(side, side, device=device), []
    product = torch.empty_like(matrix)
    for _ in range(5):
        begin = time.perf_counter()
        float(torch.mm(matrix, matrix, out=product)[0, 0])  # waits for the device
        times.append(time.perf_counter() - begin)
    return float(counted.get_total_flops()), 2 * side**3 / min(times)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    chosen = parser.parse_args()
    found = {}
    for method in METHODS:
        with multiprocessing.get_context("spawn").Pool(1) as alone:
            found[method.__name__] = alone.apply(measure, (method.__name__, *vars(chosen).values()))
    for name, (seconds, peak) in found.items():
        ratio = seconds / found["plain"][0]
        print(f"{name:14} {seconds * 1e3:9.1f} ms  {ratio:6.2f} x plain  {peak / 1e6:9.0f} MB")
    ours = found["fedgen"]
    operations, most = ceiling(chosen.width, chosen.rows, chosen.device, chosen.threads)
    print(
        json.dumps(
            {
                **vars(chosen),
                "speedup_over_opacus_hooks": round(found["opacus_hooks"][0] / ours[0], 2),
                "speedup_over_opacus_ghost": round(found["opacus_ghost"][0] / ours[0], 2),
                "speedup_over_torch_func": round(found["torch_func"][0] / ours[0], 2),
                "cost_over_plain": round(ours[0] / found["plain"][0], 3),
                "share_of_ceiling": round(operations / ours[0] / most, 3),
                "memory_over_plain": round(ours[1] / max(found["plain"][1], 1.0), 3),
            }
        )
    )


if __name__ == "__main__":
    main()
