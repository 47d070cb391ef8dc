"""Text in messages: the four parts and the code of every error and warning, and how they read; suggestions for misspelt
names, and text from outside made safe to print.
"""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import ClassVar, NoReturn, TypeVar

Value = TypeVar("Value")


class Named(dict[str, Value]):
    """Things by their names. Asking for one that there is not says which there are.

    >>> stages = Named(gpu=1, npu=2)
    >>> stages["gpuu"]
    Traceback (most recent call last):
    KeyError: "there is no 'gpuu' here: did you mean 'gpu'?"
    """

    def __missing__(self, name: object) -> NoReturn:
        raise KeyError(f"there is no {name!r} here: {did_you_mean(name, self)}")


def closest(word: object, known: Iterable[str], near: float = 0.6) -> str | None:
    """The known word that `word` was probably meant to be, or None. `near`, up to 1, says how like they have to be.

    >>> closest("micro_batchs", ["micro_batch", "schedule"]), closest("x", ["schedule"])
    ('micro_batch', None)
    >>> closest("npu", ["gpu"]), closest("npu", ["gpu"], near=0.75), closest("gpuu", ["gpu"], near=0.75)
    ('gpu', None, 'gpu')
    """
    spelled = {name.lower(): name for name in known}
    found = difflib.get_close_matches(str(word).lower(), list(spelled), n=1, cutoff=near)
    return spelled[found[0]] if found else None


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """A mend for a word that is not known: the one that was meant, or all there are.

    >>> did_you_mean("1f1B", ["gpipe", "1f1b"])
    "did you mean '1f1b'?"
    >>> did_you_mean("x", ["gpipe", "1f1b"])
    "choose one of 'gpipe', '1f1b'"
    >>> did_you_mean("x", [])
    'leave it out: nothing is known here'
    """
    names = list(known)
    meant = closest(word, names)
    if meant is not None:
        return f"did you mean {meant!r}?"
    if not names:
        return "leave it out: nothing is known here"
    return f"choose one of {list_names(names)}"


def list_names(names: Iterable[str]) -> str:
    """Names as a message says them.

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
    r"""Text of another process as printable characters of one line, at most `limit` of them; the rest is counted.

    What is not printable is written as Python's escapes write it: control characters, line ends, and those that turn
    the direction of writing. `lines` leaves line ends and tabs as they are.

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
    """Rows as lines whose cells stand under each other; columns of `numbers` are flush right.

    >>> align_columns([["gpu", "8"], ["a", "16"]], numbers={1})
    ['gpu   8', 'a    16']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def pad(column: int, cell: str) -> str:
        return cell.rjust(widths[column]) if column in numbers else cell.ljust(widths[column])

    return ["  ".join(pad(*each) for each in enumerate(row)).rstrip() for row in rows]


def remove_folders(text: str, known: Iterable[str] = ()) -> str:
    """A text whose paths are names of files, without the folders that these lie in. Folders whose names have spaces
    are found where they are `known`, or the whole path is quoted.

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
    """Nothing before a file's name; the last folder's name where the path ends with a folder."""
    if not _AFTER.match(found.string, found.end()):
        return ""
    return _last_name(found.group())


def _last_name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2] or path


def list_counts(counts: Mapping[str, int]) -> str:
    """Numbers of workers, in words.

    >>> list_counts({"gpu": 1, "npu": 2})
    '1 in gpu, 2 in npu'
    """
    return ", ".join(f"{count} in {escape_foreign_text(cluster)}" for cluster, count in counts.items())


MEND = "\n  mend: "
_LONGEST = 20_000


class _FourParts(Exception):
    """What errors and warnings have in common: the four parts, and how they read.

    A part that is not known is an empty text; a mend that is not given is that of the class.
    """

    code: ClassVar[str] = "NB-000"
    usual_mend: ClassVar[str] = "report this with the script that shows it"
    # Keras makes an error that leaves a layer anew, from its first argument alone, unless it bears this mark.
    _keras_call_info_injected: ClassVar[bool] = True
    # AutoGraph makes every error anew, as a StagingError, unless it bears this one.
    ag_pass_through: ClassVar[bool] = True

    def __init__(self, what: str, *, where: str | None = None, why: str | None = None, mend: str | None = None) -> None:
        what = to_printable(what)
        super().__init__(what)
        self.what = what
        self.where = to_printable(where or "")
        self.why = to_printable(why or "")
        self.mend = what.partition(MEND)[2] or to_printable(mend or self.usual_mend)

    def __str__(self) -> str:
        if MEND in self.what:  # Keras made it anew from our text, while it inferred a layer's output
            return self.what
        lines = [f"{self.code} {self.what}" + (f" ({self.where})" if self._shows_where() else "")]
        for name, text in (("why", self.why), ("mend", self.mend)):
            if text:  # further lines stand under the first
                lines.append(f"  {name}: " + textwrap.indent(text, " " * len(f"  {name}: ")).lstrip(" "))
        return "\n".join(lines)

    def _shows_where(self) -> bool:
        return bool(self.where)


def to_printable(text: str) -> str:
    """A part of an error as it may be written to a terminal, whoever's words are in it."""
    return text if text.isascii() and text.isprintable() else escape_foreign_text(text, _LONGEST, lines=True)


class NebulaError(_FourParts):
    """Everything that this library raises on purpose.

    `recurs` says of a class that the same script ends by such an error again when it is started again. `peer` is the
    worker that is missed, where it is one.

    >>> print(NebulaError("the line is cut", where="gpu->npu", why="8 s of silence", mend="try the cable"))
    NB-000 the line is cut (gpu->npu)
      why: 8 s of silence
      mend: try the cable
    """

    recurs: ClassVar[bool] = False
    peer: str = ""


class NebulaWarning(_FourParts, UserWarning):
    """Something that goes on, but probably not as it was meant.

    Python writes the line that it is about before it, so its text leaves that line out.

    >>> print(NebulaWarning("stage 'gpu' runs uncut", where="train.py:3", mend="call it in a step"))
    NB-900 stage 'gpu' runs uncut
      mend: call it in a step
    """

    code = "NB-900"
    usual_mend = "warnings.filterwarnings('ignore', category=nb.errors.NebulaWarning), if it was meant"

    def _shows_where(self) -> bool:
        return bool(self.where) and re.search(r":\d+$", self.where) is None
