"""Image files as arrays: what viewers show of them, or one line about all that cannot be read."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from fedgen.data.datasets import Images, as_images, centre_square
from fedgen.errors import FedgenError

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

_MOST_PIXELS = 2**26  # of an image
_LARGEST = 1024  # side that images are resized to
_GREY = ("1", "L", "LA")
_DEEP = ("I", "F")  # of 16 or 32 bits, by how the names of Pillow's modes begin
_DEEPER = re.compile(r";(16|32)[BLNF]")  # the same of colour, by what Pillow decodes
SHOWN = 20
"""Names in a line."""


def check_conversion(size: int | None, channels: int | None) -> None:
    """Raises FedgenError for a size or a number of channels that images cannot be made to have."""
    if size is not None and not 8 <= size <= _LARGEST:
        raise FedgenError("data.size", f"must lie in 8..{_LARGEST}, got {size}", "e.g. 32")
    if channels not in (None, 1, 3):
        problem = f"must be 1 (grey) or 3 (RGB), got {channels}"
        raise FedgenError("data.channels", problem, "or null, to leave images as they are")


def read_images(
    place: Path | str,
    sources: Sequence[tuple[str, Path | IO[bytes]]],
    size: int | None,
    channels: int | None,
    key: str = "data.path",
) -> Images:
    """All images (n, channels, h, w), in this order, as viewers show them: turned by what a camera
    noted (EXIF), on white where they are transparent.

    Args:
        place: where they are, for errors.
        sources: what each is called in errors, and its file.
        key: the setting that named ``place``, for errors.

    Raises:
        FedgenError: for files that are no images, and images that do not fit together.
    """
    from PIL import Image, UnidentifiedImageError

    bad: list[str] = []
    several: list[str] = []
    large: list[str] = []
    deep: list[str] = []
    found = []
    for name, file in sources:
        try:
            with _stream(file) as stream, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow's limits are not ours
                raw = Image.open(stream)
                if raw.width * raw.height > _MOST_PIXELS:
                    large.append(name)
                    continue
                if raw.mode.startswith(_DEEP) or _DEEPER.search(str(raw.tile)):
                    deep.append(name)  # its range is not told, and cut off it would be lost
                    continue
                # a camera's MPO has a picture, and others of it beside
                if raw.format != "MPO" and getattr(raw, "n_frames", 1) > 1:
                    several.append(name)
                    continue
                grey = channels == 1 or (channels is None and raw.mode in _GREY)
                image = _on_white(_upright(raw)).convert("L" if grey else "RGB")
        except Image.DecompressionBombError:
            large.append(name)
            continue
        except (UnidentifiedImageError, OSError, ValueError, NotImplementedError, SyntaxError):
            bad.append(name)
            continue
        found.append(centre_square(image, size) if size else np.asarray(image, np.uint8))
    wrong: list[tuple[str, str]] = []  # problems and remedies
    names = [name for name, _ in sources if name not in {*large, *deep, *several, *bad}]
    if large:
        problem = f"more than {_MOST_PIXELS:,} pixels: {some_of(large)}"
        wrong.append((problem, "make them smaller"))
    if deep:
        problem = f"more than 8 bits a pixel: {some_of(deep)}"
        wrong.append((problem, "scale them to 0..255 first, all by the same range"))
    if several:
        problem = f"several images in a file: {some_of(several)}"
        wrong.append((problem, "save each page as a file of its own"))
    if bad:
        problem = f"{len(bad)} of {len(sources)} files cannot be read as images: {some_of(bad)}"
        wrong.append((problem, "remove them"))
    if len({image.ndim for image in found}) > 1:
        grey_ones = [n for n, image in zip(names, found, strict=True) if image.ndim == 2]
        colour = [n for n, image in zip(names, found, strict=True) if image.ndim == 3]
        kind, fewer = ("grey", grey_ones) if len(grey_ones) <= len(colour) else ("colour", colour)
        problem = (
            f"grey images: {len(grey_ones)}, in colour: {len(colour)}; {kind}: {some_of(fewer)}"
        )
        wrong.append((problem, "set data.channels=1 or data.channels=3"))
    shapes = sorted({image.shape[:2] for image in found})
    if len(shapes) > 1 or any(high != wide for high, wide in shapes):
        sizes = ", ".join(f"{wide}x{high}" for high, wide in shapes)
        if len(shapes) > SHOWN:
            (low, high), (narrow, wide) = ((min(s), max(s)) for s in zip(*shapes, strict=True))
            sizes = f"{len(shapes)} sizes, {narrow} to {wide} wide and {low} to {high} high"
        problem = f"images are to be square and of one size, and there are {sizes}"
        remedy = "set data.size=32 (or another): the middle square is kept, and resized"
        wrong.append((problem, remedy))
    if len(wrong) == 1:
        raise FedgenError(key, *wrong[0])
    if wrong:
        told = " | ".join(f"{problem} ({remedy})" for problem, remedy in wrong)
        raise FedgenError(key, told, "correct these")
    return as_images(place, np.stack(found))


def _upright(raw: PillowImage) -> PillowImage:
    """Turned as its camera was held. Notes that cannot be read say nothing, as to viewers."""
    from PIL import ImageOps

    with suppress(Exception):  # whatever reading of what somebody made up ends in
        return ImageOps.exif_transpose(raw)
    return raw


def _on_white(image: PillowImage) -> PillowImage:
    """Without what transparent pixels hide."""
    from PIL import Image

    if not image.has_transparency_data:
        return image
    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(image.convert("RGBA"))
    return white


def _stream(file: Path | IO[bytes]) -> AbstractContextManager[IO[bytes]]:
    """Closes what it opens."""
    return file.open("rb") if isinstance(file, Path) else nullcontext(file)


def some_of(names: Sequence[str]) -> str:
    """Names for one line: the first of them, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(sorted(names)[:SHOWN]) + more
