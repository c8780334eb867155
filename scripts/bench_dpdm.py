"""Time one DPDM step with the paper's network: a client's response relative to a plain gradient.

    python scripts/bench_dpdm.py [--records 64] [--copies 32] [--width 32] [--repeats 3]

A response is the clipped sum over all rows, each with its copies, plus noise, as in a round of
``fedgen train method=dpdm``. The baseline computes the gradient of the summed loss of equally many
copies, in chunks of the same size. The two alternate; the ratio is the median over the repeats.
Print a table and one line of JSON.
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


def build_method(records: int, copies: int, width: int, device: str) -> Method:
    """Return DPDM with the network of ``configs/method/dpdm.yaml`` at this width; each batch
    contains all records."""
    file = Path(fedgen.__file__).parent / "configs" / "method" / "dpdm.yaml"
    settings = yaml.safe_load(file.read_text())
    network = {**settings["network"], "width": width}
    sampler = settings["sampler"]
    del network["type"], sampler["type"]
    return dpdm(
        PublicFacts(1, records, 10, SHAPE),
        1.0,
        network=partial(UNet, **network),
        sampler=partial(edm.Sampler, **sampler),
        copies=copies,
        label_dropout=0.1,
        learning_rate=3e-4,
        betas=(0.9, 0.999),
        ema=0.999,
        batch=records,
        sampling_rate=1.0,
        clip=1.0,
        device=device,
    )


def now(device: str) -> float:
    """Return the time in seconds, after synchronizing the device."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=64)
    parser.add_argument("--copies", type=int, default=32)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    device, copies = options.device, options.copies
    dpdm_method = build_method(options.records, copies, options.width, device)
    torch.manual_seed(0)
    images = torch.randint(0, 256, (options.records, *SHAPE), dtype=torch.uint8)
    shard = Shard(images, torch.randint(0, 10, (options.records,)))
    query = dpdm_method.server.query(dpdm_method.server.init(STREAMS), 0, STREAMS)
    assert query is not None
    weights = {name: value.clone().requires_grad_() for name, value in query.shared.items()}
    network = dpdm_method.client.respond.__self__.network  # type: ignore[attr-defined]
    clean = (images.to(device) / 127.5 - 1).repeat_interleave(copies, 0)
    labels = shard.labels.to(device).repeat_interleave(copies)
    noise_levels = torch.rand(len(clean), device=device) + 0.1
    noisy = clean + noise_levels.view(-1, 1, 1, 1) * torch.randn_like(clean)

    def plain() -> None:
        size = max(1, examples_at_once(device) // copies) * copies
        for start in range(0, len(clean), size):
            part = slice(start, start + size)
            inputs = (*edm.inputs(noisy[part], noise_levels[part]), labels[part])
            outputs = functional_call(network, weights, inputs)
            losses = edm.loss(outputs, noisy[part], noise_levels[part], clean[part])
            torch.autograd.grad(losses.sum() / copies, list(weights.values()))

    def response() -> None:
        dpdm_method.client.respond({}, query, shard, 0, STREAMS)

    turns = []
    for _ in range(options.repeats + 1):
        times = [now(device)]
        for step in (plain, response):
            step()
            times.append(now(device))
        turns.append((times[1] - times[0], times[2] - times[1]))
    turns = turns[1:]  # the first is a warm-up
    ratio = statistics.median(ours / reference for reference, ours in turns)
    seconds = [statistics.median(turn[position] for turn in turns) for position in (0, 1)]
    print(f"plain gradient   {seconds[0] * 1e3:9.1f} ms    1.00 x plain")
    print(f"response         {seconds[1] * 1e3:9.1f} ms  {ratio:6.2f} x plain")
    summary = {"plain_ms": seconds[0] * 1e3, "response_ms": seconds[1] * 1e3, "over_plain": ratio}
    print(
        json.dumps({**vars(options), **{name: round(value, 3) for name, value in summary.items()}})
    )


if __name__ == "__main__":
    main()
