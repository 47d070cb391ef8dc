"""The loss of translation: cross-entropy with label smoothing, without padding."""

from __future__ import annotations

from typing import Any

import keras

from whale_nebula.errors import OptionError


@keras.saving.register_keras_serializable("whale_nebula")
class SmoothedCrossentropy(keras.losses.Loss):
    """Cross-entropy of logits with label smoothing. Labels are ids.

    The loss is a mean over the words that are not padding, weighted by sample weights, so that a batch that is divided
    into micro-batches has the same loss.

    Args:
        smoothing: share of each label's weight that is distributed uniformly over all words.
        padding: id of labels that do not count.
        reduction: reduction, as for other Keras losses.
        name: name of the loss.
        dtype: type of the loss.

    >>> loss = SmoothedCrossentropy(0.1)
    >>> logits = [[[0.0, 4.0, 0.0, 0.0], [0.0, 9.0, 0.0, 0.0]]]
    >>> round(float(loss([[1, 0]], logits)), 4), round(float(loss([[1, 0]], [[logits[0][0]] * 2])), 4)
    (0.3535, 0.3535)
    """

    def __init__(
        self,
        smoothing: float = 0.1,
        *,
        padding: int = 0,
        reduction: str | None = "mean_with_sample_weight",
        name: str = "smoothed_crossentropy",
        dtype: Any = None,
    ) -> None:
        super().__init__(name=name, reduction=reduction, dtype=dtype)
        if not 0 <= smoothing < 1:
            raise OptionError(
                f"smoothing={smoothing!r} is not a valid share",
                why="it must be at least 0 and less than 1",
                mend="SmoothedCrossentropy(0.1)",
            )
        self._options = {"smoothing": smoothing, "padding": padding}

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """The loss of a batch: a weighted mean without padding."""
        counted = keras.ops.cast(keras.ops.not_equal(y_true, self._options["padding"]), "float32")
        if sample_weight is not None:
            weight = keras.ops.cast(sample_weight, "float32")
            counted *= keras.ops.expand_dims(weight, -1) if len(weight.shape) < len(counted.shape) else weight
        return super().__call__(y_true, y_pred, sample_weight=counted)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """The loss of each word, padding included."""
        smoothing = self._options["smoothing"]
        label = keras.ops.sparse_categorical_crossentropy(keras.ops.cast(y_true, "int32"), y_pred, from_logits=True)
        uniform = keras.ops.logsumexp(y_pred, axis=-1) - keras.ops.mean(y_pred, axis=-1)
        return (1 - smoothing) * label + smoothing * uniform

    def get_config(self) -> dict[str, Any]:
        """The options to recreate it."""
        return {**super().get_config(), **self._options}
