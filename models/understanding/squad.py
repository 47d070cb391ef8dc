"""SQuAD's files: texts, each with its questions, and where in the text the answers stand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from whale_nebula.errors import DataError, OptionError
from whale_nebula.errors.text import did_you_mean

from .examples import Question

_UNANSWERED = ("refuse", "skip")


def read_squad(path: str | Path, *, unanswered: str = "refuse") -> list[Question]:
    """The questions of `train-v1.1.json` or `dev-v1.1.json`; of version 2 with `unanswered="skip"`, which leaves out
    those that have no answer.

    >>> asked = {"id": "q1", "question": "who?", "answers": [{"answer_start": 0, "text": "anna"}]}
    >>> data = {"data": [{"paragraphs": [{"context": "anna has it", "qas": [asked]}]}]}
    >>> _ = Path("dev.json").write_text(json.dumps(data))
    >>> read_squad("dev.json")[0].answers
    ((0, 'anna'),)
    """
    if unanswered not in _UNANSWERED:
        raise OptionError(f"unanswered={unanswered!r} is not known", mend=did_you_mean(unanswered, _UNANSWERED))
    path = Path(path)
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise DataError(f"{path.name} cannot be read", where=str(path), why=error.strerror) from None
    except ValueError as error:
        raise DataError(f"{path.name} is no JSON", where=str(path), why=str(error), mend="copy it again") from None
    try:
        found = list(_questions(content, skip=unanswered == "skip"))
    except (KeyError, TypeError, AttributeError) as error:
        missing = f"a part lacks {error}" if isinstance(error, KeyError) else "a part has another form"
        raise DataError(
            f"{path.name} is not of SQuAD's form",
            where=str(path),
            why=f"{missing}: data, paragraphs, context, qas, question, answers, answer_start and text are read",
            mend="take a file of version 1.1 or 2.0",
        ) from None
    if not found:
        raise DataError(f"{path.name} has no question with an answer", where=str(path), mend="take another split")
    return found


def _questions(content: Any, *, skip: bool) -> Iterator[Question]:
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            for asked in paragraph["qas"]:
                answers = tuple((int(each["answer_start"]), str(each["text"])) for each in asked["answers"])
                if answers or not skip:
                    name = str(asked.get("id", ""))
                    yield Question(str(asked["question"]), str(paragraph["context"]), answers, name)
