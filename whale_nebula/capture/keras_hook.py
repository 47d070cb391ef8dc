"""Where Keras makes its train, test and predict functions, it asks here first.

It must ask early, because a subclassed model whose first act is `fit` enters our scopes inside Keras's own trace, too
late to cut anything. A model without scopes falls through to Keras untouched. The wrapper itself is in `late`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from whale_nebula import scopes, tf_private
from whale_nebula.capture import keras_tags, tracing
from whale_nebula.capture.keras_tags import bears_scopes

Original = Callable[..., Any]


def install() -> list[scopes.Watcher]:
    """Let scopes stamp what is traced and tag what Keras builds; gives the watchers that were not there before."""
    return [*tracing.install(), *keras_tags.install()]


def make_function(kind: str, original: Original, model: Any, force: bool) -> Any:
    """What `make_train_function` and its like do for this model."""
    install()
    attribute = f"{kind}_function"
    if getattr(model, attribute) is not None and not force:
        return getattr(model, attribute)
    if bears_scopes(model):
        setattr(model, attribute, _stepper(model, kind))
    elif _may_bear(model):
        setattr(model, attribute, _Probe(model, kind, original))
    else:
        original(model, force)
    return getattr(model, attribute)


def _may_bear(model: Any) -> bool:
    """A subclassed model shows its scopes only when it is called."""
    return not isinstance(model, tf_private.KerasFunction) and not getattr(model, "run_eagerly", False)


def _stepper(model: Any, kind: str) -> Callable[[Any], Any]:
    from whale_nebula.runtime.keras_step import stepper

    return stepper(model, kind)


class _Probe:
    """Stands for a subclassed model's function until its first batch shows whether it bears scopes."""

    def __init__(self, model: Any, kind: str, original: Original) -> None:
        self._model, self._kind, self._original = model, kind, original
        self._function: Callable[[Any], Any] | None = None

    def __call__(self, iterator: Any) -> Any:
        if self._function is None:
            iterator, batch = _peek(iterator)
            self._function = self._decide(batch)
        return self._function(iterator)

    def _decide(self, batch: Any) -> Callable[[Any], Any]:
        _call_symbolically(self._model, batch)
        if bears_scopes(self._model):
            function: Callable[[Any], Any] = _stepper(self._model, self._kind)
        else:
            setattr(self._model, f"{self._kind}_function", None)
            self._original(self._model, True)
            function = getattr(self._model, f"{self._kind}_function")
        setattr(self._model, f"{self._kind}_function", function)
        return function


def _peek(iterator: Any) -> tuple[Any, Any]:
    """The form of the next batch, and an iterator that still gives it."""
    if isinstance(iterator, tf.data.Iterator):
        return iterator, iterator.element_spec
    batches: list[Any] = [next(iter(iterator))] if not isinstance(iterator, list) else iterator
    return _again(batches, iterator), batches[0]


def _again(first: list[Any], rest: Any) -> Iterator[Any] | list[Any]:
    if isinstance(rest, list):
        return rest

    def both() -> Iterator[Any]:
        yield from first
        yield from rest

    return both()


def _call_symbolically(model: Any, batch: Any) -> None:
    """Call a model without computing, so that scopes in its `call` are met; its own errors are for `fit` to show."""
    import keras

    x = batch[0] if isinstance(batch, (tuple, list)) else batch
    form = tf.nest.map_structure(lambda t: keras.KerasTensor(_rows_free(t.shape), t.dtype), x)
    try:
        tf_private.compute_output_spec(model, form, training=False)
    except Exception:
        return


def _rows_free(shape: Any) -> tuple[int | None, ...]:
    return (None, *tuple(shape)[1:]) if len(shape) else ()
