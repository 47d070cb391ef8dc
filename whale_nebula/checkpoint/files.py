"""Files of checkpoints, on a local disk or in a file system that TensorFlow reaches (`gs://`, `s3://`, `ram://`).

On a local disk a file is synced before it is renamed, and so is its folder: after a power loss it is complete or
missing. Other file systems make a file visible when it is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from whale_nebula.tf import tf

_BLOCK = 1 << 20


def is_local(path: str) -> bool:
    """Whether a path is in the local file system.

    >>> is_local("runs/a"), is_local("gs://bucket/a")
    (True, False)
    """
    return "://" not in path


def join(folder: str, *names: str) -> str:
    """The path of a file in a folder.

    >>> join("gs://bucket/run", "step-10", "state.index")
    'gs://bucket/run/step-10/state.index'
    """
    return "/".join([folder.rstrip("/") or "/", *names])


def make_folder(path: str) -> None:
    """Create a folder and its parents."""
    if is_local(path):
        Path(path).mkdir(parents=True, exist_ok=True)
    else:
        _remote().makedirs(path)


def list_names(folder: str) -> list[str]:
    """The names in a folder, sorted; empty if the folder does not exist."""
    if is_local(folder):
        return sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    remote = _remote()
    return sorted(name.rstrip("/") for name in remote.listdir(folder)) if remote.isdir(folder) else []


def read(path: str) -> bytes:
    """The content of a file; raises `FileNotFoundError` if it does not exist."""
    if is_local(path):
        return Path(path).read_bytes()
    if not _remote().exists(path):
        raise FileNotFoundError(path)
    with _remote().GFile(path, "rb") as file:
        return bytes(file.read())


def write(path: str, content: bytes) -> None:
    """Write a file durably and atomically: an existing one is replaced at once or not at all."""
    if not is_local(path):
        beside = f"{path}.new"
        with _remote().GFile(beside, "wb") as file:
            file.write(content)
        _remote().rename(beside, path, overwrite=True)
        return
    target = Path(path)
    beside = str(target.with_name(f".{target.name}.{os.getpid()}.new"))
    with open(beside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    sync_folder(str(target.parent))


def read_blocks(path: str, size: int) -> Iterator[bytes]:
    """Read a file in blocks of this size."""
    with open(path, "rb") if is_local(path) else _remote().GFile(path, "rb") as file:
        while block := file.read(size):
            yield bytes(block)


def write_blocks(path: str, blocks: Iterable[bytes]) -> None:
    """Write a file that no manifest names yet, block by block."""
    with open(path, "wb") if is_local(path) else _remote().GFile(path, "wb") as file:
        for block in blocks:
            file.write(block)
    sync(path)


def sync(path: str) -> None:
    """Flush a written file to the disk."""
    if is_local(path):
        _sync(path, os.O_RDONLY)


def sync_folder(path: str) -> None:
    """Flush the entries of a folder to the disk."""
    if is_local(path):
        _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: str, flags: int) -> None:
    opened = os.open(path, flags)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def move(path: str, target: str) -> None:
    """Rename a file or folder."""
    if is_local(path):
        os.replace(path, target)
    else:
        _remote().rename(path, target, overwrite=True)


def remove(path: str) -> None:
    """Remove a file, or a folder with its contents; it may be missing."""
    if not is_local(path):
        with contextlib.suppress(tf.errors.NotFoundError):
            _remote().rmtree(path) if _remote().isdir(path) else _remote().remove(path)
    elif os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        Path(path).unlink(missing_ok=True)


def get_size(path: str) -> int | None:
    """The size of a file in bytes; None if it does not exist."""
    if is_local(path):
        return os.path.getsize(path) if os.path.isfile(path) else None
    return int(_remote().stat(path).length) if _remote().exists(path) else None


def compute_digest(path: str) -> str:
    """The SHA-256 of a file."""
    found = hashlib.sha256()
    for block in read_blocks(path, _BLOCK):
        found.update(block)
    return found.hexdigest()


def _remote() -> Any:
    return tf.io.gfile
