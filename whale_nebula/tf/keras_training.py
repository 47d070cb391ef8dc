"""Everything private of Keras's training that we touch, beside `tf_private`: what its own train step does before its
gradients, which callbacks a `fit` calls, and what those do that write files.

Each function has a contract test in tests/contract.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from whale_nebula.tf.private import TensorFlowTrainer, python_frames


def trains_as_keras(model: Any) -> bool:
    """Whether `model.train_step` is Keras's own."""
    return isinstance(model, keras.Model) and type(model).train_step is TensorFlowTrainer.train_step


def lacks_variables(model: Any) -> bool:
    """Whether the first call of a compiled model's own train step makes variables: its optimizer has none yet."""
    optimizer = model.optimizer
    return isinstance(optimizer, keras.optimizers.Optimizer) and not optimizer.built


def create_variables(model: Any, data: Any, later: bool) -> None:
    """Do all that makes variables in Keras's own train step: forward, loss, optimizer and metrics, in this order.

    Variables get their values at once. With `later` only those of metrics do, and the tf.function that is traced gives
    all others theirs.
    """
    x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
    with contextlib.nullcontext() if later else tf.variable_creator_scope(_create_at_once):
        outputs = model(x, training=True) if model._call_has_training_arg else model(x)
        model._compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weights, training=True)
        with contextlib.nullcontext() if later else tf.init_scope():
            _build_optimizer(model)
    with tf.variable_creator_scope(_create_at_once):
        model.compute_metrics(x, y, outputs, sample_weight=weights)


def _create_at_once(create: Callable[..., Any], **options: Any) -> Any:
    """Create a variable outside of the function that is traced, which would put its initialisation in a condition. One
    whose initial value is a tensor of that function is created inside.
    """
    inside = tf.is_symbolic_tensor(options.get("initial_value"))
    with contextlib.nullcontext() if inside else tf.init_scope():
        return create(**options)


Method = Callable[..., Any]
BACKUP = keras.callbacks.BackupAndRestore
CHECKPOINT = keras.callbacks.ModelCheckpoint
LOGGERS = (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard)
_HOOKS = tuple(name for name in dir(keras.callbacks.Callback) if name.startswith("on_"))


def list_fit_callbacks() -> list[Any]:
    """The callbacks of the innermost `fit` of Keras that is running: it has them nowhere else."""
    innermost = next(_find_fits(), None)
    return [] if innermost is None else list(innermost["callbacks"].callbacks)


def _find_fits() -> Iterator[dict[str, Any]]:
    """The variables of each `fit` of Keras that is running and has its callbacks, the innermost first."""
    for frame in python_frames():
        found = frame.f_locals if frame.f_code.co_name == "fit" else {}
        if isinstance(found.get("callbacks"), keras.callbacks.CallbackList):
            yield found


class Fit(NamedTuple):
    """A `fit` of Keras that runs: its callbacks, in the object that calls them, its data, and the epochs that it was
    asked for.
    """

    container: Any
    data: Any
    initial_epoch: int
    epochs: int

    @property
    def callbacks(self) -> list[Any]:
        """The callbacks, in the order in which they are called."""
        found: list[Any] = self.container.callbacks
        return found


def find_fit() -> Fit | None:
    """The `fit` of Keras that runs and has not begun its first epoch; None if there is no such, or if a callback of
    another `fit` has called it.
    """
    fits = list(_find_fits())
    if len(fits) != 1 or "epoch_iterator" not in fits[0]:
        return None
    (seen,) = fits
    return Fit(seen["callbacks"], seen["epoch_iterator"], int(seen["initial_epoch"]), int(seen["epochs"]))


def add_callback(fit: Fit, callback: Any, model: Any) -> None:
    """Let a `fit` call one more callback, after all others."""
    callback.set_model(model)
    callback.set_params(fit.container.params)
    fit.container.callbacks.append(callback)


def pass_epochs(fit: Fit, until: int) -> None:
    """Read the data of a `fit` up to the epoch `until`, as training would read it."""
    for _ in range(fit.initial_epoch, until):
        with fit.data.catch_stop_iteration():
            for _, _, iterator in fit.data:
                for _ in range(fit.data.steps_per_execution if hasattr(iterator, "__next__") else 0):
                    next(iterator)


def draw_batches(iterator: Any, count: int) -> tuple[list[Any], Any]:
    """The next `count` batches, or fewer where the data ends, and an iterator of the same form that gives these and
    then the rest. In place of an iterator of TensorFlow it gives these alone.
    """
    batches = list(itertools.islice(iterator, count))
    if not isinstance(iterator, tf.data.Iterator):
        return batches, itertools.chain(batches, iterator)
    return batches, iter(tf.data.Dataset.from_generator(lambda: batches, output_signature=iterator.element_spec))


def batch_spec(fit: Fit) -> Any:
    """The form of a batch of a `fit`."""
    return fit.data._distributed_dataset.element_spec


def build_model(model: Any, batch: Any) -> None:
    """Make all variables of a compiled model, its metrics and its optimizer, for batches of such a form."""

    def make_input(spec: Any) -> Any:
        return None if spec is None else keras.KerasTensor(tuple(spec.shape), spec.dtype)

    optimizer = model.optimizer
    lacks = lacks_variables(model)
    if lacks:
        optimizer.built = True  # not yet: its own name must be around its variables, as it is in a step
    try:
        model._symbolic_build(data_batch=tf.nest.map_structure(make_input, batch))
    finally:
        if lacks:
            optimizer.built = False
    if lacks:
        _build_optimizer(model)


def _build_optimizer(model: Any) -> None:
    """Make a model's optimizer its variables, with the names that they have from Keras's own train step."""
    if trained := model.trainable_variables:
        with keras.name_scope(model.optimizer.name, caller=model.optimizer):
            model.optimizer.build(trained)


def begin_with(model: Any, epoch: int) -> None:
    """Let the `fit` that is about to train begin with an epoch; with 0 it begins as it was asked to."""
    model._initial_epoch = epoch or None


def keep_logs(fit: Fit) -> None:
    """Let the callbacks of a `fit` go on with the files of logs that they wrote before, instead of beginning anew."""
    for callback in fit.callbacks:
        if isinstance(callback, keras.callbacks.CSVLogger):
            callback.append = True


def exchange(callback: Any, name: str, change: Callable[[Method], Method]) -> None:
    """Let a method of one callback be what `change` makes of it: "begin", "save" or "end"."""
    method = {"begin": "on_train_begin", "save": "_save_model", "end": "on_train_end"}[name]
    setattr(callback, method, change(getattr(callback, method)))


def silence(callback: Any, silent: Callable[[], bool]) -> None:
    """Let a callback do nothing where `silent` says so, and take back what it has written already."""
    for name in _HOOKS:
        setattr(callback, name, _silence_method(getattr(callback, name), silent))
    if isinstance(callback, keras.callbacks.TensorBoard) and silent():
        for writer in callback._writers.values():
            writer.close()
        callback._writers = {}
        for folder in (callback._train_dir, callback._val_dir):
            for path in tf.io.gfile.glob(os.path.join(folder, f"*.tfevents.*.{os.getpid()}.*")):
                tf.io.gfile.remove(path)


def _silence_method(plain: Method, silent: Callable[[], bool]) -> Method:
    @functools.wraps(plain)
    def hook(*args: Any, **kwargs: Any) -> Any:
        return None if silent() else plain(*args, **kwargs)

    return hook


def backup_path(callback: Any) -> str:
    """The file of weights that a backup writes and reads."""
    return str(callback._weights_path)


def make_folder(callback: Any, *args: Any, **kwargs: Any) -> None:
    """Make the folder of what a callback is about to save, with these arguments of its "save"; it may be there."""
    if isinstance(callback, BACKUP):
        folder = str(callback.backup_dir)
    else:
        folder = os.path.dirname(callback._get_file_path(*args, **kwargs))
    if folder:
        tf.io.gfile.makedirs(folder)


def initial_epoch(model: Any) -> int:
    """The epoch that a restored backup lets `fit` begin with; 0 where there was none."""
    return int(model._initial_epoch or 0)
