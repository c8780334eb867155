"""Grey values of clinical images: DICOM (pydicom), NIfTI (nibabel), and windows of intensities.

A window (center, width) maps intensities to 8 bits: center - width / 2 becomes 0 and center + width
/ 2 becomes 255, linearly, and values outside become 0 or 255. It is a public setting, or the one in
the DICOM file itself: then it depends on this record only. fedgen never derives a window from
several images.
"""

from __future__ import annotations

import gzip
import importlib
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Gt, Le
from numpy.typing import NDArray
from PIL import Image

from fedgen.errors import FedgenError

if TYPE_CHECKING:
    from pydicom import Dataset as DicomFile

Axis = Literal["sagittal", "coronal", "axial"]
"""Plane of the slices of a volume."""
Window = tuple[Annotated[float, Ge(-1e9), Le(1e9)], Annotated[float, Gt(0), Le(1e9)]]
"""Center and width."""
Slices = tuple[Annotated[float, Ge(0), Le(1)], Annotated[float, Ge(0), Le(1)]]
"""Start and end of the used part of a volume, as fractions of the number of slices."""
Pixels = NDArray[np.uint8]
"""(height, width), or (height, width, 3)."""

SCAN_SUFFIXES = (".dcm", ".dicom", ".nii", ".nii.gz")
"""Usual file name suffixes of DICOM and NIfTI."""
PREAMBLE = 132
"""Bytes before the first element of a DICOM file."""

MAX_VALUES, MAX_IMAGES = 2**27, 2**13
"""Limits of a file."""
_MAX_FRAME = 2**26  # values
_MAX_OFFSET = 2**20  # bytes before the voxels
_MAX_BYTES = 2**31  # of a file
_NIFTI_1, _NIFTI_2 = 348, 540  # bytes of a header; its first number
_DEFLATED = "1.2.840.10008.1.2.1.99"  # rejected: its decompressed size is unbounded
_INSTALL_CLINICAL = 'pip install "fedgen[clinical]"'


class RejectedError(Exception):
    """A file is rejected; the message is a key of the problems in ``images.py``."""


@dataclass(frozen=True)
class Scan:
    """Images of a file, its format, and its value of a tag as text; empty: none."""

    images: list[Pixels]
    kind: Literal["DICOM", "NIfTI"]
    tag: str = ""


def validate_tag(tag: str) -> str:
    """Return the keyword of a DICOM tag, e.g. ``PatientID``.

    Raises:
        FedgenError: for an unknown one.
    """
    try:
        from pydicom.datadict import tag_for_keyword
    except ImportError as error:
        raise FedgenError("data.person", "DICOM tags need pydicom", _INSTALL_CLINICAL) from error
    if tag_for_keyword(tag) is None:
        remedy = "take a keyword of DICOM, e.g. tag:PatientID"
        raise FedgenError("data.person", f"there is no DICOM tag {tag[:100]!r}", remedy)
    return tag


def apply_window(values: NDArray[Any], window: Window) -> Pixels:
    """Map intensities to 8 bits by a window; NaN becomes 0."""
    center, width = window
    share = (values.astype(np.float64) - (center - width / 2)) / width
    return np.rint(np.nan_to_num(np.clip(share, 0, 1), nan=0.0) * 255).astype(np.uint8)


def select_slices(images: list[Pixels], part: Slices | None) -> list[Pixels]:
    """Return the slices in ``part`` of a volume, at least one; None: all."""
    if part is None:
        return images
    start, end = (round(share * len(images)) for share in part)
    start = min(start, len(images) - 1)
    return images[start : max(end, start + 1)]


def reader_of(stream: IO[bytes]) -> Callable[[IO[bytes], Window | None, Axis, str], Scan] | None:
    """Return the reader for a file, by its content; None: it is neither DICOM nor NIfTI."""
    head = stream.read(_NIFTI_2)
    stream.seek(0)
    if is_dicom(head):
        return read_dicom
    if head[:2] == b"\x1f\x8b":
        try:
            head = gzip.GzipFile(fileobj=stream).read(_NIFTI_2)
        except (OSError, EOFError):
            head = b""
        stream.seek(0)
    return read_nifti if _nifti_header_bytes(head) else None


def is_dicom(head: bytes) -> bool:
    """Return whether a file is DICOM, by its first ``PREAMBLE`` bytes."""
    return head[PREAMBLE - 4 : PREAMBLE] == b"DICM"


def _nifti_header_bytes(head: bytes) -> int:
    """Return the number of bytes of a NIfTI header; 0 for other files."""
    for length in (_NIFTI_1, _NIFTI_2):
        orders: tuple[Literal["little", "big"], ...] = ("little", "big")
        if length in [int.from_bytes(head[:4], order) for order in orders]:
            return length
    return 0


# --- NIfTI ------------------------------------------------------------------------------------


def read_nifti(stream: IO[bytes], window: Window | None, axis: Axis, tag: str) -> Scan:
    """Return the slices of a volume, oriented as in DICOM: the patient's head or front is up, and
    the left side or the back is on the right.

    Raises:
        RejectedError: if the file is not one grey volume, or for intensities of more than 8 bits
            without a window.
    """
    try:
        nibabel: Any = importlib.import_module("nibabel")
    except ImportError as error:
        raise FedgenError("data.path", "NIfTI files need nibabel", _INSTALL_CLINICAL) from error
    if tag:
        raise RejectedError("tagless")
    is_gzipped = stream.read(2) == b"\x1f\x8b"
    stream.seek(0)
    unzipped = gzip.GzipFile(fileobj=stream) if is_gzipped else stream
    head = unzipped.read(_NIFTI_2)
    kind = nibabel.Nifti1Image if _nifti_header_bytes(head) == _NIFTI_1 else nibabel.Nifti2Image
    header = kind.header_class.from_fileobj(io.BytesIO(head), check=False)
    shape = [int(side) for side in header.get_data_shape()]
    while len(shape) > 3 and shape[-1] == 1:
        del shape[-1]
    numbers = header.get_data_dtype()
    if len(shape) != 3 or min(shape) < 1 or numbers.kind not in "iuf":
        raise RejectedError("volume")
    plane = ("sagittal", "coronal", "axial").index(axis)
    offset, values = int(header["vox_offset"]), math.prod(shape)
    if not 0 <= offset <= _MAX_OFFSET:
        raise RejectedError("unreadable")
    # the axis of the slices is unknown until the volume is reoriented
    if values > MAX_VALUES or max(shape) > MAX_IMAGES:
        raise RejectedError("large")
    # at most the size in the header: gzip files may expand to any size
    content = head + unzipped.read(offset + values * numbers.itemsize - len(head))
    volume = nibabel.as_closest_canonical(kind.from_bytes(content))
    intensities = np.asanyarray(volume.dataobj).reshape(volume.shape[:3])
    if window is None and intensities.dtype != np.uint8:
        raise RejectedError("deep")
    # nibabel: to the patient's right, front and head; DICOM: to the left, back and feet
    slices = np.moveaxis(np.flip(intensities), plane, 0).transpose(0, 2, 1)
    images = [
        np.ascontiguousarray(s) if window is None else apply_window(s, window) for s in slices
    ]
    width, height = np.delete(np.array(volume.header.get_zooms()[:3], float), plane)
    return Scan([_resample_to_square_pixels(image, height / width) for image in images], "NIfTI")


def _resample_to_square_pixels(image: Pixels, ratio: float) -> Pixels:
    """Return an image with square pixels.

    Args:
        ratio: height of a pixel over its width; implausible values are ignored.
    """
    if not 1 / _MAX_RATIO <= ratio <= _MAX_RATIO or abs(ratio - 1) < 0.01:
        return image
    height, width = image.shape
    size = (width, round(height * ratio)) if ratio > 1 else (round(width / ratio), height)
    return np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BILINEAR))


_MAX_RATIO = 16


# --- DICOM ------------------------------------------------------------------------------------


def read_dicom(stream: IO[bytes], window: Window | None, axis: Axis, tag: str) -> Scan:
    """Return the frames of a DICOM file as viewers display them (PS3.3 C.7.6.3, C.11).

    Stored values are rescaled (e.g. to Hounsfield units) and mapped to 8 bits by the window; None:
    that of the file, or its table of values. MONOCHROME1 is inverted.

    Raises:
        RejectedError: for unsupported images, or for intensities of more than 8 bits without a
            window.
    """
    del axis
    try:
        pydicom: Any = importlib.import_module("pydicom")
    except ImportError as error:
        raise FedgenError("data.path", "DICOM files need pydicom", _INSTALL_CLINICAL) from error
    if stream.seek(0, io.SEEK_END) > _MAX_BYTES:
        raise RejectedError("large")
    stream.seek(PREAMBLE)
    reader = pydicom.filereader
    meta = reader.read_dataset(stream, False, True, stop_when=lambda tag, vr, size: tag >> 16 != 2)
    if meta.get("TransferSyntaxUID") == _DEFLATED:
        raise RejectedError("deflated")
    stream.seek(0)
    file = pydicom.dcmread(stream)
    frames, samples = int(file.get("NumberOfFrames") or 1), int(file.SamplesPerPixel)
    values = samples * int(file.Rows) * int(file.Columns)
    if values > _MAX_FRAME or frames * values > MAX_VALUES or not 1 <= frames <= MAX_IMAGES:
        raise RejectedError("large")
    try:
        stored = pydicom.pixels.pixel_array(file)  # colours as RGB
    except (RuntimeError, NotImplementedError) as error:  # no decoder
        raise RejectedError("compressed") from error
    stored = stored if frames > 1 else stored[None]
    value = str(file.get(tag, "") or "").strip() if tag else ""
    if tag and not value:
        raise RejectedError("tagless")
    if file.PhotometricInterpretation == "PALETTE COLOR":
        bits = int(file.RedPaletteColorLookupTableDescriptor[2])
        coloured = [pydicom.pixels.apply_color_lut(frame, file) for frame in stored]
        return Scan(
            [(frame >> max(bits - 8, 0)).astype(np.uint8) for frame in coloured], "DICOM", value
        )
    if samples == 3:
        if int(file.BitsStored) > 8:
            raise RejectedError("deep_colour")
        return Scan([_to_8_bits(frame, int(file.BitsStored)) for frame in stored], "DICOM", value)
    images = [_grey(pydicom, file, frame, number, window) for number, frame in enumerate(stored)]
    if file.PhotometricInterpretation == "MONOCHROME1":
        images = [255 - image for image in images]
    return Scan(images, "DICOM", value)


def _grey(
    pydicom: Any, file: DicomFile, stored: NDArray[Any], number: int, window: Window | None
) -> Pixels:
    """Return a grey frame in 8 bits, before the inversion of MONOCHROME1."""

    def attribute(sequence: str, name: str) -> Any:
        """Return an attribute of the frame, of all frames, or of the file."""
        places = [
            file.get("PerFrameFunctionalGroupsSequence", [])[number : number + 1],
            file.get("SharedFunctionalGroupsSequence", [])[:1],
        ]
        inner = [item for place in places for group in place for item in group.get(sequence, [])]
        values = [item.get(name) for item in (*inner, file)]
        return next((value for value in values if value is not None), None)

    slope = attribute("PixelValueTransformationSequence", "RescaleSlope")
    intercept = attribute("PixelValueTransformationSequence", "RescaleIntercept")
    if "ModalityLUTSequence" in file:
        values = pydicom.pixels.apply_modality_lut(stored, file)
    else:
        values = stored * float(1 if slope is None else slope) + float(intercept or 0)
    if window is not None:
        return apply_window(values, window)
    center = _first(attribute("FrameVOILUTSequence", "WindowCenter"))
    width = _first(attribute("FrameVOILUTSequence", "WindowWidth"))
    if center is not None and width is not None:
        function = str(attribute("FrameVOILUTSequence", "VOILUTFunction") or "LINEAR").upper()
        return _file_window(values, center, width, function)
    if "VOILUTSequence" in file:
        bits = int(file.VOILUTSequence[0].LUTDescriptor[2])
        values = pydicom.pixels.apply_voi(values.astype(np.int64), file)
        return _to_8_bits(values, bits)
    bits = int(file.BitsStored)
    if bits > 8 or int(file.PixelRepresentation) or (slope or 1, intercept or 0) != (1, 0):
        raise RejectedError("deep")
    return _to_8_bits(stored, bits)


def _to_8_bits(values: NDArray[Any], bits: int) -> Pixels:
    return apply_window(values, ((2**bits - 1) / 2, 2**bits - 1))


def _file_window(values: NDArray[Any], center: float, width: float, function: str) -> Pixels:
    """Map intensities by the window of a DICOM file (PS3.3 C.11.2.1.2, C.11.2.1.3)."""
    if function == "SIGMOID" and width > 0:
        exponent = np.clip(-4 * (values - center) / width, -700, 700)
        return apply_window(1 / (1 + np.exp(exponent)), (0.5, 1.0))
    if function == "LINEAR" and width >= 1:  # a width of n covers n whole numbers
        center, width = center - 0.5, width - 1
    elif function != "LINEAR_EXACT" or width <= 0:
        raise RejectedError("window")
    return apply_window(values, (center, max(width, np.finfo(float).tiny)))


def _first(value: Any) -> float | None:
    """Return the first of possibly several values."""
    if value is None or isinstance(value, str | float | int):
        return None if value is None else float(value)
    return float(value[0]) if len(value) else None
