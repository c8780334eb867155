"""Make a data set of coloured shapes for ``data=folder``: five labels, any size.

    python scripts/make_shapes.py FILE.npz [--side 64] [--rows 20000] [--seed 0]
    python scripts/make_shapes.py FOLDER --clients 2 [--images-per-person 4 | 1-8] [--stripes] [...]

Discs, squares, triangles, rings and crosses of any colour, position and size on any other colour,
striped or not, with soft edges and a little noise. A tenth of a file's images is the test split.
With ``--clients``, the output is images, ``FOLDER/CLIENT/LABEL/NUMBER.png``; with several images
per person, which have one label and one colour on one background,
``FOLDER/CLIENT/LABEL/PERSON/NUMBER.png``, and ``FOLDER/images.csv`` lists them.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Plane = NDArray[np.float64]


def disc(x: Plane, y: Plane) -> Plane:
    """Return the signed distance to the boundary, positive inside."""
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


def look(random: np.random.Generator) -> tuple[Plane, Plane]:
    """Return colours of a shape and of its background."""
    return random.uniform(0.55, 1, 3), random.uniform(0, 0.35, 3)


def drawn(
    label: int,
    side: int,
    random: np.random.Generator,
    colours: tuple[Plane, Plane],
    striped: bool,
) -> NDArray[np.uint8]:
    """Return one image (side, side, 3)."""
    middle, size = random.uniform(0.42, 0.58, 2), random.uniform(0.26, 0.36)
    down, right = (np.mgrid[:side, :side] + 0.5) / side
    inside = SHAPES[label]((right - middle[0]) / size, (down - middle[1]) / size)
    share = np.clip(0.5 + inside * size * side / 2, 0, 1)[..., None]
    bright, ground = colours
    if striped:
        turned, stripes = random.uniform(0, np.pi), random.uniform(3, 8)
        wave = np.sin(2 * np.pi * stripes * (right * np.cos(turned) + down * np.sin(turned)))
        ground = ground + 0.08 * (1 + wave[..., None])
    image = share * bright + (1 - share) * ground + random.normal(0, 0.02, (side, side, 3))
    return np.clip(np.rint(image * 255), 0, 255).astype(np.uint8)


def write_folders(
    place: Path,
    images: NDArray[np.uint8],
    labels: NDArray[np.int64],
    persons: NDArray[np.int64],
    clients: int,
) -> None:
    """Write the folders, and the table of persons if a person has several images."""
    lines, several = [], bool(persons[-1] + 1 < len(persons))
    for number, (label, image, person) in enumerate(zip(labels, images, persons, strict=True)):
        client, below = f"client{person // len(SHAPES) % clients}", f"person{person}/" * several
        name = f"{client}/{SHAPES[label].__name__}/{below}{number}.png"
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / name)
        lines.append((name, SHAPES[label].__name__, name.split("/")[0], f"person{person}"))
    if several:
        with (place / "images.csv").open("w", newline="") as table:
            csv.writer(table).writerows([("path", "label", "client", "person"), *lines])


def main() -> None:
    """Write the file, or the folders."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--clients", type=int, help="number of clients; writes folders instead of a file"
    )
    parser.add_argument("--images-per-person", default="1", help="a number, or a range, e.g. 1-8")
    parser.add_argument("--stripes", action="store_true", help="on the ground")
    chosen = parser.parse_args()
    random = np.random.default_rng(chosen.seed)
    few, _, most = chosen.images_per_person.partition("-")
    counts = np.full(chosen.rows, int(few))
    if most:
        counts = random.integers(int(few), int(most) + 1, chosen.rows)
    persons = np.repeat(np.arange(chosen.rows), counts)[: chosen.rows]
    labels = persons % len(SHAPES)
    looks = [look(random) for _ in range(persons[-1] + 1)]
    images = np.stack(
        [
            drawn(int(label), chosen.side, random, looks[person], chosen.stripes)
            for label, person in zip(labels, persons, strict=True)
        ]
    )
    if chosen.clients is not None:
        write_folders(Path(chosen.file), images, labels, persons, chosen.clients)
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
