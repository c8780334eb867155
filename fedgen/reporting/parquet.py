"""Write samples as a Parquet file in the format of the Hugging Face hub."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedgen.data.hugging_face import library
from fedgen.reporting.figures import write_image


def write_parquet(
    images: NDArray[np.uint8], labels: Sequence[int], names: Sequence[str], out: Path
) -> None:
    """Write images (n, channels, height, width) as PNG, and labels as numbers, named in the
    metadata.

    Raises:
        FedgenError: without the ``datasets`` library.
        OSError: if the file cannot be written.
    """
    datasets = library("out")
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(names))}
    rows = [{"bytes": _png(image), "path": None} for image in images]
    columns = {"image": rows, "label": list(labels)}
    table = datasets.Dataset.from_dict(columns, datasets.Features(features))
    silent = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        table.to_parquet(str(out))
    finally:
        if not silent:
            datasets.enable_progress_bars()


def _png(image: NDArray[np.uint8]) -> bytes:
    written = io.BytesIO()
    write_image(image, written)
    return written.getvalue()
