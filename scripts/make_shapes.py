"""Makes a data set of coloured shapes for ``data=folder``: five labels, any size, nobody's.

    python scripts/make_shapes.py FILE.npz [--side 64] [--rows 20000] [--seed 0]
    python scripts/make_shapes.py FOLDER --clients 2 [...]

Discs, squares, triangles, rings and crosses of any colour, place and size on any other colour, with
soft edges and a little noise. A tenth of the rows of a file is the test split. With clients they
become images, ``FOLDER/CLIENT/LABEL/NUMBER.png``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Plane = NDArray[np.float64]


def disc(x: Plane, y: Plane) -> Plane:
    """How far inside a place is: positive within."""
    return 1 - np.hypot(x, y)


def square(x: Plane, y: Plane) -> Plane:
    """See ``disc``."""
    return 0.85 - np.maximum(abs(x), abs(y))


def triangle(x: Plane, y: Plane) -> Plane:
    """See ``disc``."""
    return np.minimum(0.7 - y, y + 1 - 1.9 * abs(x))


def ring(x: Plane, y: Plane) -> Plane:
    """See ``disc``."""
    return 0.28 - abs(np.hypot(x, y) - 0.72)


def cross(x: Plane, y: Plane) -> Plane:
    """See ``disc``."""
    return np.minimum(1 - np.maximum(abs(x), abs(y)), 0.3 - np.minimum(abs(x), abs(y)))


SHAPES: tuple[Callable[[Plane, Plane], Plane], ...] = (disc, square, triangle, ring, cross)


def drawn(label: int, side: int, random: np.random.Generator) -> NDArray[np.uint8]:
    """One image (side, side, 3)."""
    middle, size = random.uniform(0.42, 0.58, 2), random.uniform(0.26, 0.36)
    down, right = (np.mgrid[:side, :side] + 0.5) / side
    inside = SHAPES[label]((right - middle[0]) / size, (down - middle[1]) / size)
    share = np.clip(0.5 + inside * size * side / 2, 0, 1)[..., None]
    bright, dark = random.uniform(0.55, 1, 3), random.uniform(0, 0.35, 3)
    image = share * bright + (1 - share) * dark + random.normal(0, 0.02, (side, side, 3))
    return np.clip(np.rint(image * 255), 0, 255).astype(np.uint8)


def main() -> None:
    """Writes the file, or the folders."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, help="folders instead of a file, for so many")
    chosen = parser.parse_args()
    random = np.random.default_rng(chosen.seed)
    labels = np.arange(chosen.rows) % len(SHAPES)
    images = np.stack([drawn(int(label), chosen.side, random) for label in labels])
    if chosen.clients is not None:
        for number, (label, image) in enumerate(zip(labels, images, strict=True)):
            client = f"client{number // len(SHAPES) % chosen.clients}"
            place = Path(chosen.file, client, SHAPES[label].__name__)
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(place / f"{number}.png")
        print(f"{chosen.file}: {chosen.rows} images of {chosen.clients} clients")
        return
    test = chosen.rows // 10
    np.savez_compressed(
        chosen.file,
        train_images=images[test:],
        train_labels=labels[test:],
        test_images=images[:test],
        test_labels=labels[:test],
    )
    print(f"{chosen.file}: {chosen.rows - test} rows to train on, {test} to test on")


if __name__ == "__main__":
    main()
