"""Files that are either whole or not there, digests that tell, and files that somebody hands over:
data that is checked before it is believed, and never code.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import zipfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import psutil
import yaml
from numpy.typing import NDArray

from fedgen.errors import FedgenError

_MOST_YAML = 2**20  # bytes: a hundred times what a run's settings have
_MOST_TEXT = 2**28
_DEEPEST = 50  # levels of YAML
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # of a letter that JSON writes as two
_LARGE, _MOST_INFLATED = 2**29, 100  # bytes; times: images of digits inflate ten times


def write_whole(path: Path, data: bytes, durable: bool = True, mode: int = 0o666) -> None:
    """Replaces a file in one step: readers see the old one or the new.

    durable: waits for the disk, so that the new one outlives a power cut as well.
    mode: who may read and write it, less what the process masks.

    Raises:
        OSError: if it cannot be written, with the path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(path.suffix + ".new")
    fresh.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as error:  # of a full disk Python does not say where it is
        raise OSError(error.errno, error.strerror, str(path)) from error


def digest(*parts: bytes) -> str:
    """A digest that no accident leaves unchanged."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(part)
    return found.hexdigest()


def cache() -> Path:
    """Where fedgen keeps what it would have to make or load again, on this machine: the environment
    variable FEDGEN_CACHE, else ``~/.cache/fedgen``."""
    return Path(os.environ.get("FEDGEN_CACHE") or "~/.cache/fedgen").expanduser()


def home() -> Path:
    """Where fedgen keeps what must outlive runs, on this machine: the environment variable
    FEDGEN_HOME, else ``~/.fedgen``."""
    return Path(os.environ.get("FEDGEN_HOME") or "~/.fedgen").expanduser()


def write_shared(path: Path, data: bytes) -> None:
    """Replaces a file in one step, while other processes may be writing the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_bytes(data)
    fresh.replace(path)


def read_json(path: Path) -> Any:
    """What a file of JSON holds.

    Raises:
        OSError: if it cannot be read.
        ValueError: for one that is none, is too large, or nested too deep.
    """
    return as_json(_text(path, _MOST_TEXT))


def as_json(text: str) -> Any:
    """What a text holds. Raises ValueError if it is no JSON, is nested too deep, or has halves of
    letters, which cannot be written again."""
    try:
        found = json.loads(text)
        if _HALF.search(text):
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def read_yaml(path: Path) -> str:
    """A file of YAML, as text that may be parsed, and says what its reader sees: aliases could make
    a few lines into gigabytes, what stands in ``${}`` is looked up, in the environment too,
    wherever settings are resolved, tags make other things than text and numbers, and of a key that
    stands twice the last one counts.

    Raises:
        OSError: if it cannot be read.
        ValueError: for one that is too large, nested too deep, or has any of these.
        yaml.YAMLError: for one that is none.
    """
    text = _text(path, _MOST_YAML)
    try:
        events = yaml.parse(text, Loader=yaml.SafeLoader)  # as OmegaConf: libyaml reads other texts
        depth = 0
        for event in events:
            if isinstance(event, yaml.AliasEvent):
                raise ValueError("it has aliases")
            if isinstance(event, yaml.ScalarEvent) and "${" in event.value:
                raise ValueError("it has ${")
            if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag:
                raise ValueError(f"it has a tag ({event.tag})")
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                raise ValueError("nested too deep")
        _check_keys(yaml.compose(text, Loader=yaml.SafeLoader))
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    return text


def _check_keys(node: yaml.Node | None) -> None:
    """Raises ValueError for a key that stands twice, or takes over what another mapping has."""
    if isinstance(node, yaml.SequenceNode):
        for each in node.value:
            _check_keys(each)
    if isinstance(node, yaml.MappingNode):
        known = set[str]()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                raise ValueError("it has a key that is no name")
            if key.value in known:
                raise ValueError(f"it has {key.value!r} twice")
            known.add(key.value)
            _check_keys(value)


def _text(path: Path, most: int) -> str:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        raise ValueError("no file")
    if found.st_size > most:
        raise ValueError(f"larger than {most:,} bytes")
    return path.read_text()


def check_no_links(folder: Path, key: str) -> None:
    """A folder that somebody handed over holds all that is in it: a link would have fedgen read,
    or overwrite, what lies elsewhere. A folder that is not there has none.

    Raises:
        FedgenError: for a link or a device in it, or a folder that hides what is in it, named by
            the setting ``key``.
    """

    def closed(error: OSError) -> None:
        # what cannot be listed may be opened by name
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            problem = f"{error.filename} cannot be looked through"
            raise FedgenError(key, problem, "chmod u+rwx it") from error

    for place, folders, files in os.walk(folder, onerror=closed):
        for name in (*folders, *files):
            path = Path(place, name)
            with suppress(FileNotFoundError):  # one that goes on replaces its files
                kind = path.lstat().st_mode
                if stat.S_ISLNK(kind):
                    raise FedgenError(key, f"{path} is a link", "put what it leads to in its place")
                if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):  # to read a pipe is to wait
                    raise FedgenError(key, f"{path} is no file", "remove it")


def read_arrays(opened: IO[bytes], names: Iterable[str] | None = None) -> dict[str, NDArray[Any]]:
    """The arrays of an npz file, or those of them that are named; never unpickled.

    What an array claims to be is held against what is there before any of it is inflated.

    Raises:
        OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile: if it is none, or lies.
        MemoryError: if it would take more than half of the memory that is left.
    """
    with zipfile.ZipFile(opened) as archive:
        members = {each.filename.removesuffix(".npy"): each for each in archive.infolist()}
        wanted = {name: members[name] for name in (members if names is None else names)}
        if any(each.flag_bits & 1 for each in wanted.values()):
            raise ValueError("it is encrypted")
        size = sum(each.file_size for each in wanted.values())
        if size > _LARGE and size > _MOST_INFLATED * sum(e.compress_size for e in wanted.values()):
            raise ValueError(f"it would inflate to {size:,} bytes")
        if size > psutil.virtual_memory().available / 2:
            raise MemoryError("it would take more than half of the memory that is left")
        for name, each in wanted.items():
            with archive.open(each) as array:
                _check_array(name, array, each.file_size)
    opened.seek(0)
    try:
        with np.load(opened, allow_pickle=False) as loaded:
            return {name: loaded[name] for name in wanted}
    except (RuntimeError, NotImplementedError) as error:  # encrypted; another compression
        raise ValueError(str(error)) from error


def _check_array(name: str, array: IO[bytes], size: int) -> None:
    """Raises ValueError unless an array's header claims as many bytes as there are."""
    reads = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    version = np.lib.format.read_magic(array)
    if version not in reads:
        raise ValueError(f"{name} is of another format")
    shape, _, dtype = reads[version](array)
    claimed = int(np.prod([int(side) for side in shape], dtype=object)) * dtype.itemsize
    if dtype.hasobject:
        raise ValueError(f"{name} has Python objects in place of numbers: use astype")
    if min(shape, default=0) < 0 or array.tell() + claimed != size:
        raise ValueError(f"{name} is not as long as it says")
