"""Clinical images, persons, labels and archives."""

from __future__ import annotations

import gzip
import io
import struct
import unicodedata
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pydicom
import pytest
from clinical import dicom, png, save_dicom, save_nifti, save_tar
from hypothesis import given
from hypothesis import strategies as st
from mutation import kills
from numpy.typing import NDArray
from PIL import Image
from pydicom.dataset import Dataset as Item
from pydicom.uid import RLELossless
from tiny import STREAMS, tiny

from fedgen import cli
from fedgen.data.datasets import Dataset
from fedgen.data.folders import folder
from fedgen.data.images import ReadOptions, read_images
from fedgen.data.scans import apply_window
from fedgen.data.tables import number_labels
from fedgen.errors import FedgenError

RNG = np.random.default_rng(0)
STORED = RNG.integers(0, 4096, (16, 16)).astype(np.uint16)
SIGNED = RNG.integers(-2048, 2048, (16, 16)).astype(np.int16)


def read(path: Path, **settings: Any) -> Dataset:
    return folder(STREAMS, None, str(path), **settings)


def pixels(file: pydicom.FileDataset | bytes, **settings: Any) -> NDArray[np.uint8]:
    """Return the images of a file, (n, channels, h, w)."""
    stream = io.BytesIO()
    if isinstance(file, bytes):
        stream.write(file)
    else:
        pydicom.dcmwrite(stream, file, enforce_file_format=True)
    stream.seek(0)
    return read_images(
        "here", [("a file", stream)], ReadOptions(allow_multiple=True, **settings)
    ).images


# --- windows ------------------------------------------------------------------------------------


@kills("fedgen/data/scans.py", "center - width / 2)) / width", "center)) / width")
def test_a_window_maps_its_range_to_8_bits() -> None:
    """A window of 400 Hounsfield units around 40, and NaN, which some volumes contain."""
    values = np.array([-1000.0, -160, 40, 240, 3000, np.nan])
    assert apply_window(values, (40, 400)).tolist() == [0, 0, 128, 255, 255, 0]


@kills("fedgen/data/scans.py", "center - 0.5, width - 1", "center, width")
@pytest.mark.parametrize("function", [None, "LINEAR", "LINEAR_EXACT", "SIGMOID"])
@pytest.mark.parametrize("stored", [STORED, SIGNED])
@pytest.mark.parametrize("rescale", [(1, 0), (0.5, -300.0)])
def test_the_window_of_a_dicom_file(
    function: str | None, stored: NDArray[Any], rescale: tuple[float, float]
) -> None:
    """As pydicom applies it, scaled to 8 bits."""
    slope, intercept = rescale
    file = dicom(
        stored,
        WindowCenter=[100, 7],
        WindowWidth=[700, 7],
        VOILUTFunction=function,
        RescaleSlope=slope,
        RescaleIntercept=intercept,
    )
    values = pydicom.pixels.apply_modality_lut(stored, file)
    expected = pydicom.pixels.apply_windowing(values, file)
    least, most = (-2048, 2047) if stored.dtype.kind == "i" else (0, 4095)
    share = (expected - (least * slope + intercept)) / ((most - least) * slope)
    assert np.abs(pixels(file)[0, 0] - share * 255).max() <= 0.5 + 1e-9


@kills(
    "fedgen/data/scans.py", "if window is not None:\n        return", "if False:\n        return"
)
def test_a_public_window_replaces_that_of_the_file() -> None:
    file = dicom(STORED, WindowCenter=100, WindowWidth=200)
    assert (pixels(file, window=(2048.0, 4096.0))[0, 0] == apply_window(STORED, (2048, 4096))).all()


@kills("fedgen/data/scans.py", "images = [255 - image for image in images]", "pass")
def test_monochrome1_is_inverted() -> None:
    window = {"WindowCenter": 2048, "WindowWidth": 4096}
    inverse = dicom(STORED, PhotometricInterpretation="MONOCHROME1", **window)
    assert (pixels(inverse) == 255 - pixels(dicom(STORED, **window))).all()


def test_frames_have_their_own_windows() -> None:
    """Of a multi-frame file of the enhanced kind; what frames share is read too."""
    frames = np.stack([STORED, STORED])
    file, own, shared = dicom(frames), [], Item()
    for center in (500, 3000):
        window, frame = Item(), Item()
        window.WindowCenter, window.WindowWidth = center, 400
        frame.FrameVOILUTSequence = [window]
        own.append(frame)
    scale = Item()
    scale.RescaleSlope, scale.RescaleIntercept = 2, -100
    shared.PixelValueTransformationSequence = [scale]
    file.PerFrameFunctionalGroupsSequence = own
    file.SharedFunctionalGroupsSequence = [shared]
    values = STORED * 2.0 - 100
    for image, center in zip(pixels(file), (500, 3000), strict=True):
        assert (image[0] == apply_window(values, (center - 0.5, 399))).all()


def test_a_voi_lookup_table_replaces_the_window() -> None:
    table = Item()
    table.LUTDescriptor, table.LUTData = [4096, 0, 16], list(range(0, 65536, 16))
    table["LUTDescriptor"].VR, table["LUTData"].VR = "US", "US"
    file = dicom(STORED)
    file.VOILUTSequence = [table]
    assert (pixels(file)[0, 0] == apply_window(STORED * 16, (32767.5, 65535))).all()


def test_images_of_8_bits_and_in_colour_need_no_window() -> None:
    grey = RNG.integers(0, 256, (16, 16)).astype(np.uint8)
    assert (pixels(dicom(grey))[0, 0] == grey).all()
    coloured = RNG.integers(0, 256, (16, 16, 3)).astype(np.uint8)
    assert (pixels(dicom(coloured))[0] == coloured.transpose(2, 0, 1)).all()
    assert pixels(dicom(coloured), channels=1).shape == (1, 1, 16, 16)
    assert pixels(dicom(grey), channels=3, size=8).shape == (1, 3, 8, 8)


def test_palettes_are_colours() -> None:
    file = dicom(np.arange(256, dtype=np.uint8).reshape(16, 16))
    file.PhotometricInterpretation = "PALETTE COLOR"
    for colour, factor in (("Red", 256), ("Green", 128), ("Blue", 0)):
        values = (np.arange(256) * factor).astype("<u2").tobytes()
        setattr(file, f"{colour}PaletteColorLookupTableDescriptor", [256, 0, 16])
        setattr(file, f"{colour}PaletteColorLookupTableData", values)
    red, green, blue = pixels(file)[0].reshape(3, -1).astype(int)
    assert (red == np.arange(256)).all() and (green == red // 2).all() and not blue.any()


def test_compressed_files_are_read() -> None:
    file = dicom(STORED, WindowCenter=2048, WindowWidth=4096)
    before = pixels(file)
    file.compress(RLELossless)
    assert (pixels(file) == before).all()


def test_tiff_of_32_bits_and_of_inverted_grey_values(tmp_path: Path) -> None:
    """Pillow's mode has signed values, and does not invert those of 16 bits."""
    for tags, window in (({339: 1}, (2.0**31, 2.0**32)), ({262: 0}, (2048.0, 4096.0))):
        values = STORED.astype(np.int32) * (2**20 if 339 in tags else 1)
        path = tmp_path / "x.tif"
        Image.fromarray(values if 339 in tags else STORED).save(path)
        content = bytearray(path.read_bytes())
        set_tags(content, tags)
        result = pixels(bytes(content), window=window)[0, 0]
        expected = apply_window(values.view(np.uint32), window)
        assert (result == (255 - expected if 262 in tags else expected)).all()


def set_tags(file: bytearray, tags: dict[int, int]) -> None:
    """Change values of a little-endian TIFF file, which has each of these tags."""
    [start] = struct.unpack_from("<I", file, 4)
    [count] = struct.unpack_from("<H", file, start)
    entries = range(start + 2, start + 2 + 12 * count, 12)
    places = {struct.unpack_from("<H", file, at)[0]: at + 8 for at in entries}
    for tag, value in tags.items():
        struct.pack_into("<H", file, places[tag], value)


@pytest.mark.parametrize(
    ("mode", "kind"), [("I;16", "png"), ("I;16", "tif"), ("I", "tif"), ("F", "tif")]
)
def test_pictures_of_more_than_8_bits_are_read_by_a_public_window(
    mode: str, kind: str, tmp_path: Path
) -> None:
    array = STORED.astype({"I;16": np.uint16, "I": np.int32, "F": np.float32}[mode])
    Image.fromarray(array).save(tmp_path / f"x.{kind}")
    result = pixels((tmp_path / f"x.{kind}").read_bytes(), window=(2048.0, 4096.0))
    assert (result[0, 0] == apply_window(STORED, (2048, 4096))).all()


# --- volumes ------------------------------------------------------------------------------------


@kills("fedgen/data/scans.py", "np.flip(intensities)", "intensities")
@pytest.mark.parametrize("codes", ["RAS", "LAS", "SPL"])
@pytest.mark.parametrize(("axis", "shape"), [
    ("axial", (10, 1, 8, 6)), ("coronal", (8, 1, 10, 6)), ("sagittal", (6, 1, 10, 8))
])  # fmt: skip
def test_slices_are_oriented_as_in_dicom(
    codes: str, axis: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    """The voxel at the patient's right, front and head is the first of the first slice."""
    values = np.zeros((6, 8, 10), np.int16)
    values[5, 7, 9] = 100
    axes = [{"R": 0, "L": 0, "A": 1, "P": 1, "S": 2, "I": 2}[code] for code in codes]
    turned = values.transpose(axes)
    turned = np.flip(turned, [at for at, code in enumerate(codes) if code in "LPI"])
    for name in ("volume.nii", "volume.nii.gz"):
        save_nifti(tmp_path / name, turned, codes)
        file = (tmp_path / name).read_bytes()
        # slices of other sides than data.size are cropped
        sliced = pixels(file, window=(50.0, 100.0), axis=axis, size=16)
        assert len(sliced) == shape[0] and sliced.shape[1:] == (1, 16, 16)
        raw = raw_slices(file, axis)
        assert raw.shape == (shape[0], *shape[2:]) and raw[0, 0, 0] == 255 and raw.sum() == 255


def test_slices_have_square_pixels(tmp_path: Path) -> None:
    """Six voxels from head to feet, each as high as four are wide."""
    save_nifti(tmp_path / "a.nii", RNG.integers(0, 256, (24, 24, 6)).astype(np.uint8), scale=4.0)
    file = (tmp_path / "a.nii").read_bytes()
    assert pixels(file, axis="axial").shape == (6, 1, 24, 24)
    assert pixels(file, axis="coronal").shape == pixels(file, axis="sagittal").shape
    assert pixels(file, axis="coronal").shape == (24, 1, 24, 24)


@kills("fedgen/data/scans.py", "max(end, start + 1)]", "end]")
@kills("fedgen/data/scans.py", "start = min(start, len(images) - 1)", "pass")
@pytest.mark.parametrize("part", [(0.0, 1.0), (0.3, 0.7), (0.0, 0.01), (0.99, 1.0), (0.5, 0.55)])
@pytest.mark.parametrize("count", [1, 2, 10])
def test_a_part_of_a_volume_is_selected(
    part: tuple[float, float], count: int, tmp_path: Path
) -> None:
    values = np.arange(count, dtype=np.uint8)[None, None].repeat(8, 0).repeat(8, 1)
    save_nifti(tmp_path / "a.nii", values)
    kept = pixels((tmp_path / "a.nii").read_bytes(), slices=part)[:, 0, 0, 0]
    assert len(kept) == max(1, round(part[1] * count) - round(part[0] * count))
    assert set(kept.tolist()) <= set(range(count))
    if count == 10 and part == (0.3, 0.7):
        assert sorted(kept.tolist()) == [3, 4, 5, 6]


def test_frames_of_a_part_are_selected() -> None:
    frames = np.stack([np.full((8, 8), 20 * n, np.uint8) for n in range(10)])
    file = dicom(frames, BitsAllocated=8, BitsStored=8, HighBit=7)
    assert pixels(file, slices=(0.3, 0.7))[:, 0, 0, 0].tolist() == [60, 80, 100, 120]


@pytest.mark.parametrize("part", [(0.7, 0.3), (0.5, 0.5)])
def test_an_empty_part_of_a_volume_is_refused(part: tuple[float, float], tmp_path: Path) -> None:
    save_nifti(tmp_path / "a" / "a.nii", np.zeros((8, 8, 8), np.uint8))
    with pytest.raises(FedgenError, match=r"data\.slices: selects no slices"):
        read(tmp_path, slices=part)


def raw_slices(file: bytes, axis: Any) -> NDArray[np.uint8]:
    """Return the slices of a volume without cropping."""
    from fedgen.data.scans import read_nifti

    return np.stack(read_nifti(io.BytesIO(file), (50, 100), axis, "").images)


def test_volumes_of_8_bits_need_no_window(tmp_path: Path) -> None:
    values = RNG.integers(0, 256, (8, 8, 8)).astype(np.uint8)
    save_nifti(tmp_path / "a.nii.gz", values)
    assert sorted(pixels((tmp_path / "a.nii.gz").read_bytes()).ravel()) == sorted(values.ravel())


# --- files that are refused -----------------------------------------------------------------------


def nifti(shape: tuple[int, ...], content: bytes = b"", kind: int = 2) -> bytes:
    """Return a header of a volume of bytes, and content that need not agree."""
    header = nibabel.Nifti1Header()
    header["dim"][: len(shape) + 1] = [len(shape), *shape]
    header["datatype"], header["bitpix"], header["vox_offset"] = kind, 8, 352
    header["magic"] = b"n+1"
    return header.binaryblock + b"\0" * 4 + content


def deflated() -> bytes:
    file, stream = dicom(STORED, WindowCenter=1, WindowWidth=9), io.BytesIO()
    file.file_meta.TransferSyntaxUID = pydicom.uid.DeflatedExplicitVRLittleEndian
    pydicom.dcmwrite(stream, file, enforce_file_format=True)
    return stream.getvalue()


def dicom_of_stated_size(rows: int, frames: int) -> bytes:
    """Return a DICOM file with a header that states another size."""
    stream = io.BytesIO()
    file = dicom(STORED, Rows=rows, Columns=rows, NumberOfFrames=frames, WindowWidth=9)
    pydicom.dcmwrite(stream, file, enforce_file_format=True)
    return stream.getvalue()


INVALID_FILES = {
    "an invalid window": (
        dicom(STORED, WindowCenter=1, WindowWidth=0, VOILUTFunction="LINEAR"),
        "has an invalid window: a file; set data.window=",
    ),
    "without a window": (dicom(STORED), "with data=folder set data.window="),
    "signed without a window": (dicom(SIGNED), "with data=folder set data.window="),
    "volume without a window": (
        nifti((8, 8, 8), bytes(1024), 4),
        "with data=folder set data.window=",
    ),
    "colours of 16 bits": (
        dicom(np.zeros((8, 8, 3), np.uint16), BitsStored=16, HighBit=15),
        "colours of more than 8 bits",
    ),
    "four dimensions": (nifti((8, 8, 8, 3), bytes(1536)), "not one volume of grey values"),
    "two dimensions": (nifti((8, 8), bytes(64)), "not one volume of grey values"),
    "voxels in colour": (nifti((8, 8, 8), bytes(1536), 128), "not one volume of grey values"),
    "complex voxels": (nifti((8, 8, 8), bytes(4096), 32), "not one volume of grey values"),
    "too many slices": (
        nifti((1, 1, 30000), bytes(30000)),
        "too large: a file; resize or split them",
    ),
    "too many small frames": (
        dicom_of_stated_size(1, 10000),
        "too large: a file; resize or split them",
    ),
    "too large a frame": (dicom_of_stated_size(11584, 1), "too large"),
    "PGM of 12 bits": (b"P5 8 8 4095\n" + bytes(128), "save them as PNG or TIFF"),
    "too few bytes": (nifti((8, 8, 8), bytes(100)), "cannot be read"),
    "too many voxels": (nifti((30000, 30000, 8)), "too large"),
    "more than a gzip file may hold": (gzip.compress(nifti((30000, 30000, 8))), "too large"),
    "too many frames": (dicom_of_stated_size(65535, 10**6), "too large"),
    "fewer pixels than stated": (dicom_of_stated_size(1024, 1), "cannot be read"),
    "deflated": (deflated(), "deflated DICOM files: a file; save them uncompressed"),
    "only a preamble": (b"\0" * 128 + b"DICM", "cannot be read"),
    "gzip of something else": (gzip.compress(b"hello"), "cannot be read"),
}


@pytest.mark.parametrize("case", INVALID_FILES)
def test_invalid_files_are_one_line(case: str) -> None:
    file, why = INVALID_FILES[case]
    with pytest.raises(FedgenError, match=why) as error, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pixels(file)
    assert len(str(error.value)) < 500 and "\n" not in str(error.value)


@kills(
    "fedgen/data/scans.py",
    "unzipped.read(offset + values * numbers.itemsize - len(head))",
    "unzipped.read()",
)
def test_a_small_file_cannot_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 MB of zeros after a volume of half a kilobyte is not unpacked."""
    file = gzip.compress(nifti((8, 8, 8), bytes(2**24)), 1)
    read_bytes = []
    real = gzip.GzipFile.read
    monkeypatch.setattr(
        gzip.GzipFile, "read", lambda *a: (read_bytes.append(len(r := real(*a))), r)[1]
    )
    assert pixels(file).shape == (8, 1, 8, 8)
    assert sum(read_bytes) < 10_000


def dicom_bytes(file: pydicom.FileDataset) -> bytes:
    stream = io.BytesIO()
    pydicom.dcmwrite(stream, file, enforce_file_format=True)
    return stream.getvalue()


DICOM = dicom_bytes(dicom(STORED, "P1", WindowCenter=2048, WindowWidth=4096))
NIFTI = nifti((8, 8, 8), bytes(range(256)) * 2)


@given(st.sampled_from([DICOM, NIFTI]), st.data())
def test_damaged_files_are_refused_or_read(file: bytes, data: st.DataObject) -> None:
    """Damaged files raise FedgenError only."""
    damaged = bytearray(file[: data.draw(st.integers(133, len(file)))])
    for place in data.draw(st.lists(st.integers(0, min(len(damaged), 700) - 1), max_size=4)):
        damaged[place] = data.draw(st.integers(0, 255))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            assert pixels(bytes(damaged), size=8).shape[1:] == (1, 8, 8)
        except FedgenError as error:
            assert str(error).startswith("data.path: ")


# --- persons --------------------------------------------------------------------------------------


def images_of_persons(place: Path, name: str = "{label}/{person}_{n}.png", count: int = 60) -> None:
    """Write images of 20 persons under two labels; names do not repeat."""
    for n in range(count):
        label, person = ("ill", "well")[n % 2], f"P{n % 20:02d}"
        path = place / name.format(label=label, person=person, n=n)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), n + 1).save(path)


def groups(data: Dataset) -> set[tuple[int, ...]]:
    """Return the grey values of the images of each person."""
    assert data.persons is not None
    values = data.images[:, 0, 0, 0]
    return {tuple(sorted(values[data.persons == p].tolist())) for p in np.unique(data.persons)}


@kills(
    "fedgen/data/folders.py", "if record.person else (record.name,)", "if False else (record.name,)"
)
def test_persons_by_the_names_of_files_and_of_folders(tmp_path: Path) -> None:
    """Each person is entirely in one split."""
    expected = {tuple(range(n + 1, 61, 20)) for n in range(20)}
    images_of_persons(tmp_path / "files")
    images_of_persons(tmp_path / "folders", "{label}/{person}/study/series {n}/{n}.png")
    for data in (
        read(tmp_path / "files", person=r"^(P\d+)_"),
        read(tmp_path / "folders", person="folder", labels=["ill", "well"]),
    ):
        assert groups(data) < expected and len(groups(data)) > 12
        assert len(data.labels) == 3 * len(groups(data)) == 60 - len(data.test_labels)


def test_persons_by_a_tag(tmp_path: Path) -> None:
    """Frames of a file are images of one person, and of one split."""
    for n in range(40):
        frames = np.full((2, 8, 8), n * 100, np.uint16) + np.array([[[0]], [[50]]], np.uint16)
        path = tmp_path / ("ill", "well")[n % 2] / f"IM{n}"
        save_dicom(path, frames, f"P{n % 10}", WindowCenter=2048, WindowWidth=4096)
    data = read(tmp_path, person="tag:PatientID", labels=["ill", "well"])
    assert len(data.labels) + len(data.test_labels) == 80 and len(data.labels) % 8 == 0
    assert all(len(group) == 8 for group in groups(data))
    assert read(tmp_path, labels=["ill", "well"]).suggested_person == "tag:PatientID"
    with pytest.raises(FedgenError, match="names of folders may identify patients: ill, well"):
        read(tmp_path, person="tag:PatientID")
    with pytest.raises(FedgenError, match="there is no DICOM tag 'Patient'"):
        read(tmp_path, person="tag:Patient")
    save_dicom(tmp_path / "ill" / "untagged", STORED[:8, :8], WindowCenter=1, WindowWidth=9)
    images_of_persons(tmp_path, count=1)
    with pytest.raises(
        FedgenError, match=r"2 of 42 files have no value for the DICOM tag PatientID: .*untagged"
    ):
        read(tmp_path, person="tag:PatientID", labels=["ill", "well"])


@pytest.mark.parametrize("split", ["", "train/"])
def test_folders_of_clients_labels_and_persons(split: str, tmp_path: Path) -> None:
    """The names of the labels tell clients from labels."""
    for n in range(120):
        client, label = ("north", "south")[n % 2], ("ill", "well")[n // 2 % 2]
        path = tmp_path / client / f"{split}{label}" / f"{client} {n % 20}" / f"{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / client / "test" / label).mkdir(parents=True, exist_ok=True) if split else None
        Image.new("L", (8, 8), n + 1).save(path)
    for client in ("north", "south") if split else ():
        path = tmp_path / client / "test" / "ill" / "x" / f"{client}.png"
        path.parent.mkdir()
        Image.new("L", (8, 8), 200).save(path)
    data = read(tmp_path, person="folder", labels=["ill", "well"])
    assert data.writers is not None and len(set(data.writers.tolist())) == 2
    assert all(len(group) == 6 for group in groups(data))
    with pytest.raises(FedgenError, match=r"is required with data.person=folder"):
        read(tmp_path, person="folder")


def test_folders_that_are_probably_persons_are_reported(tmp_path: Path) -> None:
    for n in range(60):
        path = tmp_path / ("ill", "well")[n % 2] / f"Erika {n % 20}" / f"{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), n + 1).save(path)
    [warning] = read(tmp_path).data_warnings
    assert "look like persons: for LABEL/PERSON/ set data.person=folder" in warning


def test_persons_that_are_probably_wrong_are_reported(tmp_path: Path) -> None:
    """One for all, and some in both splits."""
    for n in range(60):
        path = tmp_path / ("train", "test")[n % 3 == 2] / "a" / f"P{n % 10}_{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), n + 1).save(path)
    [warning] = read(tmp_path, person="^(P[0-9])").data_warnings
    assert warning.startswith("10 persons have images in both splits")
    first, _ = read(tmp_path, person="^(P)").data_warnings
    assert first.startswith("all images are of one person")


def test_two_forms_of_a_name_are_one_person(tmp_path: Path) -> None:
    for n, form in enumerate(("NFC", "NFD") * 20):
        path = tmp_path / "a" / unicodedata.normalize(form, "José") / f"{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), n + 1).save(path)
    (tmp_path / "a" / "Erika").mkdir()
    Image.new("L", (8, 8), 99).save(tmp_path / "a" / "Erika" / "x.png")
    data = read(tmp_path, person="folder", labels=["a"])
    assert max(map(len, groups(data))) == 40


@kills("fedgen/data/layouts.py", "if len(files) < len(records):", "if False:")
def test_links_to_a_file_that_is_listed_are_refused(tmp_path: Path) -> None:
    images_of_persons(tmp_path, "{label}/{person}/{n}.png")
    (tmp_path / "ill" / "Q").symlink_to(tmp_path / "ill" / "P00")
    with pytest.raises(FedgenError, match=r"an image would be two records: .*/P00/0\.png"):
        read(tmp_path, person="folder", labels=["ill", "well"])


def test_an_empty_training_split_is_one_line(tmp_path: Path) -> None:
    """The folder train/ has none."""
    for name in ("train", "test"):
        (tmp_path / name / "a").mkdir(parents=True)
    Image.new("L", (8, 8), 9).save(tmp_path / "test" / "a" / "x.png")
    with pytest.raises(FedgenError, match="has no training images and 1 test images"):
        read(tmp_path)


@kills("fedgen/data/datasets.py", 'b"".join(sorted(', 'str(person).encode() + b"".join(sorted(')
def test_persons_are_held_out_as_a_whole_by_their_own_images(tmp_path: Path) -> None:
    """Removing a person moves no other, given the public number of images."""
    images_of_persons(tmp_path, "{label}/{person}_{n}.png", 200)
    whole = read(tmp_path, person="^(P[0-9]+)_")
    assert whole.persons is not None

    def held_out(data: Dataset) -> tuple[set[int], set[int]]:
        held = data.hold_out(60, STREAMS, 180)
        out = set(held.test_images[:, 0, 0, 0].tolist())
        assert all(set(group) & out in (set(), set(group)) for group in groups(data))
        return set(held.images[:, 0, 0, 0].tolist()), out

    by_writer = replace(whole, writers=whole.persons).hold_out(60, STREAMS, 180, by_person=True)
    kept, out = held_out(whole)
    assert set(by_writer.test_images[:, 0, 0, 0].tolist()) == out
    assert 10 < len(out) < 150
    for person in np.unique(whole.persons):
        rest = whole.persons != person
        own = set(whole.images[~rest][:, 0, 0, 0].tolist())
        fewer = replace(
            whole, images=whole.images[rest], labels=whole.labels[rest], persons=whole.persons[rest]
        )
        fewer = replace(fewer, persons=np.unique(whole.persons[rest], return_inverse=True)[1])
        assert held_out(fewer) == (kept - own, out - own)


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("Q", "'Q' is neither a column nor a regular expression with a group"),
        ("(Q", r"'\(Q' is neither a column nor a regular expression"),
        ("(Q)", "does not match 60 of 60 file names"),
        (r"(\d*)", "does not match 60 of 60 file names"),
    ],
)
def test_invalid_expressions_are_one_line(expression: str, why: str, tmp_path: Path) -> None:
    images_of_persons(tmp_path)
    with pytest.raises(FedgenError, match=f"data.person: {why}"):
        read(tmp_path, person=expression)


def test_images_outside_the_folders_of_persons_are_refused(tmp_path: Path) -> None:
    images_of_persons(tmp_path, "{label}/{person}/{n}.png")
    images_of_persons(tmp_path, "{label}/{n}.png", 2)
    with pytest.raises(FedgenError, match=r"outside the folders of persons: .*0\.png"):
        read(tmp_path, person="folder", labels=["ill", "well"])
    images_of_persons(tmp_path / "other", "{label}/{person}/{n}.png")
    with pytest.raises(FedgenError, match="does not apply to folders"):
        read(tmp_path, label="sex")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("{label}/{person}_{n}.png", r"^([^_.-]*[0-9])[_-]"),
        ("{label}/{person}-{n}.png", r"^([^_.-]*[0-9])[_-]"),
        ("{label}/IM_{n}.png", ""),
        ("{label}/{n}.png", ""),
        ("{label}/x{n}_1.png", ""),
    ],
)
def test_names_that_look_like_persons_are_reported(
    name: str, hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a setting that the check then accepts."""
    images_of_persons(tmp_path, name)
    data = read(tmp_path)
    assert data.suggested_person == hint
    if not hint:
        return
    asked = ["data", "check", "data=folder", f"data.path={tmp_path}"]
    assert cli.run(asked) == 0
    assert f"data.person='{hint}'" in capsys.readouterr().out
    assert cli.run([*asked, f"data.person='{hint}'"]) == 0
    assert "persons, with 3 images each" in capsys.readouterr().out


@kills(
    "fedgen/run/evaluation.py",
    "if validation.min_samples(evaluation) and not len(data.test_images):",
    "if False:",
)
def test_an_empty_test_split_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of four persons, none is chosen for it; the check proposes what training accepts."""
    for n in range(40):
        path = tmp_path / "data" / "ab"[n % 2] / f"P{n % 4}_{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), n + 1).save(path)
    words = ["data=folder", f"data.path={tmp_path}/data", "data.person='^(P[0-9])_'"]
    assert cli.run(["data", "check", *words]) == 0
    assert "no test images: provide some (folder test/" in capsys.readouterr().out
    train = ["train", "method=mixture", *tiny("mixture"), *words, "data.public_rows=40"]
    asked = [*train, "evaluation=quick", f"run_dir={tmp_path}/run"]
    assert cli.run(asked) == 2
    assert "evaluation: needs test images" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert cli.run([*train, f"run_dir={tmp_path}/run"]) == 0


# --- labels ---------------------------------------------------------------------------------------


def medmnist(path: Path, labels: NDArray[Any]) -> None:
    """Write a file in MedMNIST's layout, with a third split."""
    arrays: dict[str, NDArray[Any]] = {}
    for split, rows in (("train", slice(0, 40)), ("val", slice(40, 50)), ("test", slice(50, 60))):
        arrays[f"{split}_images"] = RNG.integers(0, 256, (60, 28, 28)).astype(np.uint8)[rows]
        arrays[f"{split}_labels"] = labels[rows]
    np.savez(path, **arrays)


FINDINGS = RNG.integers(0, 2, (60, 14)).astype(np.uint8)


@kills("fedgen/data/labels.py", "1 << bit for bit in", "1 for bit in")
def test_labels_of_medmnist(tmp_path: Path) -> None:
    """Classes, an ordinal scale, and several findings per image."""
    file = tmp_path / "x.npz"
    for kind in (np.uint8, np.int64):
        medmnist(file, (np.arange(60) % 5)[:, None].astype(kind))
        assert read(file, classes=5).labels.tolist() == [*range(5)] * 8
    medmnist(file, FINDINGS)
    data = read(file, label=3)
    assert (data.labels == FINDINGS[:40, 3]).all() and data.names == ("no 3", "3")
    data = read(file, label=[3, 0])
    assert (data.labels == FINDINGS[:40, 3] + 2 * FINDINGS[:40, 0]).all()
    assert data.names == ("none", "3", "0", "3+0")
    assert read(file, label=[0], labels=["well", "ill"]).names == ("well", "ill")
    with pytest.raises(FedgenError, match="choose columns by number"):
        read(file, classes=2)


@pytest.mark.parametrize(
    ("label", "labels", "why"),
    [
        (14, None, "choose columns from 0 to 13"),
        ([0, 0], None, "lists 0, 0"),
        ([0, 1, 2, 3, 4], None, "at most 4 columns"),
        ("effusion", None, "columns of an .npz have no names"),
        ([0, 1], ["a", "b"], "has 2 names, but the columns 0, 1 have 4 combinations"),
    ],
)
def test_invalid_columns_are_one_line(label: Any, labels: Any, why: str, tmp_path: Path) -> None:
    medmnist(tmp_path / "x.npz", FINDINGS)
    with pytest.raises(FedgenError, match=why):
        read(tmp_path / "x.npz", label=label, labels=labels)
    medmnist(tmp_path / "x.npz", FINDINGS + 1)
    with pytest.raises(FedgenError, match="contain values other than 0 and 1"):
        read(tmp_path / "x.npz", label=0)


def table(place: Path) -> Path:
    """Write a table of 60 images with two findings and a patient each."""
    lines = ["path,effusion,nodule,site,patient"]
    for n in range(60):
        Image.new("L", (8, 8), n + 1).save(place / f"{n}.png")
        lines.append(f"{n}.png,{n % 2},{n // 2 % 2},{'ab'[n % 2]},Erika {n % 12}")
    (place / "x.csv").write_text("\n".join(lines))
    return place / "x.csv"


def test_columns_of_a_table_are_chosen(tmp_path: Path) -> None:
    path = table(tmp_path)
    data = read(path, label=["effusion", "nodule"], person="patient")
    value = data.images[:, 0, 0, 0].astype(int) - 1
    assert (data.labels == value % 4).all()
    assert data.names == ("none", "effusion", "nodule", "effusion+nodule")
    assert all(len(group) == 5 for group in groups(data))
    assert data.unread_columns == ("site",)
    assert read(path, label="nodule").names == ("no nodule", "nodule")
    assert read(path, label="site", labels=["a", "b"]).names == ("a", "b")
    with pytest.raises(
        FedgenError,
        match=r"site contain values other than 0 and 1; .* name the labels of this column",
    ):
        read(path, label="site")
    with pytest.raises(FedgenError, match=r"data\.label: .* has no column age"):
        read(path, label="age")
    with pytest.raises(FedgenError, match="effusion, site contain values other than 0 and 1"):
        read(path, label=["effusion", "site"])


@kills(
    "fedgen/data/tables.py",
    "len(columns) > 1 or label_names is None):",
    "all(row[columns[0]] in _BITS for row in rows)):",
)
@given(st.lists(st.sampled_from("012"), min_size=1, max_size=6), st.sampled_from("012"))
def test_a_record_does_not_change_the_labels_of_others(values: list[str], added: str) -> None:
    """Settings decide whether a column has names or bits, not values."""
    rows = [{"grade": value} for value in values]
    for named in (["0", "1", "2"], ["1", "2", "0"]):
        numbers, names = number_labels("x", rows, ["grade"], named)
        assert [names[number] for number in numbers] == values
        assert number_labels("x", [*rows, {"grade": added}], ["grade"], named)[0][:-1] == numbers


def test_persons_of_other_layouts_are_one_line(tmp_path: Path) -> None:
    """A remedy names existing columns, and never the rejected value."""
    path = table(tmp_path)
    with pytest.raises(FedgenError, match="cannot be folder: only folders of images"):
        read(path, label="nodule", person="folder")
    with pytest.raises(FedgenError, match=r"'pat' is neither .* name a column, e\.g\. .*patient"):
        read(path, label="nodule", person="pat")
    with pytest.raises(FedgenError, match=r"data\.label: .* has no column nod; choose from 'path'"):
        read(path, label="nod")
    medmnist(tmp_path / "x.npz", FINDINGS)
    with pytest.raises(FedgenError, match=r"data\.person: does not apply to an \.npz"):
        read(tmp_path / "x.npz", label=0, person="patient")
    (tmp_path / "x.tar.gz").write_bytes(b"")
    with pytest.raises(FedgenError, match=r"is compressed; decompress it to \.tar"):
        read(tmp_path / "x.tar.gz")
    save_tar(tmp_path / "x.tar", {"a": sample(1)})
    with pytest.raises(FedgenError, match=r"data\.label: .* have no finding: a; choose from label"):
        read(tmp_path / "x.tar", label="finding")


# --- archives -------------------------------------------------------------------------------------


def sample(n: int, **fields: object) -> dict[str, bytes | object]:
    return {"png": png(np.full((8, 8), n + 1, np.uint8)), "json": {"label": n % 2, **fields}}


def test_archives_of_samples(tmp_path: Path) -> None:
    """Labels by ``.cls`` or a field; clients and persons by fields; splits by names of archives."""
    for at in range(2):
        rows = range(at * 20, at * 20 + 20)
        numbered = {
            f"a/{n}": {"png": png(np.full((8, 8), n + 1, np.uint8)), "cls": str(n % 2).encode()}
            for n in rows
        }
        save_tar(tmp_path / "plain" / f"{at}.tar", numbered)
        full = {f"a/{n}": sample(n, client="ab"[n % 2], person=f"P{n % 5}", f=n % 2) for n in rows}
        save_tar(tmp_path / "full" / f"{('train', 'test')[at]}-0.tar", full)
    data = read(tmp_path / "plain", classes=2)
    assert (data.labels == (data.images[:, 0, 0, 0] - 1) % 2).all()
    assert len(data.labels) + len(data.test_labels) == 40 and data.persons is None
    both = [str(tmp_path / "plain" / f"{at}.tar") for at in range(2)]
    same = folder(STREAMS, None, both, labels=["0", "1"])
    assert same.digest == data.digest
    data = read(tmp_path / "full", label="f")
    assert sorted(data.images[:, 0, 0, 0]) == list(range(1, 21)) and data.names == ("no f", "f")
    assert data.writers is not None and len(groups(data)) == 5
    assert len(groups(read(tmp_path / "full", classes=2, person=r"a?(\d)$"))) == 10


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"a/1": {"cls": b"1"}}, "1 of 3 samples have no image: a/1"),
        ({"a/1": {"png": b""}}, "1 of 3 samples have no label: a/1"),
        ({"a/1": {"png": b"", "cls": b"7"}}, "lacks labels of the data: 7"),
        ({"a/1": {"png": b"", "cls": b"1"}}, r"cannot be read as images: .*a/1\.png"),
        ({"a/1": {"png": b"", "jpg": b"", "cls": b"1"}}, "a/1 has several images"),
        ({"a/1": {"png": b"", "json": b"["}}, "is not a JSON object"),
        ({"a/1": {"png": b"", "json": b"[" * 10**4}}, "is not a JSON object"),
        ({"a/1": {"png": b"", "cls": b"\xff"}}, "is not UTF-8"),
        ({"a/1": {"png": b"", "cls": b"1" * 10**5}}, "has more than 65,536 bytes"),
        ({"a/1": sample(1, person="P")}, "2 of 3 samples have no person"),
    ],
)
def test_invalid_archives_are_one_line(change: Any, why: str, tmp_path: Path) -> None:
    save_tar(tmp_path / "x.tar", {f"b/{n}": sample(n) for n in range(2)} | change)
    with pytest.raises(FedgenError, match=why):
        read(tmp_path / "x.tar", labels=["0", "1"])


def test_unreadable_archives_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(b"\0" * 100)
    with pytest.raises(FedgenError, match="not a readable tar file"):
        read(tmp_path / "x.tar", classes=2)
    for at in range(2):
        save_tar(tmp_path / "two" / f"{at}.tar", {"b/1": sample(1)})
    with pytest.raises(FedgenError, match=r"b/1 is in .* and in"):
        read(tmp_path / "two", classes=2)
    save_tar(tmp_path / "none.tar", {})
    with pytest.raises(FedgenError, match="has no images"):
        read(tmp_path / "none.tar", classes=2)


# --- from files to a generator --------------------------------------------------------------------


def ct(place: Path) -> list[str]:
    for n in range(80):
        frames = RNG.integers(0, 4096, (2, 20, 16)).astype(np.uint16)
        path = place / ("ill", "well")[n % 2] / f"{n}.dcm"
        save_dicom(path, frames, f"Erika{n % 40}", RescaleSlope=1, RescaleIntercept=-1024)
    words = ["data.labels=[ill,well]", "data.size=8", "data.person=tag:PatientID"]
    return ["data.window=[40,400]", *words]


def mr(place: Path) -> list[str]:
    for n in range(40):
        volume = RNG.normal(size=(8, 8, 4)).astype(np.float32)
        save_nifti(place / ("ill", "well")[n % 2] / f"Erika{n}.nii.gz", volume)
    return [
        "data.window=[0,4]",
        "data.labels=[ill,well]",
        "data.axis=axial",
        "data.person='^(.+)[.]nii'",
    ]


def tiff(place: Path) -> list[str]:
    images_of_persons(place, "{label}/Erika{person}_{n}.png")
    for path in sorted(place.glob("*/*")):
        Image.fromarray(STORED[:8, :8]).save(path.with_suffix(".tif"))
        path.unlink()
    return ["data.window=[2048,4096]", "data.person='^(.+)_'"]


def npz_classes(place: Path) -> list[str]:
    place.mkdir()
    medmnist(place / "x.npz", (np.arange(60) % 2)[:, None])
    return [f"data.path={place}/x.npz", "data.classes=2", "privacy.unit=record"]


def npz_findings(place: Path) -> list[str]:
    place.mkdir()
    medmnist(place / "x.npz", FINDINGS)
    return [f"data.path={place}/x.npz", "data.label=[0,1]", "privacy.unit=record"]


def archive(place: Path) -> list[str]:
    save_tar(place / "x.tar", {f"{n}": sample(n, person=f"Erika{n % 30}") for n in range(60)})
    return ["data.classes=2"]


@pytest.mark.parametrize("make", [ct, mr, tiff, npz_classes, npz_findings, archive])
def test_training_writes_no_names_of_persons(
    make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For each format, in one command."""
    words = make(tmp_path / "data")
    persons = [] if "privacy.unit=record" in words else ["data.public_persons=20"]
    unit = "person" if persons else "record"
    run = tmp_path / "run"
    assert cli.run([
        "train", "method=mixture", *tiny("mixture"), "data=folder", f"data.path={tmp_path}/data",
        "data.public_rows=60", f"privacy.unit={unit}", *persons, *words, f"run_dir={run}",
    ]) == 0, capsys.readouterr().err  # fmt: skip
    output = capsys.readouterr()
    assert f"per {unit}" in output.out + output.err
    assert (run / "public" / "generator.safetensors").is_file()
    for text in [output.out, output.err]:
        assert "Erika" not in text
    for path in run.rglob("*"):
        assert "Erika" not in path.name
        assert path.is_dir() or b"Erika" not in path.read_bytes(), path
