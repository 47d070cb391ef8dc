"""Examples of understanding tasks: sentences, or pairs of them, with labels; and questions with answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whale_nebula.errors import DataError, OptionError
from whale_nebula.errors.text import did_you_mean

from .metrics import METRICS, exact_match, span_f1

_SCORES = (*METRICS, exact_match.__name__, span_f1.__name__)


@dataclass(frozen=True, slots=True)
class Task:
    """The form of a task: the number of outputs, the metrics, and whether rows are pairs.

    Args:
        name: name of the task.
        classes: number of labels; 1 for a regression. Ignored with `spans`.
        metrics: names of the metrics.
        pairs: whether a row has two sentences.
        spans: whether answers are spans of a text.

    >>> Task("sst", classes=2, metrics=("accuracy",)).regression
    False
    """

    name: str
    classes: int = 2
    metrics: tuple[str, ...] = ("accuracy",)
    pairs: bool = False
    spans: bool = False

    def __post_init__(self) -> None:
        if type(self.classes) is not int or self.classes < 1:
            raise OptionError(
                f"classes={self.classes!r} is not a positive integer", mend="classes=2, or classes=1 for a regression"
            )
        for each in self.metrics:
            if each not in _SCORES:
                raise OptionError(f"no metric is called {each!r}", mend=did_you_mean(each, _SCORES))

    @property
    def regression(self) -> bool:
        """Whether the label is a number."""
        return self.classes == 1 and not self.spans


def check_task(task: object) -> None:
    """Refuse anything other than a `Task`, such as the name of one."""
    if not isinstance(task, Task):
        mend = 'GLUE["rte"][0], TASKS["opinion"] or Task("mine", classes=2)'
        raise OptionError(f"task={task!r} is not a Task", mend=mend)


@dataclass(frozen=True, slots=True)
class Examples:
    """Rows of one or two sentences, and the label of each row.

    >>> len(Examples(["a cup", "a dog"], [1.0, 0.0]))
    2
    """

    first: Sequence[str]
    labels: Sequence[float]
    second: Sequence[str] | None = None

    def __post_init__(self) -> None:
        counts = [len(each) for each in (self.first, self.labels, self.second) if each is not None]
        if len(set(counts)) > 1 or not counts[0]:
            raise DataError(
                f"numbers of sentences and labels differ: {' and '.join(map(str, counts))}",
                why="each row needs a label, and there must be at least one row",
                mend="pass the same number of each",
            )

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a text, and its right answers: their position in the text, and their wording.

    >>> Question("who has it", "anna has it", ((0, "anna"),)).answers[0]
    (0, 'anna')
    """

    text: str
    context: str
    answers: tuple[tuple[int, str], ...]
    name: str = ""

    def __post_init__(self) -> None:
        for start, answer in self.answers:
            if not answer or self.context[start : start + len(answer)] != answer:
                raise DataError(
                    f"the answer {answer!r} is not at character {start} of its text",
                    where=self.name,
                    why=f"the text there is {self.context[start : start + len(answer)]!r}",
                    mend="set answer_start to the number of characters before the answer",
                )
        if not self.answers:
            raise DataError(
                f"the question {self.text!r} has no answer",
                where=self.name,
                why="training on spans requires an answer for each question",
                mend='read_squad(path, unanswered="skip")',
            )
