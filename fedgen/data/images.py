"""Read image files as arrays, as viewers display them; one line lists all unreadable files."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Literal

import numpy as np
from annotated_types import Ge, Le
from numpy.typing import NDArray

from fedgen.data.datasets import Images, as_images
from fedgen.errors import FedgenError

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

_MOST_PIXELS = 2**26  # limit on the pixels of an image
_LARGEST = 1024  # limit on the resized side
_GREY = ("1", "L", "LA")
_DEEP = ("I", "F")  # 16 or 32 bits, by prefix of Pillow's mode
_DEEPER = re.compile(r";(16|32)[BLNF]")  # the same for colour, by Pillow's raw mode
Side = Annotated[int, Ge(8), Le(_LARGEST)]
"""Pixels of a side of a square image."""
Channels = Literal[1, 3]
"""Grey, or RGB."""
MAX_SHOWN = 20
"""Names in a line."""


def read_images(
    place: Path | str,
    sources: Sequence[tuple[str, Path | IO[bytes]]],
    size: int | None,
    channels: int | None,
    key: str = "data.path",
) -> Images:
    """Return all images (n, channels, h, w) in this order, as viewers display them: rotated by EXIF
    orientation, on white where transparent.

    Args:
        place: their location, for errors.
        sources: name of each image for errors, and its file.
        key: setting that names ``place``, for errors.

    Raises:
        FedgenError: for files that are not one readable image of at most 8 bits per channel and
            limited size, and for images that are not square, or differ in size or in colour.
    """
    rejected: dict[str, list[str]] = {problem: [] for problem in _PROBLEMS}
    names, images = [], []
    for name, file in sources:
        image = _read_image(file, channels)
        if isinstance(image, str):
            rejected[image].append(name)
            continue
        names.append(name)
        images.append(_centre_square(image, size) if size else np.asarray(image, np.uint8))
    problems = [
        (problem.format(count=len(names_), total=len(sources), names=shorten(names_)), remedy)
        for (problem, remedy), names_ in zip(_PROBLEMS.values(), rejected.values(), strict=True)
        if names_
    ]
    problems += _shape_problems(names, images)
    if len(problems) == 1:
        raise FedgenError(key, *problems[0])
    if problems:
        text = " | ".join(f"{problem} ({remedy})" for problem, remedy in problems)
        raise FedgenError(key, text, "correct these")
    return as_images(place, np.stack(images))


_PROBLEMS = {
    "large": (f"more than {_MOST_PIXELS:,} pixels: {{names}}", "make them smaller"),
    "deep": (
        "more than 8 bits a pixel: {names}",
        "scale them to 0..255 first, all by the same range",
    ),
    "several": ("several images in a file: {names}", "save each page as a separate file"),
    "unreadable": (
        "{count} of {total} files cannot be read as images: {names}",
        "remove them",
    ),
}
"""Problem of a file -> message and remedy."""


def _read_image(file: Path | IO[bytes], channels: int | None) -> PillowImage | str:
    """Return the image of a file, as viewers display it, or its problem, a key of ``_PROBLEMS``."""
    from PIL import Image, UnidentifiedImageError

    try:
        with _stream(file) as stream, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fedgen has its own limits
            raw = Image.open(stream)
            if raw.width * raw.height > _MOST_PIXELS:
                return "large"
            if raw.mode.startswith(_DEEP) or _DEEPER.search(str(raw.tile)):
                return "deep"  # its range is unknown; clipping would lose it
            # an MPO file contains further pictures
            if raw.format != "MPO" and getattr(raw, "n_frames", 1) > 1:
                return "several"
            grey = channels == 1 or (channels is None and raw.mode in _GREY)
            return _composite_on_white(_apply_orientation(raw)).convert("L" if grey else "RGB")
    except Image.DecompressionBombError:
        return "large"
    except (UnidentifiedImageError, OSError, ValueError, NotImplementedError, SyntaxError):
        return "unreadable"


def _shape_problems(names: list[str], images: list[NDArray[np.uint8]]) -> list[tuple[str, str]]:
    """Return problems of images that are not of one size and colour, with their remedies."""
    problems = []
    if len({image.ndim for image in images}) > 1:
        grey_ones = [n for n, image in zip(names, images, strict=True) if image.ndim == 2]
        colour = [n for n, image in zip(names, images, strict=True) if image.ndim == 3]
        kind, fewer = ("grey", grey_ones) if len(grey_ones) <= len(colour) else ("colour", colour)
        problem = (
            f"grey images: {len(grey_ones)}, in colour: {len(colour)}; {kind}: {shorten(fewer)}"
        )
        problems.append((problem, "set data.channels=1 or data.channels=3"))
    shapes = sorted({image.shape[:2] for image in images})
    if len(shapes) > 1 or any(high != wide for high, wide in shapes):
        sizes = ", ".join(f"{wide}x{high}" for high, wide in shapes)
        if len(shapes) > MAX_SHOWN:
            (low, high), (narrow, wide) = ((min(s), max(s)) for s in zip(*shapes, strict=True))
            sizes = f"{len(shapes)} sizes, {narrow} to {wide} wide and {low} to {high} high"
        problem = f"images are to be square and of one size, and there are {sizes}"
        remedy = (
            "set data.size=32 (or another): images are cropped to their central square and resized"
        )
        problems.append((problem, remedy))
    return problems


def _apply_orientation(raw: PillowImage) -> PillowImage:
    """Return the image rotated by its EXIF orientation. Invalid metadata are ignored, as by
    viewers."""
    from PIL import ImageOps

    with suppress(Exception):  # reading untrusted metadata may raise anything
        return ImageOps.exif_transpose(raw)
    return raw


def _composite_on_white(image: PillowImage) -> PillowImage:
    """Return the image on white, without the colours of transparent pixels."""
    from PIL import Image

    if not image.has_transparency_data:
        return image
    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(image.convert("RGBA"))
    return white


def _stream(file: Path | IO[bytes]) -> AbstractContextManager[IO[bytes]]:
    """Return a context manager for the file, which closes only what it opens."""
    return file.open("rb") if isinstance(file, Path) else nullcontext(file)


def shorten(names: Sequence[str]) -> str:
    """Return names for one line: the first ones, and the number of others."""
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return ", ".join(sorted(names)[:MAX_SHOWN]) + more


def _centre_square(image: object, size: int) -> Images:
    """Return the central square of an image, (size, size) or (size, size, channels)."""
    from PIL import Image, ImageOps

    assert isinstance(image, Image.Image)
    fitted = ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)
    return np.asarray(fitted, dtype=np.uint8)
