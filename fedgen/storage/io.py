"""Atomic writes, digests, and reading of untrusted files, which are checked as data before use and
never executed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import psutil
import yaml
from numpy.typing import NDArray

from fedgen.errors import FedgenError

_MOST_YAML = 2**20  # bytes: a hundred times the settings of a run
_MOST_TEXT = 2**28
_DEEPEST = 50  # nesting of YAML
_NUMBER_BEGINS = re.compile(r"[-+]?[0-9_]")
_PLAIN_NUMBER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # one half of a surrogate pair
_LARGE, _MOST_INFLATED = 2**29, 100  # bytes; compression ratio: digits have ten


TEMPORARY = ".fedgen-"
"""Prefix of temporary names. A file with this prefix remains only if its process was killed."""


def is_temporary(path: Path) -> bool:
    """Return whether a killed process left this file."""
    return path.name.startswith(TEMPORARY) and path.is_file() and not path.is_symlink()


_umask: list[int] = []  # the user's, while ``private_umask`` is active


@contextmanager
def private_umask() -> Iterator[None]:
    """Create files and folders accessible only to their owner (0600, 0700): a run directory holds
    models of private records."""
    before = os.umask(0o077)
    _umask.append(before)
    try:
        yield
    finally:
        _umask.pop()
        os.umask(before)


@contextmanager
def user_umask() -> Iterator[None]:
    """Create files by the user's own umask inside ``private_umask``: public data sets, and files
    in a place that the user named."""
    before = os.umask(_user_umask())
    try:
        yield
    finally:
        os.umask(before)


def share(path: Path) -> None:
    """Give a new file or folder the permissions of the user's own umask."""
    path.chmod((0o777 if path.is_dir() else 0o666) & ~_user_umask())


def _user_umask() -> int:
    if _umask:
        return _umask[0]
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


@contextmanager
def temporary_path(path: Path, folder: bool = False) -> Iterator[Path]:
    """Create a file or folder in the directory of ``path`` under a random name, to be renamed to
    ``path``. It is removed on exit if it was not renamed.

    Raises:
        OSError: with ``path`` as its file, if it is about the temporary one.
    """
    fresh = path.with_name(f"{TEMPORARY}{secrets.token_hex(8)}{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if folder:
            fresh.mkdir(0o700)
        else:
            os.close(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        yield fresh
    except OSError as error:  # on a full disk, Python omits the path
        if error.errno is None or error.filename not in (None, str(fresh)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with suppress(OSError):
            shutil.rmtree(fresh) if fresh.is_dir() else fresh.unlink(missing_ok=True)


def write_atomic(path: Path, data: bytes, durable: bool = True, shared: bool = False) -> None:
    """Replace a file in one step: readers see the old one or the new.

    Args:
        durable: wait for the disk, so that the new one outlives a power cut as well.
        shared: readable as the user's umask allows (``share``); else by its owner only.

    Raises:
        OSError: if it cannot be written, with the path.
    """
    with temporary_path(path) as fresh:
        with fresh.open("wb") as file:
            file.write(data)
            if durable:
                sync(file, path)
        if shared:
            share(fresh)
        fresh.replace(path)


def stored_key(path: Path) -> bytes:
    """Return the 32 secret bytes of a file; a missing one is created first, durably.

    Raises:
        FedgenError: if the file was truncated.
    """
    if not path.exists():
        write_atomic(path, secrets.token_bytes(32))
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # its name outlives a power cut, too
        finally:
            os.close(folder)
    if len(key := path.read_bytes()) != 32:
        remedy = "restore the run directory from a backup, or start a new run"
        raise FedgenError(str(path), "was truncated or altered", remedy)
    return key


def sync(file: IO[Any], path: Path) -> None:
    """Flush an open file to the disk.

    Raises:
        FedgenError: if the file system does not support it.
        OSError: for another failure.
    """
    file.flush()
    try:
        os.fsync(file.fileno())
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        problem = "the file system does not support fsync: a power cut could lose files"
        raise FedgenError(str(path), problem, "choose a place on another disk") from error


def read_bounded(path: Path, limit: int) -> bytes:
    """Read an untrusted file of at most ``limit`` bytes.

    Raises:
        OSError: if it cannot be read.
        ValueError: for a device or a pipe, or more than ``limit`` bytes.
    """
    # non-blocking: opening a FIFO would wait for its writer
    with open(path, "rb", opener=lambda p, f: os.open(p, f | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a regular file")
        if status.st_size > limit:
            raise ValueError(f"larger than {limit:,} bytes")
        return file.read(status.st_size)


def digest(*parts: bytes) -> str:
    """Return a digest that detects accidental changes."""
    hasher = hashlib.blake2b(digest_size=16)
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def cache() -> Path:
    """Return the folder of files that could be computed or downloaded again: the environment
    variable FEDGEN_CACHE, else ``~/.cache/fedgen``."""
    return Path(os.environ.get("FEDGEN_CACHE") or "~/.cache/fedgen").expanduser()


def fedgen_home() -> Path:
    """Return the folder of files that must outlive runs: the environment variable FEDGEN_HOME, else
    ``~/.fedgen``."""
    return Path(os.environ.get("FEDGEN_HOME") or "~/.fedgen").expanduser()


def write_shared(path: Path, data: bytes) -> None:
    """Replace a file of the cache atomically while other processes may write the same one. It may
    contain a classifier of private records and is readable by its owner only."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomic(path, data, durable=False)


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is invalid, too large, or nested too deeply.
    """
    return parse_json(_read_text(path, _MOST_TEXT))


def parse_json(text: str) -> Any:
    """Return the content of a JSON text.

    Raises:
        ValueError: if it is invalid, nested too deeply, or has unpaired surrogates, which cannot be
            written.
    """
    try:
        content = json.loads(text)
        if _HALF.search(text):
            json.dumps(content, ensure_ascii=False).encode()
        return content
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def read_yaml(path: Path) -> str:
    """Read a YAML file as text that is safe to parse and means what its reader sees. Refused are
    aliases, which could expand to gigabytes; ``${}``, which would be resolved, also from the
    environment; tags, which create other objects; and duplicate keys, of which the last would
    count.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is too large, nested too deeply, or contains any of these.
        yaml.YAMLError: if it is invalid.
    """
    text = _read_text(path, _MOST_YAML)
    loader = _StrictLoader(text)
    try:
        _check_keys(loader.get_single_node())
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    finally:
        loader.dispose()
    return text


class _StrictLoader(yaml.SafeLoader):
    """Loader, as in OmegaConf (libyaml differs), that refuses what ``read_yaml`` does."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        is_collection = isinstance(event, yaml.CollectionStartEvent)
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it has aliases")
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag:
            raise ValueError(f"it has a tag ({event.tag})")
        if isinstance(event, yaml.ScalarEvent):
            if "${" in event.value:
                raise ValueError("it has ${")
            if parsed := _misread_number(event):
                raise ValueError(
                    f"it has {event.value}, which YAML parses as {parsed}: write {parsed} for the "
                    f'number, or "{event.value}" for the text'
                )
        self.depth += is_collection
        if self.depth > _DEEPEST:
            raise ValueError("nested too deep")
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= is_collection
        return node


def _misread_number(event: yaml.ScalarEvent) -> str | None:
    """Return the number that YAML 1.1 parses from a scalar written in another base or with colons
    or underscores (010 is 8, 5:30 is 330); None otherwise."""
    text = event.value
    if event.style is not None or not _NUMBER_BEGINS.match(text):
        return None
    value = yaml.safe_load(text)
    is_misread_integer = type(value) is int and not _PLAIN_NUMBER.fullmatch(text)
    return (
        str(value)
        if is_misread_integer or (type(value) is float and set(text) & set(":_"))
        else None
    )


def _check_keys(node: yaml.Node | None) -> None:
    """Raise ValueError for a duplicate key, or one that merges another mapping."""
    if isinstance(node, yaml.SequenceNode):
        for child in node.value:
            _check_keys(child)
    if isinstance(node, yaml.MappingNode):
        keys = set[str]()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                raise ValueError("it has a key that is not a valid name")
            if key.value in keys:
                raise ValueError(f"it has {key.value!r} twice")
            keys.add(key.value)
            _check_keys(value)


def _read_text(path: Path, most: int) -> str:
    return read_bounded(path, most).decode()


def check_no_links(folder: Path, key: str) -> None:
    """Check that an untrusted folder contains all of its files: a link would make fedgen read or
    overwrite files elsewhere. A missing folder passes.

    Raises:
        FedgenError: for a link or a device in it, or a folder that cannot be listed, named by the
            setting ``key``.
    """

    def closed(error: OSError) -> None:
        # files of an unlistable folder can be opened by name
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            problem = f"{error.filename} cannot be looked through"
            raise FedgenError(key, problem, "chmod u+rwx it") from error

    for place, folders, files in os.walk(folder, onerror=closed):
        for name in (*folders, *files):
            path = Path(place, name)
            with suppress(FileNotFoundError):  # a running run replaces its files
                kind = path.lstat().st_mode
                if stat.S_ISLNK(kind):
                    raise FedgenError(key, f"{path} is a link", "replace the link with its target")
                if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):  # reading a pipe would block
                    raise FedgenError(key, f"{path} is not a file", "move it elsewhere")


PLAIN_ZIP = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Compression of members of archives that are read: others are decompressed without a limit."""


def read_member(archive: zipfile.ZipFile, name: str, limit: int) -> bytes:
    """Return the bytes of a member of an archive of others.

    Raises:
        KeyError: if there is none.
        ValueError: for more than ``limit`` bytes, and another compression than ``PLAIN_ZIP``.
        Errors of ``fedgen.verify.UNREADABLE``: if it is damaged or encrypted.
    """
    member = archive.getinfo(name)
    if member.compress_type not in PLAIN_ZIP:
        raise ValueError(f"{name[:100]!r} is neither stored nor deflated")
    if member.file_size > limit:
        raise ValueError(f"{name[:100]!r} exceeds {limit:,} bytes")
    with archive.open(member) as opened:
        return opened.read(limit)


def read_arrays(opened: IO[bytes], names: Iterable[str] | None = None) -> dict[str, NDArray[Any]]:
    """Read the arrays of an npz file, or the named ones, without unpickling.

    The claims of an array are checked against the file before it is decompressed.

    Raises:
        OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile: if it is invalid.
        MemoryError: if it would take more than half of the available memory.
    """
    try:
        return _read_arrays(opened, names)
    except (RuntimeError, zlib.error) as error:  # encrypted, unknown compression, or damaged
        raise ValueError(str(error)) from error


def _read_arrays(opened: IO[bytes], names: Iterable[str] | None) -> dict[str, NDArray[Any]]:
    with zipfile.ZipFile(opened) as archive:
        members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
        wanted = {name: members[name] for name in (members if names is None else names)}
        if any(member.flag_bits & 1 for member in wanted.values()):
            raise ValueError("it is encrypted")
        if any(member.compress_type not in PLAIN_ZIP for member in wanted.values()):
            raise ValueError("it is neither stored nor deflated")
        size = sum(member.file_size for member in wanted.values())
        if size > _LARGE and size > _MOST_INFLATED * sum(e.compress_size for e in wanted.values()):
            raise ValueError(f"it would inflate to {size:,} bytes")
        if size > psutil.virtual_memory().available / 2:
            raise MemoryError("it would take more than half of the memory that is left")
        for name, member in wanted.items():
            with archive.open(member) as array:
                _check_array(name, array, member.file_size)
    opened.seek(0)
    with np.load(opened, allow_pickle=False) as loaded:
        return {name: loaded[name] for name in wanted}


def _check_array(name: str, array: IO[bytes], size: int) -> None:
    """Raise ValueError unless the header of an array matches its number of bytes."""
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
