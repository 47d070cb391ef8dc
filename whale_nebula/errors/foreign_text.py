"""Sanitise text that crosses the process boundary: received text before it is shown, own text before it is sent."""

from __future__ import annotations

import re
from collections.abc import Iterable

LIMIT = 500
_ENDS = r"\s:'\"()\[\]{},;<>|`"
_FOLDERS = re.compile(rf"(?<![^\s'\"(=\[{{,;<|`@:])(?:file://)?(?:~|\.\.?)?/(?!/)(?:[^/{_ENDS}]+/+)*")
_AFTER = re.compile(rf"[{_ENDS}]|$")


def escape_foreign_text(text: object, limit: int = LIMIT, *, lines: bool = False) -> str:
    r"""Text of another process as printable characters of one line, at most `limit` of them; the rest is counted.

    What is not printable is written as Python's escapes write it: control characters, line ends, and those that turn
    the direction of writing. `lines` leaves line ends and tabs as they are.

    >>> escape_foreign_text("x\x1b[2J\ny"), escape_foreign_text("a" * 9, limit=4), escape_foreign_text("señal")
    ('x\\x1b[2J\\ny', 'aaaa... (5 characters more)', 'señal')
    """
    whole = str(text)
    kept, taken = "", 0
    for character in whole:
        shown = (
            character if character.isprintable() or (lines and character in "\n\t") else _escape_character(character)
        )
        if len(kept) + len(shown) > limit:
            break
        kept, taken = kept + shown, taken + 1
    return kept if taken == len(whole) else f"{kept}... ({len(whole) - taken} characters more)"


def _escape_character(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def remove_folders(text: str, known: Iterable[str] = ()) -> str:
    """A text whose paths are names of files, without the folders that these lie in. Folders whose names have spaces
    are found where they are `known`.

    >>> remove_folders("at /home/ana/train.py:12, see https://host/a/b and encoder/.*")
    'at train.py:12, see https://host/a/b and encoder/.*'
    >>> remove_folders("~/keys/gpu.key, ./data/es.txt, '/srv/data/', /my runs/a.py", ["/my runs"])
    "gpu.key, es.txt, 'data', a.py"
    """
    for folder in sorted((each.rstrip("/") for each in known), key=len, reverse=True):
        if folder.startswith("/") and folder != "/":
            text = text.replace(f"{folder}/", "./")
    return _FOLDERS.sub(_shorten_path, text)


def _shorten_path(found: re.Match[str]) -> str:
    """Nothing before a file's name; the last folder's name where the path ends with a folder."""
    if not _AFTER.match(found.string, found.end()):
        return ""
    return found.group().rstrip("/").rpartition("/")[2] or found.group()
