"""One step of DPDM at the network of the paper: the response of a client against a plain gradient.

    python scripts/bench_dpdm.py [--rows 64] [--copies 32] [--width 32] [--repeats 3] [--device cpu]

A response is the clipped sum over all rows, each with its copies, plus noise, as in a round of
``fedgen train method=dpdm``. The plain gradient is that of the mean loss of the same copies, in
chunks of the same size. Both take turns; the ratio is the median over the turns. Print a table, and
a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path

import torch
import yaml
from torch.func import functional_call

import fedgen
from fedgen.data.datasets import Shard
from fedgen.losses import edm
from fedgen.methods.api import Method, PublicFacts
from fedgen.methods.dpdm import dpdm
from fedgen.models.unet import UNet
from fedgen.privacy.clipping import examples_at_once
from fedgen.randomness import RandomStreams

STREAMS = RandomStreams.from_seed(0, "seeded")
SHAPE = (1, 28, 28)


def method(rows: int, copies: int, width: int, device: str) -> Method:
    """Return DPDM with the network of its settings, and batches of all rows."""
    file = Path(fedgen.__file__).parent / "configs" / "method" / "dpdm.yaml"
    settings = yaml.safe_load(file.read_text())
    network = {**settings["network"], "width": width}
    sampler = settings["sampler"]
    del network["type"], sampler["type"]
    return dpdm(
        PublicFacts(1, rows, 10, SHAPE),
        1.0,
        network=partial(UNet, **network),
        sampler=partial(edm.Sampler, **sampler),
        copies=copies,
        label_dropout=0.1,
        learning_rate=3e-4,
        betas=(0.9, 0.999),
        ema=0.999,
        batch=rows,
        sampling_rate=1.0,
        clip=1.0,
        device=device,
    )


def now(device: str) -> float:
    """Return the time in seconds, after synchronising the device."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--copies", type=int, default=32)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    chosen = parser.parse_args()
    device, copies = chosen.device, chosen.copies
    built = method(chosen.rows, copies, chosen.width, device)
    torch.manual_seed(0)
    images = torch.randint(0, 256, (chosen.rows, *SHAPE), dtype=torch.uint8)
    shard = Shard(images, torch.randint(0, 10, (chosen.rows,)))
    query = built.server.query(built.server.init(STREAMS), 0, STREAMS)
    assert query is not None
    leaves = {name: value.clone().requires_grad_() for name, value in query.shared.items()}
    network = built.client.respond.__self__.network  # type: ignore[attr-defined]
    clean = (images.to(device) / 127.5 - 1).repeat_interleave(copies, 0)
    labels = shard.labels.to(device).repeat_interleave(copies)
    levels = torch.rand(len(clean), device=device) + 0.1
    noisy = clean + levels.view(-1, 1, 1, 1) * torch.randn_like(clean)

    def plain() -> None:
        size = max(1, examples_at_once(device) // copies) * copies
        for start in range(0, len(clean), size):
            part = slice(start, start + size)
            inputs = (*edm.inputs(noisy[part], levels[part]), labels[part])
            outputs = functional_call(network, leaves, inputs)
            losses = edm.loss(outputs, noisy[part], levels[part], clean[part])
            torch.autograd.grad(losses.sum() / copies, list(leaves.values()))

    def response() -> None:
        built.client.respond({}, query, shard, 0, STREAMS)

    turns = []
    for _ in range(chosen.repeats + 1):
        times = [now(device)]
        for step in (plain, response):
            step()
            times.append(now(device))
        turns.append((times[1] - times[0], times[2] - times[1]))
    turns = turns[1:]
    ratio = statistics.median(ours / reference for reference, ours in turns)
    seconds = [statistics.median(turn[position] for turn in turns) for position in (0, 1)]
    print(f"plain gradient   {seconds[0] * 1e3:9.1f} ms    1.00 x plain")
    print(f"response         {seconds[1] * 1e3:9.1f} ms  {ratio:6.2f} x plain")
    found = {"plain_ms": seconds[0] * 1e3, "response_ms": seconds[1] * 1e3, "over_plain": ratio}
    print(json.dumps({**vars(chosen), **{name: round(value, 3) for name, value in found.items()}}))


if __name__ == "__main__":
    main()
