"""Keras's train, test and predict functions for a model with scopes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import tensorflow as tf

from whale_nebula.capture.tracing import make_strategy_error
from whale_nebula.errors import UnsupportedError
from whale_nebula.report.published import note_skipped
from whale_nebula.runtime.checkpoint.fit_position import name_variables, to_tensors
from whale_nebula.runtime.run import current_run
from whale_nebula.runtime.step.step import Arguments, Step, Unpack, unpack_positional
from whale_nebula.runtime.variables.reads import make_collective, remember_results
from whale_nebula.scopes.step_options import StepOptions, replace_options
from whale_nebula.site import script_site, short_traceback
from whale_nebula.tf.keras_training import has_keras_train_step

RunStep = Callable[[Any], Any]
"""Runs a step with a batch."""


def make_train_loop(run: RunStep, model: Any) -> Callable[[Iterator[Any]], Any]:
    """The function that Keras calls with its iterator to train or to evaluate: it runs `steps_per_execution` batches,
    and returns the last result.
    """

    def execute(iterator: Iterator[Any]) -> Any:
        batches = islice(iterator, model.steps_per_execution)
        results = run(next(batches))
        for batch in batches:
            results = run(batch)
        return results

    return execute


def make_predict_loop(run: RunStep) -> Callable[[Sequence[Any]], Any]:
    """The function that Keras calls with a list of batches to predict: it returns their results, concatenated."""

    def execute(batches: Sequence[Any]) -> Any:
        if not isinstance(batches, list):
            return run(batches)
        found = [run(batch) for batch in batches]
        return found[0] if len(found) == 1 else tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *found)

    return execute


_INPUTS = ("x", "y", "sample_weight")


def make_step_function(model: Any, kind: str) -> Callable[[Any], Any]:
    """The train, test or predict function (by `kind`) of a model with scopes, which Keras calls with its iterator or,
    to predict, with a list of batches.
    """
    _check_settings(model)
    opened, step = current_run(), _make_step(model, kind)
    if not opened.alone:
        make_collective(model, opened.ledger, opened.writes_files, opened.here().cluster, opened.first_of_cluster)
    remember = None if opened.alone or kind == "predict" else remember_results(model)

    @short_traceback
    def run(data: Any) -> Any:
        find_options = _OPTIONS.get(model) if kind == "train" else None
        if find_options is None:
            return run_batch(data)
        with replace_options(find_options(data, step, *_name_arguments(data, kind))):
            return run_batch(data)

    def run_batch(data: Any) -> Any:
        if kind == "train" and opened.checkpoints is not None and opened.checkpoints.skip_batch(step.name):
            opened.checkpoints.restore_if_requested(
                step.plan(*_name_arguments(data, kind))
            )  # variables have their values from here on
            note_skipped(step.name)
            logs = to_tensors(opened.checkpoints.position.logs)
            return logs if remember is None else remember(logs)
        results = step.run(*_name_arguments(data, kind))
        return results if remember is None else remember(results)

    function = make_predict_loop(run) if kind == "predict" else make_train_loop(run, model)
    _STEPS[function] = step
    return function


FindOptions = Callable[[Any, Step, Arguments, Unpack], StepOptions | None]
_OPTIONS: weakref.WeakKeyDictionary[Any, FindOptions] = weakref.WeakKeyDictionary()
"""By model the function that finds the options of its train step for a batch."""


def set_step_options(model: Any, find_options: FindOptions | None) -> None:
    """Set the function that finds the options of a model's train steps, in place of those of scopes, by the batch, the
    step and its arguments; None for no function.
    """
    if find_options is None:
        _OPTIONS.pop(model, None)
    else:
        _OPTIONS[model] = find_options


_STEPS: weakref.WeakKeyDictionary[Any, Step] = weakref.WeakKeyDictionary()
"""The step that each of Keras's functions runs."""


def find_running_step(model: Any, kind: str) -> Step | None:
    """The step that Keras runs, if it has run one since the model was compiled."""
    function = getattr(model, f"{kind}_function", None)
    return None if function is None else _STEPS.get(function)


def make_keras_step(model: Any, kind: str, data: Any) -> tuple[Step, Arguments, Unpack]:
    """A model's step, and the arguments from a batch, for planning and verification."""
    _check_settings(model)
    return _make_step(model, kind), *_name_arguments(data, kind)


def pack_as_fit(parts: Sequence[Any]) -> Any:
    """Pack x, y and sample_weight like `fit` for a train step: missing ones at the end are omitted, and x alone is not
    wrapped, unless it has several parts.

    >>> pack_as_fit(["x"]), pack_as_fit(["x", None]), pack_as_fit([["a", "b"]]), pack_as_fit(["x", "y", None])
    ('x', 'x', (['a', 'b'],), ('x', 'y'))
    """
    kept = max((place + 1 for place, part in enumerate(parts) if part is not None), default=1)
    alone = kept == 1 and not isinstance(parts[0], tuple | list)
    return parts[0] if alone else tuple(parts[:kept])


def _make_step(model: Any, kind: str) -> Step:
    count = model.steps_per_execution
    note = f"steps_per_execution={count}: the {count} steps of an execution run separately"
    return Step(
        getattr(model, f"{kind}_step"),
        name=f"{model.name}.{kind}_step",
        paths=lambda: _map_paths(model),
        metrics=lambda: _map_metrics(model),
        owned_variables=partial(name_variables, model) if kind == "train" else dict,
        jit=bool(model.jit_compile),
        notes=(note,) if count > 1 else (),
        widens=True,
        trains=kind == "train" and has_keras_train_step(model),
    )


def _name_arguments(data: Any, kind: str) -> tuple[Arguments, Unpack]:
    data = tf.nest.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data)
    data = _complete_batch(data, kind)
    if not isinstance(data, tuple):
        return [("x", data)], unpack_positional
    kept = tuple(part is not None or _is_declared(_name_input(place)) for place, part in enumerate(data))
    names = tuple(_name_input(place) if here else None for place, here in enumerate(kept))
    return [(name, part) for name, part in zip(names, data, strict=True) if name], partial(_restore_batch, names)


def _complete_batch(data: Any, kind: str) -> Any:
    """The batch with None for trailing parts that Keras omits, if the config declares them."""
    parts = data if isinstance(data, tuple) else (data,)
    named = [place + 1 for place, name in enumerate(_INPUTS) if _is_declared(name)]
    if kind == "predict" or max(named, default=0) <= len(parts):
        return data
    return (*parts, *[None] * (max(named) - len(parts)))


def _is_declared(name: str) -> bool:
    """Whether the config declares the shape of an input, or of one inside it."""
    return any(path.partition("/")[0] == name for path in current_run().config.inputs)


def _name_input(place: int) -> str:
    """The name in reports and plans of the part of a batch at a place: x, y, sample_weight, then input3, input4 ..."""
    return _INPUTS[place] if place < len(_INPUTS) else f"input{place}"


def _restore_batch(names: tuple[str | None, ...], values: list[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments of Keras's step: the tuple of a batch, with None for the parts that have no name."""
    present = iter(values)
    return [tuple(None if name is None else next(present) for name in names)], {}


def _map_paths(model: Any) -> Mapping[int, str]:
    """The path of each variable that a model's step may touch, by its handle."""
    return {id(variable.handle): name for name, variable in name_variables(model).items()}


def _map_metrics(model: Any) -> Mapping[int, str]:
    """Names of metrics by handle, for those passed to `compile`, which Keras wraps in its own metric."""
    compiled = [metric for wrapper in model.metrics for metric in getattr(wrapper, "metrics", ())]
    pairs = [
        (getattr(variable, "value", variable), metric.name) for metric in compiled for variable in metric.variables
    ]
    return {id(value.handle): name for value, name in pairs}


def _check_settings(model: Any) -> None:
    """Refuse settings under which the step is not a single traced function."""
    strategy = model.distribute_strategy
    if strategy is not tf.distribute.get_strategy():
        raise make_strategy_error(strategy, f"{model.name}, {script_site()}")
    if model.run_eagerly:
        raise UnsupportedError(
            "compile(run_eagerly=True) is not compatible with scopes",
            where=f"{model.name}, {script_site()}",
            why="an eager step is never traced, so it cannot be divided into stages",
            mend="use model.compile(...) without run_eagerly; to debug eagerly, remove the scopes",
        )
