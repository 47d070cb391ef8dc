"""Certificates for the workers started here: those of the config, or temporary ones for this run."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from whale_nebula.config import Config
from whale_nebula.launch.identity import SecurityFiles
from whale_nebula.launch.placed import run_name
from whale_nebula.launch.resolve import cluster_of
from whale_nebula.security import Credentials, Files, Identity, ephemeral
from whale_nebula.security.identity import name

PREFIX = "whale-nebula-"
_LOCK = "in-use"


@contextlib.contextmanager
def own_folder(home: str | os.PathLike[str] | None = None) -> Iterator[Path]:
    """A fresh folder that only this user can enter, removed at the end; `home` is where it is made.

    What runs that were killed have left there is removed first.

    >>> with own_folder() as folder:
    ...     sorted(path.name for path in folder.iterdir())
    ['in-use']
    >>> folder.exists()
    False
    """
    place = Path(tempfile.gettempdir() if home is None else home)
    remove_abandoned(place)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
    lock = os.open(folder / f".{_LOCK}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(folder / f".{_LOCK}", folder / _LOCK)  # under this name it was never unlocked while we lived
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_abandoned(home: Path) -> None:
    """Remove the folders of this user's runs that are no more."""
    for folder in home.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def configured_files(config: Config, workers: Iterable[str], path: str | None) -> dict[str, SecurityFiles]:
    """The files that the config names for each worker, or their usual names beside it; none where it is insecure."""
    if config.security.insecure:
        return {}
    base = os.path.dirname(os.path.abspath(path)) if path is not None else os.getcwd()
    found = {
        worker: Files.of(config.security, Identity.of_worker(run_name(config), worker), base) for worker in workers
    }
    return {worker: _require_files(files) for worker, files in found.items()}


def check(files: Mapping[str, SecurityFiles], run: str) -> None:
    """Read them all once, so that what is wrong is said before anything is started: whose they are, too."""
    for worker, each in files.items():
        revoked = None if each.revoked is None else Path(each.revoked)
        credentials = Credentials.of(Files(Path(each.ca), Path(each.cert), Path(each.key), revoked))
        credentials.check_now()
        credentials.check_is(Identity.of_worker(run, worker))


def check_names(config: Config, workers: Iterable[str]) -> None:
    """Whether certificates can hold the names of the run and of its clusters."""
    if not config.security.insecure:
        name(run_name(config), "run")
        for cluster in dict.fromkeys(map(cluster_of, workers)):
            name(cluster, "cluster")


@contextlib.contextmanager
def for_one_run(config: Config, workers: Iterable[str]) -> Iterator[dict[str, SecurityFiles]]:
    """An authority that nobody else has, and a certificate of it for each worker: in a folder that only this user
    can open, and that is gone at the end. Its key is never written.
    """
    if config.security.insecure:
        yield {}
        return
    with own_folder() as folder:
        made = ephemeral(run_name(config), workers, folder)
        yield {worker: _require_files(files) for worker, files in made.items()}


def _require_files(files: Files) -> SecurityFiles:
    ca, cert, key, revoked = (path and os.path.abspath(path) for path in files)
    return SecurityFiles(str(ca), str(cert), str(key), None if revoked is None else str(revoked))
