"""Keras's train, test and predict functions for a model that bears scopes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from whale_nebula.errors import UnsupportedError
from whale_nebula.run import current_run
from whale_nebula.runtime.collective import make_collective
from whale_nebula.runtime.step import Arguments, Step, Unpack

_INPUTS = ("x", "y", "sample_weight")


def stepper(model: Any, kind: str) -> Callable[[Any], Any]:
    """What Keras calls with its iterator, one step at a time."""
    _check(model)
    opened = current_run()
    if not opened.alone:
        make_collective(model, opened.ledger, opened.writes_files)
    step = _step(model, kind)

    def run(data: Any) -> Any:
        return step.run(*_arguments(data))

    if kind == "predict":
        return lambda data: run(data[0] if isinstance(data, list) else data)
    return lambda iterator: run(next(iter(iterator)))


def keras_step(model: Any, kind: str, data: Any) -> tuple[Step, Arguments, Unpack]:
    """A model's step and how a batch is given to it: for planning and verification."""
    _check(model)
    return _step(model, kind), *_arguments(data)


def _step(model: Any, kind: str) -> Step:
    return Step(getattr(model, f"{kind}_step"), name=f"{model.name}.{kind}_step", paths=lambda: _paths(model))


def _arguments(data: Any) -> tuple[Arguments, Unpack]:
    named = _named(_without_optionals(data))
    return list(named.items()), partial(_restored, tuple(named))


def _named(data: Any) -> dict[str, Any]:
    """A batch of Keras, (x, y, sample_weight) or less, by the names that reports and plans use."""
    if not isinstance(data, tuple):
        return {"x": data}
    return {name: part for name, part in zip(_INPUTS, data, strict=False) if part is not None}


def _restored(names: tuple[str, ...], values: list[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The tuple that Keras's step expects."""
    parts = dict(zip(names, values, strict=True))
    last = max(_INPUTS.index(name) for name in parts)
    return [tuple(parts.get(name) for name in _INPUTS[: last + 1])], {}


def _without_optionals(data: Any) -> Any:
    return tf.nest.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data)


def _paths(model: Any) -> Mapping[int, str]:
    """Handle to path, for all that a model's step may touch."""
    found: dict[int, str] = {}
    for variable in [*model.variables, *_of_optimizer(model), *(v for m in model.metrics for v in m.variables)]:
        value = getattr(variable, "value", variable)
        found.setdefault(id(value.handle), getattr(variable, "path", value.name))
    return found


def _of_optimizer(model: Any) -> list[Any]:
    optimizer = getattr(model, "optimizer", None)
    return [] if optimizer is None else list(optimizer.variables)


def _check(model: Any) -> None:
    """Options of `compile` that would make the step something else than one traced function."""
    reasons = {
        "run_eagerly": (getattr(model, "run_eagerly", False), "an eager step is never traced, so it cannot be cut"),
        "steps_per_execution": (
            getattr(model, "steps_per_execution", 1) != 1,
            "each step ends with an exchange between clusters",
        ),
        "jit_compile": (
            getattr(model, "jit_compile", False) is True,
            "XLA would have to compile the communication too",
        ),
    }
    for option, (set_so, why) in reasons.items():
        if set_so:
            raise UnsupportedError(
                f"compile({option}={getattr(model, option)!r}) does not go with scopes",
                where=model.name,
                why=why,
                mend=f"model.compile(...) without {option}",
            )
