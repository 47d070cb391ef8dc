"""A BERT with a head for an understanding task, its loss, and its metrics."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from whale_nebula.errors import OptionError

from ..attention import Configured, near_zero
from ..bert import Bert
from .examples import Task, check_task
from .metrics import METRICS

NEVER = -1e9


@keras.saving.register_keras_serializable("whale_nebula")
class Head(Configured):
    """The head on a BERT. For sentences and pairs it computes logits of classes from the first token; for spans two
    logits for each token, as (rows, 2, length).

    >>> Head(width=8, outputs=3)(np.zeros((2, 5, 8))).shape, Head(8, 2, spans=True)(np.zeros((2, 5, 8))).shape
    (TensorShape([2, 3]), TensorShape([2, 2, 5]))
    """

    def __init__(self, width: int, outputs: int, *, spans: bool = False, dropout: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._options = {"width": width, "outputs": outputs, "spans": spans, "dropout": dropout}
        self.spans = spans
        self.pool = keras.layers.Dense(width, "tanh", kernel_initializer=near_zero(0.02), name="pool")
        self.drop = keras.layers.Dropout(dropout, name="drop")
        self.out = keras.layers.Dense(outputs, kernel_initializer=near_zero(0.02), name="out")

    def build(self, hidden_shape: Any, visible_shape: Any = None) -> None:
        """Create the weights."""
        if not self.spans:
            self.pool.build(hidden_shape)
        self.out.build((*hidden_shape[:-1], self._options["width"]))

    def call(self, hidden: Any, visible: Any = None, training: bool | None = None) -> Any:
        """The logits; padding cannot be part of an answer."""
        if not self.spans:
            return self.out(self.drop(self.pool(hidden[:, 0]), training=training))
        scores = ops.transpose(self.out(self.drop(hidden, training=training)), (0, 2, 1))
        return scores if visible is None else ops.where(visible[:, None, :], scores, NEVER)

    def compute_output_spec(self, hidden: Any, visible: Any = None, **options: Any) -> Any:
        """The output's shape and type, without tracing the layer."""
        rows, length = hidden.shape[:2]
        shape = (rows, 2, length) if self.spans else (rows, self._options["outputs"])
        return keras.KerasTensor(shape, self.compute_dtype)


def understanding(bert: Bert, task: Task, *, dropout: float = 0.0, name: str = "understanding") -> keras.Model:
    """Build a BERT with a head for a task. Its layers are those of the BERT, which are shared, and `head`.

    >>> from ..bert import BertSizes
    >>> bert = Bert(BertSizes(vocabulary=11, length=6, width=8, heads=2, layers=1, inner=16))
    >>> understanding(bert, Task("two")).output.shape
    (None, 2)
    """
    check_task(task)
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    visible = bert.visible(tokens)
    hidden = bert.embedding(tokens)
    for attention, inner in bert.sub_layers:
        hidden = inner(attention(hidden, visible))
    if bert.ending is not None:
        hidden = bert.ending(hidden)
    outputs = 2 if task.spans else task.classes
    head = Head(bert.sizes.width, outputs, spans=task.spans, dropout=dropout, name="head")
    return keras.Model(tokens, head(hidden, visible) if task.spans else head(hidden), name=name)


def loss_of(task: Task) -> keras.losses.Loss:
    """The loss of a task: squared error for numbers, cross-entropy for classes and spans.

    >>> loss_of(Task("number", classes=1)).name
    'mean_squared_error'
    """
    check_task(task)
    if task.regression:
        return keras.losses.MeanSquaredError()
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def score(task: Task, predicted: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Compute the metrics of predictions for a task with labels or numbers.

    >>> score(Task("two"), np.array([[0.0, 1.0], [2.0, 1.0]]), np.array([1, 1]))
    {'accuracy': 0.5}
    """
    check_task(task)
    if task.spans:
        raise OptionError(
            f"score() does not apply to {task.name!r}, a task of spans",
            why="its metrics compare the texts of answers",
            mend="found = read_spans(predicted, spans, questions); span_f1(found, ...) and exact_match(found, ...)",
        )
    found = predicted[:, 0] if task.regression else predicted.argmax(-1)
    return {name: METRICS[name](found, labels) for name in task.metrics}
