"""Read files of tasks: GLUE's folders of `train.tsv` and `dev.tsv`, as from gluebenchmark.com; SQuAD's JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from whale_nebula.errors import DataError, OptionError
from whale_nebula.errors.text import did_you_mean

from ..text.corpus import read_lines
from .examples import Examples, Question, Task


class Columns(NamedTuple):
    """The columns of a task's files by name, or by position in files without a header; the `labels` of classes, none
    for numbers; and the subfolder of the files.
    """

    first: str | int
    label: str | int
    second: str | int | None = None
    labels: tuple[str, ...] = ("0", "1")
    folder: str = ""


_ENTAILED = ("entailment", "not_entailment")
GLUE: dict[str, tuple[Task, Columns]] = {
    "cola": (Task("cola", 2, ("matthews",)), Columns(3, 1, folder="CoLA")),
    "sst-2": (Task("sst-2", 2, ("accuracy",)), Columns("sentence", "label", folder="SST-2")),
    "mrpc": (Task("mrpc", 2, ("accuracy", "f1"), True), Columns("#1 String", "Quality", "#2 String", folder="MRPC")),
    "qqp": (Task("qqp", 2, ("accuracy", "f1"), True), Columns("question1", "is_duplicate", "question2", folder="QQP")),
    "sts-b": (
        Task("sts-b", 1, ("pearson", "spearman"), True),
        Columns("sentence1", "score", "sentence2", (), "STS-B"),
    ),
    "qnli": (
        Task("qnli", 2, ("accuracy",), True),
        Columns("question", "label", "sentence", _ENTAILED, "QNLI"),
    ),
    "rte": (Task("rte", 2, ("accuracy",), True), Columns("sentence1", "label", "sentence2", _ENTAILED, "RTE")),
    "mnli": (
        Task("mnli", 3, ("accuracy",), True),
        Columns("sentence1", "gold_label", "sentence2", ("contradiction", "entailment", "neutral"), "MNLI"),
    ),
    "wnli": (Task("wnli", 2, ("accuracy",), True), Columns("sentence1", "label", "sentence2", folder="WNLI")),
}


def read_glue(folder: str | Path, task: str, split: str = "train") -> Examples:
    r"""Read a split of one of GLUE's tasks.

    Args:
        folder: folder with `SST-2/train.tsv`, or with `train.tsv`.
        task: one of `GLUE`.
        split: "train" or "dev"; those of MNLI are "dev_matched" and "dev_mismatched".

    >>> Path("SST-2").mkdir()
    >>> _ = Path("SST-2/train.tsv").write_text("sentence\tlabel\na fine cup\t1\na bad one\t0\n")
    >>> read_glue(".", "sst-2")
    Examples(first=['a fine cup', 'a bad one'], labels=[1.0, 0.0], second=None)
    """
    if task not in GLUE:
        raise OptionError(f"there is no GLUE task {task!r}", mend=did_you_mean(task, list(GLUE)))
    columns = GLUE[task][1]
    path = _find_file(Path(folder), columns.folder, split)
    lines = [line.rstrip("\r").split("\t") for line in read_lines(path, exact=True)]
    head = [] if isinstance(columns.first, int) else _read_head(lines, columns, path)
    if not lines:
        raise DataError(f"{path.name} has no rows", where=str(path), mend="copy it again")
    wanted = [each for each in (columns.first, columns.label, columns.second) if each is not None]
    places = [each if isinstance(each, int) else head.index(each) for each in wanted]
    begin = 2 if head else 1
    found = [_read_row(line, places, columns, f"{path}:{number}") for number, line in enumerate(lines, begin)]
    second = None if columns.second is None else [row[2] for row in found]
    return Examples([row[0] for row in found], [row[1] for row in found], second)


def _find_file(folder: Path, inner: str, split: str) -> Path:
    found = [path for path in (folder / inner / f"{split}.tsv", folder / f"{split}.tsv") if path.is_file()]
    if not found:
        raise DataError(
            f"there is no {split}.tsv",
            where=str(folder),
            why=f"it is expected in the subfolder {inner}, or in the folder itself",
            mend="pass the folder into which GLUE's archive was unpacked",
        )
    return found[0]


def _read_head(lines: list[list[str]], columns: Columns, path: Path) -> list[str]:
    head = [name.strip("\ufeff") for name in lines.pop(0)] if lines else []
    for name in (columns.first, columns.label, columns.second):
        if isinstance(name, str) and name not in head:
            raise DataError(
                f"{path.name} has no column {name!r}",
                where=f"{path}:1",
                why=f"the columns in its first line are {', '.join(map(repr, head[:12]))}",
                mend="read train or dev; test splits have no labels",
            )
    return head


def _read_row(line: list[str], places: list[int], columns: Columns, where: str) -> tuple[str, float, str]:
    if len(line) <= max(places):
        raise DataError(
            f"the row has {len(line)} columns, at least {max(places) + 1} are required",
            where=where,
            why="columns are separated by tabs",
            mend="copy the file again",
        )
    first, label, *second = (line[place].strip() for place in places)
    return first, _read_label(label, columns.labels, where), second[0] if second else ""


def _read_label(label: str, labels: tuple[str, ...], where: str) -> float:
    if label in labels:
        return float(labels.index(label))
    try:
        if labels:
            raise ValueError
        return float(label)
    except ValueError:
        expected = " or ".join(map(repr, labels)) if labels else "a number"
        raise DataError(f"the label {label!r} is not {expected}", where=where, mend="remove the row") from None


_UNANSWERED = ("refuse", "skip")


def read_squad(path: str | Path, *, unanswered: str = "refuse") -> list[Question]:
    """Read the questions of SQuAD's `train-v1.1.json` or `dev-v1.1.json`.

    Args:
        path: the file.
        unanswered: "refuse" raises an error for questions without an answer, which version 2 has; "skip" omits them.

    >>> asked = {"id": "q1", "question": "who?", "answers": [{"answer_start": 0, "text": "anna"}]}
    >>> data = {"data": [{"paragraphs": [{"context": "anna has it", "qas": [asked]}]}]}
    >>> _ = Path("dev.json").write_text(json.dumps(data))
    >>> read_squad("dev.json")[0].answers
    ((0, 'anna'),)
    """
    if unanswered not in _UNANSWERED:
        raise OptionError(f"unanswered={unanswered!r} is not a valid value", mend=did_you_mean(unanswered, _UNANSWERED))
    path = Path(path)
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        mend = f"read_squad({str(path / 'train-v1.1.json')!r})" if path.is_dir() else "pass the path of a JSON file"
        raise DataError(f"{path.name or path} cannot be read", where=str(path), why=error.strerror, mend=mend) from None
    except ValueError as error:
        raise DataError(f"{path.name} is not JSON", where=str(path), why=str(error), mend="copy it again") from None
    try:
        found = list(_read_questions(content, skip=unanswered == "skip"))
    except (KeyError, TypeError, AttributeError) as error:
        missing = f"a part lacks {error}" if isinstance(error, KeyError) else "a part has another form"
        raise DataError(
            f"{path.name} is not in SQuAD's format",
            where=str(path),
            why=f"{missing}: required are data, paragraphs, context, qas, question, answers, answer_start and text",
            mend="use a file of version 1.1 or 2.0",
        ) from None
    if not found:
        raise DataError(f"{path.name} has no question with an answer", where=str(path), mend="use a different split")
    return found


def _read_questions(content: Any, *, skip: bool) -> Iterator[Question]:
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            for asked in paragraph["qas"]:
                answers = tuple((int(each["answer_start"]), str(each["text"])) for each in asked["answers"])
                if answers or not skip:
                    name = str(asked.get("id", ""))
                    yield Question(str(asked["question"]), str(paragraph["context"]), answers, name)
