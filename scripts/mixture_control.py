"""Effect of the mixture's augmentation and private classifier on samples of another method, MNIST.

    fedgen train experiment=dp_merf_mnist evaluation=none run_dir=A
    fedgen train experiment=mixture_mnist evaluation=none run_dir=B
    python scripts/mixture_control.py A B [--samples 60000]

Print the accuracy of a CNN (test split) trained on samples of A: unchanged, augmented, labelled by
the private classifier of B, and both. With labels of B, the ε of both runs add up.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

import fedgen
from fedgen.methods.mixture import AUGMENTATIONS
from fedgen.randomness import RandomStreams

BATCH = 1000


def augment(images: np.ndarray) -> np.ndarray:
    """Return the images after the augmentation for digits."""
    results = []
    for number, part in enumerate(np.split(images, range(BATCH, len(images), BATCH))):
        streams = RandomStreams.from_seed(number, "seeded").public("warps")
        augmented = AUGMENTATIONS["digits"](torch.from_numpy(part).float() / 255, streams)
        results.append((augmented.clamp(0, 1) * 255).round().to(torch.uint8).numpy())
    return np.concatenate(results)


def main() -> None:
    """Evaluate all four."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other")
    parser.add_argument("mixture")
    parser.add_argument("--samples", type=int, default=60_000)
    chosen = parser.parse_args()
    images, labels = fedgen.load(chosen.other).samples(chosen.samples, seed=1)
    teacher = fedgen.load(chosen.mixture)
    parts = np.split(images, range(BATCH, len(images), BATCH))
    relabelled = np.concatenate([teacher.classify(part) for part in parts])
    augmented = augment(images)
    for name, some_images, some_labels in (
        ("unchanged", images, labels),
        ("augmented", augmented, labels),
        ("relabelled", images, relabelled),
        ("both", augmented, relabelled),
    ):
        settings = {"evaluation.samples": len(images), "evaluation.real2gen": []}
        results = fedgen.evaluate(some_images, some_labels, settings, data="mnist")
        mean = results["gen2real"]["cnn"]["mean"]
        print(f"{name}: {'not evaluated' if mean is None else f'{mean:.1%}'}", flush=True)


if __name__ == "__main__":
    main()
