"""Many critics of one client: fedgen's stacks against a plain loop over modules.

    python scripts/bench_critics.py [--critics 1000] [--widths 64 16] [--rows 32] [--device cpu]

Print a table, and a line of JSON with the ratios. Every critic first takes a step of WGAN-GP with
Adam, which creates all states; then ``--timed`` of them take ``--steps`` each, timed as the best of
``--repeats``. Memory is the peak of the process, one process per line (CUDA: of the device's
allocator). ``on disk``: states that are not in use are files.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from fedgen.config.build import build
from fedgen.config.compose import compose
from fedgen.data.datasets import Shard
from fedgen.federation.client.state_store import ClientStore
from fedgen.methods.api import PublicFacts
from fedgen.methods.families.critic_rotation import critics_at_once
from fedgen.models.dcgan import Critic
from fedgen.models.functional import meta_module
from fedgen.randomness import RandomStreams

SHAPE, CLASSES, ROWS_EACH, TURN = (1, 28, 28), 10, 60, 20
STREAMS = RandomStreams.from_seed(0, "seeded")
Train = Callable[[range, int], None]
"""(critics, steps): each of them takes so many steps."""


def rows(critics: int) -> Shard:
    """Return images for so many critics; their content does not affect the time."""
    flips, count = torch.Generator().manual_seed(0), ROWS_EACH * critics
    images = torch.randint(0, 256, (count, *SHAPE), generator=flips, dtype=torch.uint8)
    return Shard(images, torch.randint(0, CLASSES, (count,), generator=flips))


def plain_loop(critics: int, width: int, batch: int, device: str, folder: Path) -> Train:
    """Train a module and an optimizer per critic, one after the other."""
    shard = rows(critics)
    networks: list[nn.Module] = [Critic(CLASSES, SHAPE, width).to(device) for _ in range(critics)]
    for network in networks:  # as fedgen's: neither zero vectors, nor zero weights
        for buffer in network.buffers():
            nn.init.normal_(buffer)
    adams = [torch.optim.Adam(each.parameters(), 1e-4, (0.5, 0.9), fused=True) for each in networks]
    fakes = torch.rand(CLASSES, 16, *SHAPE, device=device)

    def step(critic: int) -> None:
        network = networks[critic]
        picked = torch.randperm(ROWS_EACH)[torch.arange(batch) % ROWS_EACH]
        real, labels = (each.to(device) for each in shard.rows(critic * ROWS_EACH + picked))
        fake = fakes[labels, torch.randint(16, (batch,), device=device)]
        share = torch.rand(batch, 1, 1, 1, device=device)
        between = (share * real + (1 - share) * fake).requires_grad_()
        scores = network(torch.cat([real, fake]), torch.cat([labels, labels]))
        slopes = torch.autograd.grad(network(between, labels).sum(), between, create_graph=True)[0]
        penalty = ((slopes.flatten(1).square().sum(1) + 1e-12).sqrt() - 1).square().mean()
        wasserstein = scores[batch:].mean() - scores[:batch].mean()
        loss = wasserstein + 10 * penalty + 1e-3 * scores[:batch].square().mean()
        adams[critic].zero_grad()
        torch.autograd.backward(loss)
        adams[critic].step()
        with torch.no_grad():
            for layer in network.modules():
                if hasattr(layer, "u"):
                    matrix = layer.weight.flatten(1)
                    v = nn.functional.normalize(matrix.T @ layer.u, dim=0)
                    layer.u.copy_(nn.functional.normalize(matrix @ v, dim=0))

    def train(members: range, steps: int) -> None:
        for critic in members:
            for _ in range(steps):
                step(critic)

    return train


def fedgen(
    critics: int,
    width: int,
    batch: int,
    device: str,
    folder: Path,
    stack: int | None = None,
    disk: bool = False,
) -> Train:
    """Train through the client program. ``stack``: critics per stack; ``disk``: states in files."""
    settings = ["method=gs_wgan", "method/generator=dcgan", f"method.critic.width={width}"]
    settings += [f"method.critics={critics}", f"method.critic_batch={batch}"]
    make = build(compose("config", settings).method, "method")
    facts = PublicFacts(1, ROWS_EACH * critics, CLASSES, SHAPE)
    program = make(facts=facts, noise_multiplier=1.0, device=device).client.train.__self__
    shard, store = rows(critics), ClientStore(folder, not disk)
    broadcast = {"images": torch.rand(CLASSES, 16, *SHAPE)}
    rounds = itertools.count()

    def train(members: range, steps: int) -> None:
        most = stack or program.rotation.max_members
        rotation = replace(program.rotation, turn_size=len(members), max_members=most)
        turn = replace(program, rotation=rotation, steps=steps)
        round_ = members.start // len(members)
        changed = turn.train(store.state(0), broadcast, shard, round_, STREAMS)
        store.commit(0, "train", next(rounds), changed, None)

    return train


def chosen_stack(width: int, device: str) -> int:
    """Return the number of critics that the code stacks."""
    critic = meta_module(Critic(CLASSES, SHAPE, width))
    return min(TURN, critics_at_once(critic, device))


FORKS = multiprocessing.get_context("forkserver")
"""Processes that start at once, as forks of one that has only imported packages."""
FORKS.set_forkserver_preload(["fedgen.config.build", "fedgen.methods.gs_wgan"])

WAYS: dict[str, Callable[..., Train]] = {
    "plain loop": plain_loop,
    "fedgen": fedgen,
    "fedgen, one by one": partial(fedgen, stack=1),
    "fedgen, all of a turn stacked": partial(fedgen, stack=TURN),
    "fedgen, on disk": partial(fedgen, disk=True),
}


def measure(
    way: str,
    width: int,
    critics: int,
    timed: int,
    steps: int,
    repeats: int,
    rows: int,
    device: str,
    threads: int,
) -> tuple[float, float]:
    """Return critic steps per second, and peak bytes."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    cuda, turns = device == "cuda", [range(at, at + TURN) for at in range(0, critics, TURN)]
    with tempfile.TemporaryDirectory() as folder:
        train = WAYS[way](critics, width, rows, device, Path(folder))
        for members in turns:
            train(members, 1)
        seconds = math.inf
        for _ in range(repeats):
            begin = time.perf_counter()
            for members in turns[: -(-timed // TURN)]:
                train(members, steps)
            if cuda:
                torch.cuda.synchronize()
            seconds = min(seconds, time.perf_counter() - begin)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.cuda.max_memory_allocated() if cuda else resident
    return -(-timed // TURN) * TURN * steps / seconds, float(peak)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 16])
    parser.add_argument("--critics", type=int, default=1000)
    parser.add_argument("--timed", type=int, default=2 * TURN)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    chosen = vars(parser.parse_args())
    if not chosen["critics"] >= chosen["timed"] > 0 == chosen["critics"] % TURN:
        parser.error(f"--critics must be a multiple of {TURN}, and at least --timed")
    ratios: dict[str, object] = dict(chosen)
    for width in chosen.pop("widths"):
        found = {}
        for way in WAYS:
            with FORKS.Pool(1) as alone:
                found[way] = alone.apply(measure, (way, width, *chosen.values()))
            rate, peak = found[way]
            ratio = rate / found["plain loop"][0]
            print(
                f"width {width:3}  {way:30} {rate:8.1f} critic steps/s  {ratio:5.2f} x the loop  "
                f"{peak / 1e9:6.2f} GB",
                flush=True,
            )
        stack = chosen_stack(width, chosen["device"])
        days = 1000 * 2000 * 5 / found["fedgen"][0] / 86400
        print(f"width {width:3}  the code stacks {stack}; the paper's warm start of 1,000 critics, "
              f"2,000 times 5 steps each, takes {days:.2g} days")  # fmt: skip
        ratios[f"speedup_over_loop_{width}"] = round(found["fedgen"][0] / found["plain loop"][0], 3)
        ratios[f"gigabytes_on_disk_{width}"] = round(found["fedgen, on disk"][1] / 1e9, 2)
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
