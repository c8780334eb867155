"""One DP-SGD step of DPGAN's discriminator: fedgen's clipped sum against a plain step and other
libraries, and a whole step of a run against a training loop by Opacus.

    python scripts/bench_dpsgd.py [--width 128] [--rows 256] [--repeats 7] [--device cpu]

Print tables, and a line of JSON with the ratios. In the first table a step is forward pass, loss,
and the gradient of all weights: summed (plain), or clipped per example and summed. Each method has
its own process, and they take turns; ratios are medians over the turns. Memory is the peak of the
process above its start (CUDA: of the device's allocator).
``share_of_ceiling``: the arithmetic of a plain step over fedgen's time, as a share of the rate of
one large matrix product.

A whole step is one step of ``fedgen train experiment=dpgan_mnist_128`` on 60,000 synthetic images
(half of ``--rows`` real on average, half fakes), from the query to the update of the generator
after n_D = 50 of them, in both noise modes: with messages, ledger and noise. The reference is a
loop over Opacus' Poisson loader, with its clipping (hooks; ghost), its noise and torch's Adam,
without generator steps. ``whole_step_over_sum_*``: relative to the clipped sums within;
``..._but_fakes``: without drawing the fakes, which any such step needs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import resource
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from fedgen.methods.families.gan import Networks, Server
from fedgen.models.cdcgan import Discriminator, Generator
from fedgen.privacy.clipping import by_vmap, clipped_sum
from fedgen.testing.operators import operators, synchronizing

Step = Callable[[], object]
T = TypeVar("T")


def losses(logits: Tensor) -> Tensor:
    """Return -log D of each example."""
    return F.softplus(-logits)


def plain(module: nn.Module, images: Tensor, labels: Tensor) -> Step:
    """Run one backward pass without privacy."""

    def step() -> None:
        module.zero_grad()
        torch.autograd.backward(losses(module(images, labels)).sum())

    return step


def fedgen(module: nn.Module, images: Tensor, labels: Tensor) -> Step:
    """Run fedgen's clipped sum."""
    weights = {name: value.detach() for name, value in module.named_parameters()}
    return lambda: clipped_sum(module, weights, (images, labels), losses, 1.0)


def fedgen_single(module: nn.Module, images: Tensor, labels: Tensor) -> Step:
    """Run fedgen's clipped sum, with norms and sums in single precision."""
    weights = {name: value.detach() for name, value in module.named_parameters()}
    given = (images, labels)
    return lambda: clipped_sum(module, weights, given, losses, 1.0, precision="float32")


def torch_func(module: nn.Module, images: Tensor, labels: Tensor) -> Step:
    """Run vmap of grad, 64 examples at a time."""
    weights = {name: value.detach() for name, value in module.named_parameters()}

    def loss(given: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return losses(functional_call(module, given, (image[None], label[None])))[0]

    return lambda: by_vmap(loss, weights, (images, labels), 1.0)


def opacus_hooks(module: nn.Module, images: Tensor, labels: Tensor) -> Step:
    """Run GradSampleModule, clip and sum."""
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
    """Run GradSampleModuleFastGradientClipping: norms in one backward pass, the sum in a second."""
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


METHODS = (plain, fedgen, fedgen_single, opacus_hooks, opacus_ghost, torch_func)


_step: Step | None = None
"""The step of this process."""


def prepare(name: str, width: int, rows: int, device: str, threads: int) -> float:
    """Build the step of this process and run it once; return its peak memory in bytes (CPU: above
    the start; CUDA: of the allocator)."""
    global _step
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    module = Discriminator(10, (1, 28, 28), width).to(device)
    images = torch.rand(rows, 1, 28, 28, device=device)
    labels = torch.randint(0, 10, (rows,), device=device)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    _step = {each.__name__: each for each in METHODS}[name](module, images, labels)
    _step()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return float(torch.cuda.max_memory_allocated() if device == "cuda" else after - before)


def time_step() -> float:
    """Run the step of this process; return its duration in seconds."""
    assert _step is not None  # prepare() ran before
    begin = now()
    _step()
    return now() - begin


def time_methods(
    width: int, rows: int, repeats: int, device: str, threads: int
) -> dict[str, tuple[float, float, float]]:
    """Return median seconds of each method, the median of their ratios to a plain step of the same
    turn, and peak memory in bytes. Methods alternate, so that changes in machine load affect all
    of them."""
    names = [method.__name__ for method in METHODS]
    with contextlib.ExitStack() as stack:
        processes = {name: stack.enter_context(FORKS.Pool(1)) for name in names}
        memory = {
            name: process.apply(prepare, (name, width, rows, device, threads))
            for name, process in processes.items()
        }
        turns = [
            {name: process.apply(time_step) for name, process in processes.items()}
            for _ in range(repeats)
        ]
    return {
        name: (
            statistics.median(turn[name] for turn in turns),
            statistics.median(turn[name] / turn["plain"] for turn in turns),
            memory[name],
        )
        for name in names
    }


def count_operators(name: str, width: int, rows: int, device: str, threads: int) -> Counter[str]:
    """Return how often a step calls each operator of torch."""
    prepare(name, width, rows, device, threads)
    assert _step is not None
    return operators(_step)


def print_profile(width: int, rows: int, device: str, threads: int) -> None:
    """Print operators and synchronizations of the steps of fedgen and of a plain one."""
    for method in (plain, fedgen, fedgen_single):
        calls = alone(count_operators, method.__name__, width, rows, device, threads)
        waits = sum(synchronizing(calls).values())
        print(f"{method.__name__:14} {sum(calls.values()):6} operators, {waits} synchronizations")


def ceiling(width: int, rows: int, device: str, threads: int) -> tuple[float, float]:
    """Return floating point operations of a plain step, and those of a large product per second."""
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


def now() -> float:
    """Return the time in seconds, after synchronizing the device."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


class Clock:
    """Seconds by part of a round, each without nested parts."""

    def __init__(self) -> None:
        self.parts: Counter[str] = Counter()
        self.rounds: list[dict[str, float]] = []
        self._inside = [0.0]

    def timed(self, part: str, owner: Any, name: str) -> None:
        """Attribute the time of a function to a part; ``round``: to all parts."""
        function = getattr(owner, name)

        def run(*given: Any, **named: Any) -> Any:
            if part == "round":
                self.parts.clear()
            begin = now()
            self._inside.append(0.0)
            try:
                return function(*given, **named)
            finally:
                seconds = now() - begin
                self.parts[part] += seconds - self._inside.pop()
                self._inside[-1] += seconds
                if part == "round":
                    self.parts["other"] = self.parts.pop("round")
                    self.rounds.append(dict(self.parts))

        setattr(owner, name, run)


def whole_step(noise: str, width: int, rows: int, device: str, threads: int) -> dict[str, float]:
    """Return seconds of a step of a run by part, from the second of two messages of 50 steps."""
    from fedgen.config.compose import compose
    from fedgen.federation import messages, rounds
    from fedgen.federation.client.state_store import ClientStore
    from fedgen.methods import dpgan
    from fedgen.methods.families import gan
    from fedgen.privacy import mechanisms
    from fedgen.privacy.ledger import Ledger
    from fedgen.run import train

    clock = Clock()
    clock.timed("round", rounds.Rounds, "_round")
    clock.timed("sum", dpgan, "clipped_sum")
    clock.timed("noise", mechanisms, "noised")
    clock.timed("adam", gan, "adam_step")
    clock.timed("fakes", Networks, "generate")
    clock.timed("ledger", Ledger, "charge")
    clock.timed("server", Server, "update")
    clock.timed("messages", ClientStore, "commit")
    for name in ("pack_query", "read_query", "digest_of", "pack_response", "read_response"):
        clock.timed("messages", messages, name)
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "made_up.npz"
        images = random.integers(0, 256, (60_000, 28, 28), dtype=np.uint8)
        labels = np.arange(60_000) % 10
        test = {"test_images": images[:100], "test_labels": labels[:100]}
        np.savez(data, train_images=images, train_labels=labels, **test)
        words = ["experiment=dpgan_mnist_128", "data=folder", f"data.path={data}"]
        words += [f"method.discriminator.width={width}", f"method.generator.width={width}"]
        words += [f"method.batch={rows // 2}", f"method.sampling_rate={rows / 2 / 60_000}"]
        words += [f"privacy.noise={noise}", "evaluation=none", "rounds=100", f"device={device}"]
        words += [f"runtime.threads={threads}", f"run_dir={folder}/run", "data.classes=10"]
        train.train(compose("config", words))
    return {part: seconds / 50 for part, seconds in clock.rounds[-1].items()}


def opacus_step(mode: str, width: int, rows: int, repeats: int, device: str, threads: int) -> float:
    """Return median seconds of a step by Opacus' PrivacyEngine."""
    from opacus import PrivacyEngine

    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    module = Discriminator(10, (1, 28, 28), width).to(device)
    generator = Generator(128, 10, (1, 28, 28), width).to(device)
    images = torch.randint(0, 256, (60_000, 1, 28, 28), dtype=torch.uint8)
    rows_of = torch.utils.data.TensorDataset(images, torch.arange(60_000) % 10)
    loader = torch.utils.data.DataLoader(rows_of, batch_size=rows // 2)
    made = PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.Adam(module.parameters(), 2e-4, (0.5, 0.999)),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
        criterion=nn.BCEWithLogitsLoss(),
    )
    module, optimizer, *criterion, loader = made
    loss = criterion[0] if criterion else nn.BCEWithLogitsLoss()
    times, batches = [], iter(loader)
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        real, labels = next(batches)
        count = rows // 2
        given = torch.randint(0, 10, (count,), device=device)
        with torch.no_grad():
            fakes = generator(torch.randn(count, 128, device=device), given)
        both = torch.cat([real.to(device).float() / 255, fakes])
        logits = module(both, torch.cat([labels.to(device), given]))
        targets = torch.cat([torch.ones(len(real)), torch.zeros(count)]).to(device)
        optimizer.zero_grad()
        loss(logits, targets).backward()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


FORKS = multiprocessing.get_context("forkserver")
"""Processes that start at once, as forks of one that has only imported packages."""
FORKS.set_forkserver_preload(["fedgen.run.train", "opacus", "torch.func"])


def alone(function: Callable[..., T], *given: Any) -> T:
    """Call a function in its own process."""
    with FORKS.Pool(1) as pool:
        return pool.apply(function, given)


def whole_steps(width: int, rows: int, repeats: int, device: str, threads: int) -> dict[str, float]:
    """Print the second table; return the ratios for JSON."""
    ours = {n: alone(whole_step, n, width, rows, device, threads) for n in ("seeded", "secure")}
    for name, parts in ours.items():
        shares = ", ".join(f"{part} {seconds * 1e3:.1f}" for part, seconds in parts.items())
        print(f"whole step, {name:6} {sum(parts.values()) * 1e3:9.1f} ms ({shares})")
    whole = {name: sum(parts.values()) for name, parts in ours.items()}
    found = {f"whole_step_over_sum_{n}": whole[n] / ours[n]["sum"] for n in ours}
    for n, parts in ours.items():
        found[f"whole_step_over_sum_{n}_but_fakes"] = (whole[n] - parts["fakes"]) / parts["sum"]
    for mode in ("hooks", "ghost"):
        theirs = alone(opacus_step, mode, width, rows, repeats, device, threads)
        print(f"whole step, Opacus' {mode} {theirs * 1e3:9.1f} ms")
        found[f"whole_step_speedup_over_opacus_{mode}"] = theirs / whole["seeded"]
    return {name: round(ratio, 3) for name, ratio in found.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--profile", action="store_true", help="count operators of a step first")
    chosen = parser.parse_args()
    if vars(chosen).pop("profile"):
        print_profile(chosen.width, chosen.rows, chosen.device, chosen.threads)
    timings = time_methods(**vars(chosen))
    for name, (median, ratio, peak) in timings.items():
        print(f"{name:14} {median * 1e3:9.1f} ms  {ratio:6.2f} x plain  {peak / 1e6:9.0f} MB")
    ours = timings["fedgen"]
    whole = whole_steps(**vars(chosen))
    operations, most = ceiling(chosen.width, chosen.rows, chosen.device, chosen.threads)
    print(
        json.dumps(
            {
                **vars(chosen),
                "speedup_over_opacus_hooks": round(timings["opacus_hooks"][1] / ours[1], 2),
                "speedup_over_opacus_ghost": round(timings["opacus_ghost"][1] / ours[1], 2),
                "speedup_over_torch_func": round(timings["torch_func"][1] / ours[1], 2),
                "cost_over_plain": round(ours[1], 3),
                "share_of_ceiling": round(operations / ours[0] / most, 3),
                "memory_over_plain": round(ours[2] / max(timings["plain"][2], 1.0), 3),
                **whole,
            }
        )
    )


if __name__ == "__main__":
    main()
