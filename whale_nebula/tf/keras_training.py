"""Private parts of Keras's training: its train step before the gradients, the callbacks of a `fit`, and callbacks that
write files.

Each function has a contract test in tests/contract.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from whale_nebula.tf.initial_values import InitialValues
from whale_nebula.tf.iterators import find_epoch_iterator
from whale_nebula.tf.private import PolymorphicFunction, TensorFlowTrainer, TFEpochIterator, iterate_python_frames


def has_keras_train_step(model: Any) -> bool:
    """Whether `model.train_step` is Keras's own."""
    return isinstance(model, keras.Model) and type(model).train_step is TensorFlowTrainer.train_step


def lacks_optimizer_variables(model: Any) -> bool:
    """Whether a compiled model's optimizer has no variables yet, so that its first train step makes them."""
    optimizer = model.optimizer
    return isinstance(optimizer, keras.optimizers.Optimizer) and not optimizer.built


def create_variables(model: Any, data: Any, slots: InitialValues | None = None) -> None:
    """Run the parts of Keras's train step that create variables: forward, loss, optimizer and metrics, in this order.
    Variables of metrics are initialised immediately, those of the optimizer, too, unless `slots` is given, which
    receives their initial values. All others are initialised by the tf.function that is being traced.
    """
    x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
    outputs = model(x, training=True) if model._call_has_training_arg else model(x)
    model._compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weights, training=True)
    if trained := model.trainable_variables:
        with tf.variable_creator_scope(_create_immediately if slots is None else slots.create_variable):
            build_optimizer(model.optimizer, trained)
    with tf.variable_creator_scope(_create_immediately):
        model.compute_metrics(x, y, outputs, sample_weight=weights)


def build_optimizer(optimizer: Any, variables: Any) -> None:
    """Create the slots of an optimizer under the names that they get in a step, with its own name as prefix."""
    with keras.name_scope(optimizer.name, caller=optimizer):
        optimizer.build(variables)


def _create_immediately(create: Callable[..., Any], **options: Any) -> Any:
    """Create a variable outside the traced function, which would put its initialisation in a condition. If its initial
    value is a tensor of that function, it is created inside.
    """
    inside = tf.is_symbolic_tensor(options.get("initial_value"))
    with contextlib.nullcontext() if inside else tf.init_scope():
        return create(**options)


Method = Callable[..., Any]
BACKUP = keras.callbacks.BackupAndRestore
CHECKPOINT = keras.callbacks.ModelCheckpoint
LOGGERS = (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard)
AVERAGES = keras.callbacks.SwapEMAWeights
_RESETTING = ("evaluate", "train_on_batch", "test_on_batch")
_HOOKS = tuple(name for name in dir(keras.callbacks.Callback) if name.startswith("on_"))


def list_loop_callbacks(*names: str) -> list[Any]:
    """The callbacks of the innermost running loop of Keras with one of these names, such as "fit" and "evaluate", which
    are only among its local variables; empty if none runs.
    """
    innermost = next(_find_loops(*names), None)
    return [] if innermost is None else list(innermost["callbacks"].callbacks)


def _find_loops(*names: str) -> Iterator[dict[str, Any]]:
    """The local variables of each running loop of Keras of these names that has its callbacks, the innermost first."""
    for frame in iterate_python_frames():
        found = frame.f_locals if frame.f_code.co_name in names else {}
        if isinstance(found.get("callbacks"), keras.callbacks.CallbackList):
            yield found


def list_reset_variables() -> list[Any]:
    """The variables of metrics that a running method of Keras has reset before its first batch; none in a `fit`, which
    may continue an epoch.
    """
    for frame in iterate_python_frames():
        name, model = frame.f_code.co_name, frame.f_locals.get("self")
        if name in ("fit", *_RESETTING) and isinstance(model, keras.Model):
            reset = model.metrics if name in _RESETTING else []
            return [each.value for metric in reset for each in metric.variables]
    return []


class Fit(NamedTuple):
    """A running `fit` of Keras: its callbacks, in their list object, its data, the requested epochs, and all local
    variables by name.
    """

    container: Any
    data: Any
    initial_epoch: int
    epochs: int
    variables: Mapping[str, Any]

    @property
    def callbacks(self) -> list[Any]:
        """The callbacks, in the order in which they are called."""
        found: list[Any] = self.container.callbacks
        return found


def find_fit() -> Fit | None:
    """The running `fit` of Keras that has not begun its first epoch; None if there is none, or if a callback of another
    `fit` has called it.
    """
    fits = list(_find_loops("fit"))
    if len(fits) != 1 or "epoch_iterator" not in fits[0]:
        return None
    (local_variables,) = fits
    return Fit(
        local_variables["callbacks"],
        local_variables["epoch_iterator"],
        int(local_variables["initial_epoch"]),
        int(local_variables["epochs"]),
        local_variables,
    )


def change_fit_data(model: Any, change: Callable[[tf.data.Dataset, int | None], tf.data.Dataset]) -> bool:
    """Replace the training data of this model's innermost running `fit` of Keras, which has not begun its first epoch,
    by the result of `change`, which also gets the number of batches of an epoch, if Keras knows it. Returns whether
    there is such a `fit`. A callback can call it in `set_model`.
    """
    data = find_epoch_iterator(model, "fit")
    if data is None:
        return False
    data._distributed_dataset = change(data._distributed_dataset, data.data_adapter.num_batches)
    return True


def is_fitting() -> bool:
    """Whether a `fit` of Keras is running in this thread."""
    return any(_find_loops("fit"))


def add_callback(fit: Fit, callback: Any, model: Any, *, first: bool = False) -> None:
    """Add a callback to a `fit`, after all others or before them."""
    callback.set_model(model)
    callback.set_params(fit.container.params)
    if first:  # a new list: the present one may be being iterated over
        fit.container.callbacks = [callback, *fit.container.callbacks]
    else:
        fit.container.callbacks.append(callback)


def skip_epochs(fit: Fit, until: int, begin: Callable[[Any], Any] | None = None) -> None:
    """Read the data of a `fit` from its initial epoch up to the epoch `until`, as training and validation would. The
    batches of the first execution are read by `begin`, if given, which gets the iterator.
    """
    for epoch in range(fit.initial_epoch, until):
        _skip_data(fit.data, begin if epoch == fit.initial_epoch else None)
        _skip_validation(fit.variables, epoch)


def _skip_data(data: Any, begin: Callable[[Any], Any] | None = None) -> None:
    with data.catch_stop_iteration():
        for number, (_, _, iterator) in enumerate(data):
            if begin is not None and number == 0:
                begin(iterator)
            else:
                for _ in range(data.steps_per_execution):
                    next(iterator)


def _skip_validation(local_variables: Mapping[str, Any], epoch: int) -> None:
    """Read the validation data of a `fit` with these variables, if it validates after an epoch. The `fit` continues to
    use that data and its position.
    """
    model = local_variables["self"]
    if local_variables["validation_data"] is None or not model._should_eval(epoch, local_variables["validation_freq"]):
        return
    if model._eval_epoch_iterator is None:
        model._eval_epoch_iterator = TFEpochIterator(
            x=local_variables["val_x"],
            y=local_variables["val_y"],
            sample_weight=local_variables["val_sample_weight"],
            batch_size=local_variables["validation_batch_size"] or local_variables["batch_size"],
            distribute_strategy=model.distribute_strategy,
            steps_per_execution=model.steps_per_execution,
            steps_per_epoch=local_variables["validation_steps"],
            shuffle=False,
        )
    model._eval_epoch_iterator.reset()
    _skip_data(model._eval_epoch_iterator)


def draw_batches(iterator: Any, count: int) -> tuple[list[Any], Any]:
    """The next `count` batches, or fewer at the end of the data, and an iterator of the same kind that yields these and
    then the rest. If it replaces a TensorFlow iterator, it yields only these.
    """
    batches = list(itertools.islice(iterator, count))
    if not isinstance(iterator, tf.data.Iterator):
        return batches, itertools.chain(batches, iterator)
    return batches, iter(tf.data.Dataset.from_generator(lambda: batches, output_signature=iterator.element_spec))


def trace_step(function: Callable[[Any], Any], batches: Any) -> Any:
    """The graph of Keras's train function for a TensorFlow iterator or a batch; it is traced if necessary, after which
    all variables exist. None if nothing is traced, as with `run_eagerly=True`.
    """
    name = "multi_step_on_iterator" if isinstance(batches, tf.data.Iterator) else "one_step_on_data"
    traced = {each._python_function.__name__: each for each in _find_tf_functions(function)}
    if name not in traced:
        return None
    argument = tf.nest.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, batches)
    return traced[name].get_concrete_function(argument).graph


def _find_tf_functions(function: Callable[..., Any]) -> Iterator[Any]:
    """The tf.functions to which a function of Keras refers, directly or through other functions."""
    for cell in getattr(function, "__closure__", None) or ():
        if isinstance(cell.cell_contents, PolymorphicFunction):
            yield cell.cell_contents
        elif hasattr(cell.cell_contents, "__closure__"):
            yield from _find_tf_functions(cell.cell_contents)


def list_captured_variables(graph: Any) -> list[Any]:
    """The variables that a graph reads or writes, in the order of their first use."""
    known = {id(variable.handle): variable for variable in graph.variables}
    return [known[id(outer)] for outer, _ in graph.captures if id(outer) in known]


def build_model(model: Any, batch: Any) -> None:
    """Create all variables of a compiled model, its metrics and its optimizer, for batches with this spec."""

    def make_input(spec: Any) -> Any:
        return None if spec is None else keras.KerasTensor(tuple(spec.shape), spec.dtype)

    optimizer = model.optimizer
    lacks = lacks_optimizer_variables(model)
    if lacks:
        optimizer.built = True  # prevents building here: the variables must have its name as prefix, as in a step
    try:
        model._symbolic_build(data_batch=tf.nest.map_structure(make_input, batch))
    finally:
        if lacks:
            optimizer.built = False
    if lacks and model.trainable_variables:
        build_optimizer(optimizer, model.trainable_variables)


def set_initial_epoch(model: Any, epoch: int) -> None:
    """Set the initial epoch of the `fit` that is about to train; with 0 it begins at the requested one."""
    model._initial_epoch = epoch or None


def append_logs(fit: Fit) -> None:
    """Make the callbacks of a `fit` append to their earlier log files instead of replacing them."""
    for callback in fit.callbacks:
        if isinstance(callback, keras.callbacks.CSVLogger):
            callback.append = True


def replace_method(callback: Any, name: str, change: Callable[[Method], Method]) -> None:
    """Replace a method of one callback by the result of `change`: "begin", "save", "log" or "end"; of averages, "swap"
    or "finalize".
    """
    methods = {"begin": "on_train_begin", "save": "_save_model", "log": "on_epoch_end", "end": "on_train_end"}
    method = {**methods, "swap": "_swap_variables", "finalize": "_finalize_ema_values"}[name]
    setattr(callback, method, change(getattr(callback, method)))


def overrides_hook(callback: Any, hook: str) -> bool:
    """Whether a callback does something at a hook of a batch, such as "on_train_batch_end"."""
    base = keras.callbacks.Callback
    names = (hook, hook.replace("on_train_", "on_"))  # by default a hook calls the one of the older name
    return any(getattr(getattr(callback, name), "__func__", None) is not getattr(base, name) for name in names)


def may_change_variables(callback: Any, hook: str) -> bool:
    """Whether a callback may change variables at a hook of a batch: those of Keras and of this library change none
    there, except for a `LambdaCallback`, which calls functions of the user.
    """
    is_known = type(callback).__module__.partition(".")[0] in ("keras", __package__.partition(".")[0])
    return overrides_hook(callback, hook) and (not is_known or isinstance(callback, keras.callbacks.LambdaCallback))


def suspend_saving(callback: Any, is_suspended: Callable[[], bool]) -> None:
    """Make a callback that saves the model after batches count no batch while `is_suspended` is true."""
    if not isinstance(callback, CHECKPOINT):
        return
    plain = callback.on_train_batch_end

    def count(batch: int, logs: Any = None) -> None:
        if not is_suspended():
            plain(batch, logs)

    callback.on_train_batch_end = count


def silence(callback: Any, is_silent: Callable[[], bool]) -> None:
    """Disable a callback while `is_silent` is true, and remove the files it has already written."""
    for name in _HOOKS:
        setattr(callback, name, _silence_method(getattr(callback, name), is_silent))
    if isinstance(callback, keras.callbacks.TensorBoard) and is_silent():
        for writer in callback._writers.values():
            writer.close()
        callback._writers = {}
        for folder in (callback._train_dir, callback._val_dir):
            for path in tf.io.gfile.glob(os.path.join(folder, f"*.tfevents.*.{os.getpid()}.*")):
                tf.io.gfile.remove(path)


def _silence_method(plain: Method, is_silent: Callable[[], bool]) -> Method:
    @functools.wraps(plain)
    def hook(*args: Any, **kwargs: Any) -> Any:
        return None if is_silent() else plain(*args, **kwargs)

    return hook


def save_embeddings(callback: Any, epoch: int) -> None:
    """Save the weights of a model for the projector of TensorBoard, as its callback does at the end of an epoch."""
    callback._log_embeddings(epoch)


def find_backup_path(callback: Any) -> str:
    """The file of weights that a backup writes and reads."""
    return str(callback._weights_path)


def make_folder(callback: Any, *args: Any, **kwargs: Any) -> None:
    """Create the folder of the file that a callback is about to save, with the arguments of its `_save_model`; it may
    exist.
    """
    if isinstance(callback, BACKUP):
        folder = str(callback.backup_dir)
    else:
        folder = os.path.dirname(callback._get_file_path(*args, **kwargs))
    if folder:
        tf.io.gfile.makedirs(folder)


def find_initial_epoch(model: Any) -> int:
    """The initial epoch of `fit` by a restored backup; 0 if there was none."""
    return int(model._initial_epoch or 0)
