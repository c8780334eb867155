"""Builders of small DICOM, NIfTI and tar files."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pydicom
from numpy.typing import NDArray
from PIL import Image
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, generate_uid

CT = "1.2.840.10008.5.1.4.1.1.2"  # storage class


def dicom(pixels: NDArray[Any], person: str = "", **attributes: object) -> FileDataset:
    """Return a DICOM file of stored values: (h, w), (frames, h, w), or (h, w, 3) as RGB; 12 bits in
    16 unless the values are uint8. Attributes replace the defaults; None: without it."""
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.TransferSyntaxUID = CT, ExplicitVRLittleEndian
    meta.MediaStorageSOPInstanceUID = generate_uid()
    file = FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
    coloured = pixels.ndim == 3 and pixels.shape[-1] == 3
    narrow = pixels.dtype == np.uint8
    values: dict[str, object] = {
        "SOPClassUID": CT,
        "SOPInstanceUID": meta.MediaStorageSOPInstanceUID,
        "PatientID": person or None,
        "PatientName": f"Name^Of {person}" if person else None,
        "Rows": pixels.shape[-3 if coloured else -2],
        "Columns": pixels.shape[-2 if coloured else -1],
        "NumberOfFrames": len(pixels) if pixels.ndim == 3 and not coloured else None,
        "SamplesPerPixel": 3 if coloured else 1,
        "PlanarConfiguration": 0 if coloured else None,
        "PhotometricInterpretation": "RGB" if coloured else "MONOCHROME2",
        "BitsAllocated": 8 if narrow else 16,
        "BitsStored": 8 if narrow else 12,
        "HighBit": 7 if narrow else 11,
        "PixelRepresentation": int(pixels.dtype.kind == "i"),
    }
    for name, value in {**values, **attributes}.items():
        if value is not None:
            setattr(file, name, value)
    file.PixelData = pixels.tobytes()
    return file


def save_dicom(path: Path, pixels: NDArray[Any], person: str = "", **attributes: object) -> None:
    """Write a DICOM file; see ``dicom``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pydicom.dcmwrite(path, dicom(pixels, person, **attributes), enforce_file_format=True)


def save_nifti(path: Path, values: NDArray[Any], codes: str = "RAS", scale: float = 1.0) -> None:
    """Write a NIfTI volume with these axes, e.g. to the patient's right, front and head; ``scale``:
    size of a voxel from head to feet over its others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    affine = np.zeros((4, 4))
    affine[3, 3] = 1
    for axis, code in enumerate(codes):
        affine["RL AP SI".index(code) // 3, axis] = (1 if code in "RAS" else -1) * (
            scale if code in "SI" else 1
        )
    nibabel.save(nibabel.Nifti1Image(values, affine), path)


def png(pixels: NDArray[np.uint8]) -> bytes:
    """Return an image as PNG."""
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "png")
    return stream.getvalue()


def save_tar(path: Path, samples: dict[str, dict[str, bytes | object]]) -> None:
    """Write samples: key -> extension -> bytes, or content of a JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for key, files in samples.items():
            for kind, value in files.items():
                content = value if isinstance(value, bytes) else json.dumps(value).encode()
                member = tarfile.TarInfo(f"{key}.{kind}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
