"""Read image files as arrays, as viewers display them; one line lists all invalid files."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Annotated, Literal, Protocol, runtime_checkable

import numpy as np
from annotated_types import Ge, Le
from numpy.typing import NDArray

from fedgen.data.datasets import Dataset, Images, as_images
from fedgen.data.scans import (
    MAX_IMAGES,
    MAX_VALUES,
    SCAN_SUFFIXES,
    Axis,
    RejectedError,
    Slices,
    Window,
    apply_window,
    reader_of,
    select_slices,
)
from fedgen.errors import FedgenError

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

_MOST_PIXELS = 2**26  # limit on the pixels of an image
_PHOTOMETRIC, _SAMPLE_FORMAT = 262, 339  # tags of TIFF; 0: white is zero, 1: unsigned
_LARGEST = 1024  # limit on the resized side
_GREY = ("1", "L", "LA")
_DEEP = ("I", "F")  # 16 or 32 bits, by prefix of Pillow's mode
_DEEPER = re.compile(r";(16|32)[BLNF]")  # the same for colour, by Pillow's raw mode
Side = Annotated[int, Ge(8), Le(_LARGEST)]
"""Pixels of a side of a square image."""
Channels = Literal[1, 3]
"""Grey, or RGB."""
_MAX_NAME_CHARS = 300  # characters of a name
MAX_SHOWN = 20
"""Names in a line."""


@dataclass(frozen=True)
class ReadOptions:
    """Public settings for converting files to 8-bit images.

    size: crop images to a square and resize them to this many pixels; None: unchanged.
    channels: 1: convert to grey; 3: convert to RGB; None: unchanged.
    window: center and width of intensities of more than 8 bits; None: the window in each DICOM
        file, and others are refused.
    axis: plane of the slices of NIfTI volumes.
    slices: used part of volumes and of DICOM files with several frames; None: all.
    tag: DICOM keyword; its value is returned for each file; empty: none.
    allow_multiple: whether a file may contain several frames or slices, each a separate image.
    """

    size: int | None = None
    channels: int | None = None
    window: Window | None = None
    axis: Axis = "axial"
    slices: Slices | None = None
    tag: str = ""
    allow_multiple: bool = False


@dataclass(frozen=True)
class DecodedFiles:
    """Images of files.

    images: (n, channels, h, w).
    counts: number of images in each file, (m,).
    tag_values: value of the DICOM tag in each file; empty: not requested.
    has_scans: whether some files are DICOM or NIfTI.
    all_dicom: whether all files are DICOM.
    """

    images: Images
    counts: NDArray[np.int64]
    tag_values: list[str]
    has_scans: bool
    all_dicom: bool


@runtime_checkable
class OpenableFile(Protocol):
    """A file, or a part of an archive."""

    def open(self, mode: Literal["rb"], /) -> IO[bytes]:
        """Return its bytes as a stream."""


ImageFile = OpenableFile | IO[bytes]


def read_images(
    place: Path | str,
    sources: Sequence[tuple[str, ImageFile]],
    options: ReadOptions,
    key: str = "data.path",
) -> DecodedFiles:
    """Return all images in this order, as viewers display them: rotated by EXIF orientation, on
    white where transparent; ``scans.py`` decodes DICOM and NIfTI.

    Args:
        place: their location, for errors.
        sources: name of each image for errors, and its file.
        key: setting that names ``place``, for errors.

    Raises:
        FedgenError: for files that are not readable images of limited size, and for images that are
            not square, or differ in size or in colour.
    """
    rejected: dict[str, list[str]] = {problem: [] for problem in _PROBLEMS}
    names, images, tag_values, counts, kinds = [], [], [], [], []
    for name, file in sources:
        try:
            file_images, tag, kind = _read_file(file, options)
        except RejectedError as error:
            rejected[str(error)].append(name)
            continue
        for image in file_images:
            names.append(name)
            images.append(pixels_of(image, options.size))
        tag_values.append(tag)
        kinds.append(kind)
        counts.append(len(file_images))
    total = len(sources)
    problems = [
        (
            problem.format(count=len(names_), total=total, names=shorten(names_), tag=options.tag),
            to_do,
        )
        for (problem, to_do), names_ in zip(_PROBLEMS.values(), rejected.values(), strict=True)
        if names_
    ]
    problems += _shape_problems(names, images)
    if len(problems) == 1:
        raise FedgenError(key, *problems[0])
    if problems:
        text = " | ".join(f"{problem} ({remedy})" for problem, remedy in problems)
        raise FedgenError(key, text, "correct these")
    return DecodedFiles(
        as_images(place, np.stack(images)),
        np.array(counts, np.int64),
        tag_values,
        has_scans=any(kinds),
        all_dicom=set(kinds) == {"DICOM"},
    )


_PROBLEMS = {
    "large": (
        "too large: {names}",
        f"resize or split them: at most {_MOST_PIXELS:,} pixels per image, {MAX_IMAGES:,} images "
        f"and {MAX_VALUES:,} values per file",
    ),
    "deep": (
        "more than 8 bits a pixel, or intensities in other units: {names}",
        "with data=folder set data.window=[center,width], a public range in these units; or scale "
        "all images by the same range to 0..255",
    ),
    "deep_colour": (
        "colours of more than 8 bits a pixel: {names}",
        "scale them to 0..255 first, all by the same range",
    ),
    "several": ("several images in a file: {names}", "save each page as a separate file"),
    "volume": (
        "not one volume of grey values: {names}",
        "save each volume, with one value per voxel, as a separate file",
    ),
    "rescaled": ("PGM of more than 8 bits: {names}", "save them as PNG or TIFF of 16 bits"),
    "deflated": ("deflated DICOM files: {names}", "save them uncompressed"),
    "window": (
        "the DICOM file has an invalid window: {names}",
        "set data.window=[center,width], a public range of intensities",
    ),
    "compressed": (
        "compressed in a format without a decoder: {names}",
        "pip install pylibjpeg pylibjpeg-openjpeg pylibjpeg-libjpeg, or save them uncompressed",
    ),
    "tagless": (
        "{count} of {total} files have no value for the DICOM tag {tag}: {names}",
        "fill it in, remove these files, or set data.person to a regular expression on file names",
    ),
    "unreadable": (
        "{count} of {total} files cannot be read as images: {names}",
        "remove them",
    ),
}
"""Problem of a file -> message and remedy."""


def _read_file(file: ImageFile, options: ReadOptions) -> tuple[list[PillowImage], str, str]:
    """Return the images of a file, as viewers display them, the value of the tag, and the kind of
    scan; empty: none.

    Raises:
        RejectedError: for an invalid file.
    """
    from PIL import Image

    try:
        with _stream(file) as stream, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fedgen has its own limits
            if (reader := reader_of(stream)) is None:
                if options.tag:
                    raise RejectedError("tagless")
                return [_read_pillow_image(stream, options)], "", ""
            scan = reader(stream, options.window, options.axis, options.tag)
    except (RejectedError, FedgenError):
        raise
    except Image.DecompressionBombError as error:
        raise RejectedError("large") from error
    except Exception as error:  # parsers of untrusted files may raise anything
        raise RejectedError("unreadable") from error
    if len(scan.images) > 1 and not options.allow_multiple:
        raise RejectedError("several")
    pictures = [Image.fromarray(pixels) for pixels in select_slices(scan.images, options.slices)]
    if options.channels is not None:
        pictures = [
            picture.convert("L" if options.channels == 1 else "RGB") for picture in pictures
        ]
    return pictures, scan.tag, scan.kind


def _read_pillow_image(stream: IO[bytes], options: ReadOptions) -> PillowImage:
    """Return the image of a file in any of Pillow's formats."""
    from PIL import Image

    raw = Image.open(stream)
    if raw.width * raw.height > _MOST_PIXELS:
        raise RejectedError("large")
    # an MPO file contains further pictures
    if raw.format != "MPO" and getattr(raw, "n_frames", 1) > 1:
        raise RejectedError("several")
    is_deep = raw.mode.startswith(_DEEP)
    if is_deep and raw.format == "PPM":
        raise RejectedError("rescaled")  # Pillow does not return the values in the file
    if is_deep and options.window is None:
        raise RejectedError("deep")  # its range is unknown; clipping would lose it
    if not is_deep and _DEEPER.search(str(raw.tile)):
        raise RejectedError("deep_colour")  # Pillow reads the upper bytes
    image = _apply_orientation(raw)
    if is_deep and options.window is not None:
        values, tags = np.asarray(image), getattr(raw, "tag_v2", {})
        if values.dtype == np.int32 and tags.get(_SAMPLE_FORMAT, (1,)) == (1,):
            values = values.view(np.uint32)  # Pillow has no mode for these
        pixels = apply_window(values, options.window)
        image = Image.fromarray(255 - pixels if tags.get(_PHOTOMETRIC) == 0 else pixels)
    grey = options.channels == 1 or (options.channels is None and image.mode in _GREY)
    return _composite_on_white(image).convert("L" if grey else "RGB")


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


def _stream(file: ImageFile) -> AbstractContextManager[IO[bytes]]:
    """Return a context manager for the file, which closes only what it opens."""
    return file.open("rb") if isinstance(file, OpenableFile) else nullcontext(file)


def shorten(names: Sequence[str]) -> str:
    """Return names for one line: the first ones, each cut, and the number of others."""
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return ", ".join(name[:_MAX_NAME_CHARS] for name in sorted(names)[:MAX_SHOWN]) + more


def mask(name: str) -> str:
    """Return a name with letters replaced by ``a`` and digits by ``0``: it may identify a
    person."""
    name = re.sub(r"[^\W\d_]", "a", name[:_MAX_NAME_CHARS])
    return re.sub(r"\d", "0", name)


def is_image_name(name: str) -> bool:
    """Return whether a file is an image, by its name."""
    from PIL import Image

    Image.init()
    suffix = PurePosixPath(name).suffix.lower()
    return name.lower().endswith(SCAN_SUFFIXES) or Image.EXTENSION.get(suffix) in Image.OPEN


def pixels_of(picture: PillowImage, size: Side | None, channels: Channels | None = None) -> Images:
    """Return the pixels of an image, (height, width) or (height, width, 3).

    Args:
        size: crop it to a square and resize it to this many pixels; None: unchanged.
        channels: 1: convert to grey; 3: convert to RGB; None: unchanged.
    """
    from PIL import Image, ImageOps

    if channels is not None:
        picture = picture.convert("L" if channels == 1 else "RGB")
    if size is not None:
        picture = ImageOps.fit(picture, (size, size), Image.Resampling.BICUBIC)
    return np.asarray(picture, dtype=np.uint8)


def convert(images: Images, size: Side | None, channels: Channels | None) -> Images:
    """Return images (n, channels, h, w) with ``pixels_of`` applied to each."""
    if (size is None or images.shape[2:] == (size, size)) and channels in (None, images.shape[1]):
        return images
    from PIL import Image

    pictures = (
        Image.fromarray(image[0] if len(image) == 1 else np.moveaxis(image, 0, 2))
        for image in images
    )
    return as_images("images", np.stack([pixels_of(p, size, channels) for p in pictures]))


def convert_dataset(dataset: Dataset, size: Side | None, channels: Channels | None) -> Dataset:
    """Return a data set with ``pixels_of`` applied to each image."""
    images, test_images = (
        convert(split, size, channels) for split in (dataset.images, dataset.test_images)
    )
    return replace(dataset, images=images, test_images=test_images)
