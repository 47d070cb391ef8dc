"""Generated tasks, their ids, and a model that learns one."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import keras
import numpy as np
import pytest

from whale_nebula.errors import DataError, OptionError
from whale_nebula.models import Bert, BertSizes, text
from whale_nebula.models.understanding import (
    GLUE,
    TASKS,
    Encoder,
    Examples,
    Question,
    Task,
    exact_match,
    generated_task,
    generated_text,
    loss_of,
    read_spans,
    score,
    understanding,
)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(text.Tokenizer(text.learn_vocabulary(generated_text(400), 300)), longest=48)


def rows_of(task: str, split: str, count: int = 300) -> set[str]:
    made: Any = generated_task(task, split, count)
    if task == "answer":
        return {f"{each.text} {each.context}" for each in made}
    return {f"{a} {b}" for a, b in zip(made.first, made.second or made.first, strict=True)}


@pytest.mark.parametrize("task", TASKS)
def test_generated_task_splits_are_disjoint(task: str) -> None:
    for one, other in combinations(("train", "dev", "test"), 2):
        assert not rows_of(task, one) & rows_of(task, other)


@pytest.mark.parametrize("task", [name for name in TASKS if name != "answer"])
def test_generated_labels_are_balanced(task: str) -> None:
    made = generated_task(task, "train", 600)
    assert isinstance(made, Examples)
    counts = np.unique(made.labels, return_counts=True)[1] / 600
    assert len(counts) == (6 if TASKS[task].regression else 2) and counts.min() > 0.7 / len(counts)


def test_read_spans_recovers_the_answers(encoder: Encoder) -> None:
    rows: Any = generated_task("answer", "dev", 20)
    spans = encoder.questions(rows)
    assert spans.ids.shape == (20, 48) and spans.labels.min() > 2
    right = np.full((20, 2, 48), -1.0)
    for row, places in enumerate(spans.labels):
        right[row, 0, places[0]] = right[row, 1, places[1]] = 1.0
    assert exact_match(read_spans(right, spans, rows), [[each.answers[0][1]] for each in rows]) == 1.0


def test_long_examples_are_truncated(encoder: Encoder) -> None:
    short = Encoder(encoder.words, longest=8)
    found = short.examples(Examples(["anna has two red cups"], [1], ["ben has three"]))
    assert found.ids.tolist()[0][-1] == encoder.words.end and found.ids.shape == (1, 8)
    spans = short.questions([Question("who ?", "ben has two red cups", ((16, "cups"),))])
    assert spans.labels.tolist() == [[0, 0]] and spans.characters[0, -1].tolist() == [-1, -1]


@pytest.mark.grid
@pytest.mark.parametrize("task", ["opinion", "similar", "answer"])
def test_understanding_model_learns(encoder: Encoder, task: str) -> None:
    """tests/examples/test_understand.py trains and scores in every run."""
    keras.utils.set_random_seed(0)
    asked: Any = generated_task(task, "train", 64)
    rows: Any = encoder.questions(asked) if task == "answer" else encoder.examples(asked)
    sizes = BertSizes(
        vocabulary=len(encoder.words.vocabulary), length=48, width=32, heads=2, layers=1, inner=64, dropout=0
    )
    model = understanding(Bert(sizes), TASKS[task])
    model.compile(keras.optimizers.Adam(3e-3), loss_of(TASKS[task]), run_eagerly=True)  # twelve steps: dearer to trace
    losses = model.fit(rows.ids, rows.labels, epochs=6, verbose=0, batch_size=32).history["loss"]
    assert losses[-1] < (0.999 if task == "opinion" else 0.95) * losses[0]
    if task != "answer":
        assert set(score(TASKS[task], model.predict(rows.ids, verbose=0), rows.labels)) == set(TASKS[task].metrics)


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        (("opinon", "train", 3), "there is no generated task 'opinon'"),
        (("opinion", "val", 3), "there is no split 'val'"),
        (("opinion", "dev", 0), "count=0 is less than 1"),
    ],
)
def test_unknown_generated_task_is_refused(asked: Any, what: str) -> None:
    with pytest.raises(OptionError, match=what):
        generated_task(*asked)


def test_examples_of_unequal_lengths_are_refused() -> None:
    with pytest.raises(DataError, match="numbers of sentences and labels differ: 2 and 1"):
        Examples(["a", "b"], [1.0])
    assert all(task.pairs == (columns.second is not None) for task, columns in GLUE.values())


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Task("mine", 0), "classes=0 is not a positive integer"),
        (lambda: Task("mine", metrics=("accurcy",)), "no metric is called 'accurcy'"),
        (lambda: loss_of("rte"), "task='rte' is not a Task"),
        (lambda: score(TASKS["answer"], None, None), "score() does not apply to 'answer', a task of spans"),
        (lambda: understanding(None, "rte"), "task='rte' is not a Task"),
        (lambda: Encoder(text.Tokenizer(text.Vocabulary((*text.SPECIAL, "a"))), 2), "longest=2 is less than 3"),
    ],
)
def test_invalid_task_options_are_refused(make: Any, what: str) -> None:
    with pytest.raises(OptionError) as raised:
        make()
    assert raised.value.what == what
