"""Packages of ``fedgen release``, read in place of the folders that they contain."""

from __future__ import annotations

import contextlib
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from fedgen.errors import FedgenError
from fedgen.storage.io import PLAIN_ZIP
from fedgen.verify import FILES, LIMITS, MANIFEST, OPTIONAL, UNREADABLE

_KNOWN = {*FILES, *OPTIONAL, MANIFEST}
_LARGEST = 2**22  # bytes of a file without a limit of its own
_PART = 2**20  # bytes copied at once


@contextlib.contextmanager
def unpacked(path: Path, key: str) -> Iterator[Path]:
    """Yield the folder of a package, unpacked for as long as the block is active; any other path is
    yielded unchanged. The package is untrusted: only files of a release, of limited size, are
    written.

    Args:
        key: setting that names it, for errors.

    Raises:
        FedgenError: if it is not a package of ``fedgen release``.
    """
    if path.suffix != ".zip" or not path.is_file():
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="fedgen-") as scratch:
        folder = Path(scratch)
        try:
            _unpack(path, folder)
        except (ValueError, *UNREADABLE) as error:
            problem = f"{path} is not a package of fedgen release ({str(error)[:100]})"
            raise FedgenError(key, problem, "give the ZIP file, or its unpacked folder") from error
        yield folder


def _unpack(path: Path, folder: Path) -> None:
    """Raise ValueError for an unknown, duplicate or too large file."""
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            name = member.filename.partition("/")[2]
            if name not in _KNOWN or (folder / name).exists():
                raise ValueError(f"it contains {member.filename!r}")
            if member.file_size > LIMITS.get(name, _LARGEST):
                raise ValueError(f"{name} is too large")
            if member.compress_type not in PLAIN_ZIP:
                raise ValueError(f"{name} is compressed in another way")
            with archive.open(member) as source, (folder / name).open("wb") as copy:
                while part := source.read(_PART):
                    copy.write(part)
