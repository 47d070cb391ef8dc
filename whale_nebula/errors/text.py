"""Text of messages: the four parts and the code of every error and warning, and their format; suggestions for misspelt
names, and escaping of text from outside.
"""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import ClassVar, NoReturn, TypeVar

Value = TypeVar("Value")


class Named(dict[str, Value]):
    """A dict by name whose error for a missing key lists the existing ones.

    >>> stages = Named(gpu=1, npu=2)
    >>> stages["gpuu"]
    Traceback (most recent call last):
    KeyError: "'gpuu' does not exist: did you mean 'gpu'?"
    """

    def __missing__(self, name: object) -> NoReturn:
        raise KeyError(f"{name!r} does not exist: {did_you_mean(name, self)}")


def closest(word: object, known: Iterable[str], similarity: float = 0.6) -> str | None:
    """The known word that `word` most probably means, or None. `similarity`, at most 1, is the least that counts.

    >>> closest("micro_batchs", ["micro_batch", "schedule"]), closest("x", ["schedule"])
    ('micro_batch', None)
    >>> closest("npu", ["gpu"]), closest("npu", ["gpu"], similarity=0.75), closest("gpuu", ["gpu"], similarity=0.75)
    ('gpu', None, 'gpu')
    """
    spelled = {name.lower(): name for name in known}
    found = difflib.get_close_matches(str(word).lower(), list(spelled), n=1, cutoff=similarity)
    return spelled[found[0]] if found else None


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """A fix for an unknown word: the closest known word, or the list of all.

    >>> did_you_mean("1f1B", ["gpipe", "1f1b"])
    "did you mean '1f1b'?"
    >>> did_you_mean("x", ["gpipe", "1f1b"])
    "choose one of 'gpipe', '1f1b'"
    >>> did_you_mean("x", [])
    'remove it: no values are valid here'
    """
    names = list(known)
    meant = closest(word, names)
    if meant is not None:
        return f"did you mean {meant!r}?"
    if not names:
        return "remove it: no values are valid here"
    return f"choose one of {list_names(names)}"


def list_names(names: Iterable[str]) -> str:
    """Names as a list in a message.

    >>> list_names(["gpu", "npu"])
    "'gpu', 'npu'"
    """
    return ", ".join(repr(name) for name in names)


LIMIT = 500
_ENDS = r"\s:'\"()\[\]{},;<>|`"
_STORES = r"(?:gs|gcs|s3[an]?|hdfs|webhdfs|viewfs|abfss?|wasbs?|adl|az|dbfs|oss|file)://"
_QUOTED = re.compile(rf"(?<![^\W_])(['\"])((?:{_STORES})?(?:~|\.\.?)?/[^'\"\n]*|{_STORES}[^'\"\n]+)\1")
_FOLDERS = re.compile(
    rf"(?:(?<![^\s'\"(=\[{{,;<|`@:])|(?<=[\s'\"(,]-[A-Za-z]))(?:file://)?(?:~|\.\.?)?/(?!/)(?:[^/{_ENDS}]+/+)*"
    rf"|(?<![^\s'\"(=\[{{,;<|`@])(?://|{_STORES})(?:[^/\s'\"]+/+)+"
)
_AFTER = re.compile(rf"[{_ENDS}]|$")


def escape_foreign_text(text: object, limit: int = LIMIT, *, lines: bool = False) -> str:
    r"""Escape another process's text to printable characters of one line, at most `limit` of them; the rest is counted.

    Unprintable characters become Python's escapes: control characters, line ends, and those that change the text
    direction. `lines` keeps line ends and tabs.

    >>> escape_foreign_text("x\x1b[2J\ny"), escape_foreign_text("a" * 9, limit=4), escape_foreign_text("señal")
    ('x\\x1b[2J\\ny', 'aaaa... (5 characters more)', 'señal')
    """
    whole = str(text)
    kept: list[str] = []
    length = 0
    for character in whole:
        plain = character.isprintable() or (lines and character in "\n\t")
        shown = character if plain else character.encode("unicode_escape").decode("ascii")
        if length + len(shown) > limit:
            break
        kept.append(shown)
        length += len(shown)
    left = len(whole) - len(kept)
    return "".join(kept) + f"... ({left} characters more)" * (left > 0)


def align_columns(rows: Sequence[Sequence[str]], numbers: Container[int] = ()) -> list[str]:
    """Format rows as lines with aligned columns; columns of `numbers` are flush right.

    >>> align_columns([["gpu", "8"], ["a", "16"]], numbers={1})
    ['gpu   8', 'a    16']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def pad(column: int, cell: str) -> str:
        return cell.rjust(widths[column]) if column in numbers else cell.ljust(widths[column])

    return ["  ".join(pad(*each) for each in enumerate(row)).rstrip() for row in rows]


def remove_folders(text: str, known: Iterable[str] = ()) -> str:
    """Reduce paths in a text to file names. Folders with spaces in their names are found if they are `known`, or if the
    whole path is quoted.

    >>> remove_folders("at /home/ana/train.py:12, see https://host/a/b and encoder/.*")
    'at train.py:12, see https://host/a/b and encoder/.*'
    >>> remove_folders("~/keys/gpu.key, ./data/es.txt, '/srv/data/', /my runs/a.py", ["/my runs"])
    "gpu.key, es.txt, 'data', a.py"
    """
    for folder in sorted((each.rstrip("/") for each in known), key=len, reverse=True):
        if folder.startswith("/") and folder != "/":
            text = text.replace(f"{folder}/", "./")
    text = _QUOTED.sub(lambda found: f"{found[1]}{_last_name(found[2])}{found[1]}", text)
    return _FOLDERS.sub(_shorten_path, text)


def _shorten_path(found: re.Match[str]) -> str:
    """Remove everything before a file's name, or before the last folder's name if the path ends with a folder."""
    if not _AFTER.match(found.string, found.end()):
        return ""
    return _last_name(found.group())


def _last_name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2] or path


def list_counts(counts: Mapping[str, int]) -> str:
    """The number of workers of each cluster, as text; a worker has the number 1 or 0.

    >>> list_counts({"gpu": 1, "npu": 2})
    'with 1 in gpu, 2 in npu'
    >>> list_counts({"npu/0": 0, "npu/1": 0, "gpu/0": 1})
    'with gpu/0, without npu/0, npu/1'
    """
    present = [escape_foreign_text(worker) for worker, count in counts.items() if "/" in worker and count]
    absent = [escape_foreign_text(worker) for worker, count in counts.items() if "/" in worker and not count]
    clusters = [f"{count} in {escape_foreign_text(name)}" for name, count in counts.items() if "/" not in name]
    words = {"with": [*clusters, *present], "without": absent}
    return ", ".join(f"{word} {', '.join(names)}" for word, names in words.items() if names)


MEND = "\n  mend: "
_LONGEST = 20_000


class _FourParts(Exception):
    """Common base of errors and warnings: the four parts, and their format.

    An unknown part is ""; a missing mend is that of the class.
    """

    code: ClassVar[str] = "NB-000"
    usual_mend: ClassVar[str] = "report this with the script that shows it"
    # Keras replaces an error of a layer with a new one built from its first argument, unless it has this attribute.
    _keras_call_info_injected: ClassVar[bool] = True
    # AutoGraph converts every error to a StagingError, unless it has this one.
    ag_pass_through: ClassVar[bool] = True

    def __init__(self, what: str, *, where: str | None = None, why: str | None = None, mend: str | None = None) -> None:
        what = to_printable(what)
        super().__init__(what)
        self.what = what
        self.where = to_printable(where or "")
        self.why = to_printable(why or "")
        self.mend = what.partition(MEND)[2] or to_printable(mend or self.usual_mend)

    def __str__(self) -> str:
        if MEND in self.what:  # Keras copied our text while it inferred a layer's output
            return self.what
        lines = [f"{self.code} {self.what}" + (f" ({self.where})" if self._shows_where() else "")]
        for name, text in (("why", self.why), ("mend", self.mend)):
            if text:  # further lines are aligned with the first
                lines.append(f"  {name}: " + textwrap.indent(text, " " * len(f"  {name}: ")).lstrip(" "))
        return "\n".join(lines)

    def _shows_where(self) -> bool:
        return bool(self.where)


def to_printable(text: str) -> str:
    """Escape a part of an error for a terminal, whatever its source."""
    return text if text.isascii() and text.isprintable() else escape_foreign_text(text, _LONGEST, lines=True)


class NebulaError(_FourParts):
    """Base of all errors that this library raises deliberately.

    `recurs`: a restarted script is expected to end with the same error. `peer` is the missing worker, if any, and
    `missed` are all that were missing at a rendezvous.

    >>> print(NebulaError("the link is down", where="gpu->npu", why="no message for 8 s", mend="check the cable"))
    NB-000 the link is down (gpu->npu)
      why: no message for 8 s
      mend: check the cable
    """

    recurs: ClassVar[bool] = False
    peer: str = ""
    missed: tuple[str, ...] = ()


class NebulaWarning(_FourParts, UserWarning):
    """A condition that does not stop the program, but is probably unintended.

    Python prints the script's line number before the text, so the text omits it.

    >>> print(NebulaWarning("stage 'gpu' runs uncut", where="train.py:3", mend="call it in a step"))
    NB-900 stage 'gpu' runs uncut
      mend: call it in a step
    """

    code = "NB-900"
    usual_mend = "warnings.filterwarnings('ignore', category=nb.errors.NebulaWarning), if it was meant"

    def _shows_where(self) -> bool:
        return bool(self.where) and re.search(r":\d+$", self.where) is None
