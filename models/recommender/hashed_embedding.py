"""An embedding whose table grows by a row for each new 64-bit id."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from whale_nebula.errors import NotYetError, OptionError, WeightsError
from whale_nebula.ir.layout import ROWS_PULLED, ROWS_PUSHED
from whale_nebula.runtime.run import find_open_run
from whale_nebula.runtime.variables.attached_memory import attach_memory
from whale_nebula.tf.failures import carry_errors

from .distinct import Distinct, find_distinct, gather_rows
from .row_optimizers import get_optimizer, make_row_optimizer
from .row_steps import RowSteps
from .row_table import RowTable
from .shares import BUCKETS, WHOLE, Share

_ARRAYS = ("ids", "counts", "values")


@keras.saving.register_keras_serializable("whale_nebula")
class HashedEmbedding(keras.layers.Layer):
    """Embedding of 64-bit ids whose table grows by a row for each new id: integers [...] to vectors [..., width].

    The table (`.table`, a `RowTable`) is in the memory of the process that runs the layer's stage. A step reads the
    rows of its distinct ids and writes back the sums of their gradients; only these rows are updated. The table is not
    among the model's variables, so the model's optimizer does not update it: the layer has its own.

    Call the layer once in a step; concatenate the ids of several look-ups. Its only variable, `anchor`, is always 0: it
    makes TensorFlow request the gradient. It has an entry for each bucket of ids, so that `nb.split(axis=0)` around the
    call shards the table: each worker of the stage then has the rows of some buckets.

    Args:
        width: width of the vectors.
        optimizer: a Keras optimizer or its name: SGD, Adagrad, Ftrl or Adam, with a constant learning rate.
        scale: initial values are uniform between -scale and scale, and depend only on id and seed.
        seed: seed of the initial values.
        most_rows: maximum number of rows; the least used ones are evicted for new ones.
        staleness: number of the last updates that look-ups in training may miss.
        expected_rows: number of rows for which a planner counts memory; by default `most_rows`.
        options: further options of a Keras layer, such as `name`.

    >>> layer = HashedEmbedding(4, optimizer="adagrad")
    >>> layer(np.array([[7, -9], [7, 2**40]])).shape, len(layer.table)
    (TensorShape([2, 2, 4]), 0)
    """

    supports_jit = False

    def __init__(
        self,
        width: int,
        *,
        optimizer: str | keras.optimizers.Optimizer = "adagrad",
        scale: float = 0.05,
        seed: int = 0,
        most_rows: int | None = None,
        staleness: int = 0,
        expected_rows: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.supports_jit = False  # XLA cannot call Python
        if self.compute_dtype == "float16":
            raise OptionError(
                "HashedEmbedding does not compute in float16",
                why="its rows are updated outside the optimizer that scales the loss",
                mend='HashedEmbedding(..., dtype="float32"), or the policy mixed_bfloat16',
            )
        self.optimizer = get_optimizer(optimizer)
        self.width, self.scale, self.seed, self.most_rows = width, scale, seed, most_rows
        self.staleness, self.expected_rows = staleness, expected_rows
        self.table = RowTable(
            width,
            make_row_optimizer(self.optimizer),
            scale=scale,
            seed=seed,
            most_rows=most_rows,
            staleness=staleness,
            expected_rows=expected_rows,
        )
        self.steps = RowSteps(self.table, self._find_distinct)

    def build(self, input_shape: Any) -> None:
        """Create the variable that connects the table with the model's gradients."""
        self.anchor = self.add_weight(shape=(BUCKETS,), initializer="zeros", dtype="float32", name="anchor")
        attach_memory(self.anchor.value, self.table)

    def call(self, inputs: Any, training: bool | None = False) -> Any:
        """The vectors of the ids. In training new ids get rows; otherwise they have the initial values of new rows."""
        self.check_ids(inputs)
        rows, places = self.look_up(inputs, training)
        vectors = tf.reshape(gather_rows([rows], places), tf.concat([tf.shape(inputs), [self.width]], 0))
        vectors.set_shape([*inputs.shape, self.width])
        return tf.cast(vectors, self.compute_dtype)

    def check_ids(self, inputs: Any) -> None:
        """Refuse ids that are not integers."""
        if not keras.backend.is_int_dtype(inputs.dtype):
            raise OptionError(
                f"{type(self).__name__} got ids of type {keras.backend.standardize_dtype(inputs.dtype)}",
                mend='keras.Input((fields,), dtype="int64")',
            )

    def look_up(self, inputs: Any, training: bool | None) -> tuple[Any, Any]:
        """The rows of the distinct ids, and the place of each id among them. In training ids get rows, to which the
        gradients are pushed.
        """
        flat, share = tf.reshape(tf.cast(inputs, tf.int64), [-1]), tf.constant(WHOLE, tf.int64)
        pull, push_rows = (carry_errors()(each) for each in (self._pull if training else self._read_rows, self._push))
        made = [tf.int64, tf.int32, tf.float32]
        ids, places, pulled = tf.numpy_function(pull, [flat, self.anchor, share], made, name=ROWS_PULLED)
        pulled.set_shape([None, self.width])

        @tf.custom_gradient
        def connect(anchor: Any) -> Any:
            def push(gradient: Any) -> Any:
                given = [ids, gradient, anchor, share]
                zeros = tf.numpy_function(push_rows, given, tf.float32, name=ROWS_PUSHED)
                zeros.set_shape([BUCKETS])
                return zeros

            return tf.identity(pulled), push

        return connect(tf.convert_to_tensor(self.anchor)), places

    def compute_output_shape(self, input_shape: Any) -> Any:
        """The input's shape with the axis of the width."""
        return (*input_shape, self.width)

    def get_config(self) -> dict[str, Any]:
        """The options to recreate the layer, without its rows."""
        names = ("width", "scale", "seed", "most_rows", "expected_rows", "staleness")
        options = {name: getattr(self, name) for name in names}
        return {**super().get_config(), **options, "optimizer": keras.optimizers.serialize(self.optimizer)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> HashedEmbedding:
        """Create the layer from its configuration."""
        return cls(**{**config, "optimizer": keras.optimizers.deserialize(config["optimizer"])})

    def save_own_variables(self, store: Any) -> None:
        """Save rows, slots and counts to a Keras file."""
        _check_alone("saving rows of HashedEmbedding to a Keras file from several processes")
        state = self.table.state_dict()
        for name in _ARRAYS:
            store[name] = state[name]
        store["steps"] = np.array(state["steps"])

    def load_own_variables(self, store: Any) -> None:
        """Load the rows of a Keras file."""
        _check_alone("loading rows of HashedEmbedding from a Keras file in several processes")
        columns = self.width * (1 + len(self.table.optimizer.slots))
        found = np.shape(store["values"])
        if len(found) != 2 or found[1] != columns:
            raise WeightsError(
                f"rows in the file have {found[-1]} numbers, but {self.name!r} has {columns}, with optimizer slots",
                mend="create the layer with the width and optimizer that it was saved with",
            )
        state = {name: np.array(store[name]) for name in _ARRAYS}
        plain = {"steps": int(np.array(store["steps"])), "optimizer": self.table.optimizer.name, "width": self.width}
        self.table.load_state_dict({**state, **plain})

    def _pull(self, flat: np.ndarray, anchor: np.ndarray, share: np.ndarray) -> tuple[np.ndarray, ...]:
        self.table.hold(Share(*share.tolist()))
        return self.steps.pull(flat)

    def _read_rows(self, flat: np.ndarray, anchor: np.ndarray, share: np.ndarray) -> tuple[np.ndarray, ...]:
        self.table.hold(Share(*share.tolist()))
        found = self._find_distinct(flat)
        return found.ids, found.places, self.table.pull(found.ids)

    def _find_distinct(self, flat: np.ndarray) -> Distinct:
        return find_distinct(flat)

    def _push(self, ids: np.ndarray, gradients: np.ndarray, anchor: np.ndarray, share: np.ndarray) -> np.ndarray:
        self.steps.push(ids, gradients)
        return np.zeros(len(anchor), np.float32)


def _check_alone(feature: str) -> None:
    run = find_open_run()
    if run is not None and not run.alone:
        raise NotYetError(
            feature,
            why="the rows are in the process that runs the layer's stage, and a different process may write the file",
            mend="use nb.init(checkpoint=...) with nb.state(rows=layer.table) in every process",
        )
