"""Generated tasks, one of each form: labels of sentences and of pairs, numbers, and spans.

All are about numbers of things that people have. A row depends only on task, split, seed and place, and splits have no
row in common.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from random import Random
from typing import TypeVar

from whale_nebula.errors import OptionError
from whale_nebula.errors.text import did_you_mean

from .examples import Examples, Question, Task

_NAMES = ("anna", "ben", "clara", "david", "emma", "felix", "greta", "hugo", "ines", "jonas")
_COUNTS = ("two", "three", "four", "five", "six", "seven")
_COLOURS = ("red", "blue", "green", "white", "black", "yellow")
_THINGS = ("cups", "books", "lamps", "chairs", "coats", "keys", "boats", "cards")
_PLACES = ("in the kitchen", "in the garden", "at school", "on the train", "in the hall")
_FINE, _BAD = ("fine", "lovely", "clever", "bright", "warm"), ("dull", "poor", "awful", "cold", "weak")
_SPLITS = {"train": range(80), "dev": range(80, 90), "test": range(90, 100)}
Fact = tuple[str, str, str, str, str]
"""A name, a count, a colour, things and a place."""
_Made = TypeVar("_Made")

TASKS: dict[str, Task] = {
    "opinion": Task("opinion", 2, ("accuracy",)),
    "grammar": Task("grammar", 2, ("matthews", "accuracy")),
    "follows": Task("follows", 2, ("accuracy", "f1"), pairs=True),
    "similar": Task("similar", 1, ("pearson", "spearman"), pairs=True),
    "answer": Task("answer", spans=True, metrics=("exact_match", "span_f1"), pairs=True),
}
"""The tasks, like SST-2, CoLA, RTE, STS-B and SQuAD: sentiment, grammaticality, entailment, similarity, and the
position of the answer to a question.
"""


def generated_task(task: str, split: str, count: int, *, seed: int = 0) -> Examples | list[Question]:
    """Generate the first `count` rows of a split of a task.

    Args:
        task: one of `TASKS`.
        split: "train", "dev" or "test".
        count: number of rows.
        seed: seed of the rows.

    >>> generated_task("opinion", "dev", 2).first == generated_task("opinion", "dev", 9).first[:2]
    True
    """
    if task not in TASKS:
        raise OptionError(f"there is no generated task {task!r}", mend=did_you_mean(task, list(TASKS)))
    if split not in _SPLITS:
        raise OptionError(f"there is no split {split!r}", mend=did_you_mean(split, list(_SPLITS)))
    if count < 1:
        raise OptionError(f"count={count!r} is less than 1", mend="count=1, or more")
    if task == "answer":
        return [_draw_row(_draw_question, f"{task}/{split}/{seed}/{place}", split) for place in range(count)]
    rows = [_draw_row(_ROWS[task], f"{task}/{split}/{seed}/{place}", split) for place in range(count)]
    second = [row[1] for row in rows] if TASKS[task].pairs else None
    return Examples([row[0] for row in rows], [row[2] for row in rows], second)


def generated_text(count: int, *, seed: int = 0) -> list[str]:
    """Generate sentences of the same kind without labels, for a vocabulary and for pretraining.

    >>> len(generated_text(3))
    3
    """
    rows: list[str] = []
    while len(rows) < count:
        drawn = _random(f"text/{seed}/{len(rows)}")
        rows += [
            _write_fact(_draw_fact(drawn)),
            _draw_opinion(drawn)[0],
            _write_question(_draw_fact(drawn)),
            _reorder(_draw_fact(drawn)),
        ]
    return rows[:count]


def _draw_row(make: Callable[[Random], _Made], where: str, split: str) -> _Made:
    """Draw rows by `make` until one belongs to the split."""
    for attempt in range(10**6):
        row = make(_random(f"{where}/{attempt}"))
        if _digest(str(row)) % 100 in _SPLITS[split]:
            return row
    raise OptionError(f"split {split!r} has no rows", mend="train")


def _random(text: str) -> Random:
    return Random(_digest(text))  # noqa: S311 - not used for secrets


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


# ---------------------------------------------------------------------- sentences
def _draw_fact(drawn: Random) -> Fact:
    return tuple(drawn.choice(each) for each in (_NAMES, _COUNTS, _COLOURS, _THINGS, _PLACES))  # type: ignore[return-value]


def _write_fact(fact: Fact) -> str:
    name, count, colour, thing, place = fact
    return f"{name} has {count} {colour} {thing} {place} ."


def _reorder(fact: Fact) -> str:
    name, count, colour, thing, place = fact
    return f"{place} {name} has {count} {thing} , and they are {colour} ."


def _write_question(fact: Fact) -> str:
    return f"how many {fact[2]} {fact[3]} does {fact[0]} have ?"


def _change_fact(fact: Fact, drawn: Random, places: Sequence[int]) -> Fact:
    """The fact with other values at these places."""
    kinds = (_NAMES, _COUNTS, _COLOURS, _THINGS, _PLACES)
    new = [
        drawn.choice([each for each in kinds[place] if each != value]) if place in places else value
        for place, value in enumerate(fact)
    ]
    return tuple(new)  # type: ignore[return-value]


# ---------------------------------------------------------------------- rows
Row = tuple[str, str, float]
"""Two sentences, of which the second may be empty, and the label."""


def _draw_opinion(drawn: Random) -> Row:
    """A positive or negative adjective, affirmed or negated, together with one about something else."""
    good, denied = drawn.random() < 0.5, drawn.random() < 0.5
    word, other = drawn.choice(_FINE if good else _BAD), drawn.choice(_BAD if drawn.random() < 0.5 else _FINE)
    name, thing = drawn.choice(_NAMES), drawn.choice(_THINGS)
    verb = "are not" if denied else "are"
    place = drawn.choice(_PLACES)
    opinion = f"the {thing} of {name} {verb} {word}"
    aside = f"near the {other} {drawn.choice(_THINGS)} {place}"
    return f"{opinion} {aside} ." if drawn.random() < 0.5 else f"{aside} {opinion} .", "", float(good != denied)


def _draw_grammar(drawn: Random) -> Row:
    """A sentence, or one with two neighbouring words swapped, which is wrong (0)."""
    words = _write_fact(_draw_fact(drawn)).split()
    right = drawn.random() < 0.5
    if not right:
        at = drawn.randrange(len(words) - 2)
        words[at], words[at + 1] = words[at + 1], words[at]
    return " ".join(words), "", float(right)


def _draw_follows(drawn: Random) -> Row:
    """A paraphrase in another order, or one with a single change."""
    fact, true = _draw_fact(drawn), drawn.random() < 0.5
    other = fact if true else _change_fact(fact, drawn, [drawn.randrange(5)])
    return _write_fact(fact), _reorder(other), float(true)


def _draw_similar(drawn: Random) -> Row:
    """Two sentences, and the number of five things that they share."""
    fact, count = _draw_fact(drawn), drawn.randrange(6)
    other = _change_fact(fact, drawn, drawn.sample(range(5), 5 - count))
    return _write_fact(fact), _reorder(other), float(count)


_ROWS: dict[str, Callable[[Random], Row]] = {
    "opinion": _draw_opinion,
    "grammar": _draw_grammar,
    "follows": _draw_follows,
    "similar": _draw_similar,
}


def _draw_question(drawn: Random) -> Question:
    """Three sentences, and a question ("who", "how many", "what" or "where") about one of them."""
    names, things = drawn.sample(_NAMES, 3), drawn.sample(_THINGS, 3)
    facts = [
        (name, *_draw_fact(drawn)[1:3], thing, _draw_fact(drawn)[4]) for name, thing in zip(names, things, strict=True)
    ]
    name, count, colour, thing, place = facts[0]
    asked, answer = drawn.choice(
        [
            (f"who has {thing} ?", name),
            (f"how many {thing} does {name} have ?", count),
            (f"what does {name} have ?", f"{count} {colour} {thing}"),
            (f"where are the {thing} ?", place),
        ]
    )
    sentences = [_write_fact(each) for each in facts]
    drawn.shuffle(sentences)
    context = " ".join(sentences)
    inside = context.index(_write_fact(facts[0]))
    start = inside + _write_fact(facts[0]).index(answer)
    return Question(asked, context, ((start, answer),))
