"""The code that a process runs: the files of its script and the installed packages, with their digests."""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Container, Iterable, Iterator, Mapping
from functools import cache
from importlib import machinery, metadata
from importlib.machinery import ExtensionFileLoader, FileFinder, SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import whale_nebula

SCRIPT = "__main__"
_ALIAS = "__mp_main__"
"""The name that multiprocessing gives the main module of a process."""
_OWN = "whale-nebula"
_UNREADABLE = "unreadable"
_GENERATED = "__autograph_generated_file"
"""The prefix of modules that TensorFlow's AutoGraph generates from functions, each with a unique name."""
_CODE_SUFFIXES = (".py", ".so", ".pyd")


@cache
def digest_code() -> str:
    """The first digits of the SHA-256 of this package's source: equal if the code is equal."""
    root = Path(whale_nebula.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(data)}\n".encode() + data)
    return digest.hexdigest()[:12]


def digest_file(path: str | Path) -> str:
    """The SHA-256 of a file, or a word that is not a digest."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return _UNREADABLE


def find_script() -> Path | None:
    """The script that this process runs, if it is a file."""
    file = getattr(sys.modules.get(SCRIPT), "__file__", None)
    return None if file is None else Path(file)


def list_files(script: str | Path | None = None) -> dict[str, str]:
    """The digests of a script, by default the one that this process runs, and of loaded modules: those that differ from
    their installer's record or have none, outside the standard library and this package.
    """
    main = find_script() if script is None else Path(script)
    found = {} if main is None else {SCRIPT: digest_file(main)}
    for name, path in sorted(_list_unrecorded_modules()):
        if main is None or path != main.resolve():
            found[name] = digest_file(path)
    return found


def list_adjacent_modules(script: str | Path, modules: Iterable[str]) -> dict[str, str]:
    """The digests of a script before it runs, and of modules in its folder, which Python would load from there."""
    found, folder = {SCRIPT: digest_file(script)}, _find_folder(script)
    for name in modules:
        file = None if name == SCRIPT else _find_module_file(folder, name)
        if file is not None:
            found[name] = digest_file(file)
    return found


def find_hiding_module(script: str | Path, approved: Container[str]) -> str | None:
    """A module next to a script that Python would load in place of a standard or installed one; None if all of these
    are approved.
    """
    folder, others = _find_folder(script), {*sys.stdlib_module_names, *metadata.packages_distributions()}
    try:
        names = sorted({each.partition(".")[0] for each in os.listdir(folder)} & others)
    except OSError:
        return None
    return next((each for each in names if each not in approved and _find_module_file(folder, each)), None)


def _find_folder(script: str | Path) -> Path:
    """The folder of a script, from which its modules are imported. A link to a script is in its own folder."""
    return Path(os.path.abspath(script)).parent


def _find_module_file(folder: Path, name: str) -> Path | None:
    """The file of a module in a folder, in Python's order: packages before extensions, source and bytecode."""
    *packages, last = name.split(".")
    spec = FileFinder(str(folder.joinpath(*packages)), *_LOADERS).find_spec(last)
    return None if spec is None or spec.origin is None else Path(spec.origin)


class _SourceLoader(SourceFileLoader):
    """A loader of source that ignores bytecode next to it, which can differ from the source."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


_LOADERS: Any = (
    (ExtensionFileLoader, machinery.EXTENSION_SUFFIXES),
    (_SourceLoader, machinery.SOURCE_SUFFIXES),
    (SourcelessFileLoader, machinery.BYTECODE_SUFFIXES),
)


def import_from_source(script: str | Path) -> None:
    """Import modules in the folder of a script from their source from now on, as approvals contain its digests: a
    cached bytecode file is loaded without a look at the source if its time matches.
    """
    folder = _find_folder(script)

    def find(path: str) -> FileFinder:
        if not Path(os.path.abspath(path)).is_relative_to(folder):
            raise ImportError("only for the script's folder", path=path)
        return FileFinder(path, *_LOADERS)

    sys.path_hooks.insert(0, find)
    sys.path_importer_cache.clear()


def _list_unrecorded_modules() -> Iterator[tuple[str, Path]]:
    recorded = {path: digest for paths in _list_recorded_files().values() for path, digest in paths.items()}
    own, library = Path(whale_nebula.__file__).resolve().parent, Path(sysconfig.get_path("stdlib")).resolve()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
        if file is None or name in (SCRIPT, _ALIAS) or name.startswith(_GENERATED):
            continue
        path = Path(os.path.abspath(file))
        known = recorded.get(str(path))
        if known is not None and known == _digest_as_recorded(str(path), _read_change_time(path)):
            continue
        path = path.resolve()
        in_library = path.is_relative_to(library) and not {"site-packages", "dist-packages"} & set(path.parts)
        if not in_library and not path.is_relative_to(own):
            yield name, path


def _read_change_time(path: Path) -> int | None:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:  # removed after it was loaded
        return None


@cache
def _digest_as_recorded(path: str, changed: int | None) -> str:
    """The digest of a file in the form that installers record; cached while its time of change is the same."""
    try:
        digest = hashlib.sha256(Path(path).read_bytes()).digest()
    except OSError:
        return _UNREADABLE
    return "sha256=" + base64.urlsafe_b64encode(digest).decode("ascii").rstrip("=")


@cache
def _list_recorded_files() -> Mapping[str, Mapping[str, str]]:
    """The installed packages, each with its code files and their digests by its installer's record."""
    found: dict[str, dict[str, str]] = {}
    for each in metadata.distributions():
        name = normalize_name(each.metadata["Name"] or "")
        if name and name not in found:
            root = _find_root(each)
            rows = csv.reader((each.read_text("RECORD") or "").splitlines())
            found[name] = {
                os.path.join(root, row[0]): row[1]
                for row in rows
                if len(row) == 3 and row[0].endswith(_CODE_SUFFIXES) and not row[0].startswith(("..", "/"))
            }
    return found


def _find_root(package: metadata.Distribution) -> str:
    return os.path.abspath(str(package.locate_file(".")))


@cache
def list_packages() -> Mapping[str, str]:
    """The installed packages and Python: for each its version and the first digits of the digest of its code."""
    found = {"python": platform.python_version()}
    for each in metadata.distributions():
        name = normalize_name(each.metadata["Name"] or "")
        if name and name not in found:
            code = sorted(
                f"{os.path.relpath(path, _find_root(each))},{own}" for path, own in _list_recorded_files()[name].items()
            )
            digest = hashlib.sha256("\n".join(code).encode()).hexdigest()[:12] if code else ""
            found[name] = f"{each.version} {digest_code() if name == _OWN else digest}".strip()
    found.setdefault(_OWN, digest_code())  # if it runs from a folder, not installed
    return dict(sorted(found.items()))


_REPORTED_PACKAGES = ("whale-nebula", "tensorflow", "keras", "numpy")


def describe_versions() -> str:
    """The versions that this process computes with, in one line; for this package with the first digits of its code's
    digest.
    """
    found = [f"python {platform.python_version()}"]
    for name in _REPORTED_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}{f' {digest_code()}' if name == _OWN else ''}")
    return ", ".join(found)


def is_loaded(package: str) -> bool:
    """Whether a module of an installed package is loaded."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return not files.isdisjoint(_list_recorded_files().get(package, {}))


def normalize_name(name: str) -> str:
    """The name of a package, normalised as installers compare it.

    >>> normalize_name("Whale_Nebula")
    'whale-nebula'
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def find_difference(here: Mapping[str, str], approved: Mapping[str, str]) -> str | None:
    """Describe the first file or package that differs from the approved one.

    >>> find_difference({"__main__": "ab" * 32}, {"__main__": "cd" * 32})
    'the script is abababababab here, but cdcdcdcdcdcd was approved'
    """
    for name, value in here.items():
        what = "the script" if name == SCRIPT else name
        if name not in approved:
            return f"{what} ({_shorten(value)}) was not approved"
        if approved[name] != value:
            return f"{what} is {_shorten(value)} here, but {_shorten(approved[name])} was approved"
    return None


def _shorten(value: str) -> str:
    return value[:12] if re.fullmatch("[0-9a-f]{64}", value) else value
