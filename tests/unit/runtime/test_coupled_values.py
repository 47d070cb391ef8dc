"""Values that micro-batches cannot give are refused for every reader: the loss, a variable, or the results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.errors import BatchCoupledError

ROWS = np.arange(1, 7, dtype="float32")[:, None]
RowFunction = Callable[[Any], Any]


def stage(micro_batch: int, cluster: str) -> contextlib.AbstractContextManager[Any]:
    return nb.stage(cluster=cluster) if micro_batch else contextlib.nullcontext()


def pipeline(micro_batch: int, **options: Any) -> contextlib.AbstractContextManager[Any]:
    return nb.pipeline(micro_batch, **options) if micro_batch else contextlib.nullcontext()


def cut(micro_batch: int, step: Callable[..., Any]) -> Callable[..., Any]:
    """Without micro-batches a step is eager code, and has no scopes."""
    return nb.function(step) if micro_batch else step


# ---------------------------------------------------------------------- a variable that is written, and then read
def assign_mean(variable: tf.Variable, p: Any) -> Any:
    variable.assign(tf.reduce_mean(p))
    return tf.reduce_mean((p - variable.read_value()) ** 2)


def add_sum(variable: tf.Variable, p: Any) -> Any:
    variable.assign_add(tf.reduce_sum(p))
    return tf.reduce_mean(p * p) * variable


def assign_shifted(variable: tf.Variable, p: Any) -> Any:
    table = tf.reshape(tf.reduce_mean(p), [1])
    variable.assign(variable + table[0])
    return tf.reduce_mean(p * p) * variable.read_value()


def read_then_write(variable: tf.Variable, p: Any) -> Any:
    loss = tf.reduce_mean(p * p) * variable
    variable.assign_add(tf.reduce_mean(p))
    return loss


def count_steps(variable: tf.Variable, p: Any) -> Any:
    variable.assign_add(1.0)
    return tf.reduce_mean(p * p) * variable


def run_step(
    compute_loss: Callable[[tf.Variable, Any], Any], micro_batch: int, variable: tf.Variable, coupled: str = "error"
) -> list[float]:
    """Loss and gradient."""
    weight = tf.Variable(1.0)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape, pipeline(micro_batch, coupled=coupled):
            with stage(micro_batch, "gpu"):
                h = x * weight
            with stage(micro_batch, "npu"):
                p = h * 1.0
            loss = compute_loss(variable, p)
        return loss, tape.gradient(loss, weight)

    return [float(each) for each in cut(micro_batch, step)(ROWS)]


def train_step(
    compute_loss: Callable[[tf.Variable, Any], Any], micro_batch: int, coupled: str = "error"
) -> list[float]:
    """Loss, gradient, and what the variable is afterwards."""
    variable = tf.Variable(0.5)
    return [*run_step(compute_loss, micro_batch, variable, coupled), float(variable)]


@pytest.mark.parametrize("compute_loss", [assign_mean, add_sum, pytest.param(assign_shifted, marks=pytest.mark.grid)])
def test_variable_written_from_the_batch_and_read_by_the_loss_is_refused(
    compute_loss: Callable[[tf.Variable, Any], Any],
) -> None:
    assert train_step(compute_loss, 0)[1] != 0.0
    with pytest.raises(BatchCoupledError, match="is written from the batch and read afterwards") as caught:
        train_step(compute_loss, 3)
    assert "test_coupled_values.py" in str(caught.value) and "read the variable before it is written" in str(
        caught.value
    )


@pytest.mark.parametrize("compute_loss", [assign_mean, add_sum])
def test_allowed_coupling_reads_the_writes_of_each_micro_batch(compute_loss: Callable[[tf.Variable, Any], Any]) -> None:
    found = train_step(compute_loss, 3, coupled="allow")
    variable, losses = 0.5, []
    for part in np.split(ROWS, 3):
        variable = part.mean() if compute_loss is assign_mean else variable + part.sum()
        losses.append(((part - variable) ** 2).mean() if compute_loss is assign_mean else (part**2).mean() * variable)
    np.testing.assert_allclose([found[0], found[2]], [np.mean(losses), variable], rtol=1e-6)


@pytest.mark.parametrize("compute_loss", [read_then_write, count_steps])
def test_write_after_the_read_or_without_rows_is_exact(compute_loss: Callable[[tf.Variable, Any], Any]) -> None:
    np.testing.assert_allclose(train_step(compute_loss, 3), train_step(compute_loss, 0), rtol=1e-6)


TABLES: dict[str, Callable[[], Any]] = {
    "mutable": lambda: tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0),
    "dense": lambda: tf.lookup.experimental.DenseHashTable(tf.int64, tf.float32, 0.0, empty_key=-1, deleted_key=-2),
}


def put(table: Any, p: Any) -> Any:
    ids = tf.cast(p[:, 0], tf.int64) % 3
    table.insert(ids, p[:, 0])
    return ids


def put_then_read(table: Any, p: Any) -> Any:
    return tf.ensure_shape(table.lookup(put(table, p)), [None])


def read_then_put(table: Any, p: Any) -> Any:
    found = tf.ensure_shape(table.lookup(tf.cast(p[:, 0], tf.int64) % 3), [None])
    put(table, p)
    return found


def put_then_count(table: Any, p: Any) -> Any:
    put(table, p)
    return tf.cast(table.size(), tf.float32)


def put_in_a_branch(table: Any, p: Any) -> Any:
    tf.cond(table.size() < 9, lambda: put(table, p), lambda: tf.zeros([0], tf.int64))
    return read_alone(table, p)


def put_alone(table: Any, p: Any) -> Any:
    put(table, p)
    return 0.0


def read_alone(table: Any, p: Any) -> Any:
    return tf.ensure_shape(table.lookup(tf.cast(p[:, 0], tf.int64) % 3), [None])


def put_the_same(table: Any, p: Any) -> Any:
    table.insert(tf.constant([0, 1], tf.int64), tf.constant([1.0, 2.0]))
    return read_alone(table, p)


def run_with_table(use: Callable[[Any, Any], Any], table: Any, micro_batch: int) -> list[float]:
    """The loss and the gradient of rows and what is found for them in a table."""
    return run_step(lambda table, p: tf.reduce_mean((p[:, 0] - use(table, p)) ** 2), micro_batch, table)


@pytest.mark.parametrize(
    ("kind", "use"),
    [("dense", put_then_read), *(("mutable", use) for use in (read_then_put, put_then_count, put_in_a_branch))],
)
def test_lookup_table_written_and_read_by_the_batch_is_refused(kind: str, use: Callable[[Any, Any], Any]) -> None:
    assert np.isfinite(run_with_table(use, TABLES[kind](), 0)).all()
    with pytest.raises(BatchCoupledError, match="a lookup table is written from the batch and read") as caught:
        run_with_table(use, TABLES[kind](), 3)
    assert "test_coupled_values.py" in caught.value.where and "before it is written" not in caught.value.mend


@pytest.mark.parametrize(
    ("kind", "use"),
    [("mutable", put_alone), ("dense", read_alone), pytest.param("mutable", put_the_same, marks=pytest.mark.grid)],
)
def test_lookup_table_only_written_or_only_read_is_exact(kind: str, use: Callable[[Any, Any], Any]) -> None:
    whole, cut = TABLES[kind](), TABLES[kind]()
    np.testing.assert_allclose(run_with_table(use, cut, 3), run_with_table(use, whole, 0), rtol=1e-6)
    keys = tf.range(3, dtype=tf.int64)
    np.testing.assert_array_equal(cut.lookup(keys), whole.lookup(keys))


@pytest.mark.parametrize("mixed", [True, False], ids=["with rows", "alone"])
def test_written_variable_combined_with_rows_is_refused_in_inference(mixed: bool) -> None:
    variable = tf.Variable(0.5)

    def compute(h: Any) -> Any:
        variable.assign_add(tf.reduce_sum(h))
        return h * variable if mixed else tf.sqrt(variable.read_value())

    first = compute_results(compute, 0)
    variable.assign(0.5)
    if mixed:
        with pytest.raises(BatchCoupledError, match="and read afterwards"):
            compute_results(compute, 3)
    else:
        np.testing.assert_allclose(compute_results(compute, 3), first, rtol=1e-6)


def make_reversing_loss(written: Callable[[tf.Variable, Any], Any]) -> Callable[[tf.Variable, Any], Any]:
    """A loss whose gradient is turned by a variable that is written first and read by the backward alone."""

    def compute_loss(variable: tf.Variable, p: Any) -> Any:
        @tf.custom_gradient
        def turn(z: Any) -> Any:
            return tf.identity(z), lambda d: -variable * d

        written(variable, p)
        return tf.reduce_mean(turn(p) ** 2)

    return compute_loss


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_backward_reads_an_earlier_write_of_the_step(micro_batch: int) -> None:
    _, gradient, _ = train_step(make_reversing_loss(lambda variable, p: variable.assign(0.25)), micro_batch)
    assert gradient == pytest.approx(-0.25 * 2 * (ROWS**2).mean(), rel=1e-6)


def test_backward_reads_a_batch_write_with_one_micro_batch_only() -> None:
    loss = make_reversing_loss(lambda variable, p: variable.assign(tf.reduce_mean(p)))
    assert train_step(loss, 1)[1] == pytest.approx(-ROWS.mean() * 2 * (ROWS**2).mean(), rel=1e-6)
    with pytest.raises(BatchCoupledError, match="and read afterwards"):
        train_step(loss, 3)


def test_backward_that_writes_a_variable_is_refused() -> None:
    def compute_loss(variable: tf.Variable, p: Any) -> Any:
        @tf.custom_gradient
        def count_steps(z: Any) -> Any:
            def back(d: Any) -> Any:
                variable.assign_add(1.0)
                return d

            return tf.identity(z), back

        return tf.reduce_mean(count_steps(p) ** 2)

    assert train_step(compute_loss, 0)[2] == 1.5
    with pytest.raises(BatchCoupledError, match="the backward writes a variable"):
        train_step(compute_loss, 3)


def update_centres(variable: tf.Variable, p: Any) -> Any:
    """Centres of classes, which follow their rows."""
    ids = tf.cast(p[:, 0] > 3, tf.int32)
    centres = tf.gather(variable, ids)
    loss = tf.reduce_mean((p[:, 0] - centres) ** 2)
    variable.scatter_sub(tf.IndexedSlices(0.1 * (centres - p[:, 0]), ids))
    return loss


def assign_to_slice(variable: tf.Variable, p: Any) -> Any:
    variable[: tf.shape(p)[0]].assign(p[:, 0])
    return tf.reduce_mean(p**2)


def scatter_rows(variable: tf.Variable, p: Any) -> Any:
    variable.scatter_update(tf.IndexedSlices(p[:, 0], tf.range(tf.shape(p)[0])))
    return tf.reduce_mean(p**2)


def compare_pairs(variable: tf.Variable, p: Any) -> Any:
    mask = p[:, 0] > 3
    one, other = (tf.boolean_mask(p[:, 0], each) for each in (mask, ~mask))
    return tf.reduce_sum(tf.nn.relu(1 - one + other))


def reshape_transposed(variable: tf.Variable, p: Any) -> Any:
    four = tf.transpose(tf.concat([p, 2 * p, 3 * p, 4 * p], 1))
    return tf.reduce_mean(tf.reduce_sum(tf.reshape(four, [tf.shape(p)[0], 4]), 1) ** 2)


def add_noise(variable: tf.Variable, p: Any) -> Any:
    return tf.reduce_mean((p + tf.random.stateless_normal(tf.shape(p), [7, 0])) ** 2)


def floor_sum(variable: tf.Variable, p: Any) -> Any:
    return tf.reduce_sum(p**2) + tf.reduce_sum(p) // 0.7


@pytest.mark.parametrize(
    "compute_loss",
    [
        *(update_centres, scatter_rows, compare_pairs, reshape_transposed, add_noise),
        *(pytest.param(each, marks=pytest.mark.grid) for each in (assign_to_slice, floor_sum)),
    ],
    ids=lambda each: each.__name__,
)
def test_values_of_the_whole_batch_are_refused(compute_loss: Callable[[tf.Variable, Any], Any]) -> None:
    def compute(micro_batch: int) -> Any:
        return run_step(compute_loss, micro_batch, tf.Variable(tf.zeros([8])))[1]

    assert np.isfinite(compute(0))
    with pytest.raises(BatchCoupledError):
        compute(3)


def compute_gradient(make_output_gradient: Callable[[Any], Any], micro_batch: int) -> float:
    """The gradient of rows, for gradients of them that are given."""
    weight = tf.Variable(1.0)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape, pipeline(micro_batch):
            with stage(micro_batch, "gpu"):
                h = x * weight
            with stage(micro_batch, "npu"):
                p = h * 1.0
        return tape.gradient(p, weight, output_gradients=make_output_gradient(p))

    return float(cut(micro_batch, step)(ROWS))


@pytest.mark.parametrize(
    "make_output_gradient",
    [lambda p: p / tf.cast(tf.shape(p)[0], tf.float32), lambda p: p - tf.reduce_mean(p)],
    ids=["divided by the rows", "less their mean"],
)
def test_output_gradients_that_depend_on_all_rows_are_refused(make_output_gradient: RowFunction) -> None:
    assert np.isfinite(compute_gradient(make_output_gradient, 0))
    with pytest.raises(BatchCoupledError, match="a given output gradient"):
        compute_gradient(make_output_gradient, 3)


def test_output_gradients_by_row_are_exact() -> None:
    assert compute_gradient(lambda p: p - 2.0, 3) == pytest.approx(compute_gradient(lambda p: p - 2.0, 0), rel=1e-6)


def test_two_uses_of_one_mask_are_exact() -> None:
    def compute_loss(variable: tf.Variable, p: Any) -> Any:
        mask = p[:, 0] > 3
        return tf.reduce_sum(tf.boolean_mask(p, mask) * tf.boolean_mask(2 * p, mask)) * variable

    np.testing.assert_allclose(train_step(compute_loss, 3), train_step(compute_loss, 0), rtol=1e-6)


# ---------------------------------------------------------------------- what leaves the step
def compute_results(compute: RowFunction, micro_batch: int) -> np.ndarray:
    """What a step returns."""

    def step(x: Any) -> Any:
        with pipeline(micro_batch):
            with stage(micro_batch, "gpu"):
                h = x * 1.0
            with stage(micro_batch, "npu"):
                return compute(h)

    return np.asarray(cut(micro_batch, step)(ROWS))


@pytest.mark.parametrize(
    ("compute", "why"),
    [
        (lambda h: tf.concat([h, -h], 0), "a different order"),
        (lambda h: tf.tile(h, [2, 1]), "a different order"),
        (lambda h: tf.reshape(tf.transpose(tf.concat([h, 10 * h], 1)), [-1]), "a different order"),
        (lambda h: tf.where(h[:, 0] > 3), "row numbers"),
        pytest.param(lambda h: tf.range(tf.shape(h)[0]), "row numbers", marks=pytest.mark.grid),
        (lambda h: tf.cast(tf.range(tf.shape(h)[0]), tf.float32)[:, None] * h, "row numbers"),
    ],
    ids=["concat", "tile", "transposed", "where", "range", "times range"],
)
def test_returned_rows_in_another_order_are_refused(compute: RowFunction, why: str) -> None:
    assert compute_results(compute, 0).size
    with pytest.raises(BatchCoupledError, match=why):
        compute_results(compute, 3)


@pytest.mark.parametrize(
    "compute",
    [lambda h: tf.concat([h, -h], 1), lambda h: tf.transpose(h), lambda h: tf.tile(h, [1, 2]), lambda h: h[:, 0] > 3],
    ids=["concat", "transpose", "tile", "compare"],
)
def test_returned_rows_in_batch_order_are_exact(compute: RowFunction) -> None:
    np.testing.assert_array_equal(compute_results(compute, 3), compute_results(compute, 0))


def test_rows_assigned_to_a_variable_are_refused() -> None:
    kept = tf.Variable(np.zeros((1, 1), "float32"), shape=[None, 1])

    def keep(h: Any) -> Any:
        kept.assign(h)
        return h

    compute_results(keep, 0)
    np.testing.assert_array_equal(kept, ROWS)
    with pytest.raises(BatchCoupledError, match="are assigned to a variable"):
        compute_results(keep, 3)
