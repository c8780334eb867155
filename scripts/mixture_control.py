"""What the mixture's warps and its private teacher do for another method's samples of MNIST.

    fedgen train experiment=dp_merf_mnist evaluation=none run_dir=A
    fedgen train experiment=mixture_mnist evaluation=none run_dir=B
    python scripts/mixture_control.py A B [--samples 60000]

Prints the accuracy of a CNN (test split) that learnt from A's samples as they are, warped, with the
labels of B's teacher, and both. The runs' epsilons add up where the teacher labels.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

import fedgen
from fedgen.methods.mixture import AUGMENTATIONS
from fedgen.randomness import RandomStreams

AT_ONCE = 1000


def warped(images: np.ndarray) -> np.ndarray:
    """The same images after the rule for digits."""
    found = []
    for number, part in enumerate(np.split(images, range(AT_ONCE, len(images), AT_ONCE))):
        streams = RandomStreams.from_seed(number, "seeded").public("warps")
        moved = AUGMENTATIONS["digits"](torch.from_numpy(part).float() / 255, streams).clamp(0, 1)
        found.append((moved * 255).round().to(torch.uint8).numpy())
    return np.concatenate(found)


def main() -> None:
    """Prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other")
    parser.add_argument("mixture")
    parser.add_argument("--samples", type=int, default=60_000)
    chosen = parser.parse_args()
    images, labels = fedgen.load(chosen.other).samples(chosen.samples, seed=1)
    teacher = fedgen.load(chosen.mixture)
    parts = np.split(images, range(AT_ONCE, len(images), AT_ONCE))
    told, moved = np.concatenate([teacher.classify(part) for part in parts]), warped(images)
    for name, some, of in (
        ("as they are", images, labels),
        ("warped", moved, labels),
        ("teacher's labels", images, told),
        ("both", moved, told),
    ):
        settings = {"evaluation.samples": len(of), "evaluation.real2gen": []}
        found = fedgen.evaluate(some, of, settings, data="mnist")
        print(f"{name}: {found['gen2real']['cnn']['mean']:.1%}", flush=True)


if __name__ == "__main__":
    main()
