"""Write samples as a Parquet file in the format of the Hugging Face hub."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedgen.data.hugging_face import library
from fedgen.reporting.figures import DIGITAL_SOURCE_TYPE, write_image


def write_parquet(
    images: NDArray[np.uint8], labels: Sequence[int], names: Sequence[str], out: Path
) -> None:
    """Write images (n, channels, height, width) as PNG, and labels as numbers, named in the
    metadata, with ``digital_source_type`` as a key of the file.

    Raises:
        FedgenError: without the ``datasets`` library.
        OSError: if the file cannot be written.
    """
    datasets = library("out")
    from pyarrow import parquet  # a dependency of datasets

    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(names))}
    rows = [{"bytes": _png(image), "path": None} for image in images]
    columns = {"image": rows, "label": list(labels)}
    table = datasets.Dataset.from_dict(columns, datasets.Features(features)).data.table
    origin = {b"digital_source_type": DIGITAL_SOURCE_TYPE.encode()}
    parquet.write_table(
        table.replace_schema_metadata({**table.schema.metadata, **origin}), str(out)
    )


def _png(image: NDArray[np.uint8]) -> bytes:
    written = io.BytesIO()
    write_image(image, written)
    return written.getvalue()
