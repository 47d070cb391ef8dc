"""The lines of one text file, plain or gzipped: UTF-8, parted by line feeds and by nothing else."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from whale_nebula.errors import DataError


def read_lines(path: Path, *, exact: bool = False) -> list[str]:
    r"""Every line without the white space around it, or `exact`; a file that is damaged, or not UTF-8, is refused.

    Only a line feed ends a line. `str.splitlines` would also cut at characters that stand within sentences, and the
    lines after them would stand beside translations of others.

    >>> path = Path("one.txt")
    >>> _ = path.write_bytes("one line\x85still the same \r\nanother\n".encode())
    >>> read_lines(path)
    ['one line\x85still the same', 'another']
    """
    lines = _decoded(path, _raw(path)).split("\n")
    if lines[-1] == "":  # what follows the last line feed
        lines.pop()
    return lines if exact else [line.strip() for line in lines]


def _raw(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path.name} is damaged", where=str(path), why=str(error), mend="copy it again; gzip -t tests it"
        ) from None
    except OSError as error:
        raise DataError(f"{path.name} cannot be read", where=str(path), why=error.strerror) from None


def _decoded(path: Path, raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path.name} is not UTF-8",
            where=f"{path}:{line}",
            why=f"byte 0x{raw[error.start]:02x} in line {line} begins no character",
            mend=f"iconv -f latin1 -t utf8, if it is Latin-1: {path.name}",
        ) from None
